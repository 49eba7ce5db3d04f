"""Figures of a point from the times of its requests."""

from __future__ import annotations

import random

import bench_data
import pytest

from cuda_ext.bench.serve.measure import EngineFigures, Record, Run, figures, percentile


@pytest.mark.parametrize(
    ("values", "percent", "wanted"),
    [
        ([], 50, None),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([1.0, 2.0, 3.0], 50, 2.0),
        (list(range(101)), 99, 99.0),
        ([0.0, 10.0], 90, 9.0),
    ],
    ids=["none", "one", "even", "odd", "hundred", "between"],
)
def test_percentile(values: list[float], percent: float, wanted: float | None) -> None:
    assert percentile(values, percent) == wanted


def test_percentile_is_that_of_numpy() -> None:
    numpy = pytest.importorskip("numpy", reason="needs numpy, not installed here")
    generator = random.Random(1)
    values = [generator.expovariate(1.0) for _ in range(137)]
    for percent in (50, 90, 99):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_tpot_is_the_time_after_the_first_token_over_the_others() -> None:
    assert Record(10, 5, 5, ttft_s=1.0, e2e_s=1.4).tpot_ms == pytest.approx(100.0)
    assert Record(10, 1, 1, ttft_s=1.0, e2e_s=1.0).tpot_ms is None


def test_figures_of_two_runs() -> None:
    engine = EngineFigures(4, 9, 0.25, 3, drafts=10, accepted=87)
    slower = EngineFigures(2, 1, 0.75, 1, drafts=30, accepted=0)
    records = (Record(9, 11, 11, 0.1, 1.1), Record(9, 11, 11, 0.3, 2.3))
    runs = [
        Run("stock", "x", 0, 2.0, "a", records, engine),
        Run("stock", "x", 1, 3.0, "b", (Record(9, 11, 11, 0.2, 0.7),), slower),
    ]
    found = figures(runs)
    assert found["output_tok_s"] == 33 / 5
    assert found["requests"] == 3
    assert found["wall_s"] == 5.0
    assert (found["ttft_p50_s"], found["e2e_p50_s"], found["tpot_p50_ms"]) == (0.2, 1.1, 100.0)
    assert found["ttft_p99_s"] == pytest.approx(0.298)
    assert (found["running_max"], found["waiting_max"], found["preemptions"]) == (4, 9, 4)
    assert found["kv_usage_max"] == 0.75
    # Weighted by verification steps: (10 + 87 + 30) / 40.
    assert found["acceptance_length"] == pytest.approx(3.175)


def test_a_request_without_tokens_has_no_times_but_counts() -> None:
    bad = Record(9, 11, 0, 5.0, 5.0, "finished by abort")
    one = bench_data.run("stock", records=(Record(9, 11, 11, 0.1, 1.1), bad))
    found = figures([one])
    assert found["requests"] == 2
    assert found["ttft_p99_s"] == 0.1


def test_without_drafts_there_is_no_acceptance_length() -> None:
    assert figures([bench_data.run("stock", engine=EngineFigures())])["acceptance_length"] is None


def test_a_run_survives_its_json() -> None:
    one = bench_data.run("replay")
    assert Run.from_json(one.as_json()) == one


def test_requests_after_the_first_wave_have_a_ttft_of_their_own() -> None:
    """Those of a burst wait for each other's prompts; later ones show the steady state."""
    records = tuple(Record(3, 8, 8, ttft, ttft + 1) for ttft in (9.0, 8.0, 1.0, 3.0, 2.0))
    runs = [bench_data.run("stock", records=records)] * 2
    found = figures(runs, 2)
    assert (found["ttft_p50_s"], found["ttft_later_p50_s"]) == (3.0, 2.0)
    assert "ttft_later_p50_s" not in figures(runs, 5)
    assert "ttft_later_p50_s" not in figures(runs)
