"""`gaudi-ext bench`: times what this package replaces against what it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    name="bench", help="Measure on this machine, both sides in one run.", no_args_is_help=True
)


@bench.callback()
def _root() -> None:
    """Keep the sub-command, also while there is only one."""


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
