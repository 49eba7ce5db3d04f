"""From options, as typed or as read out of a serve.yaml, to a `Deployment`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from vllm_gaudi_ext.planner.arithmetic import GIB, MIB
from vllm_gaudi_ext.planner.config import (
    DrafterConfig,
    DrafterOverrides,
    TargetConfig,
    load_drafter,
    load_target,
)
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.facts import Platform, find_platform
from vllm_gaudi_ext.planner.plan import (
    MAX_DRAFTS,
    Deployment,
    check_gib,
    check_range,
    check_utilisation,
    kv_cache_dtype,
    model_dtype,
    pool_from_device,
    resolve_dtype,
    ssm_dtype,
)

if TYPE_CHECKING:
    from vllm_gaudi_ext.planner.serve_args import ServeArgs

DEFAULT_TOKENS = 8192
# vLLM's --gpu-memory-utilization (vllm/config/cache.py:68, 0.26.0).
DEFAULT_UTILISATION = 0.92


class Options(BaseModel):
    """The command line of `gaudi-ext plan`; None means not given."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    serve: Path | None = None
    drafter: str | None = None
    method: str | None = None
    drafts: int | None = None
    mtp_layers: int | None = None
    overrides: DrafterOverrides = DrafterOverrides()
    tokens: int | None = None
    tp: int | None = None
    draft_tp: int | None = None
    ep: bool | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    conv_dtype: str | None = None
    state_dtype: str | None = None
    platform: str | None = None
    unit: int | None = None
    block_size: int | None = None
    caching: bool | None = None
    pool_gib: float | None = None
    pool_bytes: int | None = None
    pool_blocks: int | None = None
    device_memory_gib: float | None = None
    utilisation: float | None = None
    non_kv_gib: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    replay: Literal["auto", "on", "off"] | None = None
    plugin: bool | None = None
    packing: Literal["auto", "off"] | None = None
    attention_backends: tuple[str, ...] | None = None
    vllm: str | None = None
    assumed: tuple[str, ...] = ()


def options_from_serve(options: Options) -> Options:
    """The options of a serve.yaml; what was typed beside it wins, as it does in vLLM.

    Raises:
        PlanError: the file is refused, or asks for something that the planner can't compute.
    """
    from vllm_gaudi_ext.planner.serve_args import parse_serve_yaml, serve_args

    assert options.serve is not None, options
    if options.model is not None:
        raise PlanError("pass a model or --serve FILE, not both: the file names its model")
    args = serve_args(parse_serve_yaml(options.serve), options.serve)
    return options_from_args(_with_reading(options), args)


def _with_reading(options: Options) -> Options:
    """With what the recipe beside the serve.yaml reads into it and nobody typed."""
    from vllm_gaudi_ext.recipes import reading_beside

    assert options.serve is not None, options
    reading = reading_beside(options.serve)
    if reading is None:
        return options
    # A drafter that is typed is another one, of which the recipe says nothing.
    reading = reading.without(
        mtp=options.mtp_layers is not None, drafter=options.drafter is not None
    )
    typed = options.overrides.model_dump(exclude_none=True)
    reading = reading.model_copy(update={f"drafter_{name}": None for name in typed})
    read = reading.options()
    overrides = read.pop("overrides")
    assert isinstance(overrides, DrafterOverrides), overrides
    read["overrides"] = overrides.model_copy(update=typed)
    return options.model_copy(update={**read, "assumed": tuple(reading.sentences())})


def options_from_args(options: Options, args: ServeArgs) -> Options:
    """The options of a serve.yaml whose arguments were read already; what was typed wins.

    Raises:
        PlanError: they ask for something that the planner can't compute.
    """
    from vllm_gaudi_ext.planner.serve_args import (
        recipe_names_plugin,
        recipe_platform,
        recipe_vllm,
    )

    assert options.serve is not None, options
    if args.pp > 1:
        raise PlanError(
            f"{options.serve}: pipeline-parallel-size {args.pp} is not something we can plan for"
        )
    read = {
        "model": args.model,
        "drafter": args.drafter or ("mtp" if args.method == "mtp" else None),
        "method": args.method,
        "drafts": args.drafts,
        "draft_tp": args.draft_tp,
        "tp": args.tp,
        "ep": args.ep,
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "conv_dtype": args.conv_dtype,
        "state_dtype": args.state_dtype,
        "block_size": args.block_size,
        # None is vLLM's default, which is on for generative hybrids.
        "caching": True if args.caching is None else args.caching,
        "utilisation": args.utilisation,
        "pool_bytes": args.pool_bytes,
        "pool_blocks": args.pool_blocks,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "replay": args.replay,
        "plugin": recipe_names_plugin(options.serve),
        "packing": args.packing,
        "attention_backends": args.attention_backends,
        "platform": recipe_platform(options.serve),
        "vllm": recipe_vllm(options.serve),
    }
    typed = {
        name: getattr(options, name) for name in read if getattr(options, name, None) is not None
    }
    return options.model_copy(update={**read, **typed, "serve": None})


def _platform(options: Options) -> Platform:
    if options.platform is not None:
        return find_platform(options.platform)
    if options.unit is None:
        raise PlanError(
            "no platform given: the block size depends on its attention backend; pass --platform "
            "(gaudi2, gaudi3, a100, h100, h200, b200, cpu) or --unit"
        )
    return Platform(
        name="other",
        vendor="unknown",
        title="a card of your own",
        unit=options.unit,
        unit_source="--unit",
        device_memory_mib=None,
        memory_source="unknown",
        whole_blocks=False,
        whole_blocks_source="unknown",
    )


