"""Copies and fills between state slots and pages, bit by bit, on small CPU tensors.

Every tensor starts as 7.0, so that whatever a motion should not have touched is still 7.0 after it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="motion moves tensors: torch is not installed here")

from vllm_gaudi_ext.gdn.layout import RowColumns, copy_batches  # noqa: E402
from vllm_gaudi_ext.gdn.motion import (  # noqa: E402
    FILL_BATCHES,
    CheckpointPages,
    CopyCounters,
    PageViews,
    StateViews,
    int32_rows,
)
from vllm_gaudi_ext.gdn.plan import SlotBlock  # noqa: E402

STALE = 7.0

# What float arithmetic, a conversion or a comparison would change: quiet and signalling NaN with
# payloads and signs, both zeros, denormals, infinities, the largest finite numbers.
FLOAT32_BITS = [
    0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF80BEEF, 0x7FFFFFFF, 0x00000000, 0x80000000,
    0x00000001, 0x807FFFFF, 0x00800000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFFFFFFFF,
]  # fmt: skip
BFLOAT16_BITS = [
    0x7FC0, 0xFFC1, 0x7F81, 0xFFAB, 0x7FFF, 0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F80, 0xFF80,
    0x7F7F, 0xFFFF,
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A small cache: `layers` attention layers with the states they hold, and one without states.

    Args:
        kv: [block tokens, KV heads, head dim] of a page's K part, and of its V part.
        conv: shape of one slot's conv state, bfloat16.
        ssm: shape of one slot's recurrent state, float32.
        kv_dtype: type of the pages.
    """

    kv: tuple[int, int, int]
    conv: tuple[int, int]
    ssm: tuple[int, int, int]
    kv_dtype: torch.dtype = torch.bfloat16
    layers: int = 2
    blocks: int = 9
    slots: int = 8
    spare_tokens: int = 4


# K parts of 64 int32 columns.
IN_K_ALONE = Shape(kv=(8, 2, 8), conv=(3, 6), ssm=(2, 3, 4))  # 9 + 24 columns
SPILLS_INTO_V = Shape(kv=(8, 2, 8), conv=(3, 6), ssm=(2, 5, 9))  # 9 + 90 columns
CONV_SPILLS = Shape(kv=(4, 1, 4), conv=(3, 6), ssm=(1, 1, 3))  # 9 + 3 columns of 8 + 8
EXACT_FIT = Shape(kv=(8, 2, 8), conv=(4, 8), ssm=(2, 7, 8))  # 16 + 112 columns of 128
FP8_PAGES = Shape(kv=(16, 2, 8), conv=(3, 6), ssm=(2, 5, 9), kv_dtype=torch.float8_e4m3fn)
SHAPES = [
    pytest.param(IN_K_ALONE, id="in K alone"),
    pytest.param(SPILLS_INTO_V, id="spills into V"),
    pytest.param(EXACT_FIT, id="exact fit"),
    pytest.param(FP8_PAGES, id="fp8 pages"),
]
shapes = pytest.mark.parametrize("shape", SHAPES)


def int_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.contiguous().view(torch.uint8)


def stale(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), STALE).to(dtype)


