"""The worker proves at start-up that every piece is active, and says what it serves with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import harness
import pytest

OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 512}


@pytest.fixture
def engine(engines: Any) -> Any:
    return engines(**OPTIONS)


def refusal(engine: Any, **instead: Any) -> str:
    """What `activation.prove` says of the running engine, with some pieces exchanged."""
    from vllm_gaudi_ext import activation

    pieces = {
        "vllm_config": engine.worker.vllm_config,
        "worker": engine.worker,
        "runner": engine.runner,
    }
    with pytest.raises(RuntimeError, match="not fully active") as raised:
        activation.prove(**pieces | instead)
    assert "VLLM_PLUGINS=gaudi_ext" in str(raised.value)
    return str(raised.value)


def only(text: str, piece: str) -> None:
    """The refusal names this piece and no other."""
    pieces = ("platform (", "general plugins", "worker (", "model runner (", "scheduler (")
    named = text.split("missing: ")[1]
    assert [p for p in pieces if p in named] == [piece]


def test_a_running_engine_is_fully_active(engine: Any) -> None:
    from vllm_gaudi_ext import activation

    config = engine.worker.vllm_config
    assert activation.missing_pieces(config, engine.worker) == []
    activation.prove(config, engine.worker, engine.runner)


def test_stock_platform_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms
    from vllm_gaudi.platform import HpuPlatform

    monkeypatch.setattr(vllm.platforms, "_current_platform", HpuPlatform())
    text = refusal(engine)
    only(text, "platform (")
    assert "vllm_gaudi.platform.HpuPlatform" in text


def test_general_plugin_that_did_not_run_is_named(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_gaudi_ext import plugin

    names = [entry.name for entry in plugin.upstream_general_plugins()]
    assert len(names) == 4
    monkeypatch.setattr(plugin, "_general_chained", [n for n in names if n != names[1]])
    text = refusal(engine)
    only(text, "general plugins")
    assert f"general plugins {names[1]}. Look" in text


def test_stock_worker_is_named(engine: Any) -> None:
    from vllm_gaudi.v1.worker.hpu_worker import HPUWorker

    text = refusal(engine, worker=object.__new__(HPUWorker))
    only(text, "worker (")
    assert "hpu_worker.HPUWorker" in text


def test_stock_runner_is_named(engine: Any) -> None:
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    text = refusal(engine, runner=object.__new__(HPUModelRunner))
    only(text, "model runner (")
    assert "hpu_model_runner.HPUModelRunner" in text


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler",
    ],
)
def test_stock_scheduler_is_named(
    engine: Any, monkeypatch: pytest.MonkeyPatch, scheduler: str | None
) -> None:
    config = engine.worker.vllm_config
    monkeypatch.setattr(config.scheduler_config, "scheduler_cls", scheduler)
    text = refusal(engine)
    only(text, "scheduler (")
    assert repr(scheduler) in text


def test_all_missing_pieces_are_named_at_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms
    from vllm_gaudi.platform import HpuPlatform

    from vllm_gaudi_ext import plugin

    monkeypatch.setattr(vllm.platforms, "_current_platform", HpuPlatform())
    monkeypatch.setattr(plugin, "_general_chained", [])
    monkeypatch.setattr(engine.worker.vllm_config.scheduler_config, "scheduler_cls", None)
    text = refusal(engine, worker=object(), runner=object())
    for piece in ("platform (", "01.hpu_custom_utils", "04.", "worker (", "model runner ("):
        assert piece in text
    assert "scheduler (configured: None)" in text


# The engine refuses to start.


@pytest.mark.parametrize(
    "scheduler", [None, "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler"]
)
def test_engine_does_not_start_with_a_scheduler_put_in_behind_the_configuration(
    engines: Any, monkeypatch: pytest.MonkeyPatch, scheduler: str | None
) -> None:
    from vllm.config import VllmConfig

    engines.stop()
    finish = VllmConfig.__post_init__

    def meddled(config: Any) -> None:
        finish(config)
        config.scheduler_config.scheduler_cls = scheduler

    monkeypatch.setattr(VllmConfig, "__post_init__", meddled)
    with pytest.raises(RuntimeError, match="missing: scheduler") as raised:
        engines(**OPTIONS)
    assert repr(scheduler) in str(raised.value)


def test_engine_does_not_start_with_a_general_plugin_missing(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_gaudi_ext import plugin

    engines.stop()
    ran = plugin._general_chained
    assert "02.hpu_custom_ops" in ran
    monkeypatch.setattr(plugin, "_general_chained", [n for n in ran if n != "02.hpu_custom_ops"])
    # vLLM loads general plugins once a process; this one is taken for failed.
    with pytest.raises(RuntimeError, match=r"general plugins 02\.hpu_custom_ops"):
        engines(**OPTIONS)


@pytest.mark.parametrize(
    ("project", "function", "found"),
    [
        ("vllm-gaudi", "installed_vllm_gaudi", "0.30.0"),
        ("vllm-gaudi", "installed_vllm_gaudi", "0.26.1.dev3"),
        ("vllm", "installed_vllm", "0.31.0"),
        ("vllm", "installed_vllm", None),
    ],
)
def test_engine_does_not_start_with_an_untested_version(
    engines: Any,
    monkeypatch: pytest.MonkeyPatch,
    project: str,
    function: str,
    found: str | None,
) -> None:
    from vllm_gaudi_ext import versions

    engines.stop()
    monkeypatch.setattr(versions, function, lambda: found)
    with pytest.raises(RuntimeError, match="refuses to start") as raised:
        engines(**OPTIONS)
    text = str(raised.value)
    assert f"{project} {found or 'is not installed'}" in text
    assert all(bound in text for bound in (">=0.26.0", "<0.26.1"))
    assert "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS=1" in text


class Lines(logging.Handler):
    """Collects what one logger says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the runner's logger says."""
    logger = logging.getLogger("vllm.vllm_gaudi_ext.runner")
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.texts
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_override_starts_an_untested_version_and_the_line_has_the_numbers(
    engines: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    from vllm_gaudi_ext import __version__, versions

    monkeypatch.setattr(versions, "installed_vllm_gaudi", lambda: "0.30.0")
    allowed = {"VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS": "1"}
    engines(env=allowed, num_gpu_blocks_override=29, **OPTIONS)
    (line,) = lines
    conv, ssm = 3 * 384 * 2, 8 * 32 * 32 * 4
    page = 2 * 384 * 1 * 32 * 2
    assert line.startswith(f"gaudi_ext {__version__}: GDN prefix caching is active")
    assert "3 GDN groups at 2 layer positions" in line
    assert "B=384 tokens, 29 blocks" in line
    assert "slots for 4 requests" in line
    assert f"state {conv + ssm} of {page} page bytes (71 %)" in line
    assert f"checkpoint row {page // 8} int32 in K and {(conv + ssm - page // 2) // 4} in V" in line
    assert "copies in batches of 1/2/4/8/16/32/64 rows" in line


def test_line_says_that_vllm_turns_caching_on_by_default(
    models: Any, engine: Any, lines: list[str]
) -> None:
    """Opt-in is the final configuration: where nobody asked, the start-up line says so."""
    import tiny_models
    from vllm.engine.arg_utils import EngineArgs

    options = {k: v for k, v in harness.OPTIONS.items() if k != "enable_prefix_caching"}
    args = EngineArgs(model=str(models(tiny_models.DENSE)), **options | OPTIONS)
    by_default = args.create_engine_config().cache_config.enable_prefix_caching
    engine.runner._log_start()
    assert ("by default for this model" in lines[-1]) == bool(by_default)
