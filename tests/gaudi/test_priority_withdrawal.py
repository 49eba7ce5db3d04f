"""vllm#57580: priority scheduling withdraws a request whose blocks this step has hashed already."""

from __future__ import annotations

from typing import Any

import driving
import fp32
import harness
import pytest

from vllm_gaudi_ext.scheduler import GdnPrefixCaching

B = 256


# The scope makes pytest run all tests of one kind of scheduling together, on one engine.
@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(engines: Any, asynchronous: bool) -> Any:
    return engines(
        driving.small_model(),
        async_scheduling=asynchronous,
        dtype="float32",
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=B,
        scheduling_policy="priority",
        num_gpu_blocks_override=60,
    )


def withdraw(engine: Any) -> tuple[list[str], driving.Requests, driving.Ledger]:
    """An urgent request finds no block in the step that has scheduled, and hashed, a later one.

    The pool is large, and refuses the urgent request once: in a small pool the blocks that the
    withdrawn request leaves would be taken by the urgent one before anybody could hit them.

    Returns:
        The requests that were withdrawn, the run, and its ledger.
    """
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    withdrawn: list[str] = []

    def refusing(request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id.split("-")[0]
        if name == "urgent" and not withdrawn and request.status.name == "RUNNING":
            late = driving.find(engine, "late")
            hashed = [b.block_hash for b in manager.get_blocks(late.request_id).blocks[1][:2]]
            if late.num_computed_tokens == B and hashed[1] is not None:
                withdrawn.append("late")
                return None
        return allocate(request, *args, **kwargs)

    run = driving.Requests(engine)
    salt = driving.salt()
    with driving.ledger(engine) as book, driving.replaced(manager, "allocate_slots", refusing):
        run.add("late", harness.prompt(1, 5 * B + 20), 8, salt, priority=10)
        run.add("urgent", harness.prompt(2, 5 * B + 20), 8, driving.salt(), priority=0)
        # The order of admission is that of priority; the withdrawn one must come first.
        for _ in range(200):
            run.step()
            running = engine.scheduler.running
            if len(running) == 2 and running[0].request_id.startswith("urgent-"):
                running.reverse()
            if withdrawn:
                break
        # Same tokens as the withdrawn request: it would be hit on what that one left behind.
        run.add("same", harness.prompt(1, 5 * B + 40), 8, salt, priority=5)
        run.drain()
    return withdrawn, run, book


def test_withdrawn_request_leaves_no_hash_without_a_checkpoint(engine: Any) -> None:
    late = driving.cold(engine, harness.prompt(1, 5 * B + 20), 8)
    same = driving.cold(engine, harness.prompt(1, 5 * B + 40), 8)
    withdrawn, run, book = withdraw(engine)
    assert withdrawn, "no request was withdrawn after its blocks were hashed"
    assert book.restored > 0
    for name, cold in (("late", late), ("same", same)):
        assert run.result(name).tokens == cold.tokens
        assert run.result(name).distance(cold) <= fp32.TOLERANCE


def test_without_the_eviction_a_block_without_a_checkpoint_is_hit(
    engines: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(GdnPrefixCaching, "_preempt_request")
    with pytest.raises(AssertionError, match="restored without a checkpoint"):
        withdraw(engine)
    engines.stop()