class Cache:
    """The tensors of a small cache, laid out as vllm-gaudi 0.26.0 does, and the object under test.

    K and V are flat in tokens, with a spare kernel block behind the pool.
    """

    def __init__(self, shape: Shape, batches: Sequence[int] = (1, 2, 4)) -> None:
        self.shape = shape
        tokens, heads, dim = shape.kv
        pool = shape.blocks * tokens
        kv = (pool + shape.spare_tokens, heads, dim)
        self.k = [stale(kv, shape.kv_dtype) for _ in range(shape.layers + 1)]
        self.v = [stale(kv, shape.kv_dtype) for _ in range(shape.layers + 1)]
        self.conv = [stale((shape.slots, *shape.conv), torch.bfloat16) for _ in range(shape.layers)]
        self.ssm = [stale((shape.slots, *shape.ssm), torch.float32) for _ in range(shape.layers)]
        self.graph_ends = 0
        self.columns: RowColumns
        views = []
        for k, v in zip(self.k, self.v, strict=True):
            k_rows, v_rows = int32_rows(k[:pool], shape.blocks), int32_rows(v[:pool], shape.blocks)
            views.append(PageViews(k_rows, v_rows, (k[pool:], v[pool:])))
        states = []
        for page, conv, ssm in zip(views, self.conv, self.ssm, strict=False):
            conv_rows, ssm_rows = int32_rows(conv, shape.slots), int32_rows(ssm, shape.slots)
            self.columns = RowColumns(
                conv_rows.shape[1], ssm_rows.shape[1], page.k.shape[1], page.v.shape[1]
            )
            states.append(StateViews(page, conv_rows, ssm_rows, self.columns))
        self.pages = CheckpointPages(views, states, batches, self._end_graph)

    def _end_graph(self) -> None:
        self.graph_ends += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{kind}[{layer}]": tensor
            for kind in ("k", "v", "conv", "ssm")
            for layer, tensor in enumerate(getattr(self, kind))
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def write_state(self, slot: int, layer: int, seed: int) -> None:
        """Random bits with every hard pattern among them."""
        generator = random.Random(seed)
        for tensor, patterns, bits, integer in (
            (self.conv[layer], BFLOAT16_BITS, 16, torch.int16),
            (self.ssm[layer], FLOAT32_BITS, 32, torch.int32),
        ):
            count = tensor[slot].numel()
            values = [generator.getrandbits(bits) for _ in range(count)]
            for i in generator.sample(range(count), min(count, len(patterns))):
                values[i] = generator.choice(patterns)
            signed = [v - (1 << bits) if v >> (bits - 1) else v for v in values]
            flat = torch.tensor(signed, dtype=integer)
            tensor[slot].view(integer).copy_(flat.view(tensor[slot].shape))

    def state_bytes(self, slot: int, layer: int) -> torch.Tensor:
        return torch.cat(
            (int_bits(self.conv[layer][slot]).flatten(), int_bits(self.ssm[layer][slot]).flatten())
        )

    def page_bytes(self, block: int, layer: int) -> torch.Tensor:
        tokens = self.shape.kv[0]
        rows = slice(block * tokens, (block + 1) * tokens)
        return torch.cat(
            (int_bits(self.k[layer][rows]).flatten(), int_bits(self.v[layer][rows]).flatten())
        )

    def assert_unchanged(
        self,
        before: dict[str, torch.Tensor],
        *,
        but_slots: Sequence[int] = (),
        but_blocks: Sequence[int] = (),
        but_spare: bool = False,
    ) -> None:
        """Every byte is as before, but for these slots, these blocks and the spare block."""
        tokens, pool = self.shape.kv[0], self.shape.blocks * self.shape.kv[0]
        for name, tensor in self.tensors().items():
            touched = torch.zeros(tensor.shape[0], dtype=torch.bool)
            if name[0] in "kv":
                for block in but_blocks:
                    touched[block * tokens : (block + 1) * tokens] = True
                touched[pool:] = but_spare
            else:
                touched[list(but_slots)] = True
            same = int_bits(tensor).flatten(1) == int_bits(before[name]).flatten(1)
            wrong = (~same.all(1) & ~touched).nonzero().flatten().tolist()
            assert not wrong, f"{name} changed in rows {wrong}"


def fresh(shape: Shape, slots: Sequence[int] = (), batches: Sequence[int] = (1, 2, 4)) -> Cache:
    """A stale cache, with random states in some slots."""
    cache = Cache(shape, batches)
    for slot in slots:
        for layer in range(shape.layers):
            cache.write_state(slot, layer, seed=100 * slot + layer)
    return cache


def test_the_shapes_are_what_their_names_say() -> None:
    assert Cache(IN_K_ALONE).columns.state <= Cache(IN_K_ALONE).columns.k_columns
    spills = Cache(SPILLS_INTO_V).columns
    assert spills.k_columns < spills.state < spills.page
    assert Cache(CONV_SPILLS).columns.conv > Cache(CONV_SPILLS).columns.k_columns
    assert Cache(EXACT_FIT).columns.padding == 0


