"""Caching, refusals and the state's dtype, through the front doors that an operator uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replay_engine
import torch
import yaml

DRAFTS = 7
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def checkpoint(models: Callable[[Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without its weights: nothing that loads a model gets past it."""
    folder = tmp_path_factory.mktemp("no-weights")
    for file in models(replay_engine.SMALL).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, checkpoint: Path) -> Iterator[pytest.LogCaptureFixture]:
    """Messages of this package; vLLM's loggers don't hand theirs on to the root."""
    # The first configuration of a process resets every logger below "vllm".
    given = {"model": str(checkpoint), "dtype": "bfloat16"}
    from_python(given | {"additional_config": {"gaudi_ext": {"replay": "off"}}})
    logger = logging.getLogger("vllm.cuda_ext")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(logging.NOTSET)


def from_python(options: dict[str, Any], folder: Path | None = None) -> Any:
    """The configuration that `vllm.LLM(**options)` makes."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**options).create_engine_config()


def from_yaml(options: dict[str, Any], folder: Path) -> Any:
    """The configuration of `vllm serve --config FILE`, by its own parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({k.replace("_", "-"): v for k, v in options.items()}))
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--config", str(file)])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


DOORS = [from_python, from_yaml]


@pytest.fixture(params=DOORS, ids=lambda door: door.__name__)
def configure(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path
) -> Callable[..., Any]:
    given = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 512}

    def make(**options: Any) -> Any:
        return request.param(given | options, tmp_path)

    return make


@pytest.fixture
def any_state_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the state be something else than fp32 on a CPU with AVX512-BF16.

    There vLLM 0.31.0 keeps the operator's dtype only for a model class with exactly two states, and
    takes fp32, with a warning, for any other (`_cpu_mamba_backend`, vllm/platforms/cpu.py).
    """
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def says_caching_is_off(log: pytest.LogCaptureFixture) -> bool:
    return any("gaudi_ext: prefix caching" in message for message in log.messages)


def test_caching_by_default_is_turned_off_and_said(
    configure: Callable[..., Any], log: pytest.LogCaptureFixture
) -> None:
    config = configure(speculative_config=NGRAM)
    assert config.cache_config.enable_prefix_caching is False
    assert says_caching_is_off(log)


def test_caching_that_is_asked_for_is_refused(configure: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"prefix caching is asked for.*--no-enable-prefix-cach"):
        configure(speculative_config=NGRAM, enable_prefix_caching=True)


def test_caching_that_is_declined_stays_off(
    configure: Callable[..., Any], log: pytest.LogCaptureFixture
) -> None:
    config = configure(speculative_config=NGRAM, enable_prefix_caching=False)
    assert config.cache_config.enable_prefix_caching is False
    assert not says_caching_is_off(log)


@pytest.mark.parametrize(
    ("replay", "speculative"), [("off", NGRAM), ("auto", None)], ids=["off", "auto-no-drafts"]
)
def test_caching_is_vllms_own_where_replay_is_not_active(
    configure: Callable[..., Any],
    log: pytest.LogCaptureFixture,
    replay: str,
    speculative: dict[str, Any] | None,
) -> None:
    config = configure(
        dtype="bfloat16",
        speculative_config=speculative,
        additional_config={"gaudi_ext": {"replay": replay}},
    )
    assert config.cache_config.enable_prefix_caching is True
    assert not says_caching_is_off(log)


def test_every_refusal_is_told_at_once(
    configure: Callable[..., Any], any_state_dtype: None
) -> None:
    with pytest.raises(RuntimeError, match="gaudi_ext cannot serve with ReplaySSM") as caught:
        configure(
            dtype="bfloat16",
            speculative_config=NGRAM | {"num_speculative_tokens": 32},
            enable_prefix_caching=True,
            mamba_cache_dtype="float32",
            mamba_ssm_cache_dtype="float16",
            pipeline_parallel_size=2,
            kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        )
    told = {
        "32 draft tokens": "num_speculative_tokens",
        "prefix caching": "--no-enable-prefix-caching",
        "ExampleConnector": "--kv-transfer-config",
        "pipeline parallel": "--pipeline-parallel-size",
        "float16": "--mamba-ssm-cache-dtype",
        "conv window": "--mamba-cache-dtype",
    }
    lines = str(caught.value).splitlines()[1:]
    for problem, flag in told.items():
        assert any(problem in line and flag in line for line in lines), (problem, lines)


def test_unknown_option_is_refused(configure: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown option 'repaly'.*known: replay"):
        configure(additional_config={"gaudi_ext": {"repaly": "on"}})


def test_value_that_is_not_allowed_is_refused(configure: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="replay is 'always'"):
        configure(additional_config={"gaudi_ext": {"replay": "always"}})


def test_llm_refuses_before_a_model_is_loaded(checkpoint: Path) -> None:
    """The folder has no weights, so that any attempt to load them would be another error."""
    with pytest.raises(RuntimeError, match="prefix caching is asked for"):
        replay_engine.Engine(checkpoint, speculative_config=NGRAM, enable_prefix_caching=True)
    with pytest.raises(Exception, match="weights"):
        replay_engine.Engine(checkpoint, speculative_config=NGRAM)


def test_bf16_state_gives_the_same_text(
    oracle_engine: Callable[..., Any],
    engines: Any,
    texts: Callable[..., Any],
    any_state_dtype: None,
) -> None:
    """A bf16 state is rounded where it is written: after each step that folds.

    With drafts it is written less often than without, so the answers differ by some roundings. Each
    is at most 2**-9 of an entry, and the decay forgets old ones: over a few dozen writes the state
    is off by about sqrt(30) * 2**-9 / sqrt(3), 0.6 %, and a log-probability, whose logits are of
    order 3, by some 0.02 for each of three layers (seen: 0.023). The bound is 0.1, and most tokens
    stay the likeliest.
    """
    model, lengths = replay_engine.SMALL, [9, 63, 64, 90, 150]
    known = texts(model)
    option = {"mamba_ssm_cache_dtype": "bfloat16"}
    prompts = [known.prompt(length) for length in lengths]
    plain = engines(model, **replay_engine.WITHOUT_DRAFTS, **option)
    assert {str(layer.kv_cache[1].dtype) for layer in plain.gdn_layers()} == {"torch.bfloat16"}
    before = plain.run(prompts, max_tokens=24)
    engine = oracle_engine(model, DRAFTS, **option)
    with replay_engine.planned(engine) as plans:
        after = engine.run(prompts, max_tokens=24)
    assert plans.reached()["folds"] > 0
    compared, worst = 0, 0.0
    for mine, theirs in zip(after, before, strict=True):
        for a, b, x, y in zip(
            mine.tokens, theirs.tokens, mine.logprobs, theirs.logprobs, strict=True
        ):
            if a != b:
                break
            compared += 1
            worst = max(worst, abs(x - y))
    print(f"{compared} tokens of {24 * len(lengths)} before a near tie, worst {worst:.1e}")
    assert 0 < worst < 0.1
    assert compared > 12 * len(lengths)
