"""What the numbers of a plan mean for the operator, in plain words with what to do about it.

An error means that the deployment would not start, or would not do what was asked. A warning
means that it would be slow or waste memory. A note explains a number.
"""

from __future__ import annotations

from vllm_gaudi_ext.gdn.refusals import BUDGET_UNIT
from vllm_gaudi_ext.planner.arithmetic import GIB, MIB
from vllm_gaudi_ext.planner.plan import (
    HIDDEN_STATE_METHODS,
    READS_SSM_DTYPE,
    WHOLE_BLOCK_BACKENDS,
    Deployment,
    Finding,
    Plan,
    Side,
    layout_of,
    reads_ssm_dtype,
)

# Drafting methods of vLLM that keep no KV cache.
METHODS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "custom_class", "medusa")

# Padded accounting that costs more than this over the ideal is worth saying.
PADDING_WORTH_SAYING = 1.02


def _error(code: str, text: str) -> Finding:
    return Finding(level="error", code=code, text=text)


def _warning(code: str, text: str) -> Finding:
    return Finding(level="warning", code=code, text=text)


def _note(code: str, text: str) -> Finding:
    return Finding(level="note", code=code, text=text)


def _length(deployment: Deployment) -> list[Finding]:
    limit = deployment.target.max_position_embeddings
    if limit is not None and deployment.tokens > limit:
        return [
            _error(
                "tokens-above-model",
                f"{deployment.tokens} tokens a request exceed the model's {limit} positions; "
                "lower --tokens (and --max-model-len).",
            )
        ]
    return []


def _budget(plan: Plan) -> list[Finding]:
    deployment = plan.deployment
    if not deployment.caching:
        return []
    block = plan.served.block_tokens
    rows = 1 + deployment.drafts
    each = "" if rows == 1 else f" * {rows} rows"
    if plan.budget is None:
        unit = f", rounded up to {BUDGET_UNIT}" if deployment.gaudi else ""
        return [
            _note(
                "budget-rule",
                f"set --max-num-batched-tokens to k*{block} + max-num-seqs{each}{unit}: decodes "
                "spend the budget first, and prefill goes in whole blocks. Pass --max-num-seqs "
                "for the figure.",
            )
        ]
    budget, asked = plan.budget, deployment.max_num_batched_tokens
    advice = (
        f"--max-num-batched-tokens {budget.recommended} = {budget.blocks_per_step}*{block} + "
        f"{budget.decode_tokens}"
    )
    if budget.multiple_of > 1:
        advice += f", rounded up to {budget.multiple_of}"
    if asked is None:
        return [
            _note(
                "budget",
                f"{advice} (max-num-seqs{each}) loses nothing: decodes spend the budget first, "
                "and prefill goes in whole blocks.",
            )
        ]
    found: list[Finding] = []
    if asked % budget.multiple_of:
        found.append(
            _error(
                "budget-not-a-multiple",
                f"vllm-gaudi stops at --max-num-batched-tokens {asked}: it is no multiple of "
                f"{budget.multiple_of}; use {advice}.",
            )
        )
    left = asked - budget.decode_tokens
    if asked < block:
        found.append(
            _error(
                "budget-below-block",
                f"vLLM refuses --max-num-batched-tokens {asked} with prefix caching: it is below "
                f"the block of {block} tokens; use {advice}.",
            )
        )
    elif left < block:
        found.append(
            _error(
                "budget-starves-prefill",
                f"--max-num-batched-tokens {asked} leaves {max(left, 0)} tokens after a full batch "
                f"of decodes ({budget.decode_tokens}), less than one block of {block}: prompts "
                f"longer than a block would wait until decodes finish; use at least "
                f"{budget.least}, or {advice}.",
            )
        )
    elif left % block >= budget.multiple_of:
        found.append(
            _note(
                "budget-remainder",
                f"with all sequences decoding, {left % block} of --max-num-batched-tokens {asked} "
                f"go unused in a prefill step; {advice} loses nothing.",
            )
        )
    return found