def test_written_states_hold_the_hard_patterns() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[3])
    state = cache.ssm[0][3]
    assert state.isnan().any()
    assert not state.isnan().all()


# int32_rows


def test_a_view_aliases_its_tensor() -> None:
    tensor = torch.zeros(4, 3, 2, dtype=torch.bfloat16)
    rows = int32_rows(tensor, 2)
    assert (rows.shape, rows.dtype) == ((2, 6), torch.int32)
    rows[1].fill_(-1)
    assert int_bits(tensor[2:]).eq(0xFF).all()
    assert int_bits(tensor[:2]).eq(0).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
)
def test_a_view_has_all_bytes_of_a_row(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, 8, dtype=dtype)
    assert int32_rows(tensor, 3).shape == (3, 16 * tensor.element_size() // 4)


def test_a_tensor_that_is_not_contiguous_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"shape \(6, 8\) is not contiguous"):
        int32_rows(torch.zeros(8, 6).t(), 6)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        pytest.param(5, torch.bfloat16, id="5 x bfloat16"),
        pytest.param(6, torch.float8_e4m3fn, id="6 x fp8"),
    ],
)
def test_a_row_of_a_part_of_an_int32_is_refused(columns: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"{columns} x {dtype} is no whole number of int32"):
        int32_rows(torch.zeros(4, columns, dtype=dtype), 4)


# save and restore


@pytest.mark.parametrize("shape", [*SHAPES, pytest.param(CONV_SPILLS, id="conv spills into V")])
def test_a_saved_and_restored_state_has_the_same_bits(shape: Shape) -> None:
    cache = fresh(shape, slots=[1, 2, 3])
    before = cache.snapshot()
    saved = {layer: cache.state_bytes(2, layer) for layer in range(shape.layers)}

    cache.pages.save([SlotBlock(2, 4)])
    cache.assert_unchanged(before, but_blocks=[4])  # every slot, the source among them
    after_save = cache.snapshot()

    cache.pages.restore([SlotBlock(5, 4)])
    cache.assert_unchanged(after_save, but_slots=[5])  # every page, the source among them
    for layer in range(shape.layers):
        assert torch.equal(cache.state_bytes(5, layer), saved[layer])
        assert torch.equal(cache.state_bytes(2, layer), saved[layer])


@shapes
def test_a_page_is_the_state_and_then_zeroes(shape: Shape) -> None:
    cache = fresh(shape, slots=[2])
    cache.pages.save([SlotBlock(2, 4)])
    for layer in range(shape.layers):
        page, state = cache.page_bytes(4, layer), cache.state_bytes(2, layer)
        assert torch.equal(page[: len(state)], state)
        assert page[len(state) :].eq(0).all()
        assert len(page) - len(state) == 4 * cache.columns.padding


@shapes
def test_two_groups_of_a_request_move_in_one_call(shape: Shape) -> None:
    cache = fresh(shape, slots=[1, 2, 3, 4])
    before = cache.snapshot()
    # Slots 1 and 2 are one request's in groups 0 and 1, slots 4 and 3 another's.
    rows = [SlotBlock(1, 8), SlotBlock(2, 3), SlotBlock(4, 5), SlotBlock(3, 1)]
    cache.pages.save(rows)
    cache.assert_unchanged(before, but_blocks=[8, 3, 5, 1])
    cache.pages.zero_slots([1, 2, 3, 4])
    cache.pages.restore(rows)
    cache.assert_unchanged(before, but_blocks=[8, 3, 5, 1])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7])
def test_any_number_of_rows_survives_the_padding(count: int) -> None:
    cache = fresh(SPILLS_INTO_V, slots=range(1, count + 1), batches=(1, 4))
    before = cache.snapshot()
    rows = [SlotBlock(slot, 9 - slot) for slot in range(1, count + 1)]
    cache.pages.save(rows)
    cache.assert_unchanged(before, but_blocks=[row.block for row in rows])
    for row in rows:
        for layer in range(cache.shape.layers):
            state = cache.state_bytes(row.slot, layer)
            assert torch.equal(cache.page_bytes(row.block, layer)[: len(state)], state)
    cache.pages.zero_slots([row.slot for row in rows])
    cache.pages.restore(rows)
    cache.assert_unchanged(before, but_blocks=[row.block for row in rows])


