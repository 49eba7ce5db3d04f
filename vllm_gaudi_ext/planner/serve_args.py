"""Reads a serve.yaml: guarded as YAML here, and parsed by the installed vLLM's own parser.

`read_yaml` needs no vLLM and is safe on a stranger's file. `parse_serve_yaml` answers with what
`vllm serve --config FILE` would have understood, so no flag is interpreted by our own rules.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from vllm_gaudi_ext import envs, plugin
from vllm_gaudi_ext.config import ExtOptions, read_options
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.textfile import read_small_text

MAX_YAML_BYTES = 1_000_000
MAX_NESTING = 32

# make_arg_parser moved between releases; the first that imports is used.
_PARSER_MODULES = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.common.cli_args",
)


def _check_events(text: str, path: Path) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise PlanError(
                f"{path}: YAML aliases (*{event.anchor}) are not accepted: a few of them can "
                "stand for gigabytes; write the value out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_NESTING:
                raise PlanError(f"{path}: nested deeper than {MAX_NESTING} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file.

    Raises:
        PlanError: it is missing, not a regular file, over 1 MB, not YAML, uses aliases, is nested
            too deeply, or is not a mapping of names.
    """
    text = read_small_text(path, "serve.yaml", MAX_YAML_BYTES)
    try:
        _check_events(text, path)
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise PlanError(f"{path}: not valid YAML{where}: {problem}") from None
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise PlanError(f"{path}: expected a mapping of flag names to values")
    return parsed


def _not_importable(error: Exception) -> PlanError:
    # A broken installation fails with whatever its first broken import raises, not only
    # ImportError: PyPI's torchvision beside a CPU torch, for example, raises RuntimeError.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return PlanError(
        f"a serve.yaml is read with vLLM's own parser, and vLLM can't be imported here ({reason}); "
        "install vLLM, or pass the model and options instead"
    )


