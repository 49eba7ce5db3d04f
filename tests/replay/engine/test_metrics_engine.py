"""The metrics of ReplaySSM against what the planner did, and on the page of the real `vllm serve`.

The offline engine has no /metrics page and loads no plugin of this kind, so the logger is put
beside its others by hand; from there on vLLM calls it in every step, as in a server.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import replay_engine
from free_ports import free_ports
from oracle_drafter import Policy, spoiled

from cuda_ext.metrics.counts import Step, WaitingRows, read_step

DRAFTS = 7
MAX_ROWS = DRAFTS + 1
PREFIX = "gaudi_ext:replay_"
TOKENS = 44
PROPOSALS = 5
"""So many with drafts give at most 1 + 5 * 8 of the 44 tokens: every answer ends without drafts."""

pytestmark = pytest.mark.skipif(
    replay_engine.ON_GPU, reason="the steps of an engine that schedules ahead are not told apart"
)


@dataclass
class Life:
    """The steps of a request from its start, or its start anew, to its end or preemption.

    Args:
        request: its name.
        known: tokens that it had when it started: the prompt, and what it had said before.
        again: whether it was preempted after its first token.
        rows: as planned.
    """

    request: str
    known: int
    again: bool
    rows: list[replay_engine.Row] = field(default_factory=list)

    @property
    def verifications(self) -> list[replay_engine.Row]:
        return [row for row in self.rows if row.start >= self.known]

    @property
    def computed(self) -> bool:
        """Whether all that was known at the start got computed, so that a token came of it."""
        return self.rows[-1].start + self.rows[-1].rows >= self.known


@dataclass
class Seen:
    """What the planner did while the metrics counted."""

    lives: list[Life] = field(default_factory=list)
    steps: list[dict[str, replay_engine.Row]] = field(default_factory=list)

    def add(self, scheduler: Any, rows: list[replay_engine.Row]) -> None:
        owners = slot_owners(scheduler)
        step = {owners[row.slot]: row for row in rows if row.slot}
        for name, row in step.items():
            if row.start == 0:
                request = scheduler.requests[name]
                again = request.num_tokens > request.num_prompt_tokens
                self.lives.append(Life(name, request.num_tokens, again))
            life = next(life for life in reversed(self.lives) if life.request == name)
            life.rows.append(row)
        self.steps.append(step)

    @property
    def verifications(self) -> list[replay_engine.Row]:
        return [row for life in self.lives for row in life.verifications]

    @property
    def folds(self) -> list[replay_engine.Row]:
        return [row for life in self.lives for row in life.rows if row.pending > 0]

    @property
    def folds_of_verified(self) -> list[replay_engine.Row]:
        """Those that fold the rows of a verification, not of a prompt."""
        return [row for life in self.lives for row in life.verifications[1:]]

    @property
    def resumed(self) -> int:
        """Tokens that came of a recomputed prompt."""
        return sum(life.again and life.computed for life in self.lives)


def slot_owners(scheduler: Any) -> dict[int, str]:
    """Which request holds each slot, by name without what vLLM appends to it."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    gdn = [i for i, group in enumerate(groups) if hasattr(group.kv_cache_spec, "mamba_type")]
    owners = {}
    for name in scheduler.requests:
        blocks = scheduler.kv_cache_manager.get_block_ids(name)
        owners |= {blocks[group][0]: name for group in gdn if blocks[group]}
    return owners


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Seen]:
    """Puts the logger beside vLLM's own, and sees what the first KV group's planner does."""
    from cuda_ext.backend.step_plan import StepPlanner
    from cuda_ext.metrics.stat_logger import ReplayStatLogger

    logger = ReplayStatLogger(vllm_config=engine.config, engine_indexes=[0])
    logger.log_engine_initialized()
    loggers = engine.llm.llm_engine.logger_manager.stat_loggers
    plan, seen = StepPlanner.plan, Seen()
    first: list[Any] = []

    def recorded(self: Any, *args: Any) -> Any:
        rows = plan(self, *args)
        first.append(self)
        if self is first[0]:
            columns = (rows.slot, rows.base, rows.start, rows.row_start.diff())
            values = zip(*(c.tolist() for c in columns), strict=True)
            seen.add(engine.scheduler, [replay_engine.Row(*row) for row in values])
        return rows

    StepPlanner.plan = recorded  # type: ignore[method-assign]
    loggers.append(logger)
    try:
        yield seen
    finally:
        loggers.remove(logger)
        StepPlanner.plan = plan  # type: ignore[method-assign]


