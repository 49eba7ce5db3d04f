"""Shows a plan: a table for a terminal, JSON for a script, bars for a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ext.planner.arithmetic import MIB
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.plan import Deployment, Plan, Side

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def _mib(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") + " MiB"


def _title(deployment: Deployment) -> str:
    target = deployment.target
    parts = [f"{target.name} on {deployment.platform.title}"]
    if deployment.tp > 1:
        parts.append(f"TP{deployment.tp}" + (" EP" if deployment.ep else ""))
    parts.append(f"{deployment.tokens:,} tokens a request")
    parts.append(f"{deployment.drafts} drafts" if deployment.drafts else "no drafts")
    parts.append(f"KV {deployment.kv_dtype}, state {deployment.state_dtype}")
    parts.append(f"prefix caching {'on' if deployment.caching else 'off'}")
    return ", ".join(parts)


def _groups(side: Side) -> str:
    kinds = ", ".join(
        f"{group.groups} {group.kind}"
        + (f"({group.window})" if group.window else "")
        + (f" of {group.layers} layers" if group.layers else "")
        + (f" / {group.block_tokens} tokens" if group.block_tokens else "")
        for group in side.groups
    )
    return f"{side.group_count}: {kinds}"


def _rows(side: Side) -> list[tuple[str, str]]:
    rows = [
        ("block tokens B", f"{side.block_tokens:,}"),
        ("page", _page(side)),
        ("unused by a state", f"{side.padding_percent:.1f} %"),
        ("state copies", str(side.state_copies)),
        ("state a request", _mib(side.state_mib_per_request)),
        ("KV a request", _kv(side)),
        ("request, ideal", _mib(side.request_mib_ideal)),
        ("request, vLLM's groups", _mib(side.request_mib_padded)),
        ("KV-cache groups", _groups(side)),
        ("block in the pool", f"{_mib(side.block_mib)} ({_pages(side)})"),
        (
            "cached tokens",
            "caching off"
            if side.cached_tokens_multiple_of is None
            else f"multiples of {side.cached_tokens_multiple_of:,}",
        ),
    ]
    holds = side.capacity
    rows.append(("blocks in the pool", "unknown" if holds is None else f"{holds.pool_blocks:,}"))
    rows.append(
        (
            "requests that fit",
            "unknown"
            if holds is None
            else f"{holds.requests:,} ({holds.requests_ideal:,} ideal; vLLM logs "
            f"{holds.vllm_concurrency:.2f}x)",
        )
    )
    rows.append(
        ("sequences whose states fit", "unknown" if holds is None else f"{holds.state_slots:,}")
    )
    return rows


def _page(side: Side) -> str:
    if not side.packed:
        return _mib(side.page_mib)
    return f"{_mib(side.state_bytes / MIB)} a state, {_mib(side.page_mib)} attention"


def _pages(side: Side) -> str:
    return "packed" if side.packed else f"{side.group_size} pages"


def _kv(side: Side) -> str:
    text = _mib(side.kv_mib_per_request)
    if side.drafter_kv_mib_per_request:
        text += f" ({_mib(side.drafter_kv_mib_per_request)} the drafter's)"
    return text


def print_report(plan: Plan, console: Console) -> None:
    """Prints the table and the findings."""
    from rich.markup import escape
    from rich.table import Table

    deployment = plan.deployment
    console.print(escape(_title(deployment)), style="bold")
    if deployment.drafter is not None:
        drafter = deployment.drafter
        console.print(
            escape(
                f"drafter {drafter.name}: {drafter.full_layers} full and {drafter.sliding_layers} "
                f"sliding layers, {drafter.num_key_value_heads} KV heads of {drafter.head_dim}"
            )
        )
    if deployment.pool_source is not None:
        console.print(escape(f"pool: {deployment.pool_source}"))
    table = Table()
    table.add_column("of one card")
    native = dict(_rows(plan.native))
    if plan.replay is None:
        table.add_column("")
        for name, value in native.items():
            table.add_row(name, value)
    else:
        table.add_column("vLLM")
        table.add_column("ReplaySSM" + (" (serves)" if plan.serving == "replay" else ""))
        replay = dict(_rows(plan.replay))
        for name, value in native.items():
            table.add_row(name, value, replay[name])
        table.add_row(
            "ring",
            "",
            f"{plan.replay.ring_rows} rows, {(plan.replay.ring_bytes or 0) / 1024:.0f} KiB a layer",
        )
    if plan.gaudi is not None:
        view = plan.gaudi
        table.add_row(
            "slots (max-num-seqs)", "unknown" if view.slots is None else f"{view.slots:,}"
        )
        table.add_row(
            "slot memory",
            f"{_mib(view.slot_mib_per_request)} a sequence"
            if view.slot_mib is None
            else f"{_mib(view.slot_mib)} in {view.slot_rows:,} rows, outside of the pool",
        )
        table.add_row("non-compact pool factor", f"{view.noncompact_pool_factor:.3f}")
    if plan.budget is not None:
        table.add_row(
            "max-num-batched-tokens",
            f"{plan.budget.recommended:,} (at least {plan.budget.least:,})",
        )
    console.print(table)
    for finding in plan.findings:
        console.print(
            f"[{_STYLE[finding.level]}]{finding.level}[/]: {escape(finding.text)}",
            highlight=False,
        )


def to_json(plan: Plan) -> str:
    """The plan as JSON, with stable keys."""
    return json.dumps(plan.model_dump(mode="json"), indent=1)


def check_plot_path(path: Path) -> None:
    """Refuses a plot that could not be written, before anything is computed.

    Raises:
        PlanError: it is not a .png, its folder is missing, or matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise PlanError(f"--plot {path}: only .png files are written")
    if not path.parent.is_dir():
        raise PlanError(f"--plot {path}: the folder {path.parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError("--plot needs matplotlib: pip install 'vllm-gaudi-ext[plot]'") from None


def _bars(axis: Any, offset: float, state: list[float], kv: list[float], label: str) -> None:
    colour = {"vLLM": ("#b5482a", "#e8b9a6"), "ReplaySSM": ("#1f6f8b", "#a9d0dc")}[label]
    places = [drafts + offset for drafts in range(len(state))]
    axis.bar(places, kv, width=0.4, color=colour[1], label=f"{label}: KV cache")
    axis.bar(places, state, width=0.4, bottom=kv, color=colour[0], label=f"{label}: states")


def write_plot(plan: Plan, path: Path) -> None:
    """Writes the bars: memory of one request by draft length, and the requests that fit.

    Raises:
        PlanError: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = plan.sweep
    drafts = [point.drafts for point in points]
    with_fit = any(point.native_requests is not None for point in points)
    figure, axes = pyplot.subplots(
        2 if with_fit else 1, 1, figsize=(9, 8 if with_fit else 4.5), squeeze=False
    )
    memory = axes[0][0]
    replayed = [point for point in points if point.replay_state_mib is not None]
    _bars(
        memory,
        -0.2 if replayed else 0.0,
        [point.native_state_mib for point in points],
        [point.native_kv_mib for point in points],
        "vLLM",
    )
    if replayed:
        _bars(
            memory,
            0.2,
            [point.replay_state_mib or 0.0 for point in points],
            [point.replay_kv_mib or 0.0 for point in points],
            "ReplaySSM",
        )
    memory.set_title(_title(plan.deployment), fontsize=9)
    memory.set_ylabel("MiB a request, one card")
    memory.set_xlabel("draft tokens")
    memory.set_xticks(drafts[:: max(1, len(drafts) // 20)])
    memory.legend(fontsize=8)
    if with_fit:
        fit = axes[1][0]
        fit.plot(drafts, [p.native_requests for p in points], "o-", color="#b5482a", label="vLLM")
        if replayed:
            fit.plot(
                drafts,
                [p.replay_requests for p in points],
                "o-",
                color="#1f6f8b",
                label="ReplaySSM",
            )
        fit.set_ylabel("requests that fit")
        fit.set_xlabel("draft tokens")
        fit.set_ylim(bottom=0)
        fit.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise PlanError(f"--plot {path}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
