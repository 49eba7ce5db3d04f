"""The small Qwen3.5 hybrid of the copy task, with its MTP drafter, as a module to be trained.

Layers, names and formulas are transformers' own, so what is trained is what vLLM loads. GDN runs
through flash-linear-attention where `use_rule("fla")` finds that its backward pass is right on
this GPU, else through the chunked form below.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # type: ignore[import-not-found]
from transformers.models.qwen3_5 import modeling_qwen3_5  # type: ignore[import-not-found]

from cuda_ext.bench.copy_task import task

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vocab_size": task.VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    # The only head size that the ReplaySSM kernels know.
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "eos_token_id": task.END_OF_TEXT,
    "bos_token_id": task.BOS,
    "mtp_num_hidden_layers": 1,
    # No mrope: vLLM 0.31.0 refuses it in a drafter, and text has one position a token.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
"""config.json of the checkpoint."""

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def chunk_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = 64,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule from a zero state, in chunks, in fp32, with autograd's backward pass.

    Within a chunk the rows are coupled by a unit triangular system, solved for all chunks at once;
    only the state goes from chunk to chunk (Yang et al., arXiv:2412.06464, section 3.3).

    Args:
        query, key: [B, T, HV, K], not normalised.
        value: [B, T, HV, V].
        g, beta: [B, T, HV], log decay and write strength.

    Returns:
        Outputs [B, T, HV, V] in the dtype of `query`, and None for the state.
    """
    with torch.autocast(query.device.type, enabled=False):
        dtype, T = query.dtype, query.shape[1]
        pad = -T % chunk_size

        def chunks(x: Tensor) -> Tensor:
            x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad)).transpose(1, 2)
            return x.unflatten(2, (-1, chunk_size))  # [B, HV, chunks, C, ...]

        q, k, v, g, beta = (chunks(x) for x in (query, key, value, g, beta))
        q = q * torch.rsqrt(q.square().sum(-1, True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt(k.square().sum(-1, True) + 1e-6)
        g, beta = g.cumsum(-1), beta[..., None]
        lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
        # Masked before the exponential, which would overflow above the diagonal.
        decay = (g[..., None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
        system = (beta * (k @ k.mT) * decay).tril(-1)
        until = g.exp()[..., None]
        right = torch.cat((beta * v, beta * until * k), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
        last = g[..., -1:]
        late, whole = k * (last - g).exp()[..., None], last.exp()[..., None]
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        states, values = [], []
        for i in range(q.shape[2]):
            states.append(state)
            values.append(new[:, :, i] - carried[:, :, i] @ state)
            state = state * whole[:, :, i] + late[:, :, i].mT @ values[-1]
        before, written = torch.stack(states, 2), torch.stack(values, 2)
        out = (q * until) @ before + ((q @ k.mT) * decay) @ written
        return out.flatten(2, 3)[:, :, :T].transpose(1, 2).to(dtype), None


def fla_rule() -> Rule:
    """flash-linear-attention's chunked rule with one configuration a kernel.

    fla tunes some hundred configurations, minutes of compilation for a model of this size.
    Version 0.6.0 refuses every backward pass on Hopper with Triton 3.4 to 3.7.0, because one tile
    width is compiled wrongly there (fla-org/flash-linear-attention issue 640); heads of 128 take
    another width. So the refusal is lifted here, and `worst_gradient` decides.
    """
    import sys

    from fla.ops.common import chunk_o  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found]

    chunk_o.IS_NVIDIA_HOPPER = False
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
            if kernel is not None:
                kernel.configs = kernel.configs[:1]

    def rule(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        kwargs = {name: kwargs[name] for name in ("g", "beta")}
        return chunk_gated_delta_rule(query, key, value, use_qk_l2norm_in_kernel=True, **kwargs)

    return rule


def worst_gradient(rule: Rule, device: str = "cuda", tokens: int = 1000) -> dict[str, float]:
    """Relative RMS errors of `rule` in bf16 against `chunk_rule` in fp32: output and gradients."""
    source = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=device).bfloat16().float()

    inputs = {
        "query": normal(2, tokens, 4, 128),
        "key": normal(2, tokens, 4, 128),
        "value": normal(2, tokens, 4, 128),
        "g": -F.softplus(normal(2, tokens, 4) - 3),
        "beta": normal(2, tokens, 4).sigmoid(),
    }
    weight = normal(2, tokens, 4, 128)
    results = []
    for chosen, dtype in ((chunk_rule, torch.float32), (rule, torch.bfloat16)):
        leaves = {
            name: (x if name == "g" else x.to(dtype)).clone().requires_grad_()
            for name, x in inputs.items()
        }
        out, _ = chosen(**leaves)
        (out.float() * weight).sum().backward()
        results.append({"out": out.detach()} | {n: x.grad for n, x in leaves.items()})
    wanted, found = results
    return {name: float((found[name].float() - x).norm() / x.norm()) for name, x in wanted.items()}


def use_rule(rule: Rule) -> None:
    """Run transformers' GDN layers of this process through `rule`.

    transformers picks fla itself where it is installed, but offers no way to choose.
    """
    modeling_qwen3_5.torch_chunk_gated_delta_rule = rule


def text_config(**changes: Any) -> Qwen3_5TextConfig:
    """`CONFIG` as transformers' object."""
    return Qwen3_5TextConfig(**(CONFIG | changes), attn_implementation="sdpa")


class _Keys:
    """Keys and values of the first step of a chain of drafts, which the later steps read too."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.kept = self.kept or (key, value)
        return self.kept


class Drafter(nn.Module):
    """Qwen3.5's MTP module: one attention layer over the next token and the hidden state.

    vLLM applies it over and over for a chain of drafts: its output is the hidden state of the
    next application, and what the earlier tokens left in its cache comes from the target's.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        one = text_config(num_hidden_layers=1, layer_types=["full_attention"])
        one._attn_implementation = config._attn_implementation
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([modeling_qwen3_5.Qwen3_5DecoderLayer(one, 0)])
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            setattr(self, name, modeling_qwen3_5.Qwen3_5RMSNorm(size, config.rms_norm_eps))

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any, keys: _Keys) -> Tensor:
        """Hidden states [B, T, hidden] that predict the token after `embedded`."""
        joined = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(joined, -1))
        return self.norm(self.layers[0](x, position_embeddings=rotary, past_key_values=keys))


class CopyModel(nn.Module):
    """Target and drafter."""

    def __init__(self) -> None:
        super().__init__()
        config = text_config()
        self.target = Qwen3_5ForCausalLM(config)
        self.mtp = Drafter(config)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0)
            elif isinstance(module, modeling_qwen3_5.Qwen3_5Attention):
                # Logits of up to 18, so that one key can outweigh six thousand.
                module.q_norm.weight.data.fill_(0.5)
                module.k_norm.weight.data.fill_(0.5)
            elif isinstance(module, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
                # Half-lives from some tokens to thousands, one scale a head: transformers'
                # values would forget within two tokens.
                heads = module.num_v_heads
                rate = torch.logspace(-1, -4, heads)
                module.A_log.data.zero_()
                module.dt_bias.data.copy_(rate.expm1().log())

    def forward(self, tokens: Tensor, drafts: int = 0) -> list[Tensor]:
        """Logits [B, T, vocabulary]: the target's, then those of each draft of a chain.

        Entry j at index t is about token t + 1 + j; past the end it means nothing.
        """
        model, head = self.target.model, self.target.lm_head
        hidden = model(input_ids=tokens, use_cache=False).last_hidden_state
        logits, keys = [head(hidden)], _Keys()
        embedded = model.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, 1, -1)
        for j in range(drafts):
            rotary = model.rotary_emb(embedded, positions + j)
            embedded = embedded.roll(-1, 1)
            hidden = self.mtp(embedded, hidden, rotary, keys)
            logits.append(head(hidden))
        return logits

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; in bf16, so training that goes on from it is not the same one."""
        found = load_file(folder / "model.safetensors")
        self.mtp.load_state_dict(
            {n.removeprefix("mtp."): x for n, x in found.items() if n.startswith("mtp.")}
        )
        self.target.load_state_dict({n: x for n, x in found.items() if not n.startswith("mtp.")})

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors as published checkpoints have them."""
        weights = {f"mtp.{name}": x for name, x in self.mtp.state_dict().items()}
        weights |= self.target.state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.safetensors.part"
        save_file(
            {
                name: x.detach()
                .to("cpu", x.dtype if "A_log" in name else torch.bfloat16)
                .contiguous()
                for name, x in weights.items()
            },
            part,
            metadata={"format": "pt"},
        )
        # Whoever reads while training goes on gets a whole one.
        part.rename(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