def test_one_block_may_be_restored_into_several_slots() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2])
    cache.pages.save([SlotBlock(2, 4)])
    before = cache.snapshot()
    cache.pages.restore([SlotBlock(slot, 4) for slot in (1, 3, 5)])
    cache.assert_unchanged(before, but_slots=[1, 3, 5])
    for slot in (1, 3, 5):
        assert torch.equal(cache.state_bytes(slot, 0), cache.state_bytes(2, 0))


def test_saving_twice_is_saving_once() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2])
    cache.pages.save([SlotBlock(2, 4)])
    before = cache.snapshot()
    cache.pages.save([SlotBlock(2, 4)])
    cache.assert_unchanged(before)


def test_a_checkpoint_replaces_what_the_page_held_before() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2, 3])
    cache.pages.save([SlotBlock(2, 4)])
    cache.pages.save([SlotBlock(3, 4)])
    cache.pages.restore([SlotBlock(5, 4)])
    assert torch.equal(cache.state_bytes(5, 1), cache.state_bytes(3, 1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_saves_and_restores_follow_a_model_on_dicts(data: st.DataObject) -> None:
    shape = IN_K_ALONE
    cache = fresh(shape, slots=range(1, shape.slots - 1), batches=(1, 2, 4))
    slots = {s: cache.state_bytes(s, 0) for s in range(shape.slots)}
    pages: dict[int, torch.Tensor] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        if pages and data.draw(st.booleans()):
            targets = data.draw(st.lists(st.integers(1, 6), unique=True, min_size=1))
            rows = [SlotBlock(s, data.draw(st.sampled_from(sorted(pages)))) for s in targets]
            cache.pages.restore(rows)
            slots |= {row.slot: pages[row.block] for row in rows}
        else:
            blocks = data.draw(st.lists(st.integers(1, 8), unique=True, min_size=1))
            rows = [SlotBlock(data.draw(st.integers(1, 6)), block) for block in blocks]
            cache.pages.save(rows)
            pages |= {row.block: slots[row.slot] for row in rows}
    for slot, expected in slots.items():
        assert torch.equal(cache.state_bytes(slot, 0), expected), f"slot {slot}"
    for block, expected in pages.items():
        assert torch.equal(cache.page_bytes(block, 0)[: len(expected)], expected), f"block {block}"


# Fills


@shapes
def test_zeroed_blocks_are_zero_in_every_layer_and_nothing_else_is(shape: Shape) -> None:
    cache = fresh(shape, slots=[2])
    before = cache.snapshot()
    cache.pages.zero_blocks([3, 8])
    cache.assert_unchanged(before, but_blocks=[3, 8])
    for block in (3, 8):
        for layer in range(shape.layers):
            assert cache.page_bytes(block, layer).eq(0).all()


@shapes
def test_zeroed_slots_are_zero_in_every_layer_and_nothing_else_is(shape: Shape) -> None:
    cache = fresh(shape, slots=range(1, shape.slots))
    before = cache.snapshot()
    cache.pages.zero_slots([1, 4, 6])
    cache.assert_unchanged(before, but_slots=[1, 4, 6])
    for slot in (1, 4, 6):
        for layer in range(shape.layers):
            assert cache.state_bytes(slot, layer).eq(0).all()


@shapes
def test_padding_is_the_spare_block_and_the_first_and_last_slot(shape: Shape) -> None:
    cache = fresh(shape, slots=range(shape.slots))
    before = cache.snapshot()
    last = shape.slots - 1
    cache.pages.zero_padding()
    cache.assert_unchanged(before, but_slots=[0, last], but_spare=True)
    pool = shape.blocks * shape.kv[0]
    for layer in range(shape.layers):
        for slot in (0, last):
            assert cache.state_bytes(slot, layer).eq(0).all()
        for tensor in (cache.k[layer], cache.v[layer]):
            assert int_bits(tensor[pool:]).eq(0).all()


def test_zeroing_removes_nan() -> None:
    cache = Cache(SPILLS_INTO_V)
    for tensor in cache.tensors().values():
        tensor.fill_(float("nan"))
    cache.pages.zero_padding()
    cache.pages.zero_blocks(range(cache.shape.blocks))
    cache.pages.zero_slots(range(cache.shape.slots))
    for name, tensor in cache.tensors().items():
        assert int_bits(tensor).eq(0).all(), name


def test_more_blocks_than_the_largest_fill_are_all_zeroed() -> None:
    count = FILL_BATCHES[-1] + 3
    shape = Shape((1, 1, 4), (1, 2), (1, 1, 1), blocks=count + 1, spare_tokens=1, layers=1)
    cache = Cache(shape)
    before = cache.snapshot()
    cache.pages.zero_blocks(range(1, count + 1))
    cache.assert_unchanged(before, but_blocks=range(1, count + 1))
    assert all(cache.page_bytes(block, 0).eq(0).all() for block in range(1, count + 1))


@pytest.mark.parametrize("motion", ["save", "restore", "zero_blocks", "zero_slots"])
def test_nothing_to_do_touches_nothing_and_ends_no_graph(motion: str) -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2])
    before = cache.snapshot()
    getattr(cache.pages, motion)([])
    cache.assert_unchanged(before)
    assert cache.graph_ends == 0
    assert cache.pages.shapes == set()