def page() -> dict[str, float]:
    """Values of ours in vLLM's registry, by name without prefix and `_total`."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return {
        sample.name.removeprefix(PREFIX).removesuffix("_total"): sample.value
        for family in get_prometheus_registry().collect()
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


def ragged(drafter: Any) -> Callable[[Any], list[int]]:
    """0 to 7 drafts, of which the first 0 to all are right, for the first proposals; then none."""
    asked: Counter[int | None] = Counter()

    def script(known: Any) -> list[int]:
        text = drafter.text(known)
        asked[text] += 1
        if asked[text] > PROPOSALS:
            return []
        draw = random.Random(f"{text} {asked[text]}")
        count = draw.randint(0, DRAFTS)
        right = draw.randint(0, count)
        tokens = drafter.continuation(known)[:count]
        return [t if i < right else spoiled(t) for i, t in enumerate(tokens)]

    return script


@pytest.fixture(autouse=True)
def clean_page() -> Iterator[None]:
    yield
    from cuda_ext.metrics import exposition

    exposition.withdraw()


@pytest.fixture
def known(texts: Callable[[Any], Any]) -> Any:
    return texts(replay_engine.SMALL)


@pytest.fixture
def engine(oracle_engine: Callable[..., Any]) -> Any:
    """With a budget that holds the prompts whole."""
    return oracle_engine(
        replay_engine.SMALL, DRAFTS, disable_log_stats=False, max_num_batched_tokens=512
    )


def run_without_disturbance(engine: Any, known: Any) -> None:
    """Nobody is preempted or aborted here, and no prompt is as short as a verification.

    Raises:
        AssertionError: a metric is not what the planner did.
    """
    engine.drafter.script = ragged(engine.drafter)
    lengths = [90, 63, 64, 65, 127, 150]
    run = replay_engine.Requests(engine)
    for length in lengths:
        run.add(str(length), known.prompt(length), TOKENS)
    ring = engine.gdn_layers()[0].kv_cache[2].shape[1]
    occupied: list[dict[str, float]] = []
    holders: list[int] = []
    with watched(engine) as seen, replay_engine.preemptions(engine) as preempted:
        while run.unfinished:
            run.step()
            occupied.append(page())
            holders.append(len(set(slot_owners(engine.scheduler).values())))
    results = {length: run.result(str(length)) for length in lengths}
    replay_engine.assert_equal(results, known.answers)
    assert preempted.count == 0
    assert len(seen.lives) == len(lengths) > engine.scheduler.max_num_running_reqs
    parts = [row for life in seen.lives for row in life.rows if row.start < life.known]
    assert all(row.rows > MAX_ROWS for row in parts), "a prompt was verified, not prefilled"
    assert len({row.rows for row in seen.verifications}) > 5
    found = page()
    print(found)
    assert [shown["slots_in_use"] for shown in occupied] == holders
    assert found["pool_slots"] == len(engine.pool.blocks) - 1
    assert found["verifications"] == len(seen.verifications) > 0
    assert found["rows_verified"] == sum(row.rows for row in seen.verifications)
    assert found["folds"] == len(seen.folds) > 0
    # The last step of each had one row.
    assert found["rows_accepted"] == sum(row.pending for row in seen.folds) + len(lengths)
    assert found["slots_in_use"] == found["ring_occupancy_perc"] == 0
    assert found["ring_occupancy_max_perc"] == 0
    compared = 0
    for shown, step, after in zip(occupied, seen.steps, seen.steps[1:], strict=False):
        drafted = [name for name, row in step.items() if 1 < row.rows <= MAX_ROWS]
        if drafted:
            waiting = [after[name].pending for name in drafted]
            assert shown["ring_occupancy_perc"] * ring == pytest.approx(
                sum(waiting) / len(waiting), rel=1e-9
            )
            assert shown["ring_occupancy_max_perc"] * ring == pytest.approx(max(waiting), rel=1e-9)
            compared += len(set(waiting)) > 1
    assert compared > 0, "all requests of a step always kept as many rows"


def test_metrics_equal_what_the_planner_did(engine: Any, known: Any) -> None:
    run_without_disturbance(engine, known)


FAULTS: dict[str, Callable[[Step, Any], dict[str, Any]]] = {
    "only drafts are verified": lambda step, _: {
        "rows_verified": step.rows_verified - step.verifications
    },
    "rejected drafts stay": lambda step, _: {"rows_accepted": step.rows_verified},
    "the last token's row is not folded": lambda step, _: {
        "rows_accepted": step.rows_accepted - step.verifications
    },
    "the last step's rows are folded": lambda step, _: {"folds": step.verifications},
    "steps without drafts are none": lambda step, drafts: {
        "verifications": drafts.num_drafts if drafts else 0
    },
    "a finished request keeps its slot": lambda step, _: {
        "slots_in_use": step.slots_in_use and max(step.slots_in_use, 4)
    },
    "only drafts wait": lambda step, _: {
        "waiting": step.waiting
        and WaitingRows(max(0, step.waiting.mean - 1), max(0, step.waiting.most - 1))
    },
    "all rows of the longest wait": lambda step, _: {
        "waiting": step.waiting
        and WaitingRows(step.waiting.mean, MAX_ROWS if step.waiting.most else 0)
    },
    "the mean is over all requests": lambda step, drafts: {
        "waiting": step.waiting
        and drafts
        and WaitingRows(
            step.waiting.mean * drafts.num_drafts / step.slots_in_use, step.waiting.most
        )
    },
    "the rings are full when all is over": lambda step, _: {
        "waiting": WaitingRows(1, 1) if step.slots_in_use == 0 else step.waiting
    },
}


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen(
    engine: Any, known: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ext.metrics import stat_logger

    def wrong(scheduler: Any, iteration: Any) -> Step:
        step = read_step(scheduler, iteration)
        drafts = scheduler.spec_decoding_stats if scheduler else None
        return dataclasses.replace(step, **change(step, drafts))

    monkeypatch.setattr(stat_logger, "read_step", wrong)
    with pytest.raises(AssertionError):
        run_without_disturbance(engine, known)


def test_counters_stay_within_what_they_say_of_themselves(engine: Any, known: Any) -> None:
    """Preemptions, aborts and prompts that are verified, each off by as much as its help says."""
    engine.drafter.policy = Policy(seed=5, right=0.8, silent=0.2, pause=0.2, whole=0.2)
    lengths = [90, 8, 200, 7, 72, 150, 65]
    aborted = "150"
    run = replay_engine.Requests(engine)
    for length in lengths:
        run.add(str(length), known.prompt(length), TOKENS)
    step = 0
    with watched(engine) as seen, replay_engine.preemptions(engine) as preempted:
        while run.unfinished:
            run.step()
            step += 1
            if step in (6, 11):
                replay_engine.reset_running(engine)
            if step == 30:
                run.abort(aborted)
    kept = [length for length in lengths if str(length) in run.finished]
    replay_engine.assert_equal({n: run.result(str(n)) for n in kept}, known.answers)
    found = page()
    print(found, preempted.count, seen.resumed)
    assert seen.resumed > 0
    assert found["verifications"] == len(seen.verifications) + seen.resumed
    assert found["rows_verified"] == sum(r.rows for r in seen.verifications) + seen.resumed
    over = found["folds"] - len(seen.folds_of_verified)
    assert 0 < over <= 2 * preempted.count + 1
    ends = len(lengths) + preempted.count
    over = found["rows_accepted"] - sum(row.pending for row in seen.folds_of_verified)
    assert len(run.finished) <= over <= MAX_ROWS * ends + seen.resumed
    # What the planner folds of short prompts is not counted, and the help says so.
    assert len(seen.folds) > len(seen.folds_of_verified)


@pytest.mark.parametrize("why", ["off", "no drafts", "not named", "on Gaudi"])
def test_nothing_is_exposed_where_replay_does_not_serve(
    engine: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ext.metrics import stat_logger
    from cuda_ext.metrics.stat_logger import ReplayStatLogger

    config = copy.copy(engine.config)
    mine = {"replay": "off" if why == "off" else "auto"}
    config.additional_config = config.additional_config | {"gaudi_ext": mine}
    if why == "no drafts":
        config.speculative_config = None
    elif why == "not named":
        monkeypatch.delenv("VLLM_PLUGINS")
    elif why == "on Gaudi":
        monkeypatch.setattr(stat_logger.plugin, "hpu_stack_present", lambda: True)
    if why in ("not named", "on Gaudi"):
        # There it may not even look: what it would find is refused.
        monkeypatch.setattr(stat_logger, "checked_facts", None)
    logger = ReplayStatLogger(vllm_config=config, engine_indexes=[0])
    logger.log_engine_initialized()
    logger.record(SimpleNamespace(), SimpleNamespace(), None, 0)
    assert page() == {}


def report(running: int) -> SimpleNamespace:
    """`SchedulerStats` of a step without drafts."""
    return SimpleNamespace(num_running_reqs=running, spec_decoding_stats=None)


def test_an_unknown_report_takes_the_metrics_away_and_ends_nothing(engine: Any) -> None:
    from cuda_ext.metrics.stat_logger import ReplayStatLogger

    logger = ReplayStatLogger(vllm_config=engine.config, engine_indexes=[0])
    logger.log_engine_initialized()
    logger.record(report(2), None, None, 0)
    logger.record(report(1), None, None, 4)
    assert page()["slots_in_use"] == 2, "an engine that nobody announced"
    logger.record(SimpleNamespace(num_running_reqs=1), None, None, 0)
    assert page() == {}
    logger.record(report(1), None, None, 0)
    logger.log_engine_initialized()
    assert page() == {}


def test_tokens_of_an_engine_that_reports_nothing_are_kept_back(engine: Any) -> None:
    """`--disable-log-stats` with several API servers: nobody would hear of the drafts."""
    from cuda_ext.metrics.stat_logger import ReplayStatLogger

    logger = ReplayStatLogger(vllm_config=engine.config, engine_indexes=[0])
    tokens = SimpleNamespace(inter_token_latencies_iter=[0.1] * 3, finished_requests=[])
    for _ in range(2):
        logger.record(None, tokens, None, 0)
    assert page() == {"info": 1}
    logger.record(report(3), tokens, None, 0)
    logger.record(None, tokens, None, 0)
    found = page()
    assert (found["verifications"], found["slots_in_use"]) == (12, 3)


def test_several_engines_have_no_pool_of_their_own_to_show(engine: Any) -> None:
    from cuda_ext.metrics.stat_logger import ReplayStatLogger

    logger = ReplayStatLogger(vllm_config=engine.config, engine_indexes=[0, 1])
    logger.log_engine_initialized()
    found = page()
    assert found == {"info": 1}


def test_a_real_server_shows_them(
    models: Callable[[Any], Path],
    known: Any,
    engines: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the entry point, in the front-end process, and with vLLM's own statistics off."""
    engines.stop()
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "demo"))
    import flow
    import server

    options = replay_engine.OPTIONS | replay_engine.oracle(DRAFTS, known.file)
    del options["skip_tokenizer_init"]
    port = free_ports()
    command = flow.serve_command(models(replay_engine.SMALL), port, "tiny", options)
    environment = replay_engine.environment("gaudi_ext")
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = tmp_path / "serve.log"
    lengths = (90, 52, 64)
    with server.serving(command, port, log, environment) as running:
        running.wait_until_healthy(300, lambda seconds: None)
        for length in lengths:
            body = {
                "model": "tiny",
                "prompt": known.prompt(length),
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = httpx.post(
                f"{running.url}/v1/completions", json=body, timeout=120, trust_env=False
            )
            assert answer.raise_for_status().json()["usage"]["completion_tokens"] == TOKENS
        samples = list(running._samples())
        blocks = int(running.cache_config()["num_gpu_blocks"])
    values = {
        sample.name.removeprefix(PREFIX): sample.value
        for sample in samples
        if sample.labels.get("engine") == "0" and sample.labels.get("model_name") == "tiny"
    }
    info = next(sample.labels for sample in samples if sample.name == f"{PREFIX}info")
    assert (info["drafts"], info["ring_rows"], info["backend"]) == ("7", "32", "reference")
    verifications = values["vllm:inter_token_latency_seconds_count"]
    drafted = values["vllm:spec_decode_num_draft_tokens_total"]
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted > accepted > 0
    assert values["verifications_total"] == verifications
    assert values["folds_total"] == verifications - len(lengths)
    assert values["rows_verified_total"] == verifications + drafted
    assert values["rows_accepted_total"] == verifications + accepted
    assert values["slots_in_use"] == 0
    assert values["pool_slots"] == blocks - 1