def _hits(plan: Plan) -> list[Finding]:
    deployment, unit = plan.deployment, plan.served.cached_tokens_multiple_of
    if unit is None:
        text = "prefix caching is off, so nothing is cached"
        if deployment.serves_replay:
            text = "prefix caching is off, as ReplaySSM asks for, so nothing is cached"
        elif not deployment.gaudi:
            text += (
                "; vLLM turns it on by default for these models, which holds one more state copy "
                "a request (pass --prefix-caching to see it)"
            )
        return [_note("caching-off", text + ".")]
    if deployment.serves_replay:
        return [
            _warning(
                "replay-caching",
                "prefix caching is on, and ReplaySSM refuses to start with it yet: pass "
                "--no-enable-prefix-caching (here --no-prefix-caching), or set replay to 'off'.",
            )
        ]
    shortest = unit
    text = f"cached tokens come in multiples of {unit}; prompts shorter than that never hit"
    if deployment.drafts and deployment.method in HIDDEN_STATE_METHODS:
        shortest = 2 * unit
        text = (
            f"cached tokens come in multiples of {unit}, and with {deployment.method} drafts vLLM "
            f"leaves the last matching block out: prompts shorter than {shortest} never hit"
        )
    if deployment.tokens <= shortest:
        return [
            _warning(
                "never-hits",
                f"{text}, and requests of {deployment.tokens} tokens are that short.",
            )
        ]
    return [_note("hit-unit", text + ".")]


def _capacity(plan: Plan) -> list[Finding]:
    deployment, served = plan.deployment, plan.served
    holds = served.capacity
    if holds is None:
        return [
            _note(
                "pool-unknown",
                "the KV-cache pool is not known, so neither are the requests that fit: pass "
                "--pool-gib (vLLM logs it as available KV cache memory), or --non-kv-gib with "
                "the weights, activations and graphs of one card.",
            )
        ]
    found: list[Finding] = []
    seqs = deployment.max_num_seqs
    if holds.requests < 1:
        found.append(
            _error(
                "pool-too-small",
                f"one request of {deployment.tokens} tokens needs "
                f"{served.request_mib_padded:.1f} MiB and the pool holds "
                f"{holds.pool_blocks} blocks of {served.block_mib:.1f} MiB: shorten requests, "
                "raise memory, or use more cards.",
            )
        )
    if seqs is None:
        return found
    if not deployment.gaudi and seqs > holds.pool_blocks:
        found.append(
            _error(
                "seqs-above-blocks",
                f"vLLM refuses --max-num-seqs {seqs} with full CUDA graphs: each sequence needs a "
                f"state block and the pool has {holds.pool_blocks}; lower it to at most that.",
            )
        )
    elif seqs > holds.state_slots:
        found.append(
            _warning(
                "seqs-above-slots",
                f"--max-num-seqs {seqs} is above the {holds.state_slots} sequences whose states "
                f"fit in the pool at all: the rest always queue; lower it to at most "
                f"{holds.state_slots}.",
            )
        )
    elif seqs > holds.requests:
        found.append(
            _warning(
                "seqs-above-fit",
                f"--max-num-seqs {seqs} is above the {holds.requests} requests of "
                f"{deployment.tokens} tokens that fit: at that length vLLM queues or preempts "
                "the rest.",
            )
        )
    return found


def _gaudi(plan: Plan) -> list[Finding]:
    deployment, view = plan.deployment, plan.gaudi
    if view is None:
        return []
    found: list[Finding] = []
    if deployment.drafts:
        found.append(
            _error(
                "gaudi-drafts",
                "speculative decoding of GDN hybrids is refused on Gaudi with prefix caching; "
                "leave --drafts out.",
            )
            if deployment.caching
            else _warning(
                "gaudi-drafts",
                "speculative decoding of GDN hybrids on Gaudi was not run for this project; the "
                "figures are vLLM's arithmetic.",
            )
        )
    if view.slot_mib is not None and deployment.max_num_seqs is not None:
        text = (
            f"{deployment.max_num_seqs} sequences hold {view.slot_rows} slot rows, "
            f"{view.slot_mib / 1024:.2f} GiB outside of the pool, which vllm-gaudi does not "
            "subtract from it"
        )
        spare = deployment.spare_bytes
        if spare is not None and view.slot_mib * MIB > spare:
            found.append(
                _error(
                    "slots-do-not-fit",
                    f"{text}; only {spare / GIB:.2f} GiB stay free beside the pool: lower "
                    "--max-num-seqs or --utilisation.",
                )
            )
        else:
            found.append(_note("slots-outside-pool", f"{text}; leave room for it."))
    else:
        found.append(
            _note(
                "slots-rule",
                f"each sequence of --max-num-seqs holds {view.slot_mib_per_request:.1f} MiB of "
                "slots outside of the pool; pass --max-num-seqs for the sum.",
            )
        )
    found.append(
        _note(
            "noncompact-factor",
            f"without compact slots (VLLM_COMPACT_GDN=0) the pool would shrink to "
            f"{view.noncompact_pool_factor:.3f} of its size.",
        )
    )
    return found


def _drafts(plan: Plan) -> list[Finding]:
    deployment = plan.deployment
    found: list[Finding] = []
    # Advice to turn ReplaySSM on, and no word to those who have.
    advised = not deployment.gaudi and not deployment.serves_replay
    if advised and plan.outweighing_drafts is not None:
        first = plan.outweighing_drafts
        text = (
            f"from {first} draft tokens on, vLLM's state copies take more than the KV cache of a "
            f"{deployment.tokens}-token request"
        )
        if first == 0:
            text = (
                f"one state already takes more than the KV cache of a {deployment.tokens}-token "
                "request"
            )
        found.append(
            _warning("copies-outweigh-kv", f"{text}; here they are {_share(plan):.0f} % of it.")
            if deployment.drafts and deployment.drafts >= first
            else _note("copies-outweigh-kv", text + ".")
        )
    drafts_alone = deployment.drafts and deployment.drafter is None and not deployment.mtp_layers
    if drafts_alone and deployment.method not in METHODS_WITHOUT_KV:
        found.append(
            _note(
                "no-drafter",
                "no drafter was given, so no KV cache of one is counted (right for n-gram and "
                "suffix drafts); pass --drafter.",
            )
        )
    drafter = deployment.drafter
    if drafter is not None and drafter.sliding_layers and deployment.in_flight is None:
        found.append(
            _note(
                "window-counted-whole",
                f"how much of {drafter.name}'s window layers stays in memory depends on "
                "--max-num-batched-tokens; without it they count the whole request, the most "
                "they can take.",
            )
        )
    if drafter is not None:
        for key, why in drafter.inferred.items():
            found.append(_note("drafter-inferred", f"{drafter.name}: {key} is {why}."))
        if drafter.window_ignored:
            found.append(
                _warning(
                    "window-ignored",
                    f"{drafter.name}: layers slide but use_sliding_window is not true, so "
                    "transformers drops sliding_window and vLLM refuses the drafter; set it, or "
                    "dflash_config.swa_window_size.",
                )
            )
        block = drafter.block_size
        if block is not None and deployment.drafts > block - 1:
            found.append(
                _note(
                    "drafts-above-block",
                    f"{drafter.name} proposes blocks of {block}, so {block - 1} drafts at a time; "
                    f"{deployment.drafts} were asked.",
                )
            )
    if plan.replay is not None and deployment.drafts:
        saved = plan.native.request_mib_padded / plan.replay.request_mib_padded
        text = (
            f"with ReplaySSM a request keeps {plan.replay.state_mib_per_request:.0f} MiB of state "
            f"instead of {plan.native.state_mib_per_request:.0f}: {saved:.2f}x as many requests "
            "in the same pool"
        )
        found.append(_note("replay", text + _who_serves(deployment)))
    return found


def _who_serves(deployment: Deployment) -> str:
    """The end of a sentence on ReplaySSM: whether it serves, and whose figures are judged."""
    if deployment.serves_replay:
        return "; it serves, and these findings are about it."
    if not deployment.wants_replay:
        return "."
    refused = ", once prefix caching is off" if deployment.caching else ""
    return (
        "; it would serve where vLLM loads this package (replay is 'auto': start with "
        f"VLLM_PLUGINS=gaudi_ext{refused}), and the other findings are stock vLLM's."
    )


def _share(plan: Plan) -> float:
    """State copies as a percentage of a request's memory."""
    return 100 * plan.native.state_mib_per_request / plan.native.request_mib_ideal


