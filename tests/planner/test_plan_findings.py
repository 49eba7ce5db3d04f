"""What the findings say, at the numbers where they begin and end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_helpers import DRAFTER_4B, codes, plan_of

from vllm_gaudi_ext.gdn.refusals import ServingFacts, config_problems, smallest_budget
from vllm_gaudi_ext.planner.arithmetic import MIB, token_budget
from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.plan import Plan, attention_layers


def text_of(plan: Plan, code: str) -> str:
    return next(finding.text for finding in plan.findings if finding.code == code)


@pytest.mark.parametrize(
    ("budget", "level", "code"),
    [
        (895, "error", "budget-below-block"),
        (896, "error", "budget-starves-prefill"),
        (896 + 31, "error", "budget-starves-prefill"),
        (896 + 32, None, None),
        (896 + 33, "note", "budget-remainder"),
        (2 * 896 + 32, None, None),
    ],
)
def test_a_budget_must_leave_a_block_after_the_decodes(
    budget: int, level: str | None, code: str | None
) -> None:
    plan = plan_of(
        "Qwen3.5-27B",
        platform="b200",
        caching=True,
        max_num_seqs=32,
        max_num_batched_tokens=budget,
    )
    found = {finding.code: finding.level for finding in plan.findings if "budget" in finding.code}
    assert found == ({} if code is None else {code: level})


@pytest.mark.parametrize(
    ("budget", "level", "code"),
    [
        (768, "error", "budget-below-block"),
        (896, "error", "budget-starves-prefill"),
        (1000, "error", "budget-not-a-multiple"),
        (1024, None, None),
        (1152, "note", "budget-remainder"),
        (1920, None, None),
    ],
)
def test_a_budget_on_gaudi_is_a_multiple_of_128_too(
    budget: int, level: str | None, code: str | None
) -> None:
    plan = plan_of("Qwen3.5-27B", platform="gaudi3", max_num_seqs=32, max_num_batched_tokens=budget)
    found = {finding.code: finding.level for finding in plan.findings if "budget" in finding.code}
    assert found == ({} if code is None else {code: level})


def test_the_recommended_budget_is_whole_blocks_plus_the_sequences() -> None:
    plan = plan_of("Qwen3.5-27B", platform="b200", caching=True, max_num_seqs=32)
    assert plan.budget is not None
    assert plan.budget.recommended == 3 * 896 + 32
    assert plan.budget.least == 896 + 32


@pytest.mark.parametrize("model", ["Qwen3.5-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B"])
@pytest.mark.parametrize("seqs", [1, 32, 128, 129])
def test_the_least_budget_on_gaudi_is_the_one_that_the_engine_asks_for(
    model: str, seqs: int
) -> None:
    plan = plan_of(model, platform="gaudi3", max_num_seqs=seqs)
    assert plan.budget is not None
    facts = ServingFacts(
        contiguous_pa=False,
        compact_gdn=True,
        speculative=None,
        defragmenter=False,
        prefix_match_unit=None,
        mamba_opt_ins=(),
        kv_connector=None,
        kv_offload=None,
        pipeline_parallel=1,
        context_parallel=1,
        pooling=False,
        max_num_batched_tokens=plan.budget.least,
        max_num_seqs=seqs,
        long_prefill_token_threshold=0,
        block_tokens=plan.native.block_tokens,
    )
    assert plan.budget.least == smallest_budget(facts, plan.native.block_tokens)
    assert config_problems(facts) == []
    assert config_problems(replace(facts, max_num_batched_tokens=plan.budget.recommended)) == []


def test_decodes_with_drafts_spend_a_row_for_each_draft() -> None:
    budget = token_budget(592, max_num_seqs=64, drafts=15)
    assert budget.decode_tokens == 64 * 16
    assert (budget.recommended - budget.decode_tokens) % 592 == 0


def test_the_recommended_budget_draws_no_finding() -> None:
    first = plan_of("Qwen3.6-35B-A3B", platform="gaudi2", max_num_seqs=24)
    assert first.budget is not None
    again = plan_of(
        "Qwen3.6-35B-A3B",
        platform="gaudi2",
        max_num_seqs=24,
        max_num_batched_tokens=first.budget.recommended,
    )
    assert not any(code.startswith("budget") for code in codes(again))


def test_prompts_shorter_than_a_block_never_hit() -> None:
    assert "multiples of 896" in text_of(plan_of("Qwen3.5-27B", platform="gaudi3"), "hit-unit")
    short = plan_of("Qwen3.5-27B", platform="gaudi3", tokens=896)
    assert "never-hits" in codes(short, "warning")
    assert "never-hits" not in codes(plan_of("Qwen3.5-27B", platform="gaudi3", tokens=897))


def test_a_window_is_counted_whole_while_the_budget_is_unknown() -> None:
    options = {
        "platform": "h200",
        "drafter": "z-lab/Qwen3.6-27B-DFlash",
        "drafts": 15,
        "tokens": 65536,
    }
    whole = plan_of("Qwen3.6-27B", **options)
    held = plan_of("Qwen3.6-27B", max_num_batched_tokens=4096, **options)
    assert "window-counted-whole" in codes(whole, "note")
    assert "window-counted-whole" not in codes(held)
    # Two batches of 4,096 in flight and the 2,047 tokens before them, in blocks of 864: 12 and one.
    blocks = (-(-65536 // 864) + 1) - (-(-(2047 + 2 * 4096) // 864) + 1)
    saved = whole.native.drafter_kv_mib_per_request - held.native.drafter_kv_mib_per_request
    assert saved == pytest.approx(blocks * 4 * whole.native.page_mib)


def test_hidden_state_drafts_cost_the_last_block_of_a_hit() -> None:
    """vLLM prunes the last matching block for mtp and dflash, not for n-grams."""
    options = {"platform": "h200", "caching": True, "drafts": 15}
    dflash = plan_of("Qwen3.5-4B", drafter=DRAFTER_4B, **options)
    assert "shorter than 1184 never hit" in text_of(dflash, "hit-unit")
    ngram = plan_of("Qwen3.5-4B", method="ngram", **options)
    assert "shorter than that never hit" in text_of(ngram, "hit-unit")


def test_caching_holds_one_more_copy() -> None:
    off = plan_of("Qwen3.5-4B", platform="h200", drafts=15)
    on = plan_of("Qwen3.5-4B", platform="h200", drafts=15, caching=True)
    assert (off.native.state_copies, on.native.state_copies) == (16, 17)
    assert off.native.cached_tokens_multiple_of is None
    assert "caching-off" in codes(off, "note")


def test_cached_tokens_unit_is_common_to_uneven_blocks() -> None:
    plan = plan_of(
        "Qwen3.5-35B-A3B",
        platform="b200",
        caching=True,
        drafts=15,
        drafter="z-lab/Qwen3.5-35B-A3B-DFlash",
        overrides=DrafterOverrides(layers=6, kv_heads=8, head_dim=128, sliding_layers=0),
    )
    assert plan.native.block_tokens == 1280
    assert plan.native.cached_tokens_multiple_of == 2560


@pytest.mark.parametrize(
    ("seqs", "level", "code"),
    [(77, None, None), (78, "warning", "seqs-above-fit"), (119, "warning", "seqs-above-slots")],
)
def test_more_sequences_than_fit_is_told_in_two_steps(
    seqs: int, level: str | None, code: str | None
) -> None:
    plan = plan_of(
        "Qwen3.5-4B",
        platform="h200",
        drafter=DRAFTER_4B,
        drafts=15,
        pool_gib=106.8,
        max_num_seqs=seqs,
    )
    found = {f.code: f.level for f in plan.findings if f.code.startswith("seqs")}
    assert found == ({} if code is None else {code: level})


def test_more_sequences_than_blocks_is_refused_as_vllm_refuses_it() -> None:
    options = {"platform": "h200", "pool_blocks": 100}
    assert "seqs-above-blocks" in codes(plan_of("Qwen3.5-4B", max_num_seqs=101, **options), "error")
    assert "seqs-above-blocks" not in codes(plan_of("Qwen3.5-4B", max_num_seqs=100, **options))


def test_a_pool_below_one_request_is_an_error() -> None:
    assert "pool-too-small" in codes(plan_of("Qwen3.5-4B", platform="h200", pool_gib=0.05), "error")


def test_an_unknown_pool_says_what_to_pass() -> None:
    text = text_of(plan_of("Qwen3.5-4B", platform="h200"), "pool-unknown")
    assert "--pool-gib" in text
    assert "--non-kv-gib" in text


def test_slots_lie_outside_of_the_gaudi_pool() -> None:
    plan = plan_of("Qwen3.5-27B", platform="gaudi3", max_num_seqs=32)
    assert plan.gaudi is not None
    assert plan.gaudi.slots == 32
    assert plan.gaudi.slot_rows == 32 * 3 + 2
    assert plan.gaudi.slot_mib == 98 * 16 * 3_207_168 / MIB
    assert round(plan.gaudi.slot_mib_per_request, 1) == 146.8
    assert "slots-outside-pool" in codes(plan, "note")


def test_slots_that_do_not_fit_beside_the_pool_are_an_error() -> None:
    options = {"platform": "gaudi2", "non_kv_gib": 60.0, "utilisation": 0.95}
    few = plan_of("Qwen3.5-27B", max_num_seqs=8, **options)
    many = plan_of("Qwen3.5-27B", max_num_seqs=64, **options)
    assert "slots-do-not-fit" not in codes(few)
    assert "slots-do-not-fit" in codes(many, "error")


def test_drafts_on_gaudi_with_caching_are_an_error() -> None:
    assert "gaudi-drafts" in codes(plan_of("Qwen3.5-27B", platform="gaudi3", drafts=3), "error")


def test_replicated_kv_heads_and_experts_are_explained() -> None:
    plan = plan_of("Qwen3.5-397B-A17B", platform="gaudi3", tp=8, ep=True)
    assert "2 KV heads are replicated" in text_of(plan, "tensor-parallel")
    assert "expert parallelism spreads the experts" in text_of(plan, "experts")
    one = plan_of("Qwen3.5-27B", platform="gaudi3")
    assert not {"tensor-parallel", "experts"} & codes(one)


@pytest.mark.parametrize(("tp", "token"), [(1, 4096), (2, 2048), (4, 1024), (8, 512), (16, 512)])
def test_a_drafters_kv_heads_are_spread_and_then_replicated(tp: int, token: int) -> None:
    plan = plan_of("Qwen3.5-4B", platform="h200", drafter=DRAFTER_4B, drafts=15, tp=tp)
    assert attention_layers(plan.deployment)[1].token_bytes == token


def test_expert_parallelism_changes_no_number() -> None:
    with_ep = plan_of("Qwen3.6-35B-A3B", platform="gaudi3", ep=True)
    without = plan_of("Qwen3.6-35B-A3B", platform="gaudi3")
    assert with_ep.native == without.native


def test_a_mixed_drafter_makes_a_group_of_each_layer() -> None:
    plan = plan_of("Qwen3.6-27B", platform="h200", drafter="z-lab/Qwen3.6-27B-DFlash", drafts=15)
    assert plan.native.group_size == 1
    assert plan.native.group_count == 48 + 16 + 5
    assert "group-explosion" in codes(plan, "warning")


def test_tokens_beyond_the_model_are_an_error() -> None:
    assert "tokens-above-model" in codes(
        plan_of("Qwen3.5-4B", platform="h200", tokens=262_145), "error"
    )
    assert "tokens-above-model" not in codes(plan_of("Qwen3.5-4B", platform="h200", tokens=262_144))


def test_what_was_not_read_from_the_models_own_file_is_said() -> None:
    assert "head_dim" in text_of(plan_of("Qwen3.5-2B", platform="h200"), "model-inferred")
    assert "model-inferred" not in codes(plan_of("Qwen3.5-27B", platform="h200"))


def test_errors_come_first() -> None:
    plan = plan_of("Qwen3.5-4B", platform="h200", pool_gib=0.05, tokens=10**6)
    levels = [finding.level for finding in plan.findings]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert levels[0] == "error"