def _drafting(
    options: Options, target: TargetConfig
) -> tuple[int, str | None, int, DrafterConfig | None]:
    """Drafts, method, MTP layers and drafter."""
    given = (options.drafter or "").strip()
    drafts = options.drafts
    if drafts is not None:
        check_range("--drafts", drafts, 0, MAX_DRAFTS)
    if given.lower() in ("", "none", "mtp") and options.overrides.given:
        raise PlanError(
            "the --drafter-... options describe a drafter that has a config: pass it with --drafter"
        )
    if given.lower() in ("", "none"):
        return drafts or 0, options.method, 0, None
    if given.lower() == "mtp":
        layers = options.mtp_layers if options.mtp_layers is not None else target.mtp_layers
        if layers is None:
            hint = target.unknown.get("mtp_num_hidden_layers", "the key is not in its config")
            raise PlanError(
                f"{target.name}: mtp_num_hidden_layers is unknown ({hint}); pass --mtp-layers"
            )
        check_range("--mtp-layers", layers, 1, 64)
        if not drafts:
            raise PlanError("--drafter mtp needs --drafts, the draft tokens of one step")
        return drafts, "mtp", layers, None
    for option, value in options.overrides.model_dump().items():
        if value is not None:
            low = 0 if option == "sliding_layers" else 1
            check_range(f"--drafter-{option.replace('_', '-')}", value, low, 100_000_000)
    drafter = load_drafter(given, target, options.overrides)
    if not drafts:
        hint = ""
        if drafter.block_size is not None:
            hint = f" ({drafter.block_size - 1} fill its block of {drafter.block_size})"
        raise PlanError(f"--drafter {given} needs --drafts, the draft tokens of one step{hint}")
    method = options.method
    if method is None and (drafter.architecture or "").startswith("DFlash"):
        method = "dflash"
    return drafts, method, 0, drafter


def _pool(options: Options, platform: Platform) -> tuple[int | None, str | None, int | None]:
    """Pool bytes, where they come from, and what stays free beside the pool."""
    if options.utilisation is not None:
        check_utilisation(options.utilisation)
    if options.pool_gib is not None:
        if options.device_memory_gib is not None or options.non_kv_gib is not None:
            raise PlanError("pass --pool-gib, or --non-kv-gib with the card's memory, not both")
        return check_gib("--pool-gib", options.pool_gib), f"{options.pool_gib:g} GiB", None
    if options.pool_bytes is not None:
        size = check_gib("kv-cache-memory-bytes", options.pool_bytes / GIB)
        return size, f"{size / GIB:.2f} GiB (kv-cache-memory-bytes)", None
    if options.non_kv_gib is None:
        if options.device_memory_gib is not None:
            check_gib("--device-memory-gib", options.device_memory_gib)
        return None, None, None
    if options.device_memory_gib is not None:
        device = check_gib("--device-memory-gib", options.device_memory_gib)
    elif platform.device_memory_mib is not None:
        device = platform.device_memory_mib * MIB
    else:
        raise PlanError(
            f"the memory of {platform.title} is unknown; pass --device-memory-gib or --pool-gib"
        )
    used = check_gib("--non-kv-gib", options.non_kv_gib)
    utilisation = DEFAULT_UTILISATION if options.utilisation is None else options.utilisation
    pool, spare = pool_from_device(platform, device, utilisation, used)
    source = (
        f"{pool / GIB:.2f} GiB of {device / GIB:.1f} GiB at utilisation {utilisation:g} with "
        f"{options.non_kv_gib:g} GiB in use"
    )
    return pool, source, spare


def make_deployment(options: Options) -> Deployment:
    """The deployment that the options describe.

    Raises:
        PlanError: something is missing, contradictory or out of range; one line says what.
    """
    if options.serve is not None:
        options = options_from_serve(options)
    if options.model is None:
        raise PlanError("no model given: pass a folder, a config.json, a known name, or --serve")
    if options.unit is not None:
        check_range("--unit", options.unit, 1, 65536)
    target = load_target(options.model)
    platform = _platform(options)
    unit = platform.unit if options.unit is None else options.unit
    if options.block_size is not None:
        # vLLM rounds up to a block size that the user asked for where it is larger.
        unit = max(unit, check_range("--block-size", options.block_size, 1, 65536))
    dtype = model_dtype(target, options.dtype)
    conv = dtype
    if options.conv_dtype not in (None, "auto"):
        conv = resolve_dtype("--conv-dtype", str(options.conv_dtype))
    drafts, method, mtp_layers, drafter = _drafting(options, target)
    pool_bytes, pool_source, spare = _pool(options, platform)
    # -1 asks vLLM for the longest that fits, which is not known before a start.
    longest = None if options.max_model_len == -1 else options.max_model_len
    tokens = options.tokens
    if tokens is None:
        tokens = DEFAULT_TOKENS if longest is None else longest
    caching = options.caching
    if caching is None:
        caching = platform.vendor == "gaudi"
    return Deployment(
        target=target,
        platform=platform,
        unit=unit,
        drafter=drafter,
        method=method,
        mtp_layers=mtp_layers,
        drafts=drafts,
        tokens=check_range("--tokens", tokens, 1, 100_000_000),
        tp=check_range("--tp", 1 if options.tp is None else options.tp, 1, 1024),
        ep=bool(options.ep),
        draft_tp=options.draft_tp,
        dtype=dtype,
        conv_dtype=conv,
        state_dtype=ssm_dtype(target, options.state_dtype, conv),
        kv_dtype=kv_cache_dtype(options.kv_dtype, dtype),
        caching=caching,
        pool_bytes=pool_bytes,
        pool_source=pool_source,
        pool_blocks=options.pool_blocks,
        spare_bytes=spare,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest,
        replay=options.replay or "auto",
        plugin=bool(options.plugin),
        packing=options.packing or "auto",
        attention_backends=options.attention_backends or (),
        vllm=options.vllm,
        assumed=options.assumed,
    )
