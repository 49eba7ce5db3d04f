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
    gates = {"stock": bench_data.gate(math.nan, math.nan), "replay": bench_data.gate()}
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
    assert ["says little" in check.note for check in checks[-2:]] == [True, False]
    far = bench_data.gate() | {"decoded": [[0.0] * 20, [0.0, 0.0]]}
    checks = bench_data.results(gates={"stock": far, "replay": bench_data.gate()}).checks()
    assert ["says little" in check.note for check in checks[-2:]] == [False, True]
    assert not any("says little" in check.note for check in bench_data.results().checks())


def test_a_distance_is_held_to_stocks_own_of_the_same_kind() -> None:
    """A large one of the other kind lends it nothing."""
    stock = bench_data.gate(decoded=5.0)
    assert red(bench_data.results(gates={"stock": stock, "replay": bench_data.gate(0.16)})) == [
        "log-probabilities, prefill"
    ]
    stock = bench_data.gate() | {"prompt_alone": [[0.0] * 20, [0.0, 0.0]]}
    replay = bench_data.gate(decoded=0.06)
    assert red(bench_data.results(gates={"stock": stock, "replay": replay})) == [
        "log-probabilities, decode"
    ]


def prefill(alone: int, everywhere: float) -> tuple[bool, str]:
    """Stock 0.1 from itself at so many positions, and ReplaySSM so far from it at all 100."""
    prompt = [[-11.0 - i % 3 for i in range(100)]]
    stock = bench_data.gate() | {
        "prompt": prompt,
        "prompt_alone": [[v + 0.1 * (i < alone) for i, v in enumerate(prompt[0])]],
    }
    replay = bench_data.gate() | {"prompt": [[v + everywhere for v in prompt[0]]]}
    (check,) = (
        check
        for check in bench_data.results(gates={"stock": stock, "replay": replay}).checks()
        if check.name == "log-probabilities, prefill"
    )
    return check.ok, check.note


def test_stock_that_seldom_differs_in_another_batch_says_by_how_much_it_does() -> None:
    """Of 100 positions 12 differ: over all of them that would be a third of 0.1."""
    ok, note = prefill(12, 0.14)
    assert ok
    assert "at 12 of 100 positions, ReplaySSM at 100" in note
    assert not prefill(12, 0.16)[0]


def test_stock_that_agrees_with_itself_leaves_prefill_to_what_it_decoded() -> None:
    ok, note = prefill(0, 0.14)
    assert ok
    assert "0 positions differ in another batch, so as decoded and read 0.1" in note
    assert not prefill(0, 0.16)[0]


def test_decode_batches_past_the_graphs_are_listed_and_not_red() -> None:
    facts = {arm: one | {"max_cudagraph_capture_size": 64} for arm, one in bench_data.FACTS.items()}
    many = EngineFigures(5, 0, 0.5, 0, drafts=1000, accepted=8700)
    runs = [bench_data.run("stock"), bench_data.run("replay", engine=many)]
    results = bench_data.results(facts=facts, runs=runs)
    assert red(results) == []
    # 4 requests of 16 rows are 64, and 5 are 80.
    assert results.summary()["notes"] == [
        "decode batches in graphs, stock: at every point (graphs of up to 64 rows)",
        "decode batches in graphs, replay: not at 4 in flight, 32 out: 80 rows "
        "(graphs of up to 64 rows)",
    ]
    assert "replay: not at 4 in flight, 32 out: 80 rows" in printed(results)


def test_distances() -> None:
    assert rms_distance([[1.0, 2.0], [3.0]], [[1.0, 2.0], [6.0]]) == pytest.approx(3**0.5)
    assert rms_distance([[1.0]], [[1.0, 2.0]]) is None
    assert rms_distance([], []) is None
    assert rms_distance([[math.nan]], [[1.0]]) == math.inf
    assert spread([[1.0], [3.0]]) == 1.0
