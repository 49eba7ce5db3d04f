"""`gaudi-ext bench`: times what this package replaces against what it stands for."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    name="bench", help="Measure on this machine, both sides in one run.", no_args_is_help=True
)


class Mode(str, Enum):
    """What serves."""

    engine = "engine"
    server = "server"


class Interleave(str, Enum):
    """How two arms share a device."""

    sleep = "sleep"
    restart = "restart"


class Side(str, Enum):
    """One of the two arms."""

    stock = "stock"
    replay = "replay"


@bench.command()
def kernel(
    out: Annotated[Path, typer.Option(help="Folder for kernel-DEVICE.json and .png.")] = Path(
        "bench-results"
    ),
    repeats: Annotated[int, typer.Option(min=3, help="Samples of each arm.")] = 15,
    longest: Annotated[
        int, typer.Option(min=0, max=32, help="Rows of the curve; 0 leaves it out.")
    ] = 32,
    commit: Annotated[str | None, typer.Option(help="For the record, where git can't say.")] = None,
) -> None:
    """The ReplaySSM kernels against vLLM's own, on one GPU (2 to 4 minutes).

    The correctness gate comes first; on a red one nothing is timed and the exit code is 1. It is 2
    where there is no NVIDIA GPU, or neither torch, Triton nor vLLM's kernels.
    """
    try:
        from cuda_ext.bench.kernel import main
    except ImportError as error:
        typer.echo(
            f"bench kernel needs torch and Triton for an NVIDIA GPU, and vLLM: {error}", err=True
        )
        raise typer.Exit(2) from None
    arguments = ["--out", str(out), "--repeats", str(repeats), "--longest", str(longest)]
    raise typer.Exit(main(arguments + (["--commit", commit] if commit else [])))


@bench.command()
def serve(
    config: Annotated[
        str | None,
        typer.Argument(help="A YAML, or a packaged one: h200-4b, h200-35b, h200-4b-server."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json, NAME.png and logs.")] = Path(
        "bench-results"
    ),
    mode: Annotated[
        Mode, typer.Option(help="Engines in child processes, or real servers and vLLM's client.")
    ] = Mode.engine,
    interleave: Annotated[
        Interleave | None,
        typer.Option(help="Both arms alive and one asleep, or one after the other."),
    ] = None,
    arm: Annotated[
        Side | None, typer.Option(help="Only this one, for a result to be merged.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed-loop points instead of the YAML's: 16,64,256.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Output lengths instead of the YAML's: 512,3072.")
    ] = None,
    waves: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Closed loop: requests for each in flight, instead of the YAML's; 1 is one burst.",
        ),
    ] = None,
    points: Annotated[
        str | None,
        typer.Option(
            help="Closed loop, in this order and no other: requests in flight x output tokens, "
            "and x waves at will: 256x512x3,64x3072."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="What a step is spent on, after the points, at these: 16,64."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the YAML, of `serve` where it is no other: "
            "attention-config.backend=TRITON_ATTN.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each point and arm.")] = 1,
    budget_s: Annotated[
        float | None, typer.Option(min=1, help="Seconds; a point that would pass is left out.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="A word that results of one arm each must share.")
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Results of one arm each, of one session.")
    ] = None,
    collect: Annotated[
        list[Path] | None, typer.Option(help="Results of both arms each, of other points.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SESSION:CONCURRENCYxOUTPUT",
            help="With --collect: leave out that point of that session; the result says so.",
        ),
    ] = None,
    checks: Annotated[
        Path | None, typer.Option(help="JSON list of checks made elsewhere, for the gate.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Of the servers, in server mode: this one and the next.")
    ] = 8017,
    commit: Annotated[str | None, typer.Option(help="For the record, where git can't say.")] = None,
) -> None:
    """Serving with ReplaySSM against stock vLLM, both arms from one YAML, in turns.

    Ratios are made only where the correctness gate is green. The exit code is 0 then, 1 with a red
    gate or where the run ended early, and 2 where what was asked can't be done.
    """
    from cuda_ext.bench.serve.run import main

    given: dict[str, object] = {
        "out": out,
        "mode": mode.value,
        "interleave": interleave and interleave.value,
        "arm": arm and arm.value,
        "concurrency": concurrency,
        "output-tokens": output_tokens,
        "waves": waves,
        "points": points,
        "profile": profile,
        "repeats": repeats,
        "budget-s": budget_s,
        "session": session,
        "checks": checks,
        "port": port,
        "commit": commit,
    }
    arguments = [config] if config else []
    for name, value in given.items():
        arguments += [] if value is None else [f"--{name}", str(value)]
    for text in change or ():
        arguments += ["--set", text]
    for text in without or ():
        arguments += ["--without", text]
    for name, paths in (("merge", merge), ("collect", collect)):
        arguments += [f"--{name}", *map(str, paths)] if paths else []
    raise typer.Exit(main(arguments))
