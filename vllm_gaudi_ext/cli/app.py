"""The command line's root: which commands there are, and nothing else."""

from __future__ import annotations

import typer

from vllm_gaudi_ext.cli.bench import bench
from vllm_gaudi_ext.cli.check import check
from vllm_gaudi_ext.cli.plan import plan
from vllm_gaudi_ext.cli.preflight import preflight
from vllm_gaudi_ext.cli.recipes import recipes
from vllm_gaudi_ext.version import __version__

app = typer.Typer(
    name="gaudi-ext",
    help="Plan, check and serve Gated DeltaNet hybrids with vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Keep sub-commands, also while there is only one."""


@app.command()
def version() -> None:
    """Print the package's version."""
    typer.echo(__version__)


app.command()(check)
app.command()(plan)
app.command()(preflight)
app.add_typer(recipes)
app.add_typer(bench)


def main() -> None:
    """Entry point of the console script."""
    app()
