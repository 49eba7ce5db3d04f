"""The schema of recipe.yaml, and the commands that show recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from vllm_gaudi_ext.cli.app import app
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.recipes import find_recipe, read_recipe, recipe_names


def write(folder: Path, **changes: Any) -> Path:
    content = yaml.safe_load(
        (find_recipe("qwen3.5-4b-gaudi3") / "recipe.yaml").read_text(encoding="utf-8")
    )
    content.update(changes)
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value != "(removed)"}),
        encoding="utf-8",
    )
    return path


EVIDENCE = {
    "date": "2026-11-29",
    "commit": "0123abc",
    "device": "HL-325",
    "command": "vllm serve --config serve.yaml",
    "result": "equal",
}
READING = {"because": "by family", "mtp_layers": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "verified"}, "status verified needs evidence"),
        ({"plan": READING}, "status derived needs facts"),
        ({"schema": 2}, "schema: "),
        ({"status": "fine"}, "status: "),
        ({"titel": "x"}, "titel: "),
        ({"requires": {"vllm": "about 0.26"}}, "requires.vllm: 'about 0.26' is no version range"),
        ({"expect": "(removed)"}, "expect: "),
        ({"expect": {"block_tokens": 640}}, "expect.state_copies: "),
        ({"start": []}, "start: "),
        ({"limits": "none"}, "limits: "),
        ({"env": {"VLLM_CONTIGUOUS_PA": False}}, "env.VLLM_CONTIGUOUS_PA: "),
        ({"evidence": [{**EVIDENCE, "date": "yesterday"}]}, "evidence.0.date: "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_malformed_recipe_is_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_recipe(write(tmp_path, **changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_verified_recipe_with_evidence_is_read(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, status="verified", evidence=[EVIDENCE]))
    assert recipe.evidence[0].device == "HL-325"


def test_unknown_is_a_value_and_a_forgotten_line_is_not(tmp_path: Path) -> None:
    expect = {
        "block_tokens": "unknown",
        "state_copies": 2,
        "state_mib_per_request": "unknown",
        "slots": "unknown",
        "cached_tokens_multiple_of": "unknown",
    }
    assert read_recipe(write(tmp_path, expect=expect)).expect.block_tokens is None
    del expect["slots"]
    with pytest.raises(PlanError, match=r"expect\.slots"):
        read_recipe(write(tmp_path, expect=expect))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["recipes", *arguments])


def test_list_names_every_recipe_with_its_status() -> None:
    done = run("list")
    assert done.exit_code == 0
    for name in recipe_names():
        assert name in done.output
    rows = json.loads(run("list", "--json").output)
    assert {row["name"] for row in rows} == set(recipe_names())
    assert {row["status"] for row in rows} <= {"verified", "derived", "untested"}


def test_path_is_a_folder_that_vllm_can_be_pointed_at() -> None:
    done = run("path", "qwen3.5-27b-gaudi3")
    assert done.exit_code == 0
    assert (Path(done.output.strip()) / "serve.yaml").is_file()


def test_show_gives_both_files_or_json() -> None:
    shown = run("show", "qwen3.5-27b-gaudi3").output
    assert "block_tokens: 896" in shown
    assert "model: Qwen/Qwen3.5-27B" in shown
    as_json = json.loads(run("show", "qwen3.5-27b-gaudi3", "--json").output)
    assert as_json["schema"] == 1
    assert as_json["expect"]["block_tokens"] == 896


@pytest.mark.parametrize("command", ["show", "path"])
@pytest.mark.parametrize("name", ["qwen3.5-4b-gaudi", "", "../planner", "qwen3.5-4b-gaudi3/.."])
def test_an_unknown_name_is_one_line_with_the_nearest(command: str, name: str) -> None:
    done = run(command, name)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "no recipe" in done.stderr
    if name == "qwen3.5-4b-gaudi":
        assert "qwen3.5-4b-gaudi3" in done.stderr
    if name in ("", "../planner"):
        assert "nearest" not in done.stderr
