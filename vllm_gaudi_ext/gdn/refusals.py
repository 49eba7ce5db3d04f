"""Every precondition of prefix caching on GDN slots, checked at once, on plain values.

Written once: the engine checks what it found (runner.py and platform.py gather the facts), and
`gaudi-ext preflight` checks what a serve.yaml asks for. Each problem says what was found and which
flag mends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ext import problems as problems_room
from vllm_gaudi_ext.problems import Problem

if TYPE_CHECKING:
    from vllm_gaudi_ext.config import ExtOptions

# vllm-gaudi 0.26.0 (extension/bucketing/common.py) stops at a budget that is no multiple of the
# Mamba chunk size, which is 128 unless a model names its own.
BUDGET_UNIT = 128


@dataclass(frozen=True, kw_only=True)
class ServingFacts:
    """What the configuration says. Known before the model is loaded, but for `block_tokens`.

    Args:
        contiguous_pa: contiguous paged attention is on.
        compact_gdn: one slot a request (vllm-gaudi's default).
        speculative: the method of speculative decoding, None without.
        defragmenter: vllm-gaudi's KV defragmenter is on.
        prefix_match_unit: tokens a prefix-cache key covers, None for whole blocks.
        mamba_opt_ins: vLLM's opt-in Mamba prefix features that are on, by name.
        kv_connector: the KV connector, None without.
        kv_offload: the KV offload backend, None without.
        pipeline_parallel, context_parallel: sizes; 1 means off.
        pooling: a pooling model.
        max_num_batched_tokens: the token budget of a step.
        max_num_seqs: the largest number of running requests.
        disable_chunked_mm_input: images may not be cut, so a chunk may have to end before one.
        budget_unit: what vllm-gaudi wants the budget to be a multiple of, in tokens.
        long_prefill_token_threshold: the longest chunk of a long prefill, 0 for no limit.
        foreign_worker, foreign_scheduler: a worker or scheduler class that is not ours, else None.
        block_tokens: B, None while it is not known yet.
        mamba_cache_mode: None while it is not known yet.
    """

    contiguous_pa: bool
    compact_gdn: bool
    speculative: str | None
    defragmenter: bool
    prefix_match_unit: int | None
    mamba_opt_ins: Sequence[str]
    kv_connector: str | None
    kv_offload: str | None
    pipeline_parallel: int
    context_parallel: int
    pooling: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    disable_chunked_mm_input: bool = False
    budget_unit: int = BUDGET_UNIT
    foreign_worker: str | None = None
    foreign_scheduler: str | None = None
    block_tokens: int | None = None
    mamba_cache_mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutFacts:
    """What the KV-cache configuration and the allocated tensors say.

    Args:
        group_block_tokens: block size of every cache group, in tokens.
        attention_groups: number of attention groups.
        foreign_groups: cache groups that are neither full attention nor GDN, by kind.
        kernel_block_tokens: tokens of a block of the attention kernel.
        pairing: why layers could not be paired, None when they were.
        state_bytes, page_bytes: one layer's GDN state, and the page that must hold it.
        row_remainder_bytes: bytes of a state or page row beyond a whole number of int32.
        padding_block: the kernel block that padding is sent to.
        pool_kernel_blocks: kernel blocks of the pool, N * B / kernel_block_tokens.
        shared_layers: layers that share another layer's KV cache.
        speculative_blocks: state blocks per request for drafts or prefill checkpoints.
    """

    group_block_tokens: Sequence[int]
    attention_groups: int
    foreign_groups: Sequence[str]
    kernel_block_tokens: int
    pairing: str | None
    state_bytes: int | None
    page_bytes: int | None
    row_remainder_bytes: int
    padding_block: int
    pool_kernel_blocks: int
    shared_layers: Sequence[str]
    speculative_blocks: int


CACHING_OFF = "--no-enable-prefix-caching"


def config_problems(facts: ServingFacts) -> list[Problem]:
    """Every problem that the configuration shows; empty when there is none."""
    found: list[Problem] = []

    def refuse(condition: bool, what: str, fix: str) -> None:
        if condition:
            found.append(Problem(what, fix))

    refuse(
        facts.contiguous_pa,
        "VLLM_CONTIGUOUS_PA is on, and vllm-gaudi then turns prefix caching off without an error",
        f"VLLM_CONTIGUOUS_PA=false, or {CACHING_OFF}",
    )
    refuse(
        not facts.compact_gdn,
        "compact GDN is off (VLLM_COMPACT_GDN or VLLM_USE_HYBRID_CACHE), so states lie in blocks "
        "and not in slots",
        "VLLM_COMPACT_GDN=1 and VLLM_USE_HYBRID_CACHE=1, or leave both unset",
    )
    refuse(
        facts.speculative is not None,
        f"speculative decoding is on (method {facts.speculative!r}): a rejected draft would leave "
        "its state in a checkpoint",
        f"remove --speculative-config, or {CACHING_OFF}",
    )
    refuse(
        facts.defragmenter,
        "the KV defragmenter is on and moves blocks under their checkpoints",
        "unset VLLM_DEFRAG (it follows VLLM_CONTIGUOUS_PA: set that to false)",
    )
    refuse(
        None not in (unit := facts.prefix_match_unit, facts.block_tokens)
        and unit != facts.block_tokens,
        f"prefix_match_unit is {facts.prefix_match_unit} tokens: hits inside a block have no "
        "checkpoint",
        "remove --prefix-match-unit",
    )
    for name in facts.mamba_opt_ins:
        refuse(True, f"vLLM's Mamba prefix feature {name} is on", f"switch {name} off")
    refuse(
        facts.kv_connector is not None,
        f"KV transfer is on (connector {facts.kv_connector!r}): it moves pages, not slots",
        f"remove --kv-transfer-config, or {CACHING_OFF}",
    )
    refuse(
        facts.kv_offload is not None,
        f"KV offload is on (backend {facts.kv_offload!r}): it moves pages, not slots",
        f"remove --kv-offloading-size, or {CACHING_OFF}",
    )
    refuse(
        facts.pipeline_parallel > 1,
        f"pipeline parallelism is {facts.pipeline_parallel}",
        "--pipeline-parallel-size 1 (use --tensor-parallel-size)",
    )
    refuse(
        facts.context_parallel > 1,
        f"context parallelism is {facts.context_parallel}",
        "remove --decode-context-parallel-size and --prefill-context-parallel-size",
    )
    refuse(
        facts.pooling,
        "a pooling model ends its requests before any checkpoint is used",
        CACHING_OFF,
    )
    refuse(
        facts.disable_chunked_mm_input,
        "chunked multimodal input is off: a chunk that must end before an image may never reach a "
        "block boundary",
        "remove --disable-chunked-mm-input",
    )
    refuse(
        facts.foreign_worker is not None,
        f"the worker class is {facts.foreign_worker!r}, not this package's",
        "remove --worker-cls",
    )
    refuse(
        facts.foreign_scheduler is not None,
        f"the scheduler class is {facts.foreign_scheduler!r}, not this package's",
        "remove --scheduler-cls",
    )
    refuse(
        facts.mamba_cache_mode is not None and facts.mamba_cache_mode != "align",
        f"the mamba cache mode is {facts.mamba_cache_mode!r}; checkpoints need 'align'",
        "remove --mamba-cache-mode",
    )
    if facts.block_tokens is not None:
        found += _budget_problems(facts, facts.block_tokens)
    return found


def smallest_budget(facts: ServingFacts, block_tokens: int) -> int:
    """The smallest legal token budget: a block beside one token for each sequence."""
    needed = block_tokens + facts.max_num_seqs
    return -(-needed // facts.budget_unit) * facts.budget_unit


def _budget_problems(facts: ServingFacts, block_tokens: int) -> list[Problem]:
    found = []
    left = facts.max_num_batched_tokens - facts.max_num_seqs
    if left < block_tokens:
        found.append(
            Problem(
                f"a step's budget of {facts.max_num_batched_tokens} tokens leaves {left} after one "
                f"for each of {facts.max_num_seqs} sequences, less than a block of B="
                f"{block_tokens}: prefill would starve, since its chunks end on block boundaries",
                f"--max-num-batched-tokens {smallest_budget(facts, block_tokens)} or more "
                f"(k*B + max-num-seqs, rounded up to a multiple of {facts.budget_unit}), or a "
                "smaller --max-num-seqs",
            )
        )
    if 0 < facts.long_prefill_token_threshold < block_tokens:
        found.append(
            Problem(
                f"long_prefill_token_threshold is {facts.long_prefill_token_threshold} tokens, "
                f"less than a block of B={block_tokens}: long prompts would never advance",
                f"--long-prefill-token-threshold 0, or at least {block_tokens}",
            )
        )
    return found


def layout_problems(facts: LayoutFacts) -> list[Problem]:
    """Every problem that the KV-cache layout shows; empty when there is none."""
    found: list[Problem] = []

    def refuse(condition: bool, what: str, fix: str) -> None:
        if condition:
            found.append(Problem(what, fix))

    sizes = sorted(set(facts.group_block_tokens))
    refuse(
        len(sizes) != 1,
        f"the cache groups have block sizes of {sizes} tokens",
        "remove --block-size and --mamba-block-size, so that vLLM aligns them",
    )
    refuse(
        facts.attention_groups != 1,
        f"the KV cache has {facts.attention_groups} attention groups; checkpoints need exactly one",
        CACHING_OFF,
    )
    refuse(
        bool(facts.foreign_groups),
        f"the KV cache has groups that are neither full attention nor GDN: "
        f"{', '.join(facts.foreign_groups)}",
        CACHING_OFF,
    )
    refuse(facts.pairing is not None, str(facts.pairing), CACHING_OFF)
    if facts.state_bytes is not None and facts.page_bytes is not None:
        refuse(
            facts.state_bytes > facts.page_bytes,
            f"a GDN state takes {facts.state_bytes} bytes, its page has {facts.page_bytes}",
            "remove --block-size, so that vLLM makes the page large enough",
        )
    refuse(
        facts.row_remainder_bytes != 0,
        f"a state or page row has {facts.row_remainder_bytes} bytes beyond whole int32",
        CACHING_OFF,
    )
    refuse(
        any(size % facts.kernel_block_tokens for size in sizes),
        f"block sizes {sizes} are no multiples of the kernel block of {facts.kernel_block_tokens}",
        "remove --block-size",
    )
    refuse(
        facts.padding_block < facts.pool_kernel_blocks,
        f"decode padding goes to kernel block {facts.padding_block}, inside the pool of "
        f"{facts.pool_kernel_blocks}",
        CACHING_OFF,
    )
    refuse(
        bool(facts.shared_layers),
        f"layers share another layer's KV cache: {', '.join(facts.shared_layers)}",
        CACHING_OFF,
    )
    refuse(
        facts.speculative_blocks > 0,
        f"requests hold {facts.speculative_blocks} extra state blocks (drafts or prefill "
        "checkpoints)",
        f"remove --speculative-config, or {CACHING_OFF}",
    )
    return found


def option_problems(options: ExtOptions) -> list[Problem]:
    """Options of this package that Gaudi has nothing for."""
    if options.replay == "on":
        return [
            Problem(
                "replay is 'on', and ReplaySSM is not served on Gaudi",
                "set replay to 'auto', or leave it out of --additional-config",
            )
        ]
    return []


def refuse_options(problems: Sequence[Problem]) -> None:
    """Raise one RuntimeError for `option_problems`; return where there is none."""
    problems_room.refuse("serve as --additional-config asks", problems)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one RuntimeError that lists every problem with its fix; return where there is none."""
    problems_room.refuse("serve with prefix caching", problems)