def _layout(plan: Plan) -> list[Finding]:
    deployment, side = plan.deployment, plan.served
    found: list[Finding] = []
    target_block = next(
        group.block_tokens
        for group in side.groups
        if group.kind == "full" and group.drafter_layers < group.layers
    )
    if target_block is not None and target_block > side.block_tokens:
        found.append(
            _warning(
                "drafter-sets-page",
                f"the drafter needs more bytes a token than the target, so every page grows to "
                f"{side.page_mib:.2f} MiB and each state is padded to it "
                f"({side.padding_percent:.0f} % unused); the target's own block becomes "
                f"{target_block} tokens.",
            )
        )
    if side.group_size == 1:
        found.append(
            _warning(
                "group-explosion",
                f"a kind of layer that occurs once makes {side.group_count} KV-cache groups of one "
                "layer: nothing is padded, but metadata is built for each of them every step.",
            )
        )
    over = side.request_mib_padded / side.request_mib_ideal
    if over > PADDING_WORTH_SAYING:
        found.append(
            _note(
                "group-padding",
                f"vLLM's {_groups_of(side)} cost {100 * (over - 1):.1f} % more than the layers "
                "need: a group with fewer layers still takes whole blocks.",
            )
        )
    found += _split_blocks(deployment)
    if side.padded_attention:
        found.append(
            _warning(
                "padded-attention",
                "an attention page does not divide the largest page: vLLM pads it if the backend "
                "reads KV by the block's stride and refuses to start otherwise.",
            )
        )
    if deployment.platform.name == "b200" and deployment.unit == deployment.platform.unit:
        found.append(
            _note(
                "unit",
                f"block unit {deployment.unit}: {deployment.platform.unit_source}; pass --unit 16 "
                "for 0.26.",
            )
        )
    return found


def _groups_of(side: Side) -> str:
    if side.packed:
        return f"packed blocks of {side.block_mib:.2f} MiB"
    return f"groups of {side.group_size} layers"


def _split_blocks(deployment: Deployment) -> list[Finding]:
    """What a choice of attention backend costs ReplaySSM."""
    splitting = deployment.splitting_backends
    free = deployment.model_copy(update={"attention_backends": ()})
    if not splitting or not deployment.wants_replay or not layout_of(free, replay=True).packed:
        return []
    return [
        _note(
            "backend-splits-blocks",
            f"ReplaySSM's pages are not packed with the attention backend {', '.join(splitting)}, "
            f"and more requests fit where they are: use {' or '.join(WHOLE_BLOCK_BACKENDS)}.",
        )
    ]


def _parallel(plan: Plan) -> list[Finding]:
    deployment, target = plan.deployment, plan.deployment.target
    found: list[Finding] = []
    if deployment.tp > 1:
        text = f"figures are of one of {deployment.tp} cards; the state is split by heads"
        if deployment.tp > target.num_key_value_heads:
            text += (
                f", but {target.num_key_value_heads} KV heads are replicated, so KV memory stops "
                f"shrinking at {target.num_key_value_heads} cards while the block gets smaller"
            )
        found.append(_note("tensor-parallel", text + "."))
    if target.num_experts:
        text = (
            f"{target.num_experts} experts change the weights only: the state and the KV cache are "
            "those of a dense model with these heads"
        )
        if deployment.ep:
            text += "; expert parallelism spreads the experts and changes neither"
        found.append(_note("experts", text + "."))
    return found


def _dtypes(plan: Plan) -> list[Finding]:
    deployment, target = plan.deployment, plan.deployment.target
    found: list[Finding] = []
    if deployment.state_dtype != "float32":
        asked = target.mamba_ssm_dtype
        if asked and not reads_ssm_dtype(target):
            why = (
                f"vLLM reads mamba_ssm_dtype only from {' and '.join(READS_SSM_DTYPE)}, so this "
                f"model's {asked} is ignored"
            )
        else:
            why = f"the state would be kept in {deployment.state_dtype}, which drifts"
        found.append(
            _warning(
                "state-dtype",
                f"{why}; pass --mamba-ssm-cache-dtype float32 (here --state-dtype float32) "
                "(vllm#34489).",
            )
        )
    if target.quantised_kv and deployment.kv_dtype == deployment.dtype:
        found.append(
            _warning(
                "quantised-kv",
                f"the checkpoint asks for a quantised KV cache ({target.quantised_kv}); if the "
                "server uses it, pass --kv-dtype fp8: the block roughly doubles.",
            )
        )
    if target.inferred:
        keys = ", ".join(f"{key} ({why})" for key, why in target.inferred.items())
        found.append(_note("model-inferred", f"not read from this model's own config: {keys}."))
    return found


def _assumed(plan: Plan) -> list[Finding]:
    return [
        _note("recipe-reading", f"assumed, as the recipe beside the file reads it: {text}.")
        for text in plan.deployment.assumed
    ]


def findings(plan: Plan) -> list[Finding]:
    """All findings of a plan, errors first."""
    found = [
        *_length(plan.deployment),
        *_capacity(plan),
        *_budget(plan),
        *_hits(plan),
        *_gaudi(plan),
        *_drafts(plan),
        *_layout(plan),
        *_parallel(plan),
        *_dtypes(plan),
        *_assumed(plan),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])
