"""A checkpoint is enqueued before `sample_tokens` returns, so before any step that restores it."""

from __future__ import annotations

from typing import Any

import driving
import fp32
import harness
import pytest

B = 256


@pytest.fixture
def engine(engines: Any) -> Any:
    return engines(
        driving.small_model(),
        async_scheduling=True,
        dtype="float32",
        max_num_batched_tokens=512,
        num_gpu_blocks_override=24,
    )


class Log:
    """What the worker did, in order: begin and end of both calls of a step, and the motions."""

    def __init__(self, engine: Any) -> None:
        self.events: list[tuple[str, Any]] = []
        runner, checkpoints = engine.runner, engine.runner._checkpoints
        self.patches = [
            self._around(runner, "execute_model"),
            self._around(runner, "sample_tokens"),
            self._around(checkpoints, "save", lambda rows: tuple(r.block for r in rows)),
            self._around(checkpoints, "restore", lambda rows: tuple(r.block for r in rows)),
        ]

    def _around(self, owner: Any, name: str, detail: Any = lambda *_: None) -> Any:
        inner = getattr(owner, name)

        def logged(*args: Any, **kwargs: Any) -> Any:
            self.events.append((f"{name} begins", detail(*args)))
            result = inner(*args, **kwargs)
            self.events.append((f"{name} ends", detail(*args)))
            return result

        return driving.replaced(owner, name, logged)

    def __enter__(self) -> Log:
        for patch in self.patches:
            patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in reversed(self.patches):
            patch.__exit__(*error)

    def check(self) -> int:
        """Every restored block was saved before, inside a `sample_tokens`.

        Returns:
            The number of blocks restored.
        """
        inside = False
        saved: set[int] = set()
        restored = 0
        for name, blocks in self.events:
            if name in ("sample_tokens begins", "sample_tokens ends"):
                inside = name.endswith("begins")
            elif name == "save ends" and blocks:
                assert inside, "a checkpoint was enqueued outside of sample_tokens"
                saved.update(blocks)
            elif name == "restore begins" and blocks:
                assert not inside
                assert set(blocks) <= saved, "a block is restored before it was saved"
                restored += len(blocks)
        return restored


def test_hit_right_behind_the_step_that_fills_the_block(engine: Any) -> None:
    """The second request is admitted while the first one's last chunk is still in flight."""
    tokens = harness.prompt(1, 2 * B + 30)
    cold = driving.cold(engine, tokens, 6)
    engine.llm.reset_prefix_cache()
    run, salt = driving.Requests(engine), driving.salt()
    with Log(engine) as log:
        run.add("first", tokens, 6, salt)
        run.step()
        run.add("second", tokens, 6, salt)
        run.drain()
    assert log.check() > 0
    assert run.result("second").cached_tokens > 0
    for name in ("first", "second"):
        assert run.result(name).distance(cold) <= fp32.TOLERANCE


def test_decode_checkpoint_of_a_step_whose_sampling_waits_for_a_grammar(engine: Any) -> None:
    """A structured request's step is sampled late, behind the output of the step before."""
    from vllm.sampling_params import StructuredOutputsParams

    tokens, salt = harness.prompt(2, B - 6), driving.salt()
    engine.llm.reset_prefix_cache()
    run = driving.Requests(engine)
    deferred = []
    structured = StructuredOutputsParams(regex="[a-z ]{60}")
    with driving.ledger(engine) as book, Log(engine) as log, driving.watched(engine) as seen:
        run.add("grammar", tokens, 24, salt, structured_outputs=structured)
        run.drain()
        deferred = [s for s in seen.steps if s.pending_structured_output_tokens]
        made = run.result("grammar")
        longer = tokens + list(made.tokens)
        run.add("hit", longer + harness.prompt(3, 20), 6, salt)
        run.drain()
    assert deferred, "no step's sampling was deferred"
    assert book.saved > 0
    assert log.check() > 0
    assert run.result("hit").cached_tokens == B
    cold = driving.cold(engine, longer + harness.prompt(3, 20), 6)
    assert run.result("hit").tokens == cold.tokens
    assert run.result("hit").distance(cold) <= fp32.TOLERANCE
