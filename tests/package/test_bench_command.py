"""`gaudi-ext bench kernel` where it can't run: one line and exit code 2, nothing written."""

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