# Shapes, counters, warm-up


def test_each_motion_ends_its_graph_once() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2])
    motions = [
        lambda: cache.pages.save([SlotBlock(2, b) for b in range(1, 8)]),
        lambda: cache.pages.restore([SlotBlock(2, 1)]),
        lambda: cache.pages.zero_blocks([1, 2, 3]),
        lambda: cache.pages.zero_slots([1]),
        cache.pages.zero_padding,
    ]
    for count, motion in enumerate(motions, 1):
        motion()
        assert cache.graph_ends == count


def test_counters_count_rows_before_padding() -> None:
    cache = fresh(SPILLS_INTO_V, slots=[2])
    cache.pages.save([SlotBlock(2, b) for b in (1, 2, 3)])
    cache.pages.restore([SlotBlock(3, 1)])
    cache.pages.zero_blocks([1, 2, 3, 4, 5])
    cache.pages.zero_slots([1, 2, 3])
    assert cache.pages.counters == CopyCounters(
        saved=3, restored=1, blocks_zeroed=5, slots_zeroed=3
    )


def test_shapes_stay_bounded_and_warm_up_has_seen_them_all() -> None:
    shape = Shape((1, 1, 4), (1, 2), (1, 1, 1), blocks=400, slots=300, spare_tokens=1, layers=1)
    batches = copy_batches(3_670_016)
    warm = Cache(shape, batches)
    warm.pages.warm_up()
    cache = Cache(shape, batches)
    generator = random.Random(2)
    for _ in range(300):
        most = generator.choice((2, 8, 40, 298))
        slots = generator.sample(range(1, 299), generator.randint(0, most))
        rows = [SlotBlock(slot, generator.randint(1, 399)) for slot in slots]
        blocks = generator.sample(range(1, 400), generator.randint(0, most))
        cache.pages.zero_blocks(blocks)
        cache.pages.zero_slots(slots)
        cache.pages.restore(rows)
        cache.pages.save(rows)
    assert cache.pages.shapes <= warm.pages.shapes
    assert len(warm.pages.shapes) == 2 * len(batches) + 2 * len(FILL_BATCHES)
    # The run above was long enough to have used every one of them.
    assert cache.pages.shapes == warm.pages.shapes


@shapes
def test_warm_up_touches_only_what_holds_nothing(shape: Shape) -> None:
    cache = fresh(shape, slots=range(shape.slots))
    before = cache.snapshot()
    last = shape.slots - 1
    cache.pages.warm_up()
    cache.assert_unchanged(before, but_slots=[0, last], but_blocks=[0], but_spare=True)
    for layer in range(shape.layers):
        assert cache.page_bytes(0, layer).eq(0).all()
        assert cache.state_bytes(0, layer).eq(0).all()
        assert cache.state_bytes(last, layer).eq(0).all()
    assert cache.pages.counters == CopyCounters()
