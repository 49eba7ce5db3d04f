"""`gaudi-ext bench` where it can't run: what is wrong and exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_gaudi_ext.cli.app import app


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.cuda.is_available():
            pytest.skip("an NVIDIA GPU is there")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "kernel"])
    assert done.exit_code == 2
    lines = done.output.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("bench kernel needs")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_serve_tells_every_problem_of_a_yaml(here: Path) -> None:
    (here / "bench.yaml").write_text("name: x\nrepeats: 2\nserve: {model: m}\n")
    done = CliRunner().invoke(app, ["bench", "serve", "bench.yaml"])
    assert done.exit_code == 2
    lines = done.output.strip().splitlines()
    assert lines[0] == "bench.yaml: 2 problems"
    assert [line.split(". ")[1] for line in lines[1:]] == ["load: missing", "repeats: unknown key"]
    assert [entry.name for entry in here.iterdir()] == ["bench.yaml"]


def test_serve_without_a_yaml_says_what_it_takes(here: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "serve"])
    assert done.exit_code == 2
    assert "name a config" in done.output


def test_serve_hands_every_option_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "cuda_ext.bench.serve.run.main", lambda arguments: seen.append(arguments) or 1
    )
    asked = "h200-4b --out o --mode server --interleave restart --arm stock --concurrency 16,64 "
    asked += "--output-tokens 512 --waves 2 --repeats 3 --budget-s 60.0 --session s "
    asked += "--checks c.json --port 9000 --commit c"
    assert CliRunner().invoke(app, ["bench", "serve", *asked.split()]).exit_code == 1
    (found,) = seen
    assert found[0] == "h200-4b"

    def pairs(words: list[str]) -> set[tuple[str, str]]:
        return set(zip(words[::2], words[1::2], strict=True))

    assert pairs(found[1:]) == pairs(asked.split()[1:])


def test_serve_hands_results_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "cuda_ext.bench.serve.run.main", lambda arguments: seen.append(arguments) or 0
    )
    done = CliRunner().invoke(app, ["bench", "serve", "--merge", "a.json", "--merge", "b.json"])
    assert done.exit_code == 0
    assert seen[0][-3:] == ["--merge", "a.json", "b.json"]
