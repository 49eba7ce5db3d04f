"""Turns parsed arguments into what the engine's refusals and the planner check."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_gaudi_ext import envs, facts, plugin, versions
from vllm_gaudi_ext.gdn.refusals import BUDGET_UNIT, ServingFacts, config_problems
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.findings import findings
from vllm_gaudi_ext.planner.plan import Plan, make_plan
from vllm_gaudi_ext.planner.request import Options, make_deployment
from vllm_gaudi_ext.preflight.report import Found, found

# The planner's words for what the engine's refusals say already.
_SAID_BY_REFUSALS = ("budget-starves-prefill", "budget-below-block", "gaudi-drafts")
# From this release on vLLM caches prefixes of generative hybrids unless told otherwise; 0.26.0
# does not (engine/arg_utils.py). The releases between were not read.
_CACHES_HYBRIDS_SINCE = Version("0.31.0")
_LAST_KNOWN_WITHOUT = Version("0.26.0")


def caching_of(parsed: argparse.Namespace, version: str | None) -> tuple[bool | None, Found | None]:
    """Whether prefix caching will be on, None where it can't be told, and what to say about it."""
    given = getattr(parsed, "enable_prefix_caching", None)
    if given is not None:
        return bool(given), None
    default = None
    try:
        release = Version(version or "")
    except InvalidVersion:
        release = None
    if release is not None and release.release >= _CACHES_HYBRIDS_SINCE.release:
        default = True
    elif release is not None and release.release <= _LAST_KNOWN_WITHOUT.release:
        default = False
    state = {True: "on", False: "off", None: "on or off, depending on the release"}[default]
    return default, Found(
        what=f"enable-prefix-caching is not written out: vLLM {version or 'here'} has it {state} "
        "for hybrids",
        fix="write `enable-prefix-caching: true` or `no-enable-prefix-caching: true`",
    )


def plan_of(options: Options) -> Plan:
    """The planner's answer for the file's options.

    Raises:
        PlanError: it has none; one line says what is missing.
    """
    return make_plan(make_deployment(options), findings)


