"""On a GPU: pages packed into blocks of all layers change no answer, and are what vLLM makes.

vLLM's attention for CPUs reads one layout only, so there is no packed engine there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_engine
import tiny_models
from test_replay_graphs import BOTH, FULL, V1, V2

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not replay_engine.ON_GPU, reason="needs an NVIDIA GPU"),
]

LENGTHS = [8, 63, 65, 90, 150, 300]
DRAFTS = 7
_TEXT = dict(replay_engine.SMALL.text)
MODEL = dataclasses.replace(
    tiny_models.CPU_DENSE,
    name="tiny-packing",
    text=_TEXT
    | {
        "num_hidden_layers": 2 * _TEXT["num_hidden_layers"],
        "layer_types": 2 * list(_TEXT["layer_types"]),
    },
)
"""Six GDN layers and two of attention, with 4 KiB of K and V a token each."""
DRAFTER = dataclasses.replace(
    tiny_models.DFLASH,
    name="tiny-dflash-packing",
    dtype="float32",
    text=tiny_models.DFLASH.text
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
        "num_target_layers": 8,
    },
)
"""Four layers of attention with 1 KiB a token, so that they share no group with the target's."""
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full": {"enforce_eager": False, **FULL},
    "both": {"enforce_eager": False, **BOTH},
}


@pytest.mark.parametrize("runner", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize("arm", ARMS)
def test_packed_pages_change_no_token(
    engines: Any,
    texts: Callable[..., Any],
    models: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    arm: str,
    runner: str,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == V2)))
    known = texts(MODEL, lengths=LENGTHS, answer=32)
    speculative = {
        "method": "dflash",
        "model": str(models(DRAFTER)),
        "num_speculative_tokens": DRAFTS,
    }
    engine = engines(
        MODEL,
        speculative_config=speculative,
        max_num_batched_tokens=64 + 4 * (DRAFTS + 1),
        # A number of blocks would be a pool of another size, and is left unpacked.
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=96 << 20,
        # Part of the key, since the environment is not.
        disable_log_stats=runner == V2,
        **ARMS[arm],
    )
    assert type(engine.runner).__module__ == runner
    # With DFlash vLLM 0.31.0 schedules ahead of either runner (config/vllm.py).
    assert engine.config.scheduler_config.async_scheduling is True
    config = engine.runner.kv_cache_config
    assert engine.config.cache_config.kv_cache_layout == "BLNHC"
    assert sorted(len(group.layer_names) for group in config.kv_cache_groups) == [3, 3, 6]
    # The pages of different layers lie in one block.
    (block,) = {tensor.block_stride for tensor in config.kv_cache_tensors}
    page = engine.gdn_layers()[0].replay.nbytes
    assert block > 3 * page
    for layer in engine.gdn_layers():
        ssm = layer.kv_cache[1]
        assert ssm.stride(0) * ssm.element_size() == block
        # Where it is read as soon as it isn't its request's.
        for view in layer.kv_cache:
            view.fill_(float("nan"))
    null = replay_engine.null_page(engine)
    run = replay_engine.Requests(engine)
    for length in LENGTHS:
        run.add(str(length), known.prompt(length), len(known.answers[length].tokens))
    step = 0
    with (
        replay_engine.planned(engine) as plans,
        replay_engine.preemptions(engine) as preempted,
    ):
        while run.unfinished:
            run.step()
            step += 1
            if step % 9 == 0 and step <= 36:
                replay_engine.reset_running(engine)
    results = {length: run.result(str(length)) for length in LENGTHS}
    worst = replay_engine.assert_equal(results, known.answers)
    reached = plans.reached()
    print(f"packing {arm} {runner}: {worst:.1e}, {preempted.count} preemptions, {dict(reached)}")
    for path in ("folds", "drafts rejected", "mixed batches", "slots used again"):
        assert reached[path] > 0, f"no step reached: {path}"
    assert preempted.count > 0
    for before, after in zip(null, replay_engine.null_page(engine), strict=True):
        assert before.isnan().equal(after.isnan())
