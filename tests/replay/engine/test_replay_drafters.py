"""vLLM's own drafters change no token: ngram, suffix, MTP and DFlash."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import replay_engine
import suffix_cache
import tiny_models
import torch
from safetensors.torch import load_file, save_file

LENGTHS = [8, 63, 65, 90, 150]
MODEL = tiny_models.CPU_DENSE
"""It says tokens several times, as text does, so that drafts are accepted."""


def dflash(models: Callable[[Any], Path], drafts: int) -> dict[str, Any]:
    # vLLM takes the drafter's dtype from its own checkpoint.
    drafter = dataclasses.replace(tiny_models.DFLASH, name="tiny-dflash-fp32", dtype="float32")
    return {"method": "dflash", "model": str(models(drafter)), "num_speculative_tokens": drafts}


def ngram(models: Callable[[Any], Path], drafts: int) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"method": "ngram", "num_speculative_tokens": drafts, **lookup}


def suffix(models: Callable[[Any], Path], drafts: int) -> dict[str, Any]:
    return {"method": "suffix", "num_speculative_tokens": drafts}


def mtp(models: Callable[[Any], Path], drafts: int) -> dict[str, Any]:
    target = models(MODEL)
    folder = target.with_name(f"{target.name}-mtp")
    if not folder.exists():
        folder.mkdir()
        write_mtp(folder, load_file(target / "model.safetensors"))
    return {"method": "mtp", "model": str(folder), "num_speculative_tokens": drafts}


def write_mtp(folder: Path, target: Mapping[str, torch.Tensor]) -> None:
    """A drafter of one layer that passes the last token's embedding on to `lm_head`.

    Args:
        folder: where it goes, as a checkpoint of its own.
        target: weights of `MODEL`, of which it has embedding and head.
    """
    text = MODEL.text
    hidden, width, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (2 * queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    weights = {f"mtp.layers.0.{name}.weight": torch.zeros(s) for name, s in shapes.items()}
    # These norms scale by 1 + weight.
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(hidden)
    weights["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = target[name].float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rope = {k: v for k, v in text["rope_parameters"].items() if not k.startswith("mrope")}
    # With mrope the drafter of a text-only model gets three positions a token, for a rotary layer
    # that knows one, and the process aborts (vLLM 0.31.0).
    config = MODEL.config() | {"rope_parameters": rope, "mtp_num_hidden_layers": 1}
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("drafts", [7, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [ngram, suffix, mtp, dflash], ids=lambda method: method.__name__)
def test_drafter_changes_no_token(
    engines: Any,
    texts: Callable[..., Any],
    models: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: Any,
    drafts: int,
) -> None:
    if method is suffix:
        suffix_cache.stand_in(monkeypatch)
    speculative = method(models, drafts)
    known = texts(MODEL, lengths=LENGTHS, answer=32)
    # `auto` is what turns ReplaySSM on here.
    engine = engines(MODEL, speculative_config=speculative)
    with replay_engine.planned(engine) as plans:
        results = engine.run(
            [known.prompt(length) for length in LENGTHS],
            max_tokens=[len(known.answers[length].tokens) for length in LENGTHS],
        )
    worst = replay_engine.assert_equal(dict(zip(LENGTHS, results, strict=True)), known.answers)
    reached = plans.reached()
    print(f"{worst:.1e}", dict(reached))
    for path in ("folds", "drafts accepted", "drafts rejected", "mixed batches"):
        assert reached[path] > 0, f"no step reached: {path}"
