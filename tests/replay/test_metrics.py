"""ReplaySSM's metrics: what a report of vLLM adds, and what the page then says.

Whether the figures are those of the planner is tested in engine/test_metrics_engine.py.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from cuda_ext.metrics.counts import NOTHING_WAITS, Step, WaitingRows, read_step

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.26.0", "0.31.0", "0.33.0")
RING = 32


def drafted(*requests: tuple[int, int], drafts: int = 7) -> SimpleNamespace:
    """`SpecDecodingStats` of requests with (drafts, accepted)."""
    accepted = [right for _, right in requests]
    return SimpleNamespace(
        num_drafts=len(requests),
        num_draft_tokens=sum(count for count, _ in requests),
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=[sum(a > i for a in accepted) for i in range(drafts)],
    )


def scheduled(running: int, drafts: Any = None) -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=running, spec_decoding_stats=drafts)


def delivered(verifications: int, *finished: int) -> SimpleNamespace:
    """`IterationStats` with the lengths of the answers that ended."""
    return SimpleNamespace(
        inter_token_latencies_iter=[0.01] * verifications,
        finished_requests=[SimpleNamespace(num_generation_tokens=n) for n in finished],
    )


# What a report adds


@pytest.mark.parametrize(
    ("scheduler", "iteration", "expected"),
    [
        pytest.param(None, None, Step(), id="nothing"),
        pytest.param(
            scheduled(3, drafted((7, 7), (7, 0), (2, 1))),
            delivered(3),
            Step(3, 3, 3 + 16, 3 + 8, 3, WaitingRows(11 / 3, 8)),
            id="ragged drafts",
        ),
        pytest.param(
            scheduled(4, drafted((7, 2))),
            delivered(4),
            Step(4, 4, 4 + 7, 4 + 2, 4, WaitingRows(3.0, 3)),
            id="three of four without drafts",
        ),
        pytest.param(
            scheduled(2, drafted((5, 0), (5, 0))),
            delivered(2),
            Step(2, 2, 12, 2, 2, WaitingRows(1.0, 1)),
            id="all rejected",
        ),
        pytest.param(scheduled(2), delivered(2), Step(2, 2, 2, 2, 2, None), id="no drafts at all"),
        pytest.param(
            scheduled(1, drafted((7, 7), (7, 7))),
            delivered(2, 40),
            Step(2, 1, 16, 16, 1, WaitingRows(8.0, 8)),
            id="one of two ends",
        ),
        pytest.param(
            scheduled(1), delivered(1, 1), Step(1, 1, 1, 1, 1, None), id="one ends on its first"
        ),
        pytest.param(
            scheduled(0, drafted((7, 3))),
            delivered(1, 40),
            Step(1, 0, 8, 4, 0, NOTHING_WAITS),
            id="the last one ends",
        ),
        pytest.param(
            scheduled(5, drafted((7, 3), (7, 1))),
            None,
            Step(0, 0, 14, 4, 5, WaitingRows(3.0, 4)),
            id="the tokens go to another API server",
        ),
        pytest.param(
            None, delivered(2, 9), Step(2, 1, 2, 2, None, None), id="the counts go to another"
        ),
        pytest.param(
            scheduled(2, drafted()), delivered(2), Step(2, 2, 2, 2, 2, None), id="counts of nobody"
        ),
    ],
)
def test_what_a_report_adds(scheduler: Any, iteration: Any, expected: Step) -> None:
    assert read_step(scheduler, iteration) == expected


def test_several_api_servers_add_up_to_one() -> None:
    """Each report goes to one of them in parts, and no counter may depend on which."""
    scheduler, iteration = scheduled(3, drafted((7, 4), (3, 0))), delivered(3, 12)
    whole = read_step(scheduler, iteration)
    parts = read_step(scheduler, None), read_step(None, iteration)
    for name in ("verifications", "folds", "rows_verified", "rows_accepted"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)


def test_steps_add_up() -> None:
    first, second = Step(1, 2, 3, 4, 5, WaitingRows(6.0, 7)), Step(10, 20, 30, 40, 50, None)
    assert second.after(first) == Step(11, 22, 33, 44, 50, None)


def test_other_statistics_are_an_error_and_no_guess() -> None:
    with pytest.raises(AttributeError, match="spec_decoding_stats"):
        read_step(SimpleNamespace(num_running_reqs=1), None)


# What the page says


@pytest.fixture
def exposition() -> Iterator[Any]:
    pytest.importorskip("prometheus_client", reason="comes with vLLM, which is not installed here")
    from cuda_ext.metrics import exposition

    yield exposition
    exposition.withdraw()


def page() -> dict[tuple[str, ...], float]:
    """Samples of ours on the page, by name without prefix, model and engine."""
    from prometheus_client import REGISTRY, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        (sample.name.removeprefix("gaudi_ext:replay_"), sample.labels["engine"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("gaudi_ext:") and not sample.name.endswith("_created")
    }


def made(exposition: Any, engines: tuple[int, ...] = (0,)) -> Any:
    return exposition.ReplayMetrics("tiny", engines, RING, {"drafts": "7", "ring_rows": "32"})


def test_before_an_engine_reports_the_page_says_only_what_was_started(exposition: Any) -> None:
    made(exposition, (0, 1))
    assert page() == {("info", "0"): 1, ("info", "1"): 1}


def test_a_step_without_anything_brings_every_metric(exposition: Any) -> None:
    metrics = made(exposition)
    metrics.set_pool(0, 63)
    metrics.observe(0, Step(slots_in_use=0, waiting=NOTHING_WAITS))
    found = {name for name, _ in page()}
    counters = {f"{name}_total" for name in exposition.COUNTERS}
    assert found == {*counters, *exposition.GAUGES, "info"}


def test_steps_add_up_and_gauges_show_the_last(exposition: Any) -> None:
    metrics = made(exposition)
    metrics.set_pool(0, 63)
    metrics.observe(0, Step(3, 2, 19, 11, 3, WaitingRows(4.0, 8)))
    metrics.observe(0, Step(2, 2, 9, 5, 2, WaitingRows(2.0, 6)))
    # A report without an occupancy leaves it as it is.
    metrics.observe(0, Step(1, 1, 1, 1, None, None))
    assert page() == {
        ("info", "0"): 1,
        ("verifications_total", "0"): 6,
        ("folds_total", "0"): 5,
        ("rows_verified_total", "0"): 29,
        ("rows_accepted_total", "0"): 17,
        ("slots_in_use", "0"): 2,
        ("pool_slots", "0"): 63,
        ("ring_occupancy_perc", "0"): 2 / RING,
        ("ring_occupancy_max_perc", "0"): 6 / RING,
    }


def test_engines_of_data_parallelism_are_apart(exposition: Any) -> None:
    metrics = made(exposition, (0, 3))
    metrics.observe(3, Step(2, 2, 9, 5, 2, WaitingRows(2.0, 6)))
    found = page()
    assert {engine for name, engine in found if name != "info"} == {"3"}
    metrics.observe(0, Step(1, 1, 1, 1, 1, None))
    found = page()
    assert (found["rows_verified_total", "0"], found["rows_verified_total", "3"]) == (1, 9)
    assert (found["slots_in_use", "0"], found["slots_in_use", "3"]) == (1, 2)


def test_a_second_engine_in_the_process_takes_the_page_over(exposition: Any) -> None:
    made(exposition).observe(0, Step(verifications=5))
    assert page()["verifications_total", "0"] == 5
    made(exposition).observe(0, Step(verifications=2))
    assert page()["verifications_total", "0"] == 2


def test_nothing_stays_when_the_metrics_are_withdrawn(exposition: Any) -> None:
    made(exposition)
    exposition.withdraw()
    assert not page()


def test_every_counter_is_a_field_of_a_step_and_explains_itself(exposition: Any) -> None:
    assert set(exposition.COUNTERS) <= set(vars(Step()))
    for text in (*exposition.COUNTERS.values(), *exposition.GAUGES.values()):
        assert text.endswith(".")
        assert len(text) > 60


def test_several_processes_share_one_page(exposition: Any, tmp_path: Path) -> None:
    """As with vLLM's `--api-server-count`: counters add up, and gauges are the last one's."""
    child = """
