"""How requests are sent and timed, on an engine that computes nothing, by a clock of the test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cuda_ext.bench.serve import engine as engines
from cuda_ext.bench.serve.config import Load
from cuda_ext.bench.serve.engine import ArmEngine, Watch
from cuda_ext.bench.serve.load import Point, Request

STEP_S = 0.5
TOKENS_A_STEP = 4


class FakeLLMEngine:
    """Gives each running request four tokens a step; a prompt takes a step of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.left: dict[str, list[int]] = {}
        self.most = 0
        self.reason = "length"

    def step(self) -> list[Any]:
        self.most = max(self.most, len(self.left))
        self.clock[0] += STEP_S
        outputs = []
        for name, state in list(self.left.items()):
            given = min(state[1], TOKENS_A_STEP if state[0] else 1)
            state[0], state[1] = 1, state[1] - given
            done = state[1] == 0
            if done:
                del self.left[name]
            one = SimpleNamespace(
                token_ids=[1] * given, finish_reason=self.reason if done else None
            )
            # vLLM gives back a name with a suffix in some versions.
            found = SimpleNamespace(request_id=f"{name}-abc", outputs=[one], finished=done)
            outputs.append(found)
        return outputs


class Engine(ArmEngine):
    """An `ArmEngine` on the fake."""

    def __init__(self, clock: list[float]) -> None:
        self.engine = FakeLLMEngine(clock)
        self.watch = Watch()
        self._number = 0

    def _send(self, request: Request) -> str:
        self._number += 1
        self.engine.left[str(self._number)] = [0, request.output_tokens]
        return str(self._number)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = [100.0]
    monkeypatch.setattr(engines.time, "perf_counter", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(engines.time, "sleep", sleep)
    return Engine(clock)


def ignore(_: dict[str, Any]) -> None:
    pass


def test_a_closed_loop_keeps_so_many_in_flight(engine: Engine) -> None:
    given = [Request([1, 2, 3], 9) for _ in range(6)]
    records, wall = engine.serve(given, 2, ignore)
    assert engine.engine.most == 2
    # 1 + 4 + 4 tokens: three steps, and three turns of two.
    assert wall == pytest.approx(9 * STEP_S)
    assert all(record.complete for record in records)
    # Whoever waits to be sent is not served later for it: it starts to count when it is sent.
    assert {round(record.ttft_s, 6) for record in records} == {STEP_S}
    assert {round(record.e2e_s, 6) for record in records} == {3 * STEP_S}
    assert records[0].tpot_ms == pytest.approx(2 * STEP_S / 8 * 1e3)


def test_a_new_request_starts_as_soon_as_one_ends(engine: Engine) -> None:
    """Waves have no barrier between them: the batch stays full while anyone waits."""
    seen: list[int] = []
    step = engine.engine.step

    def watched() -> list[Any]:
        seen.append(len(engine.engine.left))
        return step()

    engine.engine.step = watched
    given = [Request([1], output) for output in (1, 33, 5, 5, 5, 9)]
    records, _ = engine.serve(given, 2, ignore)
    assert all(record.complete for record in records)
    # One long request stays beside all others; barriers would end it before the third begins.
    assert seen == [2] * 9 + [1]


def test_what_settles_a_point_is_served_at_once_and_not_counted(engine: Engine) -> None:
    engine.load = Load(concurrency=[2], prompt_tokens=(3, 5), output_tokens=[9])
    engine.vocabulary = 64
    sent: list[int] = []
    send = engine._send

    def watched(request: Request) -> str:
        sent.append(request.output_tokens)
        return send(request)

    engine._send = watched
    run = engine.point("stock", Point(2, None, 9, 6), 0, ignore)
    assert len(run.records) == 6
    settling = sent[:-6]
    assert len(settling) >= 5
    assert min(settling) >= 32
    # All of them together, which are more than the point has in flight.
    assert engine.engine.most == len(settling)


def test_an_open_loop_counts_from_when_a_request_was_due(engine: Engine) -> None:
    given = [Request([1], 5, 0.0), Request([1], 5, 0.7), Request([1], 5, 5.0)]
    records, wall = engine.serve(given, None, ignore)
    # The second was due in the middle of a step, which had to end first.
    assert [round(record.ttft_s, 2) for record in records] == [0.5, 0.8, 0.5]
    assert wall == pytest.approx(6.0, abs=0.06)


def test_a_request_that_ends_otherwise_is_an_error(engine: Engine) -> None:
    engine.engine.reason = "stop"
    (record,), _ = engine.serve([Request([1], 2)], 1, ignore)
    assert record.error == "finished by stop"
    assert not record.complete


def test_progress_comes_once_a_second(engine: Engine) -> None:
    seen: list[dict[str, Any]] = []
    engine.serve([Request([1], 1 + 4 * 9)], 1, seen.append)
    assert [found["seconds"] for found in seen] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (seen[0]["tokens"], seen[0]["done"], seen[0]["of"]) == (5, 0, 1)


def scheduled(**changes: Any) -> Any:
    stats: dict[str, Any] = {
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_skipped_waiting_reqs": 0,
        "kv_cache_usage": 0.4,
        "spec_decoding_stats": None,
    }
    return SimpleNamespace(**stats | changes)


def test_the_engines_figures_are_the_most_and_the_sums() -> None:
    watch = Watch()
    drafts = SimpleNamespace(num_drafts=3, num_accepted_tokens=20)
    watch.record(scheduled(spec_decoding_stats=drafts), SimpleNamespace(num_preempted_reqs=1))
    watch.record(scheduled(num_running_reqs=88, kv_cache_usage=0.9, num_skipped_waiting_reqs=5))
    watch.record(None, SimpleNamespace(num_preempted_reqs=2))
    found = watch.figures()
    assert (found.running_max, found.waiting_max, found.kv_usage_max) == (88, 7, 0.9)
    assert (found.preemptions, found.drafts, found.accepted) == (3, 3, 20)
    watch.reset()
    assert watch.figures() == engines.EngineFigures()


def test_the_pool_is_its_blocks_times_the_largest_group() -> None:
    def group(layers: int, **spec: Any) -> Any:
        return SimpleNamespace(layer_names=["x"] * layers, kv_cache_spec=SimpleNamespace(**spec))

    groups = [group(8, page_size_bytes=100), group(5, page_size_bytes=100)]
    groups.append(group(3, page_size_bytes=750, kv_cache_specs={}))
    assert engines.pool_bytes(SimpleNamespace(num_blocks=10, kv_cache_groups=groups)) == 8000


def test_a_group_says_what_shares_its_blocks() -> None:
    class MambaSpec:
        block_size = 8192
        page_size_bytes = 100

    class FullAttentionSpec:
        block_size = 688
        page_size_bytes = 300
        kv_cache_specs: dict[str, Any]

    states = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=MambaSpec())
    assert engines.group_of(states) == {
        "kinds": ["MambaSpec"],
        "layers": 2,
        "block_tokens": 8192,
        "block_bytes": 200,
    }
    both = FullAttentionSpec()
    both.kv_cache_specs = {"c": FullAttentionSpec(), "d": FullAttentionSpec()}
    found = engines.group_of(SimpleNamespace(layer_names=["c", "d"], kv_cache_spec=both))
    assert (found["kinds"], found["block_bytes"]) == (["FullAttentionSpec"], 300)


def test_an_unknown_command_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no command 'dance'"):
        engines.obey({"do": "dance"}, engine, ignore)
