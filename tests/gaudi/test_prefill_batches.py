"""Several prompts in one prefill batch, and both schedulers."""

from __future__ import annotations

from typing import Any

import driving
import fp32
import harness
import pytest
from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

from vllm_gaudi_ext.runner import GaudiExtModelRunner

B = 256


def start(engines: Any, bucket: int, asynchronous: bool) -> Any:
    return engines(
        driving.small_model(),
        env={"VLLM_PROMPT_BS_BUCKET_MAX": str(bucket)},
        async_scheduling=asynchronous,
        dtype="float32",
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=40,
    )


def batch_sizes(engine: Any, seen: list[int]) -> Any:
    form = engine.runner._form_prefill_batch

    def formed(contents: Any) -> Any:
        seen.append(len(contents.req_ids))
        return form(contents)

    return driving.replaced(engine.runner, "_form_prefill_batch", formed)


# The last engine is that of the next test.
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("bucket", [1, 4])
def test_prompts_that_share_a_step(engines: Any, bucket: int, asynchronous: bool) -> None:
    engine = start(engines, bucket, asynchronous)
    assert engine.runner.max_prefill_batch_size == bucket
    shared = harness.prompt(1, B + 20)
    prompts = [shared + harness.prompt(10 + i, 20 + 11 * i) for i in range(4)]
    expected = [driving.cold(engine, p, 6) for p in prompts]
    fresh = [harness.prompt(30 + i, 60 + 50 * i) for i in range(4)]
    fresh_expected = [driving.cold(engine, p, 6) for p in fresh]
    sizes: list[int] = []
    with driving.ledger(engine), batch_sizes(engine, sizes):
        fresh_results = engine.run(fresh, max_tokens=6, salt=driving.salt())
        salt = driving.salt()
        engine.run([shared], max_tokens=1, salt=salt)
        results = engine.run(prompts, max_tokens=6, salt=salt)
    assert max(sizes) == (1 if bucket == 1 else 4)
    assert [r.cached_tokens for r in results] == [B] * 4
    for result, cold in zip(results + fresh_results, expected + fresh_expected, strict=True):
        assert result.tokens == cold.tokens
        assert result.distance(cold) <= fp32.TOLERANCE


def test_stock_branch_stops_a_batch_of_several_prompts(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(engines, 4, True)
    monkeypatch.setattr(
        GaudiExtModelRunner, "_form_prefill_batch", HPUModelRunner._form_prefill_batch
    )
    with pytest.raises(AssertionError):
        engine.run([harness.prompt(40 + i, 60) for i in range(4)], salt=driving.salt())
    engines.stop()
