"""Exit code 0 with a green gate, 1 with a red one; `--out` gets soak.json and the logs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_ext.bench.copy_task import task
from cuda_ext.bench.provenance import provenance
from cuda_ext.bench.soak import checks
from cuda_ext.bench.soak.job import FAULTS, Job, refusals
from vllm_gaudi_ext import envs

START_S = 400
"""Longest start of an engine and answer of the fixed set."""


def child(what: str, job: Job, folder: Path, seconds: float, **told: Any) -> tuple[Any, str]:
    """Run a process; its result, or None and why there is none. Its lines are printed."""
    result, log = folder / f"{what}.json", folder / f"{what}.log"
    result.unlink(missing_ok=True)
    environment = envs.with_overrides(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "gaudi_ext"}
    )
    told |= {"what": what, "job": asdict(job), "result": str(result)}
    with log.open("wb") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "cuda_ext.bench.soak.engine", json.dumps(told)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            code = None
    if code == 0 and result.exists():
        return json.loads(result.read_text()), ""
    lines = log.read_text(errors="replace").splitlines()
    print(*lines[-40:], sep="\n", flush=True)
    why = f"took longer than {seconds:.0f} s" if code is None else f"exit code {code}"
    return None, f"process `{what}`: {why}; {log.name} says why"


def judge(job: Job, answers: Mapping[str, Any]) -> tuple[checks.Usual | None, str | None]:
    """What is usual without drafts, None where answers are exact; and why it is of no use."""
    prompts, words = job.set_of_prompts(), job.prompts.get("words")
    if len(answers["answers"]) != len(prompts) or job.exact == ("again" in answers):
        return None, "--known names answers to other prompts, or of another dtype"
    truths = [prompt.truth for prompt in prompts]
    if job.exact:
        asked = sum(prompt.answer for prompt in prompts)
        return None, checks.exact_problem(answers["answers"], asked, truths, words)
    assert words is not None, "answers to random prompts are compared in float32 only"
    usual = checks.usual([answers["answers"], answers["again"]], truths)
    print(
        f"without drafts: {usual.word_error_rate:.4%} of the words are wrong, with drafts "
        f"{usual.allowed:.4%} may be",
        flush=True,
    )
    return usual, usual.problem(words)


def soak(job: Job, folder: Path, known: Path | None) -> dict[str, Any]:
    """Both processes and the gate; `gate`, `problems`, and what was found.

    Args:
        job: the job.
        folder: of the processes' results.
        known: answers of an earlier run of the same model, prompts and options.
    """
    if refused := refusals(job):
        return {"gate": "red", "problems": refused}
    if known is None:
        found, problem = child("answers", job, folder, START_S)
        if found is None:
            return {"gate": "red", "problems": [problem]}
        known = folder / "answers.json"
    answers = json.loads(known.read_text())
    usual, useless = judge(job, answers)
    if useless is not None:
        return {"gate": "red", "problems": [useless]}
    result, problem = child(
        "serve",
        job,
        folder,
        START_S + 60 * job.minutes + 120,
        answers=str(known),
        usual=asdict(usual) if usual else None,
    )
    if result is None:
        return {"gate": "red", "problems": [problem]}
    allowed = None if usual is None else usual.allowed
    problems = checks.problems(result, checks.Tally(**result["tally"]), allowed)
    lengths = [len(answer) for answer in answers["answers"]]
    return {
        "gate": "red" if problems else "green",
        "problems": problems,
        "check": "exact" if job.exact else "words",
        "known_tokens": sum(lengths),
        "allowed_word_error_rate": allowed,
        **result,
    }


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        "python -m cuda_ext.bench.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="folder of the result")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument(
        "--aborts",
        type=float,
        default=0.05,
        help="share of the requests: a quarter of them before the first token, the others within "
        "their answer, or where they are preempted before that",
    )
    parser.add_argument(
        "--pool",
        type=float,
        default=0.9,
        help="blocks, as a share of what that many requests hold on average over their lives: by "
        "KV cache group one of GDN layers, and what prompt and answer so far fill (of answers of "
        "any length up to A, that is prompt + A / 3); below 1, or none is preempted",
    )
    parser.add_argument("--prompts", choices=("copy", "random"), default="copy")
    parser.add_argument("--count", type=int, default=96, help="prompts of the fixed set")
    parser.add_argument(
        "--words",
        type=_pair,
        default=(task.FULL_WORDS, task.FULL_WORDS),
        help="of copy texts, LOW:HIGH; by default those that copy_task.train ends with",
    )
    parser.add_argument("--lengths", type=_pair, default=(8, 1200), help="of random prompts")
    parser.add_argument("--answers", type=_pair, default=(16, 600), help="to random prompts")
    parser.add_argument(
        "--speculative",
        type=json.loads,
        default={"method": "mtp", "num_speculative_tokens": 7},
        help="vLLM's speculative_config, as JSON",
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=2_000_000)
    parser.add_argument("--known", type=Path, help="answers.json of an earlier run, same arguments")
    parser.add_argument("--commit", help="for the record, where git can't say")
    parser.add_argument("--fault", choices=FAULTS, help="see the gate red")
    given = parser.parse_args(argv)
    prompts: Mapping[str, Any] = {"count": given.count, "seed": given.seed}
    if given.prompts == "copy":
        prompts = {**prompts, "words": given.words}
    else:
        prompts = {**prompts, "lengths": given.lengths, "answers": given.answers}
        if given.options.get("dtype") != "float32":
            parser.error("answers to random prompts are compared in float32 only: --options dtype")
    job = Job(
        model=str(given.model.resolve()),
        prompts=prompts,
        random=given.prompts == "random",
        options=given.options,
        speculative=given.speculative,
        concurrency=given.concurrency,
        minutes=given.minutes,
        aborts=given.aborts,
        pool=given.pool,
        every=given.every,
        seed=given.seed,
        fault=given.fault,
    )
    given.out.mkdir(parents=True, exist_ok=True)
    found = soak(job, given.out, given.known)
    command = ["python -m cuda_ext.bench.soak", *(argv or sys.argv[1:])]
    result = {"gate": found.pop("gate"), **provenance(command, given.commit), "job": asdict(job)}
    (given.out / "soak.json").write_text(json.dumps(result | found, indent=1) + "\n")
    shown = {k: v for k, v in (result | found).items() if k not in ("job", "samples")}
    print(json.dumps(shown, indent=1))
    return 0 if result["gate"] == "green" else 1


if __name__ == "__main__":
    sys.exit(main())