def serving_facts(
    parsed: argparse.Namespace, environment: Mapping[str, str], block_tokens: int | None
) -> ServingFacts:
    """The facts that the engine would find, as far as the arguments tell.

    Args:
        parsed: vLLM's arguments; max_num_seqs and max_num_batched_tokens are given.
        environment: the variables that the server will see.
        block_tokens: the planner's B, None where it has none.
    """

    def get(name: str, default: Any = None) -> Any:
        return getattr(parsed, name, default)

    def of(config: Any, key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    speculative, transfer = get("speculative_config"), get("kv_transfer_config")
    budget = int(get("max_num_batched_tokens"))
    if (scheduled := get("max_num_scheduled_tokens")) is not None:
        budget = min(budget, int(scheduled))
    mode = get("mamba_cache_mode")
    return ServingFacts(
        contiguous_pa=envs.contiguous_pa(environment),
        compact_gdn=envs.compact_gdn(environment),
        speculative=None if not speculative else str(of(speculative, "method") or "by its model"),
        defragmenter=envs.defragmenter(environment),
        prefix_match_unit=get("prefix_match_unit"),
        mamba_opt_ins=[name for name in facts.MAMBA_OPT_INS if get(name)],
        kv_connector=None if not transfer else str(of(transfer, "kv_connector")),
        kv_offload=(
            str(get("kv_offloading_backend")) if get("kv_offloading_size") is not None else None
        ),
        pipeline_parallel=int(get("pipeline_parallel_size", 1) or 1),
        context_parallel=max(
            int(get("decode_context_parallel_size", 1) or 1),
            int(get("prefill_context_parallel_size", 1) or 1),
        ),
        pooling=get("runner") == "pooling" or get("convert") not in (None, "auto", "none"),
        max_num_batched_tokens=budget,
        max_num_seqs=int(get("max_num_seqs")),
        long_prefill_token_threshold=int(get("long_prefill_token_threshold", 0) or 0),
        disable_chunked_mm_input=bool(get("disable_chunked_mm_input", False)),
        budget_unit=BUDGET_UNIT,
        foreign_worker=facts.foreign_worker(get("worker_cls", "auto")),
        foreign_scheduler=facts.foreign_scheduler(get("scheduler_cls")),
        block_tokens=block_tokens,
        # none is vLLM's default, which becomes align where prefixes are cached.
        mamba_cache_mode=None if mode in (None, "auto", "none") else str(mode),
    )


def gaudi_problems(
    parsed: argparse.Namespace, environment: Mapping[str, str], block_tokens: int | None
) -> list[Found]:
    """What the engine would refuse on Gaudi, with prefix caching on."""
    problems = []
    if not envs.named_in_vllm_plugins(plugin.PLUGIN, environment):
        problems.append(
            Found(
                what=f"VLLM_PLUGINS does not name {plugin.PLUGIN}, so the stock vllm-gaudi would "
                "serve, and its hits resume from states that were never saved",
                fix=f"start with VLLM_PLUGINS={plugin.PLUGIN}, or write it into the recipe's env",
            )
        )
    facts = serving_facts(parsed, environment, block_tokens)
    return problems + found(config_problems(facts))


def missing_sizes(parsed: argparse.Namespace, block_tokens: int | None) -> list[Found]:
    """Sizes that decide whether prefill starves, and are left to vLLM's defaults."""
    names = [
        name
        for name in ("max_num_batched_tokens", "max_num_seqs")
        if getattr(parsed, name, None) is None
    ]
    if not names:
        return []
    flags = " and ".join(name.replace("_", "-") for name in names)
    block = f"B={block_tokens}" if block_tokens is not None else "B"
    return [
        Found(
            what=f"{flags} {'are' if len(names) > 1 else 'is'} not written out: vLLM's default "
            "depends on release and device, and prefill starves where the budget does not leave "
            f"a block of {block} tokens after max-num-seqs",
            fix="write both: max-num-batched-tokens is k*B + max-num-seqs",
        )
    ]


def planner_problems(plan: Plan, *, refusals_asked: bool) -> list[Found]:
    """What the planner calls an error, less what the refusals have said."""
    return [
        Found(what=finding.text, fix="see gaudi-ext plan --serve")
        for finding in plan.findings
        if finding.level == "error" and not (refusals_asked and finding.code in _SAID_BY_REFUSALS)
    ]


def planner_warnings(plan: Plan) -> list[Found]:
    """What the planner calls a warning."""
    return [
        Found(what=finding.text, fix="see gaudi-ext plan --serve")
        for finding in plan.findings
        if finding.level == "warning"
    ]


def version_problems(vllm: str | None, *, gaudi: bool) -> list[Found]:
    """An installed version that the package refuses to start with, on Gaudi."""
    if not gaudi or envs.VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS:
        return []
    problems = []
    for window, version in (
        (versions.VLLM, vllm),
        (versions.VLLM_GAUDI, versions.installed_vllm_gaudi()),
    ):
        if version is not None and not window.admits(version):
            problems.append(
                Found(
                    what=f"{window.project} {version} is installed here, and the package refuses "
                    "to start with it",
                    fix=f"install {window.project}{window.supported}",
                )
            )
    return problems


def options_without_vllm(content: Mapping[str, Any]) -> argparse.Namespace:
    """The file's values as written, for the planner where vLLM's parser is absent.

    Raises:
        PlanError: a value that the planner needs is not of the kind that vLLM takes.
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name.startswith("no_") and value is True:
            name, value = name.removeprefix("no_"), False
        values[name] = value
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "block_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "num_gpu_blocks_override",
    ):
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise PlanError(
                f"{name.replace('_', '-')}: {value!r} is no whole number, and its other forms "
                "are vLLM's own"
            )
    for name in ("speculative_config", "kv_transfer_config", "additional_config"):
        if values.get(name) is not None:
            values[name] = _mapping(name, values[name])
    return argparse.Namespace(**values)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    """A configuration that vLLM takes as a mapping or as JSON."""
    if isinstance(value, str):
        # What is not JSON, or nested too deeply for it, is refused below like any other word.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise PlanError(f"{name.replace('_', '-')}: {str(value)[:60]!r} is no mapping")
    return value