import sys
from cuda_ext.metrics.counts import Step, WaitingRows
from cuda_ext.metrics.exposition import ReplayMetrics
metrics = ReplayMetrics("tiny", (0,), 32, {"drafts": "7"})
count = int(sys.argv[1])
metrics.observe(0, Step(count, count, count, count, count, WaitingRows(count, count)))
"""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for count in ("5", "3"):
        subprocess.run([sys.executable, "-c", child, count], env=env, check=True, timeout=60)
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{engine="0",model_name="tiny"}'
    assert float(values[f"gaudi_ext:replay_rows_verified_total{labels}"]) == 8
    assert float(values[f"gaudi_ext:replay_slots_in_use{labels}"]) == 3


# vLLM's side, read from the files of each version: importing one takes longer than all of the above


@pytest.fixture(params=VERSIONS)
def classes(
    request: pytest.FixtureRequest, vllm_files: Callable[[str], Path]
) -> dict[str, ast.ClassDef]:
    """Classes of a version's statistics and loggers, by name."""
    folder = vllm_files(request.param) / "vllm" / "v1"
    files = ("metrics/stats.py", "metrics/loggers.py", "spec_decode/metrics.py")
    trees = [ast.parse((folder / file).read_text(encoding="utf-8")) for file in files]
    return {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}