def vllm_argument_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve` of the installed vLLM.

    Raises:
        PlanError: vLLM is not installed, or has its parser where no release that we know has it.
    """
    try:
        utils = importlib.import_module("vllm.utils.argparse_utils")
    except Exception as error:
        raise _not_importable(error) from None
    for name in _PARSER_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise _not_importable(error) from None
        except Exception as error:
            raise _not_importable(error) from None
        if hasattr(module, "make_arg_parser"):
            parser = module.make_arg_parser(utils.FlexibleArgumentParser(prog="vllm serve"))
            assert isinstance(parser, argparse.ArgumentParser), type(parser)
            return parser
    raise PlanError(f"the installed vLLM has no make_arg_parser in {' or '.join(_PARSER_MODULES)}")


def without_false(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that `vllm serve --config` takes: a false says nothing to it.

    vLLM 0.26.0 drops every false. 0.31.0 and 0.33.0 write `--no-KEY`, where it is an option of the
    parser that reads the file; that is the program's, and the options of `serve` are not among its
    own. The parser of `serve` alone, which is asked here, would know them.
    """
    return {key: value for key, value in content.items() if value is not False}


def parse_serve_yaml(path: Path) -> argparse.Namespace:
    """What vLLM understands of a serve.yaml.

    vLLM logs to stdout while it is imported, which would spoil a --json, and its parser prints a
    usage text; both are held back, and the parser's own message becomes the error.

    Raises:
        PlanError: the file is refused by `read_yaml` or by vLLM's parser.
    """
    content = read_yaml(path)
    taken = without_false(content)
    held = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(held),
            contextlib.redirect_stderr(held),
            tempfile.TemporaryDirectory() as folder,
        ):
            given = path
            if taken != content:
                # With its own suffix, which vLLM looks at.
                given = Path(folder) / f"serve{path.suffix}"
                given.write_text(yaml.safe_dump(taken), encoding="utf-8")
            parsed = vllm_argument_parser().parse_args(["--config", str(given)])
    except SystemExit:
        lines = [line for line in held.getvalue().splitlines() if ": error: " in line]
        reason = lines[-1].split(": error: ", 1)[1] if lines else "vLLM's parser refuses it"
        raise PlanError(f"{path}: {reason}") from None
    except PlanError:
        raise
    except Exception as error:
        # The parser runs validators of many options; each may raise its own kind.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(f"{path}: vLLM's parser refuses it: {first}") from None
    return parsed


@dataclass(frozen=True)
class ServeArgs:
    """What the planner takes from vLLM's parsed arguments; None is vLLM's default."""

    model: str
    method: str | None
    drafter: str | None
    drafts: int
    draft_tp: int | None
    tp: int
    pp: int
    ep: bool
    dtype: str | None
    kv_dtype: str | None
    conv_dtype: str | None
    state_dtype: str | None
    block_size: int | None
    caching: bool | None
    utilisation: float | None
    pool_bytes: int | None
    pool_blocks: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    replay: Literal["auto", "on", "off"]
    packing: Literal["auto", "off"]
    attention_backends: tuple[str, ...]


def _ext_options(parsed: argparse.Namespace) -> ExtOptions:
    """Our own options; their defaults where the server refuses them anyway."""
    try:
        return read_options(getattr(parsed, "additional_config", None))
    except ValueError:
        return ExtOptions()


def _attention_backends(
    parsed: argparse.Namespace, speculative: Mapping[str, Any]
) -> tuple[str, ...]:
    """Names of the attention backends that are asked for, the drafter's too.

    `attention_backend` is short for `attention_config.backend`, vLLM refuses both at once, and an
    entry of `backend_per_kind` wins over either (vllm/config/attention.py of 0.31.0).
    """
    attention = _mapping(getattr(parsed, "attention_config", None))
    asked = (
        _mapping(attention.get("backend_per_kind")).get("full_attention")
        or attention.get("backend")
        or getattr(parsed, "attention_backend", None),
        speculative.get("attention_backend"),
    )
    names = (str(getattr(one, "name", one)).upper() for one in asked if one)
    return tuple(dict.fromkeys(name for name in names if name != "AUTO"))


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        # As written in a file that vLLM's parser did not read, which takes JSON here.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, Mapping):
        return value
    if not hasattr(value, "__dict__"):
        return {}
    return {key: getattr(value, key) for key in vars(value)}


def serve_args(parsed: argparse.Namespace, path: Path) -> ServeArgs:
    """The planner's part of vLLM's parsed arguments.

    Raises:
        PlanError: no model is named, or drafts are asked for without their number.
    """
    model = getattr(parsed, "model_tag", None) or getattr(parsed, "model", None)
    if not read_yaml(path).get("model") or not model:
        raise PlanError(f"{path}: no model is named; write `model:` in it")
    speculative = _mapping(getattr(parsed, "speculative_config", None))
    drafts = speculative.get("num_speculative_tokens")
    if speculative and not isinstance(drafts, int):
        raise PlanError(f"{path}: speculative-config has no num_speculative_tokens; write it out")
    method = speculative.get("method")
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"

    options = _ext_options(parsed)

    def get(name: str) -> Any:
        return getattr(parsed, name, None)

    def size(name: str) -> int:
        value = get(name)
        return 1 if value is None else int(value)

    return ServeArgs(
        model=str(model),
        method=method,
        drafter=speculative.get("model"),
        drafts=int(drafts or 0),
        draft_tp=speculative.get("draft_tensor_parallel_size"),
        tp=size("tensor_parallel_size"),
        pp=size("pipeline_parallel_size"),
        ep=bool(get("enable_expert_parallel")),
        dtype=get("dtype"),
        kv_dtype=get("kv_cache_dtype"),
        conv_dtype=get("mamba_cache_dtype"),
        state_dtype=get("mamba_ssm_cache_dtype"),
        block_size=get("block_size"),
        caching=get("enable_prefix_caching"),
        utilisation=get("gpu_memory_utilization"),
        pool_bytes=get("kv_cache_memory_bytes"),
        pool_blocks=get("num_gpu_blocks_override"),
        max_model_len=get("max_model_len"),
        max_num_seqs=get("max_num_seqs"),
        max_num_batched_tokens=get("max_num_batched_tokens"),
        replay=options.replay,
        packing=options.packing,
        attention_backends=_attention_backends(parsed, speculative),
    )


def _beside(path: Path) -> Mapping[str, Any]:
    """The recipe.yaml beside a serve.yaml; empty where there is none."""
    beside = path.with_name("recipe.yaml")
    return read_yaml(beside) if beside.is_file() else {}


def recipe_platform(path: Path) -> str | None:
    """The platform that the recipe.yaml beside a serve.yaml names, if there is one."""
    platform = _beside(path).get("platform")
    return platform if isinstance(platform, str) else None


def recipe_names_plugin(path: Path) -> bool:
    """Whether the recipe.yaml beside a serve.yaml sets a VLLM_PLUGINS that names this package."""
    env = _beside(path).get("env")
    if not isinstance(env, Mapping):
        return False
    given = {name: value for name, value in env.items() if isinstance(value, str)}
    return envs.named_in_vllm_plugins(plugin.PLUGIN, given)


def recipe_vllm(path: Path) -> str | None:
    """The versions of vLLM that the recipe.yaml beside a serve.yaml asks for, if it does."""
    requires = _beside(path).get("requires")
    vllm = requires.get("vllm") if isinstance(requires, Mapping) else None
    return vllm if isinstance(vllm, str) else None
