"""Dummy weights: of which size, and the same in every process."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch, not installed here")

from cuda_ext.bench.serve.weights import (  # noqa: E402
    Fill,
    fill_model,
    fill_of,
    head_rates,
)


class GemmaRMSNorm(torch.nn.Module):
    """As vLLM's: multiplies by one more than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 7.0))


class Layer(torch.nn.Module):
    """A layer with a parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(256, 64, bias=True)
        self.conv1d = torch.nn.Conv1d(512, 512, 4, groups=512, bias=False)
        self.norm = torch.nn.RMSNorm(8)
        self.input_layernorm = GemmaRMSNorm()
        self.A_log = torch.nn.Parameter(torch.full((4,), math.nan))
        self.dt_bias = torch.nn.Parameter(torch.full((4,), math.nan, dtype=torch.bfloat16))
        self.w13_weight = torch.nn.Parameter(torch.empty(8, 32, 64, dtype=torch.bfloat16))
        self.k_scale = torch.nn.Parameter(torch.tensor(7.0))
        self.ids = torch.nn.Parameter(torch.tensor([7, 7]), requires_grad=False)
        self.register_buffer("table", torch.full((4,), 7.0))
        self.head = torch.nn.Linear(256, 64, bias=False)
        self.head.weight = self.in_proj.weight


def filled() -> tuple[Any, dict[str, Any]]:
    model = torch.nn.ModuleDict({"layer": Layer()})
    return model, fill_model(model)


def test_what_goes_in_with_a_mean_square_of_one_comes_out_with_one() -> None:
    layer = filled()[0]["layer"]
    for weight, fan_in in ((layer.in_proj.weight, 256), (layer.w13_weight, 64)):
        assert float(weight.detach().float().square().mean()) * fan_in == pytest.approx(
            1.0, rel=0.05
        )
    assert float(layer.conv1d.weight.detach().square().mean()) * 4 == pytest.approx(1.0, rel=0.05)
    assert not layer.in_proj.bias.any()
    assert (layer.norm.weight == 1).all()
    assert not layer.input_layernorm.weight.any()


def test_what_is_no_weight_is_left_alone() -> None:
    layer = filled()[0]["layer"]
    assert layer.k_scale == 7.0
    assert layer.ids.tolist() == [7, 7]
    assert (layer.table == 7.0).all()


def test_the_same_names_and_shapes_have_the_same_numbers() -> None:
    (one, told), (other, again) = filled(), filled()
    assert told == again
    # Tied ones count once.
    assert told["tensors"] == 8
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not torch.equal(one["layer"].w13_weight[0], one["layer"].w13_weight[1])


def test_another_name_has_other_numbers_and_another_digest() -> None:
    one, other = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)
    first = fill_model(torch.nn.ModuleDict({"a": one}))
    second = fill_model(torch.nn.ModuleDict({"b": other}))
    assert first["digest"] != second["digest"]
    assert not torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_heads_forget_at_rates_from_a_tenth_to_a_thousandth(heads: int) -> None:
    logs, biases = head_rates(heads)
    decays = [
        math.exp(-math.exp(log) * math.log1p(math.exp(bias)))
        for log, bias in zip(logs, biases, strict=True)
    ]
    assert decays[0] == pytest.approx(0.1, abs=0.01)
    if heads > 1:
        assert decays[-1] == pytest.approx(0.999, abs=1e-4)
        assert decays == sorted(decays)
        assert len(set(logs)) == heads


def test_fills() -> None:
    assert fill_of("model.embed_tokens.weight", (100, 64)) == Fill(std=0.125)
    assert fill_of("x.e_score_correction_bias", (8,)) == Fill(values=(0.0,))
    assert fill_of("x.k_scale", ()) is None
