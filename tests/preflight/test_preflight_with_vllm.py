"""Preflight with the real parser of the installed vLLM, in a child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_with_vllm

from vllm_gaudi_ext.planner.facts import find_platform
from vllm_gaudi_ext.recipes import find_recipe, read_recipe, recipe_names

pytestmark = pytest.mark.engine

BASE = """\
model: Qwen/Qwen3.5-4B
max-model-len: 32768
max-num-seqs: 16
max-num-batched-tokens: 8192
enable-prefix-caching: true
"""

# name: lines beside BASE, what a problem must say (None: no problem), and its fix.
CASES: dict[str, tuple[str, str | None, str]] = {
    "clean": ("", None, ""),
    "false-with-no-form": (
        "enable-chunked-prefill: false\n",
        "enable-chunked-prefill: False is dropped without a word by vLLM",
        "write `no-enable-chunked-prefill: true`",
    ),
    "false-without-no-form": (
        "headless: false\n",
        "headless: False is dropped without a word by vLLM",
        "remove the line",
    ),
    "no-form": ("no-enable-chunked-prefill: true\n", None, ""),
    "null": ("seed:\n", "seed has no value (null)", "remove the line seed"),
    "unknown": ("max-num-sequences: 4\n", "max-num-sequences is no flag", "max-num-seqs"),
    "metadata": ("title: mine\n", "title is no flag of vllm serve", "remove the line"),
    "word-for-number": ("seed: many\n", "seed: many is refused by vLLM", "--help=seed"),
    "choice": ("dtype: float7\n", "dtype: float7 is refused by vLLM", "--help=dtype"),
    "value-for-switch": ("headless: 3\n", "it takes no value", "--help=headless"),
    "abbreviation": ("max-long-partial-pref: 1\n", None, ""),
    "no-value": ("port: true\n", "port: True is refused by vLLM: argument --port", "--help"),
    "empty-list": ("allowed-origins: []\n", "is dropped without a word", "list a value"),
    "speculative-key": (
        "speculative-config:\n  method: mtp\n  num_speculative_token: 1\n",
        "speculative-config.num_speculative_token is no field",
        "num_speculative_tokens",
    ),
    "duplicate": ("seed: 1\nseed: 2\n", "seed is given twice", "keep one"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Reports of all recipes and of all cases, from one process: vLLM takes long to import."""
    folder = tmp_path_factory.mktemp("serve")
    asked: list[tuple[str, str | None]] = []
    names = []
    for name in recipe_names():
        names.append(name)
        asked.append((str(find_recipe(name) / "serve.yaml"), None))
    for name, (lines, _, _) in CASES.items():
        path = folder / f"{name}.yaml"
        path.write_text(BASE + lines, encoding="utf-8")
        names.append(name)
        asked.append((str(path), "h200"))
    path = folder / "several.yaml"
    path.write_text(BASE + "seed: many\ntitle: x\nport:\nheadless: false\n", encoding="utf-8")
    names.append("several")
    asked.append((str(path), "h200"))
    path = folder / "suffix.conf"
    path.write_text(BASE + "title: x\n", encoding="utf-8")
    names.append("suffix")
    asked.append((str(path), "h200"))
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    script = Path(__file__).resolve().parent / "preflight_process.py"
    done = run_with_vllm([str(script), str(folder / "asked.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_passes(reports: dict[str, dict[str, Any]], name: str) -> None:
    report = reports[name]
    recipe = read_recipe(find_recipe(name) / "recipe.yaml")
    gaudi = find_platform(recipe.platform).vendor == "gaudi"
    told = [problem["what"] for problem in report["problems"]]
    if not gaudi and "VLLM_PLUGINS" in recipe.env:
        # The vLLM that is asked here is Gaudi's, which ReplaySSM is not served with.
        assert told.pop().startswith(f"vllm {report['vllm']}, ReplaySSM is served with ")
        assert report["exit_code"] == 1
    else:
        assert "ReplaySSM" not in str(report["problems"])
        assert report["exit_code"] == 0
    assert told == []
    assert report["unchecked"] == []
    assert report["block_tokens"] == recipe.expect.block_tokens


@pytest.mark.parametrize("name", CASES)
def test_what_vllm_makes_of_a_key_is_found(reports: dict[str, dict[str, Any]], name: str) -> None:
    _, says, fix = CASES[name]
    report = reports[name]
    if says is None:
        assert report["problems"] == []
        assert report["exit_code"] == 0
        return
    found = [p for p in report["problems"] if says in p["what"]]
    assert len(found) == 1, report["problems"]
    assert fix in found[0]["fix"]
    assert len(report["problems"]) == 1
    assert report["exit_code"] == 1


def test_the_parsers_first_error_hides_no_other(reports: dict[str, dict[str, Any]]) -> None:
    said = " ".join(problem["what"] for problem in reports["several"]["problems"])
    for part in ("seed: many", "title is no flag", "port has no value", "headless: False"):
        assert part in said
    assert len(reports["several"]["problems"]) == 4
    # The sizes are checked though vLLM refuses the file.
    assert reports["several"]["block_tokens"] == 528


def test_an_abbreviation_is_a_warning(reports: dict[str, dict[str, Any]]) -> None:
    (warning,) = reports["abbreviation"]["warnings"]
    assert warning["fix"] == "write max-long-partial-prefills"


def test_a_wrong_suffix_hides_no_other_problem(reports: dict[str, dict[str, Any]]) -> None:
    said = [problem["what"] for problem in reports["suffix"]["problems"]]
    assert len(said) == 2
    assert "takes yaml or yml only" in said[0]
    assert "title is no flag" in said[1]


def test_the_command_runs_where_vllm_is_installed(tmp_path: Path) -> None:
    serve = find_recipe("qwen3.5-4b-gaudi3") / "serve.yaml"
    done = run_with_vllm(["-m", "plan_command", "preflight", str(serve)])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "no problem"
    assert "B=640" in done.stdout
