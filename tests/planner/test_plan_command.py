"""`gaudi-ext plan` as a user runs it: exit codes, one line for bad input, JSON, plot, speed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import DRAFTER_4B
from typer.testing import CliRunner

from vllm_gaudi_ext.cli.app import app

RUN = [sys.executable, "-c", "from vllm_gaudi_ext.cli import main; main()", "plan"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def plan_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def test_a_known_model_is_planned_within_2_seconds_without_torch_or_vllm() -> None:
    """`-X importtime` writes every import to stderr, so what is not there was not imported."""
    seconds = []
    # The best of three: a busy machine may slow any one of them.
    for _ in range(3):
        started = time.monotonic()
        plain = subprocess.run(
            [*RUN, "Qwen3.5-27B", "--platform", "gaudi3"],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(time.monotonic() - started)
        assert "896" in plain.stdout
    assert min(seconds) < 2, seconds
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", *RUN[1:], "Qwen3.5-27B", "--platform", "gaudi3"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {
        line.rsplit("|", 1)[1].strip() for line in traced.stderr.splitlines() if "|" in line
    }
    assert "vllm_gaudi_ext.planner.arithmetic" in imported
    roots = {name.split(".")[0] for name in imported}
    assert not roots & {"torch", "vllm", "triton", "matplotlib", "numpy", "transformers"}


def test_the_table_shows_both_sides() -> None:
    result = run(
        "Qwen3.5-4B",
        "--platform",
        "b200",
        "--drafter",
        DRAFTER_4B,
        "--drafter-layers",
        "6",
        "--drafts",
        "15",
    )
    assert result.exit_code == 0
    for text in ("ReplaySSM", "960 MiB", "72 MiB", "455 MiB", "1,415 MiB", "2.5 MiB", "640"):
        assert text in result.stdout, text


def test_json_carries_the_keys_that_recipes_expect() -> None:
    plan = plan_json(
        "Qwen3.5-27B", "--platform", "gaudi3", "--max-num-seqs", "16", "--pool-gib", "40"
    )
    assert plan["expect"] == {
        "block_tokens": 896,
        "state_copies": 2,
        "state_mib_per_request": 336.0,
        "slots": 16,
        "cached_tokens_multiple_of": 896,
    }
    assert plan["native"]["capacity"]["pool_blocks"] == 40 * 1024 // 56
    assert plan["replay"] is None
    assert plan["schema_version"] == 1


def test_device_memory_and_utilisation_make_the_pool_as_each_vendor_does() -> None:
    """vLLM takes its share of the whole card, vllm-gaudi of what is free, less a tenth."""
    shared = ("--utilisation", "0.5", "--non-kv-gib", "10", "--device-memory-gib", "100")
    nvidia = plan_json("Qwen3.5-4B", "--platform", "h200", *shared)
    gaudi = plan_json("Qwen3.5-4B", "--platform", "gaudi3", *shared)
    gib = 1024**3
    assert nvidia["deployment"]["pool_bytes"] == 40 * gib
    assert gaudi["deployment"]["pool_bytes"] == int(90 * gib * 0.5 * 0.9)


def test_errors_among_the_findings_exit_1() -> None:
    result = run("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "0.05")
    assert result.exit_code == 1
    assert "error: one request of 8192 tokens needs" in result.stdout


def test_a_plot_is_a_png_with_something_on_it(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the plot extra is not installed")
    path = tmp_path / "memory.png"
    arguments = ("Qwen3.5-4B", "--platform", "h200", "--drafts", "15", "--plot", str(path))
    assert run(*arguments, "--pool-gib", "106.8").exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    image = pyplot.imread(path)
    assert image.shape[0] > 400
    assert image.shape[1] > 800
    colours = {
        tuple(round(float(c), 2) for c in pixel[:3]) for pixel in image[::5, ::5].reshape(-1, 4)
    }
    for wanted in ((0.71, 0.28, 0.16), (0.91, 0.73, 0.65), (0.12, 0.44, 0.55)):
        assert wanted in colours, wanted


def test_a_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("Qwen3.5-4B", "--platform", "h200", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert "vllm-gaudi-ext[plot]" in result.stderr


def test_serve_without_vllm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With its submodules, which another test of this process may have imported.
    for name in ["vllm", *(n for n in sys.modules if n.startswith("vllm."))]:
        monkeypatch.setitem(sys.modules, name, None)
    serve = tmp_path / "serve.yaml"
    serve.write_text("model: Qwen/Qwen3.5-4B\n", encoding="utf-8")
    result = run("--serve", str(serve), "--platform", "h200")
    assert result.exit_code == 2
    assert "vLLM can't be imported here" in result.stderr
    assert result.stderr.count("\n") == 1


BAD = {
    "nothing": ((), "no model given"),
    "no-platform": (("Qwen3.5-4B",), "pass --platform"),
    "odd-platform": (("Qwen3.5-4B", "--platform", "tpu"), "platform 'tpu' is not known"),
    "no-model": (("Qwen4-1T", "--platform", "h200"), "neither a file nor a known model"),
    "no-file": (("./missing/config.json", "--platform", "h200"), "No such file"),
    "blank-model": ((" ", "--platform", "h200"), "no model given"),
    "negative-drafts": (("Qwen3.5-4B", "--platform", "h200", "--drafts", "-1"), "got -1"),
    "no-number": (("Qwen3.5-4B", "--platform", "h200", "--drafts", "many"), "got 'many'"),
    "no-pool-number": (("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "1G"), "got '1G'"),
    "huge-number": (("Qwen3.5-4B", "--platform", "h200", "--tp", "9" * 5000), "whole number"),
    "absurd-drafts": (("Qwen3.5-4B", "--platform", "h200", "--drafts", "99999"), "got 99999"),
    "zero-tokens": (("Qwen3.5-4B", "--platform", "h200", "--tokens", "0"), "got 0"),
    "absurd-tokens": (
        ("Qwen3.5-4B", "--platform", "h200", "--tokens", str(10**12)),
        "--tokens must be between",
    ),
    "zero-tp": (("Qwen3.5-4B", "--platform", "h200", "--tp", "0"), "--tp must be between"),
    "odd-tp": (("Qwen3.5-4B", "--platform", "h200", "--tp", "3"), "size 3 does not divide"),
    "large-tp": (("Qwen3.5-4B", "--platform", "h200", "--tp", "32"), "does not divide"),
    "zero-unit": (("Qwen3.5-4B", "--unit", "0"), "--unit must be between"),
    "negative-pool": (
        ("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "-4"),
        "--pool-gib must be above 0",
    ),
    "nan-pool": (("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "nan"), "got nan"),
    "infinite-pool": (("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "inf"), "got inf"),
    "two-pools": (
        ("Qwen3.5-4B", "--platform", "h200", "--pool-gib", "4", "--non-kv-gib", "4"),
        "not both",
    ),
    "utilisation": (
        ("Qwen3.5-4B", "--platform", "h200", "--non-kv-gib", "9", "--utilisation", "1.5"),
        "--utilisation must be above 0 and at most 1",
    ),
    "utilisation-unused": (
        ("Qwen3.5-4B", "--platform", "h200", "--utilisation", "1.5"),
        "--utilisation must be above 0 and at most 1",
    ),
    "no-memory-left": (
        ("Qwen3.5-4B", "--platform", "h200", "--non-kv-gib", "139"),
        "no memory is left for the KV cache",
    ),
    "unknown-memory": (
        ("Qwen3.5-4B", "--platform", "cpu", "--non-kv-gib", "9"),
        "pass --device-memory-gib",
    ),
    "zero-seqs": (("Qwen3.5-4B", "--platform", "h200", "--max-num-seqs", "0"), "--max-num-seqs"),
    "odd-kv": (("Qwen3.5-4B", "--platform", "h200", "--kv-dtype", "fp7"), "'fp7'"),
    "odd-state": (("Qwen3.5-4B", "--platform", "h200", "--state-dtype", "fp8"), "--state-dtype"),
    "ep-dense": (("Qwen3.5-27B", "--platform", "h200", "--ep"), "has no experts"),
    "no-drafter": (
        ("Qwen3.5-4B", "--platform", "h200", "--drafter", "z-lab/none", "--drafts", "3"),
        "neither a file nor a known drafter",
    ),
    "drafter-without-drafts": (
        ("Qwen3.5-4B", "--platform", "h200", "--drafter", DRAFTER_4B),
        "15 fill its block of 16",
    ),
    "mtp-without-drafts": (("Qwen3.5-4B", "--platform", "h200", "--drafter", "mtp"), "--drafts"),
    "overrides-alone": (
        ("Qwen3.5-4B", "--platform", "h200", "--drafter-layers", "6"),
        "pass it with --drafter",
    ),
    "negative-window": (
        (
            *("Qwen3.5-4B", "--platform", "h200", "--drafter", DRAFTER_4B, "--drafts", "3"),
            *("--drafter-sliding-layers", "2", "--drafter-window", "-5"),
        ),
        "--drafter-window must be between",
    ),
    "too-many-sliding": (
        (
            *("Qwen3.5-4B", "--platform", "h200", "--drafter", DRAFTER_4B, "--drafts", "3"),
            *("--drafter-sliding-layers", "9"),
        ),
        "is not between 0 and the drafter's 5 layers",
    ),
    "wrong-drafter": (
        (
            *("Qwen3-Next-80B-A3B", "--platform", "h200", "--state-dtype", "float32"),
            *("--drafter", DRAFTER_4B, "--drafts", "15"),
        ),
        "made for another model",
    ),
    "plot-suffix": (("Qwen3.5-4B", "--platform", "h200", "--plot", "x.svg"), "only .png"),
    "plot-folder": (
        ("Qwen3.5-4B", "--platform", "h200", "--plot", "missing-folder/x.png"),
        "does not exist",
    ),
    "model-and-serve": (("Qwen3.5-4B", "--serve", "x.yaml"), "not both"),
    "no-serve": (("--serve", "missing.yaml", "--platform", "h200"), "No such file"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr
