"""From a deployment to its plan: checks what was asked, runs the formulas, keeps every number.

`Deployment` is what an operator chose, `make_plan` turns it into a `Plan`, and report.py shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field

from cuda_ext.refusals import asks_for_replay
from cuda_ext.ring import ITEM_BYTES, GdnHeads, PageLayout, native_layout, replay_layout
from vllm_gaudi_ext.gdn.refusals import BUDGET_UNIT
from vllm_gaudi_ext.planner import arithmetic
from vllm_gaudi_ext.planner.arithmetic import GIB, MIB, AttentionLayers, Layout, RequestBytes
from vllm_gaudi_ext.planner.config import DrafterConfig, TargetConfig
from vllm_gaudi_ext.planner.errors import IllegalValue, PlanError
from vllm_gaudi_ext.planner.facts import Platform
from vllm_gaudi_ext.version import __version__
from vllm_gaudi_ext.versions import VLLM_FOR_REPLAY

# vllm-gaudi keeps a tenth of the usable memory for HPU graphs unless VLLM_GRAPH_RESERVED_MEM says
# otherwise (vllm_gaudi/v1/worker/hpu_worker.py:402).
HPU_GRAPH_SHARE = 0.1
# Async scheduling, vLLM's default, keeps two batches in flight (vllm/config/vllm.py:512).
CONCURRENT_BATCHES = 2

MAX_DRAFTS = 1024
MAX_TOKENS = 100_000_000
MAX_GIB = 1_000_000.0

_DTYPE_ALIAS = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Architectures whose mamba_ssm_dtype vLLM takes when --mamba-ssm-cache-dtype is auto
# (vllm/model_executor/models/config.py:863); for others the key is ignored.
READS_SSM_DTYPE = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")

# Attention backends whose kernels take a block of any multiple of 16 unsplit, in any layout of the
# KV cache (vLLM 0.31.0). FLASHINFER splits blocks, and FLEX_ATTENTION asks for one layout.
WHOLE_BLOCK_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")

# Drafters that read the target's hidden states: vLLM then leaves the last matching block of a hit
# out (SpeculativeConfig.use_eagle, vllm/config/speculative.py:1324).
HIDDEN_STATE_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")


class Deployment(BaseModel):
    """What an operator chose. Counts are whole servers', bytes are one card's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: TargetConfig
    platform: Platform
    unit: int = Field(description="tokens that B is rounded up to")
    drafter: DrafterConfig | None = None
    method: str | None = Field(None, description="vLLM's name of the drafting method")
    mtp_layers: int = 0
    drafts: int = 0
    tokens: int = Field(8192, description="prompt and output of one request")
    tp: int = 1
    ep: bool = False
    draft_tp: int | None = None
    dtype: str = Field("bfloat16", description="the model's dtype, that of the conv window too")
    conv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    kv_dtype: str = "bfloat16"
    caching: bool = False
    pool_bytes: int | None = Field(None, description="KV-cache pool of one card")
    pool_source: str | None = None
    pool_blocks: int | None = Field(None, description="vLLM's num_gpu_blocks_override")
    spare_bytes: int | None = Field(None, description="memory beside the pool and the weights")
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = Field(None, description="the longest request that is taken")
    replay: Literal["auto", "on", "off"] = "auto"
    plugin: bool = Field(False, description="VLLM_PLUGINS is known to name this package")
    packing: Literal["auto", "off"] = "auto"
    attention_backends: tuple[str, ...] = Field(
        (), description="those asked for by name, the drafter's too; none where vLLM chooses"
    )
    vllm: str | None = Field(None, description="versions that it will run on; None: the newest")
    assumed: tuple[str, ...] = Field((), description="what a recipe reads where facts are silent")

    @property
    def in_flight(self) -> int | None:
        """Tokens scheduled but not settled, or None while the budget is unknown."""
        if self.max_num_batched_tokens is None:
            return None
        return CONCURRENT_BATCHES * self.max_num_batched_tokens

    @property
    def gaudi(self) -> bool:
        """Whether the cards are Gaudi's."""
        return self.platform.vendor == "gaudi"

    @property
    def wants_replay(self) -> bool:
        """Whether ReplaySSM is to serve wherever vLLM loads this package."""
        architecture = self.target.architecture or ""
        return not self.gaudi and asks_for_replay(self.replay, architecture, drafts=self.drafts > 0)

    @property
    def serves_replay(self) -> bool:
        """Whether ReplaySSM serves, as far as is known: `on` is refused where it can't."""
        return self.wants_replay and (self.replay == "on" or self.plugin)

    @property
    def splitting_backends(self) -> tuple[str, ...]:
        """Attention backends asked for that packed blocks can't be had with."""
        return tuple(b for b in self.attention_backends if b not in WHOLE_BLOCK_BACKENDS)

    @property
    def may_pack(self) -> bool:
        """Whether ReplaySSM would have vLLM pack blocks where that saves memory."""
        if self.packing == "off" or not self.platform.whole_blocks or self.splitting_backends:
            return False
        # Whoever counts blocks has vLLM's own in mind, which are smaller (cuda_ext.packing).
        if self.pool_blocks is not None:
            return False
        # What vLLM keeps in fewer bits is not a plain page (cuda_ext.packing).
        return self.kv_dtype in ITEM_BYTES and _has_packing(self.vllm)


def _has_packing(vllm: str | None) -> bool:
    if vllm is None:
        return True
    try:
        versions = SpecifierSet(vllm)
    except InvalidSpecifier:
        return False
    # All that ReplaySSM is served with pack; 0.26.0, which only the override starts, has no
    # KV-cache layouts.
    return any(window.first in versions for window in VLLM_FOR_REPLAY)


class GroupView(BaseModel):
    """KV-cache groups of one kind of layer."""

    kind: Literal["gdn", "full", "sliding"]
    layers: int
    drafter_layers: int
    groups: int
    block_tokens: int | None
    window: int | None


class CapacityView(BaseModel):
    """What the pool holds."""

    pool_blocks: int
    vllm_concurrency: float = Field(description="the figure of vLLM's start-up log")
    requests: int = Field(description="whole requests, vLLM's padded accounting")
    requests_ideal: int = Field(description="whole requests, summed layer by layer")
    state_slots: int = Field(description="requests whose states fit when nothing else is held")


class Side(BaseModel):
    """One way to keep the states: vLLM's own, or ReplaySSM."""

    state_copies: int
    state_bytes: int = Field(description="one state of one layer, conv window and rings included")
    block_tokens: int
    packed: bool = Field(description="each layer's page has its own size; blocks hold any group's")
    page_bytes: int = Field(description="of every layer; where packed, of the target's attention")
    page_mib: float
    padding_bytes: int
    padding_percent: float = Field(description="of the page")
    groups: list[GroupView]
    group_size: int = Field(description="layers of the largest group")
    group_count: int
    block_mib: float
    padded_attention: bool
    cached_tokens_multiple_of: int | None
    state_mib_per_request: float
    kv_mib_per_request: float
    target_kv_mib_per_request: float
    drafter_kv_mib_per_request: float
    request_mib_ideal: float
    request_mib_padded: float
    state_mib_per_request_padded: float
    blocks_per_request: int
    capacity: CapacityView | None
    ring_rows: int | None = None
    ring_bytes: int | None = None
    ring_bytes_per_token: int | None = None


class GaudiView(BaseModel):
    """What only a Gaudi card has."""

    slots: int | None = Field(description="requests that hold a slot at once")
    slot_rows: int | None = Field(description="rows of each state tensor")
    slot_mib: float | None = Field(description="all state tensors, outside of the pool")
    slot_mib_per_request: float
    noncompact_pool_factor: float
    noncompact_pool_blocks: int | None


class BudgetView(BaseModel):
    """--max-num-batched-tokens."""

    decode_tokens: int
    least: int
    recommended: int
    blocks_per_step: int
    multiple_of: int


class SweepPoint(BaseModel):
    """One draft length of the plot."""

    drafts: int
    native_state_mib: float
    native_kv_mib: float
    native_request_mib: float
    native_requests: int | None
    replay_state_mib: float | None
    replay_kv_mib: float | None
    replay_request_mib: float | None
    replay_requests: int | None


class Finding(BaseModel):
    """Something the operator should know, with what to do about it."""

    level: Literal["error", "warning", "note"]
    code: str
    text: str


class Expect(BaseModel):
    """The keys of a recipe's `expect`."""

    block_tokens: int
    state_copies: int
    state_mib_per_request: float
    slots: int | None
    cached_tokens_multiple_of: int | None


class Plan(BaseModel):
    """Everything that was asked and computed, of one card."""

    schema_version: Literal[1] = 1
    version: str = __version__
    deployment: Deployment
    native: Side
    replay: Side | None
    serving: Literal["native", "replay"] = Field(
        description="the side whose layers serve: that of `budget`, `expect` and the findings"
    )
    gaudi: GaudiView | None
    budget: BudgetView | None
    outweighing_drafts: int | None = Field(
        description="first draft length whose state copies outweigh the KV cache"
    )
    sweep: list[SweepPoint]
    expect: Expect
    findings: list[Finding] = []

    @property
    def served(self) -> Side:
        """The side whose layers serve."""
        if self.serving == "native":
            return self.native
        assert self.replay is not None, self.deployment
        return self.replay


def check_range(name: str, value: int, low: int, high: int) -> int:
    """`value` where low <= value <= high.

    Raises:
        IllegalValue: it is not.
    """
    if not low <= value <= high:
        raise IllegalValue(f"{name} must be between {low} and {high}, got {value}")
    return value


def check_gib(name: str, value: float) -> int:
    """Bytes of `value` GiB.

    Raises:
        PlanError: it is not a positive, finite and sensible number.
    """
    if not math.isfinite(value) or not 0 < value <= MAX_GIB:
        raise PlanError(f"{name} must be above 0 and at most {MAX_GIB:.0f} GiB, got {value}")
    return int(value * GIB)


def check_utilisation(value: float) -> float:
    """`value` as a share of a card's memory.

    Raises:
        IllegalValue: it is not above 0 and at most 1.
    """
    if not math.isfinite(value) or not 0 < value <= 1:
        raise IllegalValue(f"--utilisation must be above 0 and at most 1, got {value}")
    return value


def resolve_dtype(name: str, value: str) -> str:
    """A state dtype by any of vLLM's names.

    Raises:
        PlanError: it is not one.
    """
    dtype = _DTYPE_ALIAS.get(value, value)
    if dtype not in ITEM_BYTES:
        raise PlanError(f"{name} must be one of {', '.join(ITEM_BYTES)}, got {value!r}")
    return dtype


def model_dtype(target: TargetConfig, asked: str | None) -> str:
    """The model's dtype.

    Raises:
        PlanError: neither the config nor the command line gives it, or the config's is float32,
            which vLLM serves in a dtype of its own choice.
    """
    if asked not in (None, "auto"):
        return resolve_dtype("--dtype", str(asked))
    if target.dtype is None:
        raise PlanError(f"{target.name}: its dtype is unknown; pass --dtype bfloat16 or float16")
    dtype = resolve_dtype(f"{target.name}: dtype", target.dtype)
    if dtype == "float32":
        raise PlanError(
            f"{target.name}: its config says float32, which vLLM casts when --dtype is auto; "
            "pass the --dtype that you serve with"
        )
    return dtype


def ssm_dtype(target: TargetConfig, asked: str | None, conv_dtype: str) -> str:
    """The recurrent state's dtype, as vLLM resolves it.

    The flag wins; else the config's mamba_ssm_dtype where vLLM reads it; else the conv window's
    dtype (`MambaStateDtypeCalculator`, vllm/model_executor/layers/mamba/mamba_utils.py:86).

    Raises:
        PlanError: the key's value is unknown and no flag was given.
    """
    if asked not in (None, "auto"):
        return resolve_dtype("--state-dtype", str(asked))
    if "mamba_ssm_dtype" in target.unknown:
        raise PlanError(
            f"{target.name}: mamba_ssm_dtype is unknown ({target.unknown['mamba_ssm_dtype']}); "
            "pass --state-dtype, or the served config.json"
        )
    if target.mamba_ssm_dtype is not None and reads_ssm_dtype(target):
        return resolve_dtype(f"{target.name}: mamba_ssm_dtype", target.mamba_ssm_dtype)
    return conv_dtype


def reads_ssm_dtype(target: TargetConfig) -> bool:
    """Whether vLLM copies mamba_ssm_dtype out of this architecture's config file."""
    return target.architecture in READS_SSM_DTYPE


def kv_cache_dtype(asked: str | None, dtype: str) -> str:
    """The KV cache's dtype.

    Raises:
        PlanError: the planner has no formula for it.
    """
    if asked in (None, "auto"):
        return dtype
    name = _DTYPE_ALIAS.get(str(asked), str(asked))
    if name not in arithmetic.KV_DTYPES:
        raise PlanError(
            f"--kv-dtype must be auto or one of {', '.join(arithmetic.KV_DTYPES)}, got {asked!r}"
        )
    return name


def pool_from_device(
    platform: Platform, device_bytes: int, utilisation: float, non_kv_bytes: int
) -> tuple[int, int]:
    """KV-cache pool of one card, and what stays free beside it.

    vLLM takes `utilisation` of the whole card and subtracts what is used; vllm-gaudi takes it of
    what is free, and a tenth less for graphs (HPUWorker.determine_available_memory).

    Args:
        platform: decides which of the two.
        device_bytes: the card's memory.
        utilisation: --gpu-memory-utilization.
        non_kv_bytes: weights, activations and graphs.

    Raises:
        PlanError: nothing is left.
    """
    check_utilisation(utilisation)
    if platform.vendor == "gaudi":
        free = device_bytes - non_kv_bytes
        pool = int(free * utilisation * (1 - HPU_GRAPH_SHARE))
    else:
        free = device_bytes - non_kv_bytes
        pool = int(device_bytes * utilisation) - non_kv_bytes
    if pool <= 0:
        raise PlanError(
            f"no memory is left for the KV cache: {device_bytes / GIB:.1f} GiB at utilisation "
            f"{utilisation} less {non_kv_bytes / GIB:.1f} GiB in use"
        )
    return pool, free - pool


def gdn_heads(deployment: Deployment) -> GdnHeads:
    """Heads of one GDN layer on one rank.

    Raises:
        PlanError: the head counts don't divide.
    """
    target = deployment.target
    try:
        return GdnHeads(
            target.linear_num_key_heads,
            target.linear_num_value_heads,
            target.linear_key_head_dim,
            target.linear_value_head_dim,
            target.linear_conv_kernel_dim,
        ).shard(deployment.tp)
    except ValueError as error:
        raise IllegalValue(f"{target.name}: {error}") from None


def attention_layers(deployment: Deployment) -> list[AttentionLayers]:
    """The target's attention layers, then the drafter's, on one rank.

    Raises:
        PlanError: the tensor-parallel size does not fit the heads.
    """
    target, tp = deployment.target, deployment.tp
    heads = target.num_attention_heads
    if heads is not None and heads % tp:
        raise IllegalValue(
            f"{target.name}: tensor parallel size {tp} does not divide {heads} attention heads"
        )
    _check_kv_heads(target.name, target.num_key_value_heads, tp)
    own = arithmetic.ranks_kv_heads(target.num_key_value_heads, tp)
    layers = [
        AttentionLayers(
            "target", target.attention_layers, own, target.head_dim, deployment.kv_dtype
        )
    ]
    if deployment.mtp_layers:
        layers.append(
            AttentionLayers(
                "drafter", deployment.mtp_layers, own, target.head_dim, deployment.kv_dtype
            )
        )
    drafter = deployment.drafter
    if drafter is not None:
        draft_tp = deployment.draft_tp or tp
        _check_kv_heads(drafter.name, drafter.num_key_value_heads, draft_tp)
        heads_of_rank = arithmetic.ranks_kv_heads(drafter.num_key_value_heads, draft_tp)
        for count, window in (
            (drafter.full_layers, None),
            (drafter.sliding_layers, drafter.window),
        ):
            if count:
                layers.append(
                    AttentionLayers(
                        "drafter",
                        count,
                        heads_of_rank,
                        drafter.head_dim,
                        deployment.kv_dtype,
                        window,
                    )
                )
    return layers


def _check_kv_heads(name: str, kv_heads: int, tp: int) -> None:
    if kv_heads % tp and tp % kv_heads:
        raise PlanError(
            f"{name}: tensor parallel size {tp} neither divides nor is a multiple of "
            f"{kv_heads} KV heads"
        )


def page_of(deployment: Deployment, *, replay: bool) -> PageLayout:
    """The page of one GDN layer on one rank, before padding."""
    heads = gdn_heads(deployment)
    try:
        if replay:
            return replay_layout(
                heads,
                deployment.drafts,
                conv_dtype=deployment.conv_dtype,
                ssm_dtype=deployment.state_dtype,
                input_dtype=deployment.dtype,
            )
        return native_layout(
            heads,
            deployment.drafts,
            conv_dtype=deployment.conv_dtype,
            ssm_dtype=deployment.state_dtype,
        )
    except ValueError as error:
        raise PlanError(f"{deployment.target.name}: {error}") from None


def layout_of(deployment: Deployment, *, replay: bool = False) -> Layout:
    """Block size, page and groups; ReplaySSM's are packed where the server's would be."""
    gdn_layers = deployment.target.gdn_layers
    state_bytes = page_of(deployment, replay=replay).nbytes
    attention = attention_layers(deployment)
    today = arithmetic.lay_out(
        gdn_layers=gdn_layers, state_bytes=state_bytes, attention=attention, unit=deployment.unit
    )
    if not replay or not deployment.may_pack:
        return today
    packed = arithmetic.lay_out_packed(
        gdn_layers=gdn_layers, state_bytes=state_bytes, attention=attention, unit=deployment.unit
    )
    return arithmetic.choose(
        today,
        packed,
        # The server knows no other length.
        tokens=deployment.max_model_len or deployment.tokens,
        copies=_copies_of(deployment, replay=True),
    )


def _copies_of(deployment: Deployment, *, replay: bool) -> int:
    return arithmetic.state_copies(deployment.drafts, caching=deployment.caching, replay=replay)


def _request_of(deployment: Deployment, layout: Layout, *, replay: bool) -> RequestBytes:
    return arithmetic.request_bytes(
        layout,
        copies=_copies_of(deployment, replay=replay),
        tokens=deployment.tokens,
        in_flight=deployment.in_flight,
    )


def pool_bytes_of(deployment: Deployment, layout: Layout) -> int | None:
    """The pool in bytes, also where it was given in blocks."""
    if deployment.pool_blocks is not None:
        return deployment.pool_blocks * layout.block_bytes
    return deployment.pool_bytes


def _side(deployment: Deployment, *, replay: bool) -> Side:
    page = page_of(deployment, replay=replay)
    layout = layout_of(deployment, replay=replay)
    request = _request_of(deployment, layout, replay=replay)
    pool = pool_bytes_of(deployment, layout)
    holds = None
    if pool is not None:
        fit = arithmetic.capacity(layout, request, pool)
        holds = CapacityView(
            pool_blocks=fit.blocks,
            vllm_concurrency=fit.concurrency,
            requests=fit.requests,
            requests_ideal=fit.ideal_requests,
            state_slots=fit.state_slots,
        )
    return Side(
        state_copies=request.copies,
        state_bytes=layout.state_bytes,
        block_tokens=layout.block_tokens,
        packed=layout.packed,
        page_bytes=layout.page_bytes,
        page_mib=layout.page_bytes / MIB,
        padding_bytes=layout.padding_bytes,
        padding_percent=100 * layout.padding_bytes / layout.page_bytes,
        groups=[
            GroupView(
                kind=bucket.kind,
                layers=bucket.layers,
                drafter_layers=bucket.drafter_layers,
                groups=bucket.groups,
                block_tokens=bucket.block_tokens,
                window=bucket.window,
            )
            for bucket in layout.buckets
        ],
        group_size=layout.group_size,
        group_count=layout.groups,
        block_mib=layout.block_bytes / MIB,
        padded_attention=layout.padded_attention,
        cached_tokens_multiple_of=layout.cached_tokens_unit if deployment.caching else None,
        state_mib_per_request=request.state / MIB,
        kv_mib_per_request=request.kv / MIB,
        target_kv_mib_per_request=request.target_kv / MIB,
        drafter_kv_mib_per_request=request.drafter_kv / MIB,
        request_mib_ideal=request.ideal / MIB,
        request_mib_padded=request.padded / MIB,
        state_mib_per_request_padded=request.padded_state / MIB,
        blocks_per_request=request.blocks,
        capacity=holds,
        ring_rows=page.ring_rows or None,
        ring_bytes=page.ring_bytes or None,
        ring_bytes_per_token=page.token_bytes or None,
    )


def _gaudi_view(deployment: Deployment, layout: Layout) -> GaudiView:
    seqs = deployment.max_num_seqs
    slots = arithmetic.gaudi_slots(layout, seqs or 1)
    factor = arithmetic.noncompact_pool_factor(layout)
    pool = pool_bytes_of(deployment, layout)
    return GaudiView(
        slots=seqs,
        slot_rows=None if seqs is None else slots.rows,
        slot_mib=None if seqs is None else slots.bytes / MIB,
        slot_mib_per_request=slots.bytes_per_request / MIB,
        noncompact_pool_factor=factor,
        noncompact_pool_blocks=None if pool is None else int(pool * factor) // layout.block_bytes,
    )


