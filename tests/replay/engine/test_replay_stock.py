"""Where ReplaySSM is not active, vLLM is what it is without this package.

Two processes run the same script, one without `VLLM_PLUGINS`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_engine

SCRIPT = Path(__file__).with_name("stock_child.py")


def run(model: Path, plugins: str | None, result: Path) -> Any:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), str(result)],
        env=replay_engine.environment(plugins),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def both(models: Callable[[Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(without the plugin, with it)"""
    folder, model = tmp_path_factory.mktemp("stock"), models(replay_engine.SMALL)
    return (
        run(model, None, folder / "without.json"),
        run(model, "gaudi_ext", folder / "with.json"),
    )


def test_the_plugin_was_loaded_in_one_of_them(both: Any) -> None:
    without, plugged = both
    assert without["layer"] == ["QwenGatedDeltaNetAttention"]
    assert plugged["layer"] == ["ReplayGatedDeltaNetAttention"]


def test_auto_without_drafts_gives_the_stock_answers(both: Any) -> None:
    without, plugged = both
    assert len(without["answers"]) > 6
    assert plugged["answers"] == without["answers"]


@pytest.mark.parametrize("arm", ["plain", "drafts"])
def test_the_cache_is_laid_out_as_in_stock(both: Any, arm: str) -> None:
    """Specs, blocks, tensors and state shapes, for `auto` without drafts and `off` with some."""
    without, plugged = both
    assert plugged[arm] == without[arm]
    assert without[arm]["caching"] is True
    assert without[arm]["blocks"] > 0
