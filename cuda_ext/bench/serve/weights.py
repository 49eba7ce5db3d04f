"""Dummy weights of the size that trained ones have, the same in every process.

vLLM's own (uniform within 1e-3) leave GDN with a share of 1e-5 of the residual, so that no
log-probability tells whether its state is right. `register` puts a loader in the place of vLLM's
for `load_format: dummy`, by vLLM's public way of registering one. It runs where weights are loaded,
of the target and of the drafter: before vLLM ties, fuses or packs them, and before any graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RATES = (2.3, 1e-3)
"""Decay of GDN heads a token, first and last head: exp(-2.3) = 0.1 to exp(-1e-3) = 0.999."""


@dataclass(frozen=True)
class Fill:
    """What a parameter is filled with.

    Args:
        std: of normal numbers; None for `values`.
        values: constants, one for all or one an element.
    """

    std: float | None = None
    values: tuple[float, ...] = ()


def head_rates(heads: int) -> tuple[list[float], list[float]]:
    """`A_log` and `dt_bias` of GDN heads whose decays lie evenly between `RATES`, by logarithm.

    At a = 0 a head decays by exp(-exp(A_log) * softplus(dt_bias)) a token.
    """

    def spread(low: float, high: float) -> list[float]:
        steps = max(1, heads - 1)
        return [low + (high - low) * i / steps for i in range(heads)]

    logs = spread(-1.0, 1.0)
    rates = [math.exp(x) for x in spread(*map(math.log, RATES))]
    return logs, [
        math.log(math.expm1(rate / math.exp(log))) for rate, log in zip(rates, logs, strict=True)
    ]


def fill_of(name: str, shape: Sequence[int], owners: Sequence[str] = ()) -> Fill | None:
    """What a parameter is filled with; None leaves it as vLLM made it.

    Linear weights, embeddings, experts and the taps of convolutions are normal with a deviation of
    1/sqrt(fan-in), so that what goes in with a mean square of 1 comes out with one; norms do
    nothing.

    Args:
        name: of the parameter, its module's path before it.
        shape: its last dimension is the fan-in.
        owners: names of the module's class and of its bases.
    """
    last = name.rsplit(".", 1)[-1]
    if "scale" in last:
        return None
    if last in ("A_log", "dt_bias"):
        return Fill(values=tuple(head_rates(shape[0])[last == "dt_bias"]))
    if "bias" in last:
        return Fill(values=(0.0,))
    if any("Norm" in owner for owner in owners):
        # GemmaRMSNorm multiplies by one more than its weight.
        return Fill(values=(0.0 if "GemmaRMSNorm" in owners else 1.0,))
    return Fill(std=max(1, shape[-1]) ** -0.5)


def fill_model(model: nn.Module) -> dict[str, Any]:
    """Fill every floating-point parameter of a model, in place.

    Numbers follow from name and shape alone, made on the parameter's own device.

    Returns:
        `tensors`, how many were filled; `digest` of names, shapes and fills, which is equal where
        the weights are.
    """
    seen: set[int] = set()
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        owners = [kind.__name__ for kind in type(module).__mro__]
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.numel() or not _plain(parameter):
                continue
            full = f"{path}.{name}"
            fill = fill_of(full, parameter.shape, owners)
            if fill is None:
                continue
            seen.add(id(parameter))
            told = f"{full} {tuple(parameter.shape)} {fill}"
            digest.update(told.encode())
            _fill(parameter.data, fill, told)
    return {"tensors": len(seen), "digest": digest.hexdigest()[:16]}


def _plain(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _fill(data: Tensor, fill: Fill, text: str) -> None:
    if fill.std is not None:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        generator = torch.Generator(data.device).manual_seed(seed)
        data.normal_(0.0, fill.std, generator=generator)
    elif len(fill.values) == 1:
        data.fill_(fill.values[0])
    else:
        data.copy_(torch.tensor(fill.values, dtype=torch.float32).view(data.shape))


def register() -> list[dict[str, Any]]:
    """Make `load_format: dummy` of this process fill models so.

    Returns:
        A list that gets an entry for each model that is loaded, as `fill_model` gives it.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    filled: list[dict[str, Any]] = []

    class ScaledDummyLoader(DummyModelLoader):
        """vLLM's, and then numbers of another size."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            filled.append(fill_model(model))

    register_model_loader("dummy")(ScaledDummyLoader)
    return filled
