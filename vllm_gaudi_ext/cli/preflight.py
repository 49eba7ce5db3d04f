"""`gaudi-ext preflight FILE`: whether a serve.yaml is legal, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_gaudi_ext.preflight.report import PreflightReport


def preflight(
    file: Annotated[Path, typer.Argument(help="The serve.yaml of `vllm serve --config`.")],
    platform: Annotated[
        str | None,
        typer.Option(
            help="gaudi2, gaudi3, a100, h100, h200, b200 or cpu.  "
            "[default: that of the recipe.yaml beside the file]"
        ),
    ] = None,
    model_config: Annotated[
        str | None,
        typer.Option(help="The model's folder or config.json, where its id is not a known one."),
    ] = None,
    drafter_config: Annotated[
        str | None, typer.Option(help="The drafter's folder or config.json, likewise.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Check a serve.yaml with vLLM's own parser, the engine's refusals and the planner.

    Exit code 0: all checked and legal. 1: something is wrong. 2: bad input, or nothing is wrong
    but something could not be checked here, such as every flag where vLLM is not installed.
    """
    from vllm_gaudi_ext.planner.errors import PlanError
    from vllm_gaudi_ext.preflight.run import preflight as run

    try:
        report = run(
            file, platform=platform, model_config=model_config, drafter_config=drafter_config
        )
    except PlanError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


def _print(report: PreflightReport) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    parser = f"vLLM {report.vllm}" if report.vllm else "no vLLM"
    block = f", B={report.block_tokens}" if report.block_tokens is not None else ""
    lines = [f"{escape(report.file)} on {report.platform} ({parser}{block})"]
    for number, found in enumerate(report.problems, 1):
        lines.append(f"[red]problem {number}:[/red] {escape(found.what)}")
        lines.append(f"  [bold]fix:[/bold] {escape(found.fix)}")
    for text in report.unchecked:
        lines.append(f"[yellow]not checked:[/yellow] {escape(text)}")
    for found in report.warnings:
        lines.append(f"[yellow]warning:[/yellow] {escape(found.what)} ({escape(found.fix)})")
    for text in report.assumed:
        lines.append(f"assumed: {escape(text)}")
    count = len(report.problems)
    if count:
        lines.append(f"[red]{count} problem{'s' if count > 1 else ''}[/red]")
    elif report.unchecked:
        lines.append("[yellow]no problem found, but not everything could be checked[/yellow]")
    else:
        lines.append("[green]no problem[/green]")
    # Sentences are not broken into columns: a log or a pipe has no width of its own.
    for line in lines:
        console.print(line, soft_wrap=True)