def fields(owner: ast.ClassDef) -> set[str]:
    """Names that are declared in the class."""
    return {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def assigned(owner: ast.ClassDef) -> set[str]:
    """Attributes that the class's methods set on self."""
    stores = (n for n in ast.walk(owner) if isinstance(n, ast.Attribute))
    return {n.attr for n in stores if isinstance(n.ctx, ast.Store)}


def methods(tree: ast.AST) -> dict[str, list[str]]:
    """Parameters of each method by name."""
    found = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return {n.name: [a.arg for a in n.args.args] for n in found}


def test_every_version_reports_what_is_read(classes: dict[str, ast.ClassDef]) -> None:
    assert {"num_running_reqs", "spec_decoding_stats"} <= fields(classes["SchedulerStats"])
    assert "num_generation_tokens" in fields(classes["FinishedRequestStats"])
    wanted = {"inter_token_latencies_iter", "finished_requests"}
    assert wanted <= assigned(classes["IterationStats"])


def test_every_versions_counts_of_drafts_are_understood(classes: dict[str, ast.ClassDef]) -> None:
    names = {"dataclass": dataclasses.dataclass, "field": dataclasses.field}
    code = ast.Module([classes["SpecDecodingStats"]], type_ignores=[])
    exec(compile(code, "vllm", "exec"), names)
    stats: Any = names["SpecDecodingStats"]
    counted = stats.new(7)
    counted.observe_draft(3, 2)
    counted.observe_draft(1, 0)
    expected = Step(3, 3, 3 + 4, 3 + 2, 3, WaitingRows(2.0, 3))
    assert read_step(scheduled(3, counted), delivered(3)) == expected


def test_our_logger_takes_what_every_version_gives_it(classes: dict[str, ast.ClassDef]) -> None:
    source = ROOT / "cuda_ext" / "metrics" / "stat_logger.py"
    ours = methods(ast.parse(source.read_text(encoding="utf-8")))
    theirs = methods(classes["StatLoggerBase"])
    assert ours["record"] == theirs["record"]
    assert ours["log_engine_initialized"] == theirs["log_engine_initialized"]
    base = classes["AggregateStatLoggerBase"]
    assert [b.id for b in base.bases if isinstance(b, ast.Name)] == ["StatLoggerBase"]
    assert (
        methods(base)["__init__"] == ours["__init__"] == ["self", "vllm_config", "engine_indexes"]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_entry_points_group_is_vllms(version: str, vllm_files: Callable[[str], Path]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    group = "vllm.stat_logger_plugins"
    assert project["entry-points"][group] == {
        "gaudi_ext": "cuda_ext.metrics.stat_logger:ReplayStatLogger"
    }
    plugins = (vllm_files(version) / "vllm" / "plugins" / "__init__.py").read_text("utf-8")
    assert f'STAT_LOGGER_PLUGINS_GROUP = "{group}"' in plugins
