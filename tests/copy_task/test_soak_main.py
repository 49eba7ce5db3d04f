"""Both processes of the soak replaced: what stops it before the load, and what it is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import test_soak_checks

from cuda_ext.bench.copy_task import task
from cuda_ext.bench.soak import __main__ as main
from cuda_ext.bench.soak import checks
from cuda_ext.bench.soak.job import Job, refusals

WORDS = 200
JOB = Job(
    model="model",
    prompts={"count": 4, "words": (WORDS, WORDS), "seed": 5},
    random=False,
    options={"dtype": "bfloat16"},
    speculative={"method": "mtp", "num_speculative_tokens": 7},
    concurrency=8,
    minutes=10,
    aborts=0.05,
    pool=0.9,
    every=10,
    seed=1,
)
EXACT = dataclasses.replace(JOB, options={"dtype": "float32"})
TRUTHS = [list(prompt.truth) for prompt in JOB.set_of_prompts()]
SPOILED = [test_soak_checks.spoiled(truth, 20) for truth in TRUTHS]
"""A tenth of the words is wrong."""


class Children:
    """In place of `child`: what was started, and with what it ends.

    Args:
        answers: of the process `answers`.
        changes: of a sound result of `serve`, and of its tally.
    """

    def __init__(self, answers: Any, **changes: Any) -> None:
        result, tally = test_soak_checks.green()
        tally = dataclasses.replace(tally, **changes.pop("tally", {}))
        self.result = result | changes | {"tally": dataclasses.asdict(tally)}
        self.answers = answers
        self.started: list[str] = []
        self.told: dict[str, Any] = {}

    def __call__(
        self, what: str, job: Job, folder: Path, seconds: float, **told: Any
    ) -> tuple[Any, str]:
        self.started.append(what)
        self.told |= told
        if what == "serve":
            return self.result, ""
        if self.answers is None:
            return None, "process `answers`: exit code 3"
        (folder / "answers.json").write_text(json.dumps(self.answers))
        return self.answers, ""


def soak(
    monkeypatch: pytest.MonkeyPatch, folder: Path, job: Job, children: Children, **known: Any
) -> dict[str, Any]:
    monkeypatch.setattr(main, "child", children)
    return main.soak(job, folder, known.get("known"))


RIGHT = {"answers": TRUTHS, "again": TRUTHS}
USELESS: dict[str, tuple[Job, dict[str, Any], str]] = {
    "wrong answers": (JOB, {"answers": SPOILED, "again": TRUTHS}, "10.0% of the words are wrong"),
    "answers that differ": (
        JOB,
        {
            "answers": [test_soak_checks.spoiled(TRUTHS[0], 20), *TRUTHS[1:]],
            "again": [TRUTHS[0], test_soak_checks.spoiled(TRUTHS[1], 20), *TRUTHS[2:]],
        },
        "in 5.0% two batch compositions differ",
    ),
    "wrong answers, float32": (EXACT, {"answers": SPOILED}, "10.0% of the words are wrong"),
    "answers that are hardly known": (
        EXACT,
        {"answers": [truth[: WORDS * 2] for truth in TRUTHS]},
        "of 4800 tokens of the answers 1600 are clear",
    ),
    "answers to other prompts": (JOB, {"answers": TRUTHS[1:], "again": TRUTHS[1:]}, "--known"),
    "bfloat16's answers, float32": (EXACT, RIGHT, "--known"),
    "float32's answers, bfloat16": (JOB, {"answers": TRUTHS}, "--known"),
}


@pytest.mark.parametrize("of_an_earlier_run", [False, True])
@pytest.mark.parametrize("name", USELESS)
def test_answers_that_are_of_no_use_end_it_before_the_load(
    name: str, of_an_earlier_run: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, answers, text = USELESS[name]
    children, known = Children(answers), None
    if of_an_earlier_run:
        known = tmp_path / "earlier.json"
        known.write_text(json.dumps(answers))
    found = soak(monkeypatch, tmp_path, job, children, known=known)
    assert found["gate"] == "red"
    assert len(found["problems"]) == 1
    assert text in found["problems"][0]
    assert children.started == ([] if of_an_earlier_run else ["answers"])


def test_a_process_that_gives_no_answers_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children = Children(None)
    found = soak(monkeypatch, tmp_path, JOB, children)
    assert found == {"gate": "red", "problems": ["process `answers`: exit code 3"]}
    assert children.started == ["answers"]


def test_the_load_is_told_what_is_usual_and_judged_by_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = WORDS * len(TRUTHS)
    one = [test_soak_checks.spoiled(TRUTHS[0], 4), *TRUTHS[1:]]
    children = Children({"answers": one, "again": TRUTHS})
    found = soak(monkeypatch, tmp_path, JOB, children)
    assert found["gate"] == "green", found["problems"]
    assert children.started == ["answers", "serve"]
    assert children.told["usual"]["by_prompt"] == [4, 0, 0, 0]
    assert json.loads(Path(children.told["answers"]).read_text()) == children.answers
    allowed = (4 + 4 + checks.UNSEEN) / words
    assert found["allowed_word_error_rate"] == pytest.approx(allowed)
    assert allowed < task.MAY_ERR
    children.result["tally"] |= {"words": 1000, "word_errors": int(1000 * allowed) + 1}
    assert soak(monkeypatch, tmp_path, JOB, children)["gate"] == "red"


def test_exact_answers_are_judged_token_by_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children = Children({"answers": [truth[:-5] for truth in TRUTHS]})
    found = soak(monkeypatch, tmp_path, EXACT, children)
    assert (found["gate"], found["check"], children.told["usual"]) == ("green", "exact", None)
    assert found["allowed_word_error_rate"] is None
    children = Children({"answers": TRUTHS}, tally={"wrong": 1, "first_wrong": "x"})
    assert soak(monkeypatch, tmp_path, EXACT, children)["problems"] == [
        "1 of 50 answers are wrong: x"
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "room for all": ({"pool": 1.0}, "--pool 1.0: between 0 and 1"),
    "no pool": ({"pool": 0.0}, "--pool 0.0"),
    "no aborts": ({"aborts": 0.0}, "--aborts 0.0"),
    "all aborted": ({"aborts": 1.0}, "--aborts 1.0"),
    "one request": ({"concurrency": 1}, "--concurrency 1"),
    "few samples": ({"minutes": 1.0, "every": 7.5}, "--minutes 1 with --every 7.5: 8.0 samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_can_not_be_green_starts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changes, text = REFUSED[name]
    children = Children(RIGHT)
    found = soak(monkeypatch, tmp_path, dataclasses.replace(JOB, **changes), children)
    assert (found["gate"], len(found["problems"]), children.started) == ("red", 1, [])
    assert text in found["problems"][0]


def test_all_that_is_refused_is_said_together() -> None:
    assert refusals(JOB) == []
    assert refusals(dataclasses.replace(JOB, every=0, minutes=0.1)) == []
    assert len(refusals(dataclasses.replace(JOB, pool=2, aborts=0, concurrency=1))) == 3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that `soak` was given; it says red for a pool below a half."""
    jobs: list[Job] = []

    def soak(job: Job, folder: Path, known: Path | None) -> dict[str, Any]:
        jobs.append(job)
        return {"gate": "green" if job.pool > 0.5 else "red", "problems": [], "samples": [1]}

    monkeypatch.setattr(main, "soak", soak)
    return jobs


