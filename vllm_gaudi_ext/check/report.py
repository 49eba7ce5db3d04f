"""How a report reads: a table for people, JSON for programs, JUnit XML for CI.

Only `save_prompts` writes prompts and answers, and only when it is called.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_gaudi_ext.check.verdict import CaseResult, CheckReport, Observation, Verdict

_STYLES = {"passed": "green", "difference": "bold red", "gap": "yellow", "neutral": "dim"}
# XML 1.0 has no way to write these.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def kind(verdict: Verdict) -> str:
    """Which of the four sorts a verdict is of: passed, difference, gap or neutral."""
    if verdict.passed:
        return "passed"
    if verdict.is_difference:
        return "difference"
    return "gap" if verdict.is_gap else "neutral"


def counts(report: CheckReport) -> dict[str, int]:
    """Number of cases of each sort."""
    result = dict.fromkeys(_STYLES, 0)
    for case in report.cases:
        result[kind(case.verdict)] += 1
    return result


def summary(report: CheckReport) -> str:
    """The last line: what to conclude."""
    n = counts(report)
    if len(report.cases) == 1 and report.cases[0].scenario == "server":
        only = report.cases[0]
        return f"{report.outcome}: {only.verdict.words}: {only.detail}"
    return (
        f"{report.outcome}: {n['passed']} cases equal, {n['difference']} different, "
        f"{n['gap']} not to be told, {n['neutral']} without a hit"
    )


def to_json(report: CheckReport) -> str:
    """The report as JSON, with the exit code, the outcome and each verdict's words."""
    data = report.model_dump(mode="json")
    data["outcome"] = report.outcome
    data["exit_code"] = report.exit_code
    for written, case in zip(data["cases"], report.cases, strict=True):
        written["words"] = case.verdict.words
        # JSON has no infinity: tokens that share no label differ without a number.
        for field in ("largest_difference", "granted"):
            if written[field] in (float("inf"), "Infinity"):
                written[field] = None
    for name, value in data["noise"].items():
        if value == float("inf"):
            data["noise"][name] = None
    return json.dumps(data, indent=2, allow_nan=False)


def print_report(report: CheckReport, console: Console) -> None:
    """Print the table, what it rests on, and the conclusion."""
    table = Table(title=f"prefix cache of {escape(report.url)}", title_justify="left")
    table.add_column("case")
    table.add_column("prompt", justify="right")
    table.add_column("cached", justify="right")
    table.add_column("largest\ndifference", justify="right")
    table.add_column("verdict")
    for case in report.cases:
        style = _STYLES[kind(case.verdict)]
        words = escape(case.verdict.words)
        detail = f"\n{escape(case.detail)}" if case.detail else ""
        table.add_row(
            escape(case.case),
            "" if case.prompt_tokens is None else f"{case.prompt_tokens:,}",
            _cached_words(case),
            "" if case.largest_difference is None else f"{case.largest_difference:.3g}",
            f"[{style}]{words}[/]{detail}",
        )
    console.print(table)
    for line in _basis(report):
        console.print(line, highlight=False, markup=False)
    style = {0: "green", 1: "bold red", 2: "yellow"}[report.exit_code]
    console.print(f"[{style}]{escape(summary(report))}[/]", highlight=False)
    if report.exit_code == 1:
        console.print("A hit does not give what a cold run gives: serve without prefix caching.")


def to_junit(report: CheckReport) -> str:
    """The report as JUnit XML: a difference is a failure, a gap an error, no hit a skip."""
    n = counts(report)
    suite = ElementTree.Element(
        "testsuite",
        name="gaudi-ext check",
        tests=str(len(report.cases)),
        failures=str(n["difference"]),
        errors=str(n["gap"]),
        skipped=str(n["neutral"]),
        time=f"{report.seconds:.3f}",
        timestamp=report.started,
    )
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "url": report.url,
        "model": report.model,
        "block_tokens": report.block_tokens,
        "block_source": report.block_source,
        "prompts_as": report.prompts_as,
        "outcome": report.outcome,
        "version": report.version,
    }
    for name, value in facts.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=name, value=_xml(str(value)))
    for case in report.cases:
        element = ElementTree.SubElement(
            suite, "testcase", classname=f"prefix_cache.{case.scenario}", name=_xml(case.case)
        )
        tag = {"difference": "failure", "gap": "error", "neutral": "skipped"}.get(
            kind(case.verdict)
        )
        if tag is not None:
            message = f"{case.verdict.words}: {case.detail}".rstrip(": ")
            ElementTree.SubElement(element, tag, message=_xml(message), type=case.verdict.value)
    if report.notes:
        ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(report.notes))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def save_prompts(observations: Sequence[Observation], folder: Path) -> int:
    """Write each request, its prompt and its answer into a file of its own.

    Returns:
        The number of files.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, o in enumerate(observations):
        name = re.sub(r"[^A-Za-z0-9]+", "-", o.ask.case).strip("-")[:60]
        data = {
            "scenario": o.scenario,
            "case": o.ask.case,
            "role": o.ask.role.value,
            "prompt": list(o.ask.prompt),
            "answer_tokens": o.ask.answer_tokens,
            "answer": None
            if o.answer is None
            else {
                "token_ids": o.answer.token_ids,
                "text": o.answer.text,
                "logprobs": None if o.answer.logprobs is None else list(o.answer.logprobs),
                "prompt_tokens": o.answer.prompt_tokens,
                "cached_tokens": o.answer.cached_tokens,
            },
            "trouble": o.trouble,
        }
        path = folder / f"{i:04d}-{o.ask.role.value}-{name}.json"
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")
    return len(observations)


def _cached_words(case: CaseResult) -> str:
    known = [c for c in case.cached_tokens if c is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _basis(report: CheckReport) -> list[str]:
    lines = []
    if report.block_tokens is not None:
        lines.append(f"B = {report.block_tokens:,} tokens ({report.block_source})")
    floors = {
        "cold runs repeated alone": report.noise.alone,
        "sent together": report.noise.together,
        "prefilled against decoded": report.noise.prefill_decode,
    }
    known = [f"{name} {value:.3g}" for name, value in floors.items() if value is not None]
    if known:
        lines.append(f"without a cache, logprobs differ by up to: {', '.join(known)}")
    lines += [f"note: {note}" for note in report.notes]
    if report.requests:
        lines.append(
            f"{report.requests} requests in {report.seconds:.1f} s, {report.retries} tried again"
        )
    return lines


def _xml(text: str) -> str:
    return _NO_XML.sub("?", text)