def _sweep(deployment: Deployment) -> list[SweepPoint]:
    points = []
    last = 0 if deployment.gaudi else max(deployment.drafts, 16)
    for drafts in range(min(last, 64) + 1):
        at = deployment.model_copy(update={"drafts": drafts})
        native = _side(at, replay=False)
        replay = None if deployment.gaudi else _side(at, replay=True)
        points.append(
            SweepPoint(
                drafts=drafts,
                native_state_mib=native.state_mib_per_request,
                native_kv_mib=native.kv_mib_per_request,
                native_request_mib=native.request_mib_padded,
                native_requests=native.capacity.requests if native.capacity else None,
                replay_state_mib=replay.state_mib_per_request if replay else None,
                replay_kv_mib=replay.kv_mib_per_request if replay else None,
                replay_request_mib=replay.request_mib_padded if replay else None,
                replay_requests=replay.capacity.requests if replay and replay.capacity else None,
            )
        )
    return points


def check_deployment(deployment: Deployment) -> None:
    """Refuses numbers that no deployment can have.

    Raises:
        PlanError: the first that is out of range, with the range.
    """
    checks: list[tuple[str, int | None, int, int]] = [
        ("--drafts", deployment.drafts, 0, MAX_DRAFTS),
        ("--tokens", deployment.tokens, 1, MAX_TOKENS),
        ("--tp", deployment.tp, 1, 1024),
        ("--unit", deployment.unit, 1, 65536),
        ("--mtp-layers", deployment.mtp_layers, 0, 64),
        ("--max-model-len", deployment.max_model_len, 1, MAX_TOKENS),
        ("--max-num-seqs", deployment.max_num_seqs, 1, 1_000_000),
        ("--max-num-batched-tokens", deployment.max_num_batched_tokens, 1, MAX_TOKENS),
        ("num-gpu-blocks-override", deployment.pool_blocks, 1, 10**9),
    ]
    for name, value, low, high in checks:
        if value is not None:
            check_range(name, value, low, high)
    if deployment.ep and not deployment.target.num_experts:
        if deployment.target.num_experts is None:
            raise PlanError(
                f"{deployment.target.name}: num_experts is not in its config, so --ep "
                "can't be checked; leave --ep out, it changes none of these numbers"
            )
        raise IllegalValue(
            f"{deployment.target.name} has no experts, so vLLM refuses expert "
            "parallelism; leave --ep out"
        )


def make_plan(deployment: Deployment, find: Callable[[Plan], list[Finding]] | None = None) -> Plan:
    """The plan of a deployment.

    Args:
        deployment: what was chosen.
        find: writes the findings from the numbers (findings.py).

    Raises:
        PlanError: the deployment can't exist.
    """
    check_deployment(deployment)
    native = _side(deployment, replay=False)
    replay = None if deployment.gaudi else _side(deployment, replay=True)
    served = replay if deployment.serves_replay and replay is not None else native
    sweep = _sweep(deployment)
    gaudi = _gaudi_view(deployment, layout_of(deployment)) if deployment.gaudi else None
    budget = None
    if deployment.max_num_seqs is not None and deployment.caching:
        tokens = arithmetic.token_budget(
            served.block_tokens,
            max_num_seqs=deployment.max_num_seqs,
            drafts=deployment.drafts,
            asked=deployment.max_num_batched_tokens,
            unit=BUDGET_UNIT if deployment.gaudi else 1,
        )
        budget = BudgetView(
            decode_tokens=tokens.decode_tokens,
            least=tokens.least,
            recommended=tokens.recommended,
            blocks_per_step=tokens.k,
            multiple_of=tokens.unit,
        )
    if gaudi is not None:
        slots = gaudi.slots
    else:
        slots = served.capacity.state_slots if served.capacity else None
    plan = Plan(
        deployment=deployment,
        native=native,
        replay=replay,
        serving="replay" if served is replay else "native",
        gaudi=gaudi,
        budget=budget,
        outweighing_drafts=arithmetic.outweighing_drafts(
            [
                (
                    point.drafts,
                    round(point.native_state_mib * MIB),
                    round(point.native_kv_mib * MIB),
                )
                for point in sweep
            ]
        ),
        sweep=sweep,
        expect=Expect(
            block_tokens=served.block_tokens,
            state_copies=served.state_copies,
            state_mib_per_request=served.state_mib_per_request,
            slots=slots,
            cached_tokens_multiple_of=served.cached_tokens_multiple_of,
        ),
    )
    if find is not None:
        plan = plan.model_copy(update={"findings": find(plan)})
    return plan
