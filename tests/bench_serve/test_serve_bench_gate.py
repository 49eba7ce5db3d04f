"""The gate: what turns it red, and that a red one makes no ratio anywhere."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import bench_data
import pytest
from rich.console import Console

from cuda_ext.bench.serve import report
from cuda_ext.bench.serve.checks import Check, rms_distance, spread
from cuda_ext.bench.serve.measure import EngineFigures, Record
from cuda_ext.bench.serve.results import Results


def red(results: Results) -> list[str]:
    return [check.name for check in results.checks() if not check.ok]


def printed(results: Results) -> str:
    text = io.StringIO()
    report.print_summary(results.summary(), Console(file=text, width=200))
    return text.getvalue()


def test_a_run_in_which_all_is_well_is_green_and_has_ratios() -> None:
    results = bench_data.results()
    assert red(results) == []
    summary = results.summary()
    assert summary["gate"] == "green"
    assert summary["ratios"]["fit_8k"] == 2.6
    (one,) = summary["ratios"]["points"]
    assert one["concurrency"] == 4
    # Better is above 1, for time and for speed.
    assert (one["output_tok_s"], one["ttft_p50_s"], one["tpot_p50_ms"]) == (2.0, 2.0, 2.0)
    assert "output_tok_s 2.0x" in printed(results)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "one arm": ({"runs": [bench_data.run("stock")]}, "both arms"),
    "a request cut short": (
        {
            "runs": [
                bench_data.run("stock"),
                bench_data.run("replay", records=(Record(35, 32, 31, 0.1, 1.0),)),
            ]
        },
        "requests complete",
    ),
    "a request with an error": (
        {
            "runs": [
                bench_data.run("stock", records=(Record(35, 32, 32, 0.1, 1.0, "lost"),)),
                bench_data.run("replay"),
            ]
        },
        "requests complete",
    ),
    "other prompts": (
        {"runs": [bench_data.run("stock"), bench_data.run("replay", prompts="others")]},
        "same requests",
    ),
    "acceptance off by 3 %": (
        {
            "runs": [
                bench_data.run("stock"),
                bench_data.run("replay", engine=EngineFigures(drafts=10**6, accepted=8_990_000)),
            ]
        },
        "acceptance of replay",
    ),
    "no drafts at all": (
        {"runs": [bench_data.run("stock", engine=EngineFigures()), bench_data.run("replay")]},
        "acceptance of stock",
    ),
    "stock with our layers": (
        {
            "facts": bench_data.FACTS
            | {"stock": {"gdn_layers": 24, "replay_layers": 24, "drafts": 15}}
        },
        "layers of stock",
    ),
    "replay with one layer of vLLM's": (
        {
            "facts": bench_data.FACTS
            | {"replay": {"gdn_layers": 24, "replay_layers": 23, "drafts": 15}}
        },
        "layers of replay",
    ),
    "a server without ReplaySSM": (
        {"facts": bench_data.FACTS | {"replay": {"replay_active": False}}},
        "layers of replay",
    ),
    "no gate of one arm": ({"gates": {"stock": bench_data.gate()}}, "log-probabilities"),
    "other gate prompts": (
        {
            "gates": {
                "stock": bench_data.gate(),
                "replay": bench_data.gate() | {"prompts": "others"},
            }
        },
        "gate prompts",
    ),
    "prefill far from stock": (
        {"gates": {"stock": bench_data.gate(), "replay": bench_data.gate(0.16)}},
        "log-probabilities, prefill",
    ),
    "decode far from its own prefill": (
        {"gates": {"stock": bench_data.gate(), "replay": bench_data.gate(decoded=0.06)}},
        "log-probabilities, decode",
    ),
    "a position missing": (
        {
            "gates": {
                "stock": bench_data.gate(),
                "replay": bench_data.gate() | {"decoded": [[-1.0], [-2.0]]},
            }
        },
        "log-probabilities, decode",
    ),
    "no number": (
        {
            "gates": {
                "stock": bench_data.gate(),
                "replay": bench_data.gate() | {"prompt": [[math.nan] * 20, [-12.0, -10.0]]},
            }
        },
        "log-probabilities, prefill",
    ),
    "a check made elsewhere": ({"extra": [Check("tokens in fp32", False)]}, "tokens in fp32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_thing_wrong_is_red_and_makes_no_ratio(name: str, tmp_path: Path) -> None:
    changes, wanted = BROKEN[name]
    results = bench_data.results(**changes)
    assert red(results) == [wanted]
    saved = json.loads(results.save(tmp_path).read_text())
    assert saved["gate"] == "red"
    assert "ratios" not in saved
    text = printed(results)
    assert "no ratios: the gate is red" in text
    assert f"RED {wanted}" in text
    # No ratio under another name either.
    assert not any(word.rstrip(",").endswith("x") and word[0].isdigit() for word in text.split())


def test_stock_that_gives_no_number_is_red() -> None:
    gates = {"stock": bench_data.gate(math.nan), "replay": bench_data.gate()}
    assert set(red(bench_data.results(gates=gates))) == {
        "log-probabilities, prefill",
        "log-probabilities, decode",
    }


def test_a_few_steps_may_be_further_from_the_acceptance_length() -> None:
    """15 drafts deviate by up to 7.5, so a dozen steps say nothing of 2 %."""
    few = EngineFigures(drafts=12, accepted=96)
    runs = [bench_data.run("stock", engine=few), bench_data.run("replay", engine=few)]
    assert red(bench_data.results(runs=runs)) == []


def test_a_weak_check_says_that_it_is_weak() -> None:
    far = bench_data.gate() | {"prompt_alone": [[0.0] * 20, [0.0, 0.0]]}
    checks = bench_data.results(gates={"stock": far, "replay": bench_data.gate()}).checks()
    assert ["says little" in check.note for check in checks[-2:]] == [True, True]
    assert not any("says little" in check.note for check in bench_data.results().checks())


def test_distances() -> None:
    assert rms_distance([[1.0, 2.0], [3.0]], [[1.0, 2.0], [6.0]]) == pytest.approx(3**0.5)
    assert rms_distance([[1.0]], [[1.0, 2.0]]) is None
    assert rms_distance([], []) is None
    assert rms_distance([[math.nan]], [[1.0]]) == math.inf
    assert spread([[1.0], [3.0]]) == 1.0
