"""What a step zeroes, restores and saves, on plain ints."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_gaudi_ext.gdn.layout import copy_batches
from vllm_gaudi_ext.gdn.plan import (
    NULL_BLOCK,
    Position,
    Replays,
    SlotBlock,
    StepPlan,
    ends_on_boundary,
    padded_batches,
    plan_step,
    release_order,
    schedule_order,
)

ROOT = Path(__file__).resolve().parents[2]
B = 16

boundaries = pytest.mark.parametrize("k", [1, 2, 3])

# On a loaded machine an example may take any time; that is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def position(tokens: int, *, blocks: int = 4, request_id: str = "r1") -> Position:
    """A request with slots 5 and 6 in two GDN groups, blocks 10, 11.. and 20, 21.. in them."""
    return Position(request_id, tokens, (5, 6), [range(10, 10 + blocks), range(20, 20 + blocks)])


# plan_step


def test_a_fresh_request_gets_zeroed_slots_and_no_checkpoint() -> None:
    assert plan_step(B, [position(0)], [], [7, 8]) == StepPlan(
        zero_blocks=(7, 8), zero_slots=(5, 6)
    )


@boundaries
def test_a_hit_restores_the_last_block_before_its_start(k: int) -> None:
    assert plan_step(B, [position(k * B)], [], []) == StepPlan(
        restore=(SlotBlock(5, 9 + k), SlotBlock(6, 19 + k))
    )


@boundaries
def test_a_step_that_ends_on_a_boundary_saves_into_the_block_it_filled(k: int) -> None:
    assert plan_step(B, [], [position(k * B)], []) == StepPlan(
        save=(SlotBlock(5, 9 + k), SlotBlock(6, 19 + k))
    )


@boundaries
@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("edge", ["start", "end"])
def test_a_position_off_the_boundary_is_refused(k: int, offset: int, edge: str) -> None:
    tokens = k * B + offset
    off = [position(tokens, request_id="chat-17")]
    with pytest.raises(RuntimeError) as error:
        plan_step(B, off if edge == "start" else [], off if edge == "end" else [], [])
    for fragment in ("chat-17", f" {tokens} tokens", f"B={B}"):
        assert fragment in str(error.value)


def test_one_bad_start_among_good_ones_is_named() -> None:
    starts = [position(0, request_id="a"), position(B + 1, request_id="b"), position(B)]
    with pytest.raises(RuntimeError, match="request b "):
        plan_step(B, starts, [], [])


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        pytest.param(3 * B, 2, id="more tokens than blocks"),
        pytest.param(B, 0, id="no blocks"),
        pytest.param(-B, 4, id="negative"),
    ],
)
def test_a_position_without_its_block_is_refused(tokens: int, blocks: int) -> None:
    with pytest.raises(RuntimeError) as error:
        plan_step(B, [position(tokens, blocks=blocks, request_id="chat-17")], [], [])
    for fragment in ("chat-17", f"{tokens} tokens", f"B={B}", f"block {tokens // B - 1}"):
        assert fragment in str(error.value)


def test_an_end_at_token_0_is_refused() -> None:
    with pytest.raises(RuntimeError, match="r1 at 0 tokens"):
        plan_step(B, [], [position(0)], [])


@pytest.mark.parametrize("edge", ["start", "end"])
def test_the_null_block_never_holds_a_checkpoint(edge: str) -> None:
    null = [Position("chat-17", 2 * B, (5, 6), [[10, 11], [20, NULL_BLOCK]])]
    with pytest.raises(RuntimeError, match=r"chat-17 at 32 tokens \(B=16\).*\[20, 0\]"):
        plan_step(B, null if edge == "start" else [], null if edge == "end" else [], [])


def test_null_blocks_before_the_checkpoint_are_no_problem() -> None:
    # vLLM replaces blocks that a Mamba layer no longer needs by the null block.
    only_last = Position("r1", 3 * B, (5,), [[NULL_BLOCK, NULL_BLOCK, 12]])
    assert plan_step(B, [only_last], [], []).restore == (SlotBlock(5, 12),)


def test_slots_and_blocks_of_different_group_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        plan_step(B, [Position("r1", B, (5, 6), [[10]])], [], [])


def test_a_request_may_start_from_a_checkpoint_and_leave_the_next_one_in_one_step() -> None:
    step = plan_step(B, [position(B)], [position(2 * B)], [])
    assert step.restore == (SlotBlock(5, 10), SlotBlock(6, 20))
    assert step.save == (SlotBlock(5, 11), SlotBlock(6, 21))


def test_an_empty_step_plans_nothing() -> None:
    assert plan_step(B, [], [], []) == StepPlan()


def test_iterators_are_read_once() -> None:
    step = plan_step(B, iter([position(0)]), iter([position(B)]), iter([3]))
    assert (step.zero_slots, len(step.save), step.zero_blocks) == ((5, 6), 2, (3,))


@unhurried
@given(data=st.data(), block_tokens=st.integers(1, 2000), groups=st.integers(1, 4))
def test_each_start_is_either_zeroed_or_restored_and_each_end_saved(
    data: st.DataObject, block_tokens: int, groups: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), max_size=8))
    blocks = itertools.count(1)
    slots = itertools.count(1)
    starts = [
        Position(
            f"r{i}",
            count * block_tokens,
            [next(slots) for _ in range(groups)],
            [[next(blocks) for _ in range(count)] for _ in range(groups)],
        )
        for i, count in enumerate(counts)
    ]
    ends = [start for start in starts if start.tokens]
    step = plan_step(block_tokens, starts, ends, ())
    fresh = [slot for start in starts if not start.tokens for slot in start.slots]
    rows = [(s, b[-1]) for end in ends for s, b in zip(end.slots, end.blocks, strict=True)]
    assert list(step.zero_slots) == fresh
    assert list(step.restore) == list(step.save) == rows


# ends_on_boundary


@boundaries
def test_only_the_boundary_itself_counts_as_one(k: int) -> None:
    chunk = 5
    for end in (k * B - 1, k * B, k * B + 1):
        assert ends_on_boundary(end - chunk, chunk, B) == (end == k * B)


def test_a_decode_that_fills_a_block_ends_on_its_boundary() -> None:
    assert ends_on_boundary(2 * B - 1, 1, B)


def test_a_chunk_that_only_crosses_a_boundary_does_not_end_on_it() -> None:
    assert not ends_on_boundary(B - 3, 5, B)


def test_a_request_that_computes_nothing_ends_nowhere() -> None:
    assert not ends_on_boundary(B, 0, B)


# release_order


@unhurried
@given(ids=st.sets(st.text(min_size=1), max_size=20), seeds=st.lists(st.integers(), min_size=2))
def test_slots_come_back_in_one_order_whatever_the_order_of_the_set(
    ids: set[str], seeds: list[int]
) -> None:
    orders = set()
    for seed in seeds:
        shuffled = list(ids)
        random.Random(seed).shuffle(shuffled)
        orders.add(tuple(release_order(shuffled)))
    assert len(orders) == 1
    assert set(orders.pop()) == ids


def test_processes_with_different_string_hashes_hand_slots_back_in_one_order() -> None:
    code = (
        "from vllm_gaudi_ext.gdn.plan import release_order\n"
        "ids = {f'chatcmpl-{i}' for i in range(40)}\n"
        "print(','.join(ids)); print(','.join(release_order(ids)))"
    )
    raw, released = set(), set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        order, release = done.stdout.splitlines()
        raw.add(order)
        released.add(release)
    assert len(raw) > 1, "the seeds did not change the set's order, so this test shows nothing"
    assert len(released) == 1


# padded_batches

sizes_of_copies = st.sets(st.integers(1, 300), min_size=1, max_size=6).map(sorted)


@unhurried
@given(rows=st.lists(st.integers(), max_size=700), sizes=sizes_of_copies)
def test_batches_cover_the_rows_in_order_and_repeat_only_the_last_one(
    rows: list[int], sizes: list[int]
) -> None:
    batches = list(padded_batches(rows, sizes))
    assert all(len(batch) in sizes for batch in batches)
    flat = [row for batch in batches for row in batch]
    assert flat[: len(rows)] == rows
    assert all(row == rows[-1] for row in flat[len(rows) :])
    # Only the last batch is padded, and to no more than the next allowed size.
    assert all(len(batch) == sizes[-1] for batch in batches[:-1])
    if batches:
        left = len(rows) - sizes[-1] * (len(batches) - 1)
        assert len(batches[-1]) == min(size for size in sizes if size >= left)


@unhurried
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=100),
    sizes=sizes_of_copies,
)
def test_padding_repeats_change_nothing(rows: list[tuple[int, int]], sizes: list[int]) -> None:
    plain: dict[int, int] = {}
    for slot, block in rows:
        plain[block] = slot
    padded: dict[int, int] = {}
    for batch in padded_batches([SlotBlock(*row) for row in rows], sizes):
        for slot, block in batch:
            padded[block] = slot
    assert padded == plain


def test_no_rows_give_no_batch() -> None:
    assert list(padded_batches([], (1, 2, 4))) == []


def test_batches_do_not_alias_the_rows() -> None:
    rows = [1, 2]
    (batch,) = padded_batches(rows, (2,))
    batch.append(3)
    assert rows == [1, 2]


@unhurried
@given(st.lists(st.integers(0, 600), min_size=1, max_size=50))
def test_the_number_of_shapes_is_bounded_by_the_sizes(counts: list[int]) -> None:
    sizes = copy_batches(3_670_016)
    shapes = {len(batch) for n in counts for batch in padded_batches([0] * n, sizes)}
    assert shapes <= set(sizes)


# schedule_order


def apply(swaps: list[int], rows: list[str]) -> list[str]:
    result = list(rows)
    for a, b in zip(swaps[::2], swaps[1::2], strict=True):
        result[a], result[b] = result[b], result[a]
    return result


def test_prompts_are_put_in_the_order_of_the_schedule() -> None:
    rows = ["d1", "d0", "p2", "p0", "p1"]
    swaps = schedule_order(rows, 2, ["d0", "d1", "p0", "p1", "p2"])
    assert apply(swaps, rows) == ["d1", "d0", "p0", "p1", "p2"]


def test_prompts_in_order_need_no_swap() -> None:
    assert schedule_order(["d", "p0", "p1"], 1, ["p0", "d", "p1"]) == []


@pytest.mark.parametrize("first", [2, 3])
def test_a_batch_without_prompts_needs_no_swap(first: int) -> None:
    assert schedule_order(["d1", "d0"], first, ["d0", "d1"]) == []


@unhurried
@given(data=st.data(), count=st.integers(0, 40))
def test_swaps_sort_the_prompts_and_leave_decodes_alone(data: st.DataObject, count: int) -> None:
    scheduled = [f"r{i}" for i in range(count)]
    rows = data.draw(st.permutations(scheduled))
    first = data.draw(st.integers(0, count))
    swaps = schedule_order(rows, first, scheduled)
    ordered = apply(swaps, rows)
    assert ordered[:first] == list(rows[:first])
    assert ordered[first:] == sorted(rows[first:], key=scheduled.index)
    assert all(row >= first for row in swaps)
    # Each swap puts one prompt in its place for good, so there are fewer swaps than prompts.
    assert len(swaps) // 2 <= max(0, count - first - 1)


def test_requests_that_are_scheduled_but_not_in_the_batch_do_not_matter() -> None:
    swaps = schedule_order(["p1", "p0"], 0, ["gone", "p0", "other", "p1"])
    assert apply(swaps, ["p1", "p0"]) == ["p0", "p1"]


# Replays


def test_a_resumed_request_counts_its_outputs_as_prompt_until_it_has_caught_up() -> None:
    replays = Replays()
    replays.resume("a", 50)
    assert replays.prompt_tokens({"a": 16, "b": 3}) == {"a": 50}
    assert replays.prompt_tokens({"a": 49}) == {"a": 50}, "one token is left: still a prompt"
    assert replays.prompt_tokens({"a": 50}) == {}
    assert len(replays) == 0


def test_a_request_that_is_not_in_this_step_keeps_its_replay() -> None:
    replays = Replays()
    replays.resume("a", 50)
    assert replays.prompt_tokens({}) == {}
    assert replays.prompt_tokens({"a": 32}) == {"a": 50}


def test_finished_and_preempted_requests_are_forgotten() -> None:
    replays = Replays()
    replays.resume("a", 50)
    replays.resume("b", 60)
    replays.forget(["a", "never seen"])
    assert replays.prompt_tokens({"a": 0, "b": 0}) == {"b": 60}
    assert len(replays) == 1


def test_a_second_resume_replaces_the_first() -> None:
    replays = Replays()
    replays.resume("a", 50)
    replays.resume("a", 70)
    assert replays.prompt_tokens({"a": 60}) == {"a": 70}


def test_two_objects_share_nothing() -> None:
    Replays().resume("a", 50)
    assert len(Replays()) == 0


# Imports

PURE_MODULES = [
    "vllm_gaudi_ext",
    "vllm_gaudi_ext.envs",
    "vllm_gaudi_ext.versions",
    "vllm_gaudi_ext.plugin",
    "vllm_gaudi_ext.gdn",
    "vllm_gaudi_ext.gdn.plan",
    "vllm_gaudi_ext.gdn.layout",
    "vllm_gaudi_ext.gdn.refusals",
    "vllm_gaudi_ext.facts",
    "vllm_gaudi_ext.planner",
    "vllm_gaudi_ext.planner.plan",
    "cuda_ext",
    "cuda_ext.ring",
]
HEAVY_MODULES = ["torch", "vllm", "vllm_gaudi", "triton", "habana_frameworks"]


@pytest.mark.parametrize("module", PURE_MODULES)
def test_planning_is_imported_without_torch_vllm_or_triton(module: str) -> None:
    code = (
        f"import sys; import {module}\n"
        f"print([name for name in {HEAVY_MODULES} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
