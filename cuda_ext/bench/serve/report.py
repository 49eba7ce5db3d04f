"""Lines and tables for an operator. A ratio is printed where the summary has one: on green."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

from cuda_ext.bench.serve.measure import Run, figures
from cuda_ext.bench.serve.profile import NAMES
from cuda_ext.bench.serve.results import RATIOS


def start_line(facts: Mapping[str, Any]) -> str:
    """What an arm says of itself."""
    parts = []
    if "start_s" in facts:
        parts.append(f"{facts['start_s']} s")
    if facts.get("layer_classes"):
        parts.append(
            f"{facts['gdn_layers']} x {', '.join(facts['layer_classes'])}, "
            f"{facts['replay_layers']} with ReplaySSM"
        )
    if facts.get("pool_bytes"):
        parts.append(f"pool {facts['pool_bytes'] / 2**30:.1f} GiB")
    if facts.get("fit_8k"):
        parts.append(f"{facts['fit_8k']:.1f} requests of 8k fit")
    if facts.get("kv_cache_groups"):
        layers = "+".join(str(group["layers"]) for group in facts["kv_cache_groups"])
        parts.append(f"groups of {layers} layers, layout {facts['kv_cache_layout']}")
    if facts.get("attention_backends"):
        parts.append(", ".join(facts["attention_backends"]))
    for name in ("model_runner", "cudagraph_mode", "async_scheduling"):
        if name in facts:
            parts.append(f"{name} {facts[name]}")
    return "; ".join(parts)


def run_line(run: Run) -> str:
    """The figures of one run in a line."""
    found = figures([run])
    acceptance = found["acceptance_length"]
    return (
        f"{run.arm:6} {run.label:24} {_number(found['output_tok_s'])} tok/s  "
        f"TTFT p50 {_number(found['ttft_p50_s'])} p99 {_number(found['ttft_p99_s'])} s  "
        f"TPOT p50 {_number(found['tpot_p50_ms'])} ms  running {found['running_max']} "
        f"waiting {found['waiting_max']}  cache {found['kv_usage_max']:.0%}  "
        f"preempted {found['preemptions']}  accepted {acceptance or '-'}  {run.wall_s:.1f} s"
    )


def profile_line(arm: str, line: Mapping[str, Any]) -> str:
    """The figures of one profile in a line."""
    if "error" in line:
        return f"profile of {arm}, {_profiled(line)}: {line['error']}"
    kinds = ", ".join(f"{name} {ms:.2f}" for name, ms in line["ms"].items())
    return (
        f"profile of {arm}, {_profiled(line)}: {line['running']} running, "
        f"{line['tokens']:g} tokens and {line['wall_ms']:.2f} ms a step, busy "
        f"{line['busy_ms']:.2f}, idle {line['idle_ms']:.2f}: {kinds} ({line['seconds']} s)"
    )


def _profiled(line: Mapping[str, Any]) -> str:
    if line["concurrency"] is None:
        return str(line["kind"])
    return f"{line['kind']} at {line['concurrency']}"


def profile_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Milliseconds a step, a column for each arm and load."""
    whole = [line for line in lines if "error" not in line]
    table = Table(title="ms a step; busy: the device runs a kernel, idle: it does not")
    table.add_column("")
    for line in whole:
        table.add_column(f"{line['arm']}\n{_profiled(line)}", justify="right")
    for name in ("running", "tokens", "kernels", "wall_ms", "busy_ms", "idle_ms"):
        table.add_row(name, *(_number(line[name]) for line in whole))
    for name in NAMES:
        if any(name in line["ms"] for line in whole):
            table.add_row(name, *(f"{line['ms'].get(name, 0.0):.2f}" for line in whole))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Gate, then figures, then ratios where there are any."""
    console.print(f"gate {summary['gate']}", highlight=False)
    for check in summary["checks"]:
        mark = "ok " if check["ok"] else "RED"
        console.print(
            f"  {mark} {check['name']}: {check.get('value')} (allowed {check.get('limit')})"
            + (f"  {check['note']}" if check.get("note") else ""),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if summary.get("bf16") and not summary["bf16"]["holds"]:
        console.print(
            "  without slack the bf16 distances do not hold: see `bf16` in the result",
            highlight=False,
        )
    for note in summary.get("notes", ()):
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)
    if summary.get("torch_note"):
        console.print(summary["torch_note"], markup=False, highlight=False)
    table = Table(title="requests of 8k that fit: " + _fits(summary["fit_8k"]))
    names = ("arm", "load", "out", "tok/s", "TTFT p50 s", "TTFT p99 s", "TPOT p50 ms", "running")
    for name in names:
        justify: JustifyMethod = "left" if name in ("arm", "load") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for line in summary["points"]:
        table.add_row(
            line["arm"],
            _load(line),
            str(line["output_tokens"]),
            *(
                _number(line[key])
                for key in ("output_tok_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_ms")
            ),
            str(line["running_max"]),
        )
    console.print(table)
    if summary.get("profile"):
        console.print(profile_table(summary["profile"]))
    if "ratios" in summary:
        ratios = summary["ratios"]
        console.print(f"ReplaySSM to stock, above 1 is better: fit_8k {ratios.get('fit_8k')}")
        for one in ratios["points"]:
            figures_of = {k: v for k, v in one.items() if k in RATIOS}
            text = ", ".join(f"{name} {value}x" for name, value in figures_of.items())
            console.print(
                f"  {_load(one)}, {one['output_tokens']} out: {text}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    elif summary["gate"] == "red":
        console.print("no ratios: the gate is red")
    for name in ("left_out", "failure"):
        if summary.get(name):
            console.print(f"{name.replace('_', ' ')}: {summary[name]}", markup=False)


def _load(line: Mapping[str, Any]) -> str:
    if line["request_rate"] is not None:
        return f"{line['request_rate']:g} requests/s"
    return f"{line['concurrency']} in flight"


def _fits(fits: Mapping[str, Any]) -> str:
    return ", ".join(f"{arm} {value}" for arm, value in fits.items()) or "not known"
