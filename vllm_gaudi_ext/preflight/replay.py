"""What ReplaySSM would refuse of a file, in the words of the engine's own refusals."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from cuda_ext.facts import ReplayFacts
from cuda_ext.refusals import not_named, replay_problems, wants_replay
from vllm_gaudi_ext import envs, plugin
from vllm_gaudi_ext.config import ExtOptions, read_options
from vllm_gaudi_ext.gdn.refusals import option_problems
from vllm_gaudi_ext.planner.plan import Plan, gdn_heads
from vllm_gaudi_ext.preflight.report import Found, found


def options_of(parsed: argparse.Namespace) -> tuple[ExtOptions | None, list[Found]]:
    """Our options in `additional-config`; None and the reason where they are not valid."""
    try:
        return read_options(getattr(parsed, "additional_config", None)), []
    except ValueError as error:
        return None, [Found(what=str(error), fix="correct additional-config")]


def gaudi_option_problems(options: ExtOptions) -> list[Found]:
    """What a Gaudi server would refuse of the options."""
    return found(option_problems(options))


def nvidia_problems(
    parsed: argparse.Namespace,
    options: ExtOptions,
    environment: Mapping[str, str],
    plan: Plan,
    vllm: str | None,
) -> list[Found]:
    """What the engine would refuse with ReplaySSM, where `VLLM_PLUGINS` names this package.

    Args:
        parsed: vLLM's arguments.
        options: ours.
        environment: the variables that the server will see.
        plan: the planner's answer, which knows dtypes and heads.
        vllm: the version installed here; None where it is not.
    """
    if not envs.named_in_vllm_plugins(plugin.PLUGIN, environment):
        return found([not_named()]) if options.replay == "on" else []
    facts = _facts(parsed, options, environment, plan, vllm)
    return found(replay_problems(facts))


def serves(
    parsed: argparse.Namespace,
    options: ExtOptions,
    environment: Mapping[str, str],
    plan: Plan,
    vllm: str | None,
) -> bool:
    """Whether an NVIDIA server would be served with ReplaySSM; arguments as `nvidia_problems`."""
    if not envs.named_in_vllm_plugins(plugin.PLUGIN, environment):
        return False
    return wants_replay(_facts(parsed, options, environment, plan, vllm))


def _facts(
    parsed: argparse.Namespace,
    options: ExtOptions,
    environment: Mapping[str, str],
    plan: Plan,
    vllm: str | None,
) -> ReplayFacts:
    deployment = plan.deployment

    def size(name: str) -> int:
        return int(getattr(parsed, name, None) or 1)

    transfer: Any = getattr(parsed, "kv_transfer_config", None)
    connector = (
        transfer.get("kv_connector")
        if isinstance(transfer, Mapping)
        else getattr(transfer, "kv_connector", None)
    )
    if connector is None and getattr(parsed, "kv_offloading_size", None) is not None:
        # vLLM makes a KV connector of it (config/vllm.py).
        connector = "of --kv-offloading-size"
    return ReplayFacts(
        options=options,
        vllm=vllm,
        device="cuda",
        architecture=deployment.target.architecture or "",
        drafts=deployment.drafts,
        method=deployment.method,
        # A drafter with states is none that the planner takes.
        drafter_has_states=False,
        heads=gdn_heads(deployment.model_copy(update={"tp": 1})),
        dtype=deployment.dtype,
        conv_dtype=deployment.conv_dtype,
        state_dtype=deployment.state_dtype,
        tp=deployment.tp,
        pp=size("pipeline_parallel_size"),
        dp=size("data_parallel_size"),
        dcp=size("decode_context_parallel_size"),
        pcp=size("prefill_context_parallel_size"),
        prefix_caching=bool(getattr(parsed, "enable_prefix_caching", None)),
        kv_connector=connector,
        dual_batch_overlap=bool(getattr(parsed, "enable_dbo", False)) or size("ubatch_size") > 1,
        eager=bool(getattr(parsed, "enforce_eager", False)),
        native_flag=bool(getattr(parsed, "use_replayssm", False)),
        fused_decode_kernel=envs.fused_gdn_decode_kernel(environment),
    )
