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


def fault(moved: float, folds: int) -> dict[str, Any]:
    """A gate in which lost rows move what is decoded by so much."""
    read = [[0.0, -1.0]]
    said = [[value + moved for value in read[0]]]
    planted = {"every": 1, "folds": folds, "said": said, "read": read}
    return bench_data.gate() | {"faults": [planted]}


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
                "replay": bench_data.gate()
                | {"decode": {"together": {"said": [[-1.0], [-2.0]], "read": [[-1.0]]}}},
            }
        },
        "log-probabilities, decode",
    ),
    "no number": (
        {
            "gates": {
                "stock": bench_data.gate(),
                "replay": bench_data.gate()
                | {
                    "read": bench_data.gate()["read"]
                    | {"together": [[math.nan] * 20, [-12.0, -10.0]]}
                },
            }
        },
        "log-probabilities, prefill",
    ),
    "a composition missing": (
        {
            "gates": {
                "stock": bench_data.gate(),
                "replay": bench_data.gate() | {"read": {"together": [[-1.0] * 20, [-1.0] * 2]}},
            }
        },
        "log-probabilities, prefill",
    ),
    "a fault that is not seen": (
        {"gates": {"stock": bench_data.gate(), "replay": fault(0.14, 12)}},
        "planted fault is seen",
    ),
    "a fault that spoiled nothing": (
        {"gates": {"stock": bench_data.gate(), "replay": fault(5.0, 0)}},
        "planted fault is seen",
    ),
    "no fault planted": (
        {"gates": {"stock": bench_data.gate(), "replay": bench_data.gate() | {"faults": []}}},
        "planted fault is seen",
    ),
    "other dummy weights": (
        {
            "facts": {
                arm: facts | {"dummy_weights": {"kind": "scaled", "models": [{"digest": arm}]}}
                for arm, facts in bench_data.FACTS.items()
            }
        },
        "dummy weights by one rule",
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
        "planted fault is seen",
    }


def test_a_few_steps_may_be_further_from_the_acceptance_length() -> None:
    """15 drafts deviate by up to 7.5, so a dozen steps say nothing of 2 %."""
    few = EngineFigures(drafts=12, accepted=96)
    runs = [bench_data.run("stock", engine=few), bench_data.run("replay", engine=few)]
    assert red(bench_data.results(runs=runs)) == []


def alone(values: list[list[float]]) -> dict[str, Any]:
    """The gate's prompts, read otherwise when each is alone."""
    return bench_data.gate()["read"] | {"alone": values}


def test_a_weak_check_says_that_it_is_weak() -> None:
    def weak(stock: dict[str, Any]) -> list[str]:
        checks = bench_data.results(gates={"stock": stock, "replay": bench_data.gate()}).checks()
        return [check.name for check in checks if "says little" in check.note]

    assert weak(bench_data.gate() | {"read": alone([[0.0] * 20, [0.0, 0.0]])}) == [
        "log-probabilities, prefill"
    ]
    said = {"said": [[0.0] * 20, [0.0, 0.0]], "read": [[-11.0] * 20, [-12.0, -10.0]]}
    assert weak(bench_data.gate() | {"decode": {"together": said}}) == ["log-probabilities, decode"]
    assert weak(bench_data.gate()) == []


def test_a_distance_is_held_to_stocks_own_of_the_same_kind() -> None:
    """A large one of the other kind lends it nothing."""
    stock = bench_data.gate(decoded=0.5)
    assert red(bench_data.results(gates={"stock": stock, "replay": bench_data.gate(0.16)})) == [
        "log-probabilities, prefill"
    ]
    stock = bench_data.gate() | {"read": alone([[0.0] * 20, [0.0, 0.0]])}
    replay = bench_data.gate(decoded=0.06) | {"read": stock["read"]}
    assert red(bench_data.results(gates={"stock": stock, "replay": replay})) == [
        "log-probabilities, decode"
    ]


def far(at: int, everywhere: float) -> Results:
    """Stock 0.1 from itself at so many positions, and ReplaySSM so far from it at all 100."""
    prompt = [-11.0 - i % 3 for i in range(100)]
    read = {"together": [prompt], "alone": [[v + 0.1 * (i < at) for i, v in enumerate(prompt)]]}
    moved = {name: [[v + everywhere for v in one]] for name, (one,) in read.items()}
    gates = {"stock": bench_data.gate() | {"read": read}}
    return bench_data.results(gates=gates | {"replay": bench_data.gate() | {"read": moved}})


def prefill(at: int, everywhere: float) -> tuple[bool, str]:
    (check,) = (c for c in far(at, everywhere).checks() if c.name == "log-probabilities, prefill")
    return check.ok, check.note


def test_stock_that_seldom_differs_in_another_batch_says_by_how_much_it_does() -> None:
    """Of 100 positions 12 differ: over all of them that would be a third of 0.1."""
    ok, note = prefill(12, 0.14)
    assert ok
    assert "alone, at 12 of 100 positions, ReplaySSM at 100" in note
    assert not prefill(12, 0.16)[0]


def test_the_result_says_whether_distances_hold_without_slack() -> None:
    """Between one and one and a half of stock's own the gate is green, and `holds` is not."""
    found = far(12, 0.14).summary()
    assert found["gate"] == "green"
    assert found["bf16"]["stock_to_itself"] == {"alone": {"rms": 0.1, "positions": 12}}
    assert found["bf16"]["replay_to_stock"]["together"] == {"rms": 0.14, "positions": 100}
    assert found["bf16"]["holds"] is False
    assert "without slack" in printed(far(12, 0.14))
    assert far(12, 0.09).summary()["bf16"]["holds"] is True
    # Where stock agrees with itself to the bit there is nothing to hold it to.
    assert far(0, 0.09).summary()["bf16"]["holds"] is False


def test_the_composition_in_which_stock_is_furthest_from_itself_counts() -> None:
    gates = {"stock": bench_data.gate(), "replay": bench_data.gate(0.16)}
    assert red(bench_data.results(gates=gates)) == ["log-probabilities, prefill"]
    for gate in gates.values():
        together = gate["read"]["together"]
        gate["read"]["in pairs"] = [[v + 0.2 for v in one] for one in together]
    assert red(bench_data.results(gates=gates)) == []


def test_a_fault_says_how_fine_the_gate_sees() -> None:
    (check,) = (c for c in bench_data.results().checks() if c.name == "planted fault is seen")
    assert (check.ok, check.value, check.limit) == (True, 1.0, "above 0.15")
    assert "of one fold in 16 (1 folds): 0.05, not seen" in check.note


def test_in_a_server_no_fault_can_be_planted() -> None:
    facts = {"stock": {"replay_active": False}, "replay": {"replay_active": True}}
    gates = {arm: bench_data.gate() | {"faults": []} for arm in ("stock", "replay")}
    assert red(bench_data.results(facts=facts, gates=gates)) == []


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
