"""The ReplaySSM serving write-up's figures, and this project's own H200 baseline.

Where a published figure follows only from one reading of what was not published, the test names
the reading and by how much the other one is off.
"""

from __future__ import annotations

import pytest
from plan_helpers import DRAFTER_4B, DRAFTER_35B, WRITE_UP_35B, codes, plan_of

from vllm_gaudi_ext.planner.arithmetic import GIB, MIB, capacity, request_bytes
from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.plan import Plan, layout_of

SIX_LAYERS = DrafterOverrides(layers=6)


def the_4b(**options: object) -> Plan:
    return plan_of("Qwen3.5-4B", platform="b200", drafter=DRAFTER_4B, **{"drafts": 15, **options})


def the_35b() -> Plan:
    return plan_of(
        "Qwen3.5-35B-A3B",
        platform="b200",
        drafter=DRAFTER_35B,
        overrides=WRITE_UP_35B,
        drafts=15,
    )


def test_4b_keeps_16_copies_in_960_of_1415_mib() -> None:
    side = the_4b(overrides=SIX_LAYERS).native
    assert side.state_copies == 16
    assert side.page_mib == 2.5
    assert side.state_mib_per_request == 960
    assert side.kv_mib_per_request == 455
    assert side.request_mib_ideal == 1415


def test_455_mib_need_a_six_layer_drafter() -> None:
    """SpecForge's config of the drafter has five layers: 422.5 MiB, 32.5 less than published."""
    side = the_4b().native
    assert side.kv_mib_per_request == 422.5
    assert 455 - side.kv_mib_per_request == 13 * 1 * 2.5


def test_each_draft_token_adds_60_mib() -> None:
    points = {point.drafts: point for point in the_4b(overrides=SIX_LAYERS).sweep}
    assert all(points[d].native_state_mib == 60 * (d + 1) for d in range(16))


def test_past_7_drafts_the_copies_outweigh_the_kv_cache() -> None:
    plan = the_4b(overrides=SIX_LAYERS)
    assert plan.outweighing_drafts == 7
    by_drafts = {point.drafts: point for point in plan.sweep}
    assert by_drafts[6].native_state_mib < 455 < by_drafts[7].native_state_mib
    assert "copies-outweigh-kv" in codes(plan, "warning")


def test_the_copies_share_falls_with_the_length() -> None:
    shares = [
        side.state_mib_per_request / side.request_mib_ideal
        for side in (the_4b(tokens=tokens).native for tokens in (4096, 8192, 32768))
    ]
    assert shares == sorted(shares, reverse=True)


def test_replay_keeps_72_mib() -> None:
    side = the_4b(overrides=SIX_LAYERS).replay
    assert side is not None
    assert side.state_copies == 1
    assert side.ring_rows == 32
    assert side.page_mib == 3
    assert side.state_mib_per_request == 72


def test_replay_page_of_the_35b_is_5_5_mib() -> None:
    """A ring of fp32 corrected values would need 6.0 MiB; the raw bf16 ring needs one unit less."""
    side = the_35b().replay
    assert side is not None
    assert side.page_mib == 5.5


def test_35b_copies_take_2_4_gib_and_85_percent() -> None:
    side = the_35b().native
    assert side.page_mib == 5
    assert round(side.state_bytes / MIB, 2) == 2.28
    assert side.state_mib_per_request == 2400
    assert side.kv_mib_per_request == 410
    assert round(100 * side.state_mib_per_request / side.request_mib_ideal) == 85
    assert "drafter-sets-page" in codes(the_35b(), "warning")


def test_105_and_274_requests_come_out_of_padded_accounting_with_five_drafter_layers() -> None:
    """Reading B of the design notes: five drafter layers, vLLM's padded groups, one pool.

    1,487.5 and 570 MiB a request: 105 and 274 requests for every pool of 156,188 to 156,750 MiB.
    That reading contradicts the six layers that 455 MiB need; neither can be ruled out from what
    was published.
    """
    plan = the_4b()
    assert plan.replay is not None
    assert plan.native.request_mib_padded == 1487.5
    assert plan.replay.request_mib_padded == 570
    for pool in (156_188, 156_750):
        assert pool // plan.native.request_mib_padded == 105
    for pool in (156_180, 156_749):
        assert pool // plan.replay.request_mib_padded == 274


def test_274_requests_miss_by_2_percent_under_the_ideal_reading() -> None:
    """Reading A: six layers, ideal accounting. A pool that holds 105 of 1,415 MiB holds 278 to 281
    of 534 MiB, 1.5 to 2.4 % above the published 274, unless our pool is that much smaller."""
    plan = the_4b(overrides=SIX_LAYERS)
    assert plan.replay is not None
    assert plan.replay.request_mib_ideal == 534
    least, most = 105 * 1415, 106 * 1415 - 1
    assert (least // 534, most // 534) == (278, 280)


def test_35b_gains_5_1_fold() -> None:
    """5.08x by vLLM's padded groups; the ideal accounting gives 5.32x, 4 % more than published."""
    plan = the_35b()
    assert plan.replay is not None
    assert round(plan.native.request_mib_padded / plan.replay.request_mib_padded, 2) == 5.08
    assert round(plan.native.request_mib_ideal / plan.replay.request_mib_ideal, 2) == 5.32


def test_h200_baseline_holds_77_5_requests_in_106_8_gib() -> None:
    """Measured for this project with vLLM 0.31.0: block 592, 77.5 requests of 8k (design notes)."""
    plan = plan_of("Qwen3.5-4B", platform="h200", drafter=DRAFTER_4B, drafts=15, pool_gib=106.8)
    assert plan.native.block_tokens == 592
    assert plan.native.page_mib == 2.3125
    assert plan.native.capacity is not None
    assert round(plan.native.capacity.vllm_concurrency, 1) == 77.5


def test_the_two_accountings_agree_where_groups_are_even() -> None:
    plan = plan_of("Qwen3.5-27B", platform="gaudi3", pool_gib=64)
    assert plan.native.request_mib_ideal == plan.native.request_mib_padded
    uneven = the_4b()
    assert uneven.native.request_mib_padded > uneven.native.request_mib_ideal


def test_a_pool_never_gives_out_its_null_block() -> None:
    plan = the_4b()
    layout = layout_of(plan.deployment)
    request = request_bytes(layout, copies=16, tokens=8192)
    exact = capacity(layout, request, request.padded)
    assert (exact.concurrency, exact.requests) == (1.0, 0)
    assert capacity(layout, request, request.padded + layout.block_bytes).requests == 1


@pytest.mark.parametrize("gib", [0.001, 40])
def test_ideal_never_counts_fewer_requests_than_padded(gib: float) -> None:
    plan = the_4b(pool_gib=gib)
    for side in (plan.native, plan.replay):
        assert side is not None
        assert side.capacity is not None
        assert side.capacity.requests_ideal >= side.capacity.requests
        assert side.capacity.pool_blocks == int(gib * GIB) // int(side.block_mib * MIB)
