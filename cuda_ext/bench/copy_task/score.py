"""Scores the copy task with stock vLLM and with ReplaySSM: `... copy_task.score CHECKPOINT`.

Every arm is a process of its own with vLLM's engine in it; all arms answer the same prompts with
temperature 0, each of them twice, in two batch compositions (`ROUNDS`). The gate, `verdict`:

* each arm ran the layer that it is named after, drafted in every round if it has a method of
  drafts, and all answers have their full length;
* the model can do it: stock's word error rate is at most `task.MAY_ERR`;
* the truth is hard enough: a state that loses rows (arm `replay-lost-row`, where it is run) has
  more word errors than the gate allows; where it is not run, the result's `notes` say that this
  was not shown;
* ReplaySSM's word errors are no more than the most that stock had in a round, plus the most words
  in which two rounds of stock differ. Rounds of stock differ by rounding alone, so this is what
  rounding does to the count; where no round of stock changes a word, ReplaySSM may not either;
* with drafts, ReplaySSM's acceptance length is that of stock, but for `ACCEPTANCE_MAY_DIFFER`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_ext.bench.copy_task import task
from cuda_ext.bench.faults import lost_rows
from cuda_ext.bench.provenance import provenance
from vllm_gaudi_ext import envs

ACCEPTANCE_MAY_DIFFER = 0.03
"""Relative. Some 20,000 steps a round give the mean to 0.5 %; a round of other words, the same."""
ROUNDS = ("together", "in halves")
"""All prompts in one batch; half of them, then the others."""


@dataclass(frozen=True)
class Arm:
    """One engine.

    Args:
        replay: whether ReplaySSM serves; else the plugin is not loaded at all.
        method: of the drafts; None for no drafts.
        lost_row: whether ReplaySSM's plan is spoiled, by `faults.lost_rows`.
    """

    replay: bool
    method: str | None = "mtp"
    lost_row: bool = False


ARMS = {
    "stock": Arm(replay=False),
    "stock-no-drafts": Arm(replay=False, method=None),
    "stock-ngram": Arm(replay=False, method="ngram"),
    "replay": Arm(replay=True),
    "replay-no-drafts": Arm(replay=True, method=None),
    "replay-ngram": Arm(replay=True, method="ngram"),
    "replay-lost-row": Arm(replay=True, lost_row=True),
}


@dataclass(frozen=True)
class Job:
    """What a child is told.

    Args:
        model: folder of the checkpoint.
        prompts: how many.
        output: tokens of an answer; prompts are as long.
        drafts: D.
        options: further arguments of `vllm.LLM`.
        seed: of the words.
    """

    model: str
    prompts: int
    output: int
    drafts: int
    options: Mapping[str, Any]
    seed: int

    def texts(self) -> list[list[task.Word]]:
        count = -(-self.output // task.WORD_TOKENS)
        return [task.words(count, self.seed + index) for index in range(self.prompts)]


def engine_options(job: Job, arm: Arm) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    options: dict[str, Any] = {
        "model": job.model,
        "skip_tokenizer_init": True,
        "max_model_len": 2 * job.output + 128,
        "max_num_seqs": job.prompts,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    if arm.replay:
        options["additional_config"] = options["additional_config"] | {
            "gaudi_ext": {"replay": "on"}
        }
    if arm.method:
        options["speculative_config"] = {
            "method": arm.method,
            "num_speculative_tokens": job.drafts,
        }
        if arm.method == "ngram":
            options["speculative_config"] |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    changes = dict(job.options)
    changes["additional_config"] = options["additional_config"] | changes.get(
        "additional_config", {}
    )
    if not arm.replay:
        changes["additional_config"].pop("gaudi_ext", None)
    return options | changes


def _counters(llm: Any) -> dict[str, float]:
    names = {"vllm:spec_decode_num_drafts": "steps", "vllm:spec_decode_num_accepted_tokens": "ok"}
    found = {
        names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names
    }
    return {"steps": 0.0, "ok": 0.0} | found


def _layers(llm: Any) -> dict[str, str]:
    """Classes of runner and GDN layers."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = {type(layer).__name__ for layer in context.values() if hasattr(layer, "mamba_type")}
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "layers": ", ".join(sorted(layers)),
    }


