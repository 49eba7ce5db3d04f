"""The copy task's gate, on invented answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_ext.bench.copy_task import score, task

WORDS = 60
JOB = score.Job("model", 4, WORDS * task.WORD_TOKENS, 7, {}, seed=5)
ALL = JOB.prompts * WORDS

Found = dict[str, dict[str, Any]]
Change = Callable[[Found], object]


def truths() -> list[list[int]]:
    return [task.answer(words) for words in JOB.texts()]


def wrong_tags(found: Found, arm: str, rounds: list[int], count: int, start: int = 0) -> None:
    """Spoil the tag of `count` words of the first answer."""
    for number in rounds:
        answer = found[arm][score.ROUNDS[number]]["answers"][0]
        for word in range(start, start + count):
            at = (word + 1) * task.WORD_TOKENS - 1
            answer[at] = task.FIRST_TAG + (answer[at] - task.FIRST_TAG + 1) % task.TAGS


def green() -> Found:
    """What a sound run gives."""
    found: Found = {}
    for arm, settings in score.ARMS.items():
        length = None if settings.method is None else 6.0
        layers = "ReplayGatedDeltaNetAttention" if settings.replay else "QwenGatedDeltaNetAttention"
        found[arm] = {"runner": "runner", "layers": layers, "seconds_to_start": 1.0}
        for name in score.ROUNDS:
            found[arm][name] = {"answers": truths(), "acceptance_length": length, "seconds": 1.0}
    wrong_tags(found, "replay-lost-row", [0, 1], 30)
    return found


def judge(found: Found) -> tuple[list[str], int]:
    return score.verdict(score.compare(JOB, found), found)


def test_a_sound_run_is_green() -> None:
    found = green()
    compared = score.compare(JOB, found)
    assert compared["words"] == ALL
    assert compared["stock_differs"] == 0
    assert compared["arms"]["replay"]["together"] == {
        "word_errors": 0,
        "word_error_rate": 0.0,
        "wrong_answers": 0,
        "first_wrong_word": None,
        "acceptance_length": 6.0,
        "complete": True,
    }
    lost = compared["arms"]["replay-lost-row"]["in halves"]
    assert (lost["word_errors"], lost["wrong_answers"], lost["first_wrong_word"]) == (30, 1, 0)
    assert judge(found) == ([], 0)


def test_replay_may_err_where_stock_does_and_by_as_much_as_stock_differs_from_itself() -> None:
    found = green()
    # Stock: 2 and 3 errors, of which none is shared; so 5 words differ.
    wrong_tags(found, "stock", [0], 2)
    wrong_tags(found, "stock", [1], 3, start=10)
    compared = score.compare(JOB, found)
    assert compared["stock_differs"] == 5
    wrong_tags(found, "replay", [0, 1], 8, start=20)
    assert judge(found) == ([], 8)
    wrong_tags(found, "replay", [1], 1, start=40)
    problems, allowed = judge(found)
    assert allowed == 8
    assert problems == ["replay, in halves: 9 word errors, 8 allowed"]


def set_in(arm: str, **values: Any) -> Change:
    return lambda found: found[arm].update(values)


def set_round(arm: str, **values: Any) -> Change:
    return lambda found: found[arm][score.ROUNDS[1]].update(values)


RED: dict[str, tuple[Change, str]] = {
    "replay errs once where stock never does": (
        lambda found: wrong_tags(found, "replay", [0], 1),
        "replay, together: 1 word errors, 0 allowed",
    ),
    "replay without drafts errs": (
        lambda found: wrong_tags(found, "replay-no-drafts", [1], 2),
        "replay-no-drafts, in halves: 2 word errors, 0 allowed",
    ),
    "the fault does not show": (
        set_round("replay-lost-row", answers=truths()),
        "replay-lost-row, in halves: 0 word errors with rows lost",
    ),
    "stock can't copy": (
        lambda found: wrong_tags(found, "stock", [0, 1], 13),
        "stock's word error rate is 0.054167",
    ),
    "an answer is cut": (
        lambda found: found["stock"]["together"]["answers"][2].pop(),
        "stock, together: answers are too short",
    ),
    "fewer drafts are accepted": (
        set_round("replay", acceptance_length=5.8),
        "replay, in halves: acceptance length 5.8, stock has 6.0",
    ),
    "the replay arm ran vLLM's own layer": (
        set_in("replay", layers="QwenGatedDeltaNetAttention"),
        "replay was served by QwenGatedDeltaNetAttention",
    ),
    "the stock arm ran ours": (
        set_in("stock", layers="ReplayGatedDeltaNetAttention"),
        "stock was served by ReplayGatedDeltaNetAttention",
    ),
    "replay never drafted": (
        set_round("replay", acceptance_length=None),
        "replay, in halves: nothing was drafted, with mtp",
    ),
    "stock never drafted": (
        set_round("stock", acceptance_length=None),
        "stock, in halves: nothing was drafted, with mtp",
    ),
    "the faulty arm never drafted": (
        set_round("replay-lost-row", acceptance_length=None),
        "replay-lost-row, in halves: nothing was drafted, with mtp",
    ),
    "there is no stock": (
        lambda found: [found.pop(arm) for arm in list(found) if arm.startswith("stock")],
        "arms `stock` and `replay` are both needed",
    ),
}


@pytest.mark.parametrize("name", RED)
def test_a_fault_of_the_run_is_red(name: str) -> None:
    change, problem = RED[name]
    found = green()
    change(found)
    problems, _ = judge(found)
    assert any(found.startswith(problem) for found in problems), problems


@pytest.mark.parametrize("shown", [True, False])
def test_a_green_result_says_where_sensitivity_was_not_shown(
    shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = green()

    def run(job: score.Job, arms: list[str], folder: Path, *_: Any) -> list[str]:
        for arm in arms:
            (folder / f"{arm}.answers.json").write_text(json.dumps(sound[arm]))
        return []

    monkeypatch.setattr(score, "run", run)
    monkeypatch.setattr(score, "provenance", lambda *_: {})
    arms = ["stock", "replay", *(["replay-lost-row"] if shown else [])]
    given = ["model", "--out", str(tmp_path), "--arms", ",".join(arms), "--seed", str(JOB.seed)]
    given += ["--prompts", str(JOB.prompts), "--output", str(JOB.output)]
    assert score.main(given) == 0
    result = json.loads((tmp_path / "copy-task.json").read_text())
    assert result["gate"] == "green"
    told = ["sensitivity was not shown: replay-lost-row, whose state is wrong, was not run"]
    assert result["notes"] == ([] if shown else told)


def test_arms_differ_in_what_their_names_say_and_in_nothing_else() -> None:
    options = {arm: score.engine_options(JOB, settings) for arm, settings in score.ARMS.items()}
    stock, replay = dict(options["stock"]), dict(options["replay"])
    assert "gaudi_ext" not in stock["additional_config"]
    assert replay.pop("additional_config") == stock.pop("additional_config") | {
        "gaudi_ext": {"replay": "on"}
    }
    assert stock == replay
    assert stock["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 7}
    assert options["replay"] == options["replay-lost-row"]
    assert "speculative_config" not in options["stock-no-drafts"]
    assert options["stock-ngram"]["speculative_config"]["method"] == "ngram"
    # An answer as long as its prompt fits.
    assert stock["max_model_len"] >= len(task.prompt(JOB.texts()[0])) + JOB.output


def test_options_of_the_command_reach_every_arm_and_ours_only_ours() -> None:
    given = {
        "dtype": "float32",
        "additional_config": {"gaudi_ext": {"replay": "on", "x": 1}, "y": 2},
    }
    job = score.Job("model", 4, 60, 7, given, seed=5)
    stock = score.engine_options(job, score.ARMS["stock"])
    assert stock["dtype"] == "float32"
    assert stock["additional_config"] == {"gdn_prefill_backend": "triton", "y": 2}
    replay = score.engine_options(job, score.ARMS["replay"])
    assert replay["additional_config"]["gaudi_ext"] == {"replay": "on", "x": 1}
    assert given["additional_config"] == {"gaudi_ext": {"replay": "on", "x": 1}, "y": 2}
