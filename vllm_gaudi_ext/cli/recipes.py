"""`gaudi-ext recipes`: the recipes that came with the package."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

recipes = typer.Typer(
    name="recipes", help="Recipes that came with the package.", no_args_is_help=True
)

_Name = Annotated[str, typer.Argument(help="The recipe's name, as `recipes list` shows it.")]
_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2) from None


@recipes.command("list")
def list_recipes(as_json: _Json = False) -> None:
    """All recipes: platform, model, drafter and status."""
    import json

    from vllm_gaudi_ext.planner.errors import PlanError
    from vllm_gaudi_ext.recipes import find_recipe, read_recipe, recipe_names

    try:
        found = {name: read_recipe(find_recipe(name) / "recipe.yaml") for name in recipe_names()}
    except PlanError as error:
        _refuse(error)
    rows = [
        {
            "name": name,
            "platform": recipe.platform,
            "status": recipe.status,
            "title": recipe.title,
        }
        for name, recipe in found.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_rows(rows)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "platform", "status", "title"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    # A pipe has no width of its own, and a name cut at 80 columns can't be copied.
    (console if console.is_terminal else Console(width=150)).print(table)
    typer.echo("verified: it was run (see evidence); derived: computed from published facts;")
    typer.echo("untested: computed, and some facts are readings (see plan and limits).")


@recipes.command()
def show(name: _Name, as_json: _Json = False) -> None:
    """One recipe: its two files, or the facts as JSON."""
    from vllm_gaudi_ext.planner.errors import PlanError
    from vllm_gaudi_ext.recipes import find_recipe, read_recipe

    try:
        folder = find_recipe(name)
        recipe = read_recipe(folder / "recipe.yaml")
    except PlanError as error:
        _refuse(error)
    if as_json:
        typer.echo(recipe.model_dump_json(indent=1, by_alias=True))
        return
    for file in ("recipe.yaml", "serve.yaml"):
        typer.echo(f"# {folder.resolve() / file}")
        typer.echo((folder / file).read_text(encoding="utf-8"))


@recipes.command()
def path(name: _Name) -> None:
    """The recipe's folder; `vllm serve --config` takes the serve.yaml in it."""
    from vllm_gaudi_ext.planner.errors import PlanError
    from vllm_gaudi_ext.recipes import find_recipe

    try:
        typer.echo(str(find_recipe(name).resolve()))
    except PlanError as error:
        _refuse(error)
