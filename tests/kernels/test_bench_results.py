"""The committed result file has the form that readers of it rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cuda_ext.bench.kernel as bench
from cuda_ext.bench import plot

RESULTS = Path(__file__).parents[2] / "cuda_ext/bench/results"
LINE = {"requests", "rows", "pending", "heads", "stock_us", "ours_us", "floor_us"}


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((RESULTS / "kernel-h200.json").read_text())


def test_the_result_says_where_it_comes_from(result: dict) -> None:
    assert result["gate"] == "green"
    assert result["device"] == "NVIDIA H200"
    for key in ("command", "commit", "date"):
        assert result[key], key
    assert {"torch", "triton", "vllm"} <= set(result["versions"])
    gates = [name for name in bench.GATE_HEADS if name in result]
    assert "errors" in gates
    for name in gates:
        assert result[name]["tokens"] >= bench.GATE_TOKENS
        for side in ("outputs", "states"):
            errors = result[name][side]
            assert 0 < errors["ours"] <= bench.MAY_BE_WORSE * errors["stock"], (name, side)


def test_every_shape_of_the_table_is_there_with_its_floor(result: dict) -> None:
    measured = {}
    for line in result["table"]:
        assert set(line) == LINE
        shape = bench.Shape(line["requests"], line["rows"], line["pending"], *line["heads"])
        rate = bench.COPY_BYTES_PER_US[result["device"]]
        assert line["floor_us"] == pytest.approx(shape.floor_bytes() / rate, abs=0.01)
        assert line["floor_us"] < line["ours_us"]
        measured[shape] = line
    assert set(bench._shapes()) <= set(measured)


def test_the_plot_counts_the_bytes_that_the_table_counts() -> None:
    for shape in bench._shapes():
        heads = [shape.key_heads, shape.value_heads]
        us = plot.floor_us(shape.requests, heads, shape.rows, shape.pending, plot.H200)
        assert us == pytest.approx(shape.floor_bytes() / plot.H200)


def test_the_curve_covers_every_row_and_pending_count(result: dict, tmp_path: Path) -> None:
    points = result["curve"]["points"]
    assert [point["rows"] for point in points] == list(range(1, 33))
    assert all(len(point["ours_us"]) == 33 for point in points)
    pytest.importorskip("matplotlib")
    plot.draw(result, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