def test_texts_are_as_long_as_those_that_the_model_was_trained_for(
    told: list[Job], tmp_path: Path
) -> None:
    """The default was 20 to 400 words, which a model of train.py can't copy."""
    arguments = ["model", "--out", str(tmp_path)]
    assert main.main(arguments) == 0
    assert told[0].prompts["words"] == (task.FULL_WORDS, task.FULL_WORDS)
    assert {len(prompt.truth) for prompt in told[0].set_of_prompts()} == {task.FULL_ANSWER}
    assert refusals(told[0]) == []
    assert main.main([*arguments, "--words", "20:40"]) == 0
    assert told[1].prompts["words"] == (20, 40)


def test_the_exit_code_and_the_file_say_the_gate(told: list[Job], tmp_path: Path) -> None:
    arguments = ["model", "--out", str(tmp_path), "--words", "9"]
    assert main.main(arguments) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["gate"] == "green"
    assert result["job"]["prompts"]["words"] == [9, 9]
    assert main.main([*arguments, "--pool", "0.4"]) == 1
    assert json.loads((tmp_path / "soak.json").read_text())["gate"] == "red"


def test_random_prompts_are_for_float32_alone(told: list[Job], tmp_path: Path) -> None:
    arguments = ["model", "--out", str(tmp_path), "--prompts", "random"]
    with pytest.raises(SystemExit):
        main.main(arguments)
    assert not told
    assert main.main([*arguments, "--options", '{"dtype": "float32"}']) == 0
    assert told[0].exact
