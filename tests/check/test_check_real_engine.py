"""The checker against the real `vllm serve`: it catches the stock fault, and passes ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_gaudi_ext.check import CheckOptions, run_check
from vllm_gaudi_ext.check.verdict import Verdict

TESTS = Path(__file__).resolve().parent.parent
OPTIONS = CheckOptions(
    block_tokens=384,
    blocks=2,
    answer_tokens=8,
    suffixes=(40,),
    scenarios=("boundary", "a-b-a"),
    use_proxies=False,
)


@pytest.mark.engine
@pytest.mark.parametrize("plugin", ["gaudi_ext", None], ids=["ours", "stock"])
def test_check_tells_the_stock_engine_from_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str | None
) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "demo"))
    import gaudi_flow
    import harness
    import server
    import tiny_models
    from free_ports import free_ports

    model = tiny_models.write(tiny_models.DENSE, tmp_path / "models")
    environment = harness.environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    environment.pop("VLLM_PLUGINS", None)
    if plugin is not None:
        environment["VLLM_PLUGINS"] = plugin
    port = free_ports()
    log = tmp_path / "serve.log"
    with server.serving(gaudi_flow.serve_command(model, port), port, log, environment) as running:
        running.wait_until_healthy(300, lambda seconds: None)
        report = run_check(running.url, OPTIONS)
    assert any(sum(c or 0 for c in case.cached_tokens) for case in report.cases), "no hit"
    if plugin is None:
        assert report.exit_code == 1
        assert any(case.verdict is Verdict.DIFFERENT for case in report.cases)
    else:
        assert report.exit_code == 0
        compared = [case for case in report.cases if case.verdict.passed]
        assert len(compared) >= 6
        assert max(case.largest_difference or 0.0 for case in compared) == 0.0