def answer_all(job: Job, arm: Arm) -> dict[str, Any]:
    """Run one arm in this process.

    Returns:
        `runner`, `layers`, `seconds_to_start`, and for each of `ROUNDS` the answers, the
        acceptance length and the seconds.
    """
    from vllm import LLM, SamplingParams

    begin = time.monotonic()
    llm: Any = LLM(**engine_options(job, arm))
    result: dict[str, Any] = _layers(llm)
    result["seconds_to_start"] = round(time.monotonic() - begin, 1)
    print(f"started in {result['seconds_to_start']} s, {result['layers']}", flush=True)
    prompts: Any = [{"prompt_token_ids": task.prompt(words)} for words in job.texts()]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job.output, ignore_eos=True, detokenize=False
    )
    half = -(-len(prompts) // 2)
    for name, size in zip(ROUNDS, (len(prompts), half), strict=True):
        begin, before = time.monotonic(), _counters(llm)
        answers: list[list[int]] = []
        for first in range(0, len(prompts), size):
            outputs = llm.generate(prompts[first : first + size], sampling, use_tqdm=False)
            answers += [list(output.outputs[0].token_ids) for output in outputs]
        after = _counters(llm)
        steps = after["steps"] - before["steps"]
        accepted = after["ok"] - before["ok"]
        length = round(1 + accepted / steps, 3) if steps else None
        seconds = round(time.monotonic() - begin, 1)
        print(f"{name}: acceptance length {length}, {seconds} s", flush=True)
        result[name] = {"answers": answers, "acceptance_length": length, "seconds": seconds}
    return result


def compare(job: Job, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Word errors of all arms, and words in which rounds differ.

    Args:
        job: the job.
        found: by arm, what `answer_all` gave.

    Returns:
        By arm and round: `word_errors`, `word_error_rate`, `wrong_answers`, `first_wrong_word`
        (the earliest of all answers), `acceptance_length`, `complete`. And `words`, of all
        prompts; `stock_differs`, the most words in which two rounds of stock differ.
    """
    truths = [task.answer(words)[: job.output] for words in job.texts()]
    rounds: dict[tuple[str, str], list[list[int]]] = {}
    table: dict[str, Any] = {}
    for arm, result in found.items():
        table[arm] = {}
        for name in ROUNDS:
            answers = rounds[arm, name] = result[name]["answers"]
            errors = [task.word_errors(a, t) for a, t in zip(answers, truths, strict=True)]
            wrong = [task.first_wrong_word(a, t) for a, t in zip(answers, truths, strict=True)]
            words = sum(len(list(task.split(truth))) for truth in truths)
            table[arm][name] = {
                "word_errors": sum(errors),
                "word_error_rate": round(sum(errors) / words, 6),
                "wrong_answers": sum(error > 0 for error in errors),
                "first_wrong_word": min((w for w in wrong if w is not None), default=None),
                "acceptance_length": result[name]["acceptance_length"],
                "complete": all(len(answer) == job.output for answer in answers),
            }
    stock = [answers for (arm, _), answers in rounds.items() if arm.startswith("stock")]
    differs = max(
        (
            sum(task.word_errors(a, b) for a, b in zip(one, other, strict=True))
            for index, one in enumerate(stock)
            for other in stock[:index]
        ),
        default=0,
    )
    return {"words": words, "stock_differs": differs, "arms": table}


def verdict(
    compared: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], int]:
    """The gate of the module docstring.

    Returns:
        What is wrong, nothing where the gate is green; and the word errors allowed.
    """
    table = compared["arms"]
    problems = []
    stock = [entry for arm in table if arm.startswith("stock") for entry in table[arm].values()]
    if not stock or "replay" not in table:
        return ["arms `stock` and `replay` are both needed"], 0
    allowed = max(entry["word_errors"] for entry in stock) + compared["stock_differs"]
    if (most := max(entry["word_error_rate"] for entry in stock)) > task.MAY_ERR:
        problems.append(f"stock's word error rate is {most}, at most {task.MAY_ERR} is of use")
    for arm, entries in table.items():
        ours = "Replay" in found[arm]["layers"]
        if ours != ARMS[arm].replay:
            problems.append(f"{arm} was served by {found[arm]['layers']}")
        for name, entry in entries.items():
            where = f"{arm}, {name}"
            errors, length = entry["word_errors"], entry["acceptance_length"]
            if not entry["complete"]:
                problems.append(f"{where}: answers are too short")
            if ARMS[arm].method and length is None:
                problems.append(f"{where}: nothing was drafted, with {ARMS[arm].method}")
            if ARMS[arm].lost_row:
                if errors <= allowed:
                    problems.append(
                        f"{where}: {errors} word errors with rows lost, {allowed} allowed: "
                        "the task would not show a wrong state"
                    )
                continue
            if not ARMS[arm].replay:
                continue
            if errors > allowed:
                problems.append(f"{where}: {errors} word errors, {allowed} allowed")
            other = table.get(arm.replace("replay", "stock"), {}).get(name)
            wanted = other["acceptance_length"] if other else None
            if length is None or wanted is None:
                continue
            if abs(length - wanted) > ACCEPTANCE_MAY_DIFFER * wanted:
                problems.append(f"{where}: acceptance length {length}, stock has {wanted}")
    return problems, allowed


def notes(arms: Collection[str]) -> list[str]:
    """What a green gate of these arms does not say."""
    if any(ARMS[arm].lost_row for arm in arms):
        return []
    return ["sensitivity was not shown: replay-lost-row, whose state is wrong, was not run"]


def start(job: Job, arm: str, folder: Path) -> subprocess.Popen[bytes]:
    """A child that writes `folder/ARM.answers.json`, its output in `folder/ARM.log`."""
    environment = envs.with_overrides(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PLUGINS": "gaudi_ext" if ARMS[arm].replay else "",
        }
    )
    told = {"job": asdict(job), "arm": arm, "result": str(folder / f"{arm}.answers.json")}
    with (folder / f"{arm}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cuda_ext.bench.copy_task.score", "--child", json.dumps(told)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run(job: Job, arms: Sequence[str], folder: Path, minutes: float, at_once: int) -> list[str]:
    """Run the arms, `at_once` at a time.

    Returns:
        The arms that gave no result, each with the reason.
    """
    waiting, running, failed = list(arms), dict[str, Any](), []
    deadline = time.monotonic() + 60 * minutes
    while waiting or running:
        while waiting and len(running) < at_once:
            arm = waiting.pop(0)
            (folder / f"{arm}.answers.json").unlink(missing_ok=True)
            running[arm] = start(job, arm, folder)
            print(f"{arm} starts", flush=True)
        late = time.monotonic() > deadline
        for arm, child in list(running.items()):
            if child.poll() is None and not late:
                continue
            child.kill()
            code = child.wait()
            del running[arm]
            lines = (folder / f"{arm}.log").read_text(errors="replace").splitlines()
            if (folder / f"{arm}.answers.json").exists():
                print(f"{arm} is done: {'; '.join(lines[-2:])}", flush=True)
            else:
                why = "took too long" if late else f"exit code {code}"
                failed.append(f"{arm}: {why}")
                print(f"{arm}: {why}", *lines[-30:], sep="\n", flush=True)
        if late:
            failed += [f"{arm}: no time was left" for arm in waiting]
            break
        time.sleep(0.5)
    return failed


def child(told: Mapping[str, Any]) -> None:
    """The work of a child."""
    arm = ARMS[told["arm"]]
    # In each fold, about one row of seven. One fold of 16 changed no word of 16,384 on an H200: of
    # the rows that it loses only tags are read again, and a class comes up 16 times.
    with lost_rows() if arm.lost_row else nullcontext():
        result = answer_all(Job(**told["job"]), arm)
    path = Path(told["result"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a green gate, 1 with a red one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("copy-task"), help="folder of the result")
    parser.add_argument("--arms", default="stock,stock-no-drafts,replay,replay-lost-row")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output", type=int, default=task.FULL_ANSWER, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1_000_000, help="of the words")
    parser.add_argument("--options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--at-once", type=int, default=1, help="engines at a time")
    parser.add_argument("--commit", help="for the record, where git can't say")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(options.child)
        return 0
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"arms {sorted(unknown)}; there are {', '.join(ARMS)}")
    if options.model is None:
        parser.error("a checkpoint is needed")
    job = Job(
        str(options.model.resolve()),
        options.prompts,
        options.output,
        options.drafts,
        options.options,
        options.seed,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    failed = run(job, arms, options.out, options.minutes, options.at_once)
    found = {
        arm: json.loads(path.read_text())
        for arm in arms
        if (path := options.out / f"{arm}.answers.json").exists()
    }
    command = ["python -m cuda_ext.bench.copy_task.score", *(argv or sys.argv[1:])]
    result: dict[str, Any] = {"gate": "red", **provenance(command, options.commit)}
    result["job"] = asdict(job)
    problems = failed
    if found:
        compared = compare(job, found)
        wrong, allowed = verdict(compared, found)
        problems = failed + wrong
        result |= {"allowed_word_errors": allowed, **compared}
        result["engines"] = {
            arm: {k: v for k, v in entry.items() if k not in ROUNDS} for arm, entry in found.items()
        }
    result["problems"] = problems
    result["notes"] = notes(found)
    result["gate"] = "red" if problems else "green"
    (options.out / "copy-task.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "job"}, indent=1))
    return 0 if result["gate"] == "green" else 1


if __name__ == "__main__":
    sys.exit(main())
