"""Attention and rotary kernels, as plain torch."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F


class RotaryPosEmbeddingMode(enum.Enum):
    """Which elements form a rotated pair."""

    BLOCKWISE = 0  # i and i + D/2 (GPT-NeoX)
    PAIRWISE = 1  # 2i and 2i + 1 (GPT-J)


def apply_rotary_pos_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """`x` [..., D] rotated.

    Args:
        cos, sin: broadcastable to `x`; with `position_ids`, tables to be indexed by them.
        offset: must be 0.
    """
    if offset:
        raise NotImplementedError(f"emulated apply_rotary_pos_emb: {offset=!r}")
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(start_dim=-2)
    return x * cos + turned * sin


class FusedSDPA:
    """Scaled dot-product attention in the argument order of the fused kernel."""

    @staticmethod
    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        padding_side: str = "left",
        fp8_in: bool = False,
        fp8_out: bool = False,
        window_size: tuple[int, int] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` [N, H, T, D] to `key` and `value` [N, HKV, S, D].

        Args:
            attn_mask: bool, or float to be added to the scores; not with `is_causal`.
            is_causal: the last query sees the last key (S >= T).
            valid_seq_len: [N], keys from there on are hidden; right padding only.
            softmax_mode, recompute: tuning of the device kernel; without effect here.

        Raises:
            NotImplementedError: for dropout, fp8, a sliding window, sinks and left padding.
        """
        asked = {
            "dropout_p": dropout_p or None,
            "fp8": (fp8_in or fp8_out) or None,
            "window_size": None if window_size in (None, (-1, -1)) else window_size,
            "sinks": sinks,
            "is_causal with attn_mask": (is_causal and attn_mask is not None) or None,
            "padding_side": None if valid_seq_len is None or padding_side == "right" else "left",
        }
        unsupported = [name for name, given in asked.items() if given is not None]
        if unsupported:
            raise NotImplementedError(f"emulated FusedSDPA does not do {', '.join(unsupported)}")
        queries, keys = query.shape[-2], key.shape[-2]
        if is_causal:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        if valid_seq_len is not None:
            valid = torch.arange(keys) < valid_seq_len.view(-1, 1, 1, 1)
            attn_mask = valid if attn_mask is None else valid & attn_mask
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            scale=scale,
            enable_gqa=query.dim() == 4 and query.shape[1] != key.shape[1],
        )
