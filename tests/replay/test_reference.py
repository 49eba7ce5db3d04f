"""The reference of a ReplaySSM step: its forms agree, and its pages hold what they should.

The arm of each schedule is `replay_step` on poisoned pages, with drafts of which some are wrong;
the oracle is one float64 loop over the accepted tokens alone. Tolerances are derived in rows.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import pytest

torch = pytest.importorskip("torch", reason="the reference is written in torch: not installed here")

from cuda_ext.ops.reference import (  # noqa: E402
    Pages,
    StepRows,
    Weights,
    block,
    conv_rows,
    fold,
    gates,
    loop,
    normalise,
    replay_step,
)
from cuda_ext.ring import GdnHeads, replay_layout, ring_rows  # noqa: E402

from .rows import (  # noqa: E402
    NAN,
    STALE,
    Stream,
    assert_close,
    int_bits,
    ints,
    joined,
    oracle,
    oracle_rows,
    poisoned_pages,
    random_stream,
    random_weights,
    snapshot,
    step_rows,
    stored,
    tolerance,
)

# H, HV, K, V, W
EQUAL = GdnHeads(3, 3, 8, 5, 4)
PAIRS = GdnHeads(2, 4, 7, 6, 4)
FOURS = GdnHeads(1, 4, 8, 8, 4)
HEADS = [
    pytest.param(EQUAL, id="one value head a key head"),
    pytest.param(PAIRS, id="two value heads a key head"),
    pytest.param(FOURS, id="four value heads a key head"),
]
POISONS = [pytest.param(NAN, id="NaN"), pytest.param(STALE, id="stale")]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Rows:
    """Inputs of the recurrence in float64, gates from 0.01 to 10 and with them."""

    state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def to(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, f.name).to(dtype) for f in fields(Rows))


def random_rows(heads: GdnHeads, count: int, seed: int) -> Rows:
    generator = seeded(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    strength = torch.rand(count, HV, generator=generator, dtype=torch.float64)
    return Rows(
        state=normal(HV, V, K),
        q=normal(count, H, K),
        k=normal(count, H, K),
        v=normal(count, HV, V),
        g=-(0.01 * 1000**strength),
        beta=normal(count, HV).sigmoid(),
    )


# The forms of the recurrence


def test_the_loop_is_the_formula() -> None:
    """Two rows of one head with K = 2, V = 1, reckoned by hand in Python floats."""
    q, k, v = [(3.0, 4.0), (1.0, 0.0)], [(0.0, 2.0), (5.0, 12.0)], [3.0, -2.0]
    g, beta = [-0.5, -1.0], [0.25, 0.75]
    s, want = [0.5, -1.5], []
    for t in range(2):
        norm_k, norm_q = (math.sqrt(x[t][0] ** 2 + x[t][1] ** 2 + 1e-6) for x in (k, q))
        unit_k, unit_q = [x / norm_k for x in k[t]], [x / norm_q / math.sqrt(2) for x in q[t]]
        s = [math.exp(g[t]) * x for x in s]
        d = beta[t] * (v[t] - s[0] * unit_k[0] - s[1] * unit_k[1])
        s = [s[0] + d * unit_k[0], s[1] + d * unit_k[1]]
        want.append(s[0] * unit_q[0] + s[1] * unit_q[1])

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    state = torch.tensor([[[0.5, -1.5]]], dtype=torch.float64)
    rows = [torch.tensor(x, dtype=torch.float64)[:, None] for x in (q, k)]
    o, after = loop(state, *rows, column(v)[..., None], column(g), column(beta))
    assert o.flatten().tolist() == pytest.approx(want, rel=1e-14)
    assert after.flatten().tolist() == pytest.approx(s, rel=1e-14)


def test_a_value_head_uses_the_key_head_of_its_group() -> None:
    rows = random_rows(PAIRS, 9, seed=1)
    o, state = loop(*rows.to(torch.float64))
    for h in range(4):
        one = slice(h, h + 1)
        key = slice(h // 2, h // 2 + 1)
        o_h, state_h = loop(
            rows.state[one],
            rows.q[:, key],
            rows.k[:, key],
            rows.v[:, one],
            rows.g[:, one],
            rows.beta[:, one],
        )
        assert torch.equal(o[:, one], o_h)
        assert torch.equal(state[one], state_h)


@pytest.mark.parametrize("count", range(1, 41))
def test_block_and_fold_equal_the_loop(count: int) -> None:
    for heads in (EQUAL, PAIRS, FOURS):
        rows = random_rows(heads, count, seed=100 + count)
        o, state = loop(*rows.to(torch.float64))
        for dtype in (torch.float32, torch.float64):
            inputs = rows.to(dtype)
            limit = tolerance(dtype, count, heads)
            for block_rows in (64, 16, 7):
                name = f"{heads}, {dtype}, blocks of {block_rows}"
                got_o, got_state = block(*inputs, rows=block_rows)
                folded = fold(inputs[0], *inputs[2:], rows=block_rows)
                assert (got_o.dtype, got_state.dtype, folded.dtype) == (dtype,) * 3
                assert_close(f"o of {name}", got_o, o, limit)
                assert_close(f"state of {name}", got_state, state, limit)
                assert_close(f"fold of {name}", folded, state, limit)
            assert all(torch.equal(x, y) for x, y in zip(inputs, rows.to(dtype), strict=True)), (
                "an input changed"
            )


def test_gates_span_a_hundredth_to_ten() -> None:
    g = torch.cat([random_rows(FOURS, 40, seed=seed).g for seed in range(20)])
    assert g.max() > -0.011
    assert g.min() < -9.5
    weights = random_weights(FOURS, seeded(3))
    stream = random_stream(FOURS, 500, seeded(4))
    g, _ = gates(stream.a, stream.b, weights.A_log, weights.dt_bias)
    assert g.max() > -0.01
    assert g.min() < -10


def test_weak_gates_after_strong_ones_keep_their_digits() -> None:
    """Decays come from sums between two rows; running sums would cancel after a strong gate."""
    heads = FOURS
    rows = random_rows(heads, 64, seed=5)
    rows = replace(rows, g=torch.full_like(rows.g, -0.01))
    rows.g[:32:2] = -60.0
    o, state = loop(*rows.to(torch.float64))
    got_o, got_state = block(*rows.to(torch.float32))
    # g itself is rounded to float32, so its own digits are the limit: a few units.
    assert_close("o", got_o, o, 4e-7)
    assert_close("state", got_state, state, 4e-7)


def test_equal_keys_written_at_full_strength_stay_bounded() -> None:
    """The solve's worst case: every row overwrites the one before it."""
    rows = random_rows(PAIRS, 40, seed=6)
    k = rows.k[:1].expand_as(rows.k).clone()
    rows = replace(rows, k=k, g=torch.zeros_like(rows.g), beta=torch.ones_like(rows.beta))
    o, state = loop(*rows.to(torch.float64))
    got_o, got_state = block(*rows.to(torch.float32))
    assert_close("o", got_o, o, tolerance(torch.float32, 40, PAIRS))
    assert_close("state", got_state, state, tolerance(torch.float32, 40, PAIRS))


@pytest.mark.parametrize("form", [block, loop])
def test_no_rows_leave_the_state(form: Callable) -> None:
    rows = random_rows(PAIRS, 0, seed=7)
    o, state = form(*rows.to(torch.float64))
    assert o.shape == (0, 4, 6)
    assert torch.equal(state, rows.state)
    assert torch.equal(fold(rows.state, rows.k, rows.v, rows.g, rows.beta), rows.state)


def test_gates_are_the_formula() -> None:
    a, b, rate, shift = [0.5, -30.0, 50.0], [0.3, -80.0, 80.0], 0.7, -0.2
    g, beta = gates(
        torch.tensor(a, dtype=torch.float64)[:, None],
        torch.tensor(b, dtype=torch.float64)[:, None],
        torch.tensor([rate]),
        torch.tensor([shift]),
    )
    rate, shift = torch.tensor([rate, shift]).tolist()
    want = [-math.exp(rate) * math.log1p(math.exp(x + shift)) for x in a]
    assert g.flatten().tolist() == pytest.approx(want, rel=1e-9)
    assert beta.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in b], rel=1e-12)
    assert gates(g.bfloat16(), g.bfloat16(), g[0], g[0])[0].dtype == torch.float32


def test_normalised_rows_have_length_one_and_zero_stays_zero() -> None:
    q = torch.tensor([[[3.0, 4.0, 0.0, 0.0]], [[0.0] * 4]], dtype=torch.float64)
    unit_q, unit_k = normalise(q, q)
    assert unit_k[0, 0].tolist() == pytest.approx([0.6, 0.8, 0, 0], rel=1e-6)
    assert torch.equal(unit_q, unit_k / 2)
    assert not unit_k[1].any()


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize(
    ("activation", "bias"), [("silu", True), ("swish", False), (None, True), (None, False)]
)
def test_conv_rows_equal_the_convolution_of_the_whole_request(
    taps: int, activation: str | None, bias: bool
) -> None:
    heads = replace(PAIRS, conv_kernel=taps)
    weights = replace(random_weights(heads, seeded(8), bias), activation=activation)
    stream = random_stream(heads, 23, seeded(9))
    want = torch.cat(
        [x.flatten(1) for x in oracle_rows(weights, heads, stream, torch.float64)[:3]], 1
    )
    inputs = torch.cat((torch.zeros(taps - 1, heads.conv_channels), stream.qkv))
    for dtype in (torch.float32, torch.float64):
        got = conv_rows(
            inputs[5 : 5 + taps - 1].to(dtype),
            inputs[5 + taps - 1 :].to(dtype),
            weights.conv_weight,
            weights.conv_bias,
            activation,
        )
        assert got.dtype == dtype
        assert_close("conv", got, want[5:], tolerance(dtype, 1, heads), first=5)


def test_products_of_16_bits_are_rounded_before_they_are_summed() -> None:
    """The square of 1 + 2^-7 has 15 bits, of which a bfloat16 keeps 8."""
    row = torch.full((1, 1), 1 + 2**-7, dtype=torch.bfloat16)
    weight = torch.full((1, 2), 1 + 2**-7, dtype=torch.bfloat16)
    rounded = float((row * weight[:, :1]).double())
    exact = (1 + 2**-7) ** 2
    assert rounded != exact
    for dtype in (torch.float32, torch.float64):
        got = conv_rows(row, row, weight, None, None, dtype)
        assert got.dtype == dtype
        assert float(got) == 2 * rounded
        wide = conv_rows(row.to(dtype), row.to(dtype), weight, None, None)
        assert float(wide) == 2 * exact
        mixed = conv_rows(row, row, weight.float(), None, None, dtype)
        assert float(mixed) == 2 * exact


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'gelu' is none of 'silu'"):
        conv_rows(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2, 2), None, "gelu")


# Schedules of steps


@dataclass
class Request:
    """A request in a slot: its tokens, and how far it is computed."""

    stream: Stream
    slot: int
    outputs: torch.Tensor  # [n, HV, V], the oracle's
    base: int = 0
    start: int = 0
    steps: int = 0


@dataclass
class Server:
    """Steps of one layer, each checked against the oracle and against what it must not touch."""

    heads: GdnHeads
    drafts: int
    poison: float = NAN
    dtype: torch.dtype = torch.float32
    ssm_dtype: torch.dtype = torch.float32
    conv_dim_first: bool = False
    rule: Callable = block
    slots: int = 6
    seed: int = 0
    bias: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.generator = seeded(self.seed)
        self.weights = random_weights(self.heads, self.generator, self.bias)
        self.pages = poisoned_pages(
            self.heads,
            self.drafts,
            self.slots,
            self.poison,
            self.dtype,
            self.ssm_dtype,
            self.conv_dim_first,
        )
        self.max_rows = self.drafts + 1
        self.ring = ring_rows(self.drafts)
        self.window = self.pages.conv.shape[1]
        self.used: set[int] = set()

    def arrive(self, count: int, slot: int, scale: float = 1.0) -> Request:
        stream = random_stream(self.heads, count, self.generator, self.dtype, scale)
        request = Request(stream, slot, oracle(self.weights, self.heads, stream, self.dtype)[0])
        self.seen["dirty slot"] += slot in self.used
        self.used.add(slot)
        return request

    def limit(self, request: Request) -> float:
        """What rounding allows an output; a bfloat16 state is rounded at each of its steps."""
        limit = tolerance(
            torch.promote_types(self.ssm_dtype, torch.float32), len(request.stream), self.heads
        )
        if self.dtype != torch.float64:
            # Convolutions of float32 and float64 may round to different neighbours.
            limit += 2 * stored(self.dtype)
        if self.ssm_dtype == torch.bfloat16:
            limit += 2 * stored(self.ssm_dtype, request.steps + 1)
        return limit

    def step(self, *batch: tuple[Request, int, int], padding: int = 0) -> None:
        """One step: `rows` of each request, of which the first `accepted` are its next tokens.

        Args:
            batch: (request, rows, accepted).
            padding: requests of the null slot behind them, the first with two rows.
        """
        parts, plan = [], []
        for request, rows, accepted in batch:
            right = request.stream[request.start : request.start + accepted]
            assert len(right) == accepted, "the schedule overruns the request"
            wrong = random_stream(self.heads, rows - accepted, self.generator, self.dtype, 3.0)
            parts.append(joined((right, wrong)))
            plan.append((request.slot, request.base, request.start, rows))
        if padding:
            parts.append(random_stream(self.heads, 2, self.generator, self.dtype))
            plan += [(0, 99, 12, 2)] + [(0, 7, 7, 0)] * (padding - 1)
        inputs = joined(parts)
        tokens = len(inputs)
        # vLLM pads a batch: rows behind the last request are garbage.
        spare = random_stream(self.heads, 3, self.generator, self.dtype, NAN)
        inputs = joined((inputs, spare))
        HV, V = self.heads.value_heads, self.heads.value_dim
        out = torch.full((len(inputs), HV, V), STALE, dtype=self.dtype)
        buffers = step_rows(plan)

        before = snapshot(self.pages)
        sources = [*vars(inputs).values(), *vars(buffers).values()]
        sources += [x for x in vars(self.weights).values() if isinstance(x, torch.Tensor)]
        copies = [x.clone() for x in sources]
        replay_step(
            self.pages,
            self.weights,
            self.heads,
            inputs.qkv,
            inputs.a,
            inputs.b,
            buffers,
            self.max_rows,
            out,
            rule=self.rule,
        )
        for source, copy in zip(sources, copies, strict=True):
            assert torch.equal(int_bits(source), int_bits(copy)), "a source changed"
        self._check_pages(before, inputs, plan)

        first = 0
        for request, rows, accepted in batch:
            end = request.start + accepted
            where = (
                f"step {request.steps} of slot {request.slot} (base={request.base}, "
                f"start={request.start}, T={rows}, D={self.drafts})"
            )
            assert_close(
                where,
                out[first : first + accepted],
                request.outputs[request.start : end],
                self.limit(request),
                first=request.start,
            )
            self._count(request, rows, accepted)
            if not rows:
                continue
            request.base = request.start + rows if rows > self.max_rows else request.start
            request.start = end if rows <= self.max_rows else request.start + rows
            request.steps += 1
            first += rows
        assert not out[first:tokens].any(), "rows of the null slot are not zero"
        assert out[tokens:].eq(STALE).all(), "rows behind the last request were written"

    def _count(self, request: Request, rows: int, accepted: int) -> None:
        pending, start, R = request.start - request.base, request.start, self.ring
        short = 0 < rows <= self.max_rows
        if not rows:
            self.seen["empty row"] += 1
            return
        self.seen["fold"] += pending > 0
        self.seen["fold of a zero state"] += pending > 0 and request.base == 0
        self.seen["fold across the ring's end"] += pending > 0 and request.base % R + pending > R
        self.seen["append across the ring's end"] += short and start % R + rows > R
        self.seen["window across its end"] += start % self.window + rows > self.window
        self.seen["history across the start"] += 0 < start < self.heads.conv_kernel - 1
        self.seen["chunk"] += not short
        self.seen["chunk after pending rows"] += not short and pending > 0
        self.seen["short row after a chunk"] += short and pending == 0 and start > 0
        self.seen["rejected rows"] += rows - accepted
        self.seen["full row"] += rows == self.max_rows
        self.seen["single row"] += rows == 1

    def _check_pages(
        self, before: Pages, inputs: Stream, plan: list[tuple[int, int, int, int]]
    ) -> None:
        """Only what the contract names changed, and what was appended is there bit by bit."""
        touched = {
            f.name: torch.zeros(getattr(before, f.name).shape[:2], dtype=torch.bool)
            for f in fields(Pages)
        }
        first = 0
        for slot, base, start, rows in plan:
            if slot and rows:
                short = rows <= self.max_rows
                if short:
                    for t in range(rows):
                        for name in "kvab":
                            touched[name][slot, (start + t) % self.ring] = True
                        for name in "ab":
                            got = getattr(self.pages, name)[slot, (start + t) % self.ring]
                            assert torch.equal(got, getattr(inputs, name)[first + t])
                for t in range(max(0, rows - self.window), rows):
                    column = (start + t) % self.window
                    touched["conv"][slot, column] = True
                    assert torch.equal(self.pages.conv[slot, column], inputs.qkv[first + t])
                touched["ssm"][slot] = start > base or not short
            first += rows
        for name, mask in touched.items():
            old, new = getattr(before, name), getattr(self.pages, name)
            same = int_bits(old).flatten(2).eq(int_bits(new).flatten(2)).all(2)
            wrong = (~same & ~mask).nonzero().tolist()
            assert not wrong, f"{name} changed at (slot, row) {wrong}"

    def check_state(self, request: Request) -> None:
        """The state in the page is the oracle's after `base` tokens."""
        assert request.base > 0
        _, want = oracle(self.weights, self.heads, request.stream[: request.base], self.dtype)
        name = f"state of slot {request.slot} after {request.base} tokens"
        assert_close(name, self.pages.ssm[request.slot], want, self.limit(request))

    def expect(self, *what: str) -> None:
        missing = [name for name in what if not self.seen[name]]
        assert not missing, f"the schedule never had: {missing}; it had {dict(self.seen)}"


EVERYTHING = (
    "fold",
    "fold of a zero state",
    "fold across the ring's end",
    "append across the ring's end",
    "window across its end",
    "history across the start",
    "chunk",
    "chunk after pending rows",
    "short row after a chunk",
    "rejected rows",
    "full row",
    "single row",
    "empty row",
    "dirty slot",
    "preemption",
    "null slot",
    "batch without drafts after drafts",
)


def serve_randomly(server: Server, steps: int, seed: int) -> None:
    """A pool of slots under ragged chunks, ragged drafts, empty rows, preemption and slot reuse."""
    rng = random.Random(seed)
    length = server.ring + 3 * server.max_rows + 20
    requests = [server.arrive(length, slot) for slot in range(1, server.slots - 1)]
    prompts = [rng.randrange(1, length // 2) for _ in requests]
    free = [server.slots - 1]

    def move(i: int) -> int:
        free.append(requests[i].slot)
        return free.pop(0)

    for step in range(steps):
        batch, plain = [], step % 7 == 6
        for i, request in enumerate(requests):
            if rng.random() < 0.15:
                continue
            left = len(request.stream) - request.start
            to_go = prompts[i] - request.start
            if rng.random() < 0.1:
                batch.append((request, 0, 0))
            elif to_go > 0:
                chunk = rng.choice(
                    [1, 2, server.max_rows, server.max_rows + 1, 2 * server.max_rows + 3]
                )
                rows = min(chunk, to_go)
                batch.append((request, rows, rows))
            else:
                drafts = (
                    0 if plain else rng.choice([0, server.drafts, rng.randrange(server.drafts + 1)])
                )
                batch.append((request, 1 + drafts, min(left, 1 + rng.randint(0, drafts))))
                if plain and request.start > request.base + 1:
                    server.seen["batch without drafts after drafts"] += 1
        if batch:
            padding = rng.choice([0, 1, 3])
            server.seen["null slot"] += padding
            server.step(*batch, padding=padding)
        for i, request in enumerate(requests):
            if request.start == len(request.stream):
                server.check_state(request)
                requests[i] = server.arrive(length, move(i))
                prompts[i] = rng.randrange(1, length // 2)
            elif request.start and rng.random() < 0.03:
                prompts[i] = request.start
                request.base = request.start = 0
                request.slot = move(i)
                server.seen["preemption"] += 1


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("drafts", [1, 3, 7, 15, 24, 31])
def test_a_random_schedule_equals_the_accepted_tokens_alone(drafts: int, poison: float) -> None:
    heads = {1: FOURS, 3: EQUAL, 7: PAIRS}.get(drafts, PAIRS)
    server = Server(heads, drafts, poison, seed=drafts, bias=drafts > 3)
    serve_randomly(server, steps=110, seed=drafts + 50)
    server.expect(*EVERYTHING)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"rule": loop}, id="by the loop"),
        pytest.param({"dtype": torch.float64, "ssm_dtype": torch.float64}, id="float64"),
        pytest.param({"conv_dim_first": True}, id="DS window"),
        pytest.param({"dtype": torch.bfloat16}, id="bfloat16 model"),
        pytest.param({"dtype": torch.float16}, id="float16 model"),
        pytest.param({"ssm_dtype": torch.bfloat16}, id="bfloat16 state"),
    ],
)
def test_a_random_schedule_in_other_forms_and_dtypes(options: dict) -> None:
    server = Server(PAIRS, 5, seed=60, **options)
    serve_randomly(server, steps=110, seed=61)
    server.expect(*EVERYTHING)
    if server.conv_dim_first:
        assert server.pages.conv.stride(1) == 1


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("drafts", range(1, 16))
def test_c2_a_prompt_of_one_token_and_the_drafts_is_a_prompt(drafts: int, poison: float) -> None:
    """vllm#53051: a prompt of 1 + D tokens, and its neighbours, followed by accepted drafts."""
    for prompt in (drafts, drafts + 1, drafts + 2):
        server = Server(PAIRS, drafts, poison, seed=drafts)
        request = server.arrive(prompt + 2 * drafts + 3, slot=2)
        server.step((request, prompt, prompt))
        assert request.base == (prompt if prompt > drafts + 1 else 0)
        server.step((request, drafts + 1, drafts + 1))
        server.step((request, drafts + 1, drafts + 1))
        server.step((request, 1, 1))
        server.check_state(request)
        assert request.base == prompt + 2 * drafts + 2
        server.expect("fold")
        assert not server.seen["rejected rows"]


@pytest.mark.parametrize("poison", POISONS)
def test_c5_rejected_drafts_then_none_then_drafts_again(poison: float) -> None:
    """vllm#39273: three of five drafts accepted, a step with none, drafts again."""
    server = Server(PAIRS, 5, poison, seed=5)
    request = server.arrive(40, slot=3)
    server.step((request, 11, 11))
    server.step((request, 6, 4))
    assert (request.base, request.start) == (11, 15)
    server.step((request, 1, 1))
    assert (request.base, request.start) == (15, 16)
    server.step((request, 6, 3))
    server.step((request, 6, 6))
    server.step((request, 1, 1))
    server.check_state(request)
    assert (request.base, request.start) == (25, 26)
    assert server.seen["rejected rows"] == 5
    assert server.seen["fold"] == 4


def test_c23_a_batch_without_drafts_keeps_what_was_accepted_before() -> None:
    server = Server(PAIRS, 7, seed=23)
    one, two = server.arrive(60, slot=1), server.arrive(60, slot=4)
    server.step((one, 20, 20), (two, 3, 3))
    server.step((one, 8, 5), (two, 8, 2))
    for _ in range(3):
        server.step((one, 1, 1), (two, 1, 1), padding=2)
    server.step((one, 8, 8), (two, 8, 8))
    server.step((one, 1, 1), (two, 1, 1))
    for request in (one, two):
        server.check_state(request)
    assert server.seen["single row"] == 8


def test_c24_verified_rows_and_a_prefill_chunk_of_one_batch_have_their_own_gates() -> None:
    server = Server(PAIRS, 5, seed=24)
    one, two = server.arrive(60, slot=1), server.arrive(60, slot=2)
    # Gates far apart: rows that met each other's would be off by far more than rounding.
    far = replace(two.stream, a=two.stream.a + 4, b=two.stream.b - 4)
    two = Request(far, 2, oracle(server.weights, server.heads, far, server.dtype)[0])
    server.step((one, 9, 9))
    server.step((two, 20, 20), (one, 6, 4))
    server.step((one, 6, 2), (two, 20, 20))
    server.step((one, 1, 1), (two, 6, 1))
    server.step((two, 1, 1), (one, 1, 1))
    for request in (one, two):
        server.check_state(request)
    server.expect("chunk", "rejected rows", "fold")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("taps", [2, 4])
def test_the_first_tokens_have_zeros_before_them(taps: int, poison: float) -> None:
    for first in range(1, 2 * taps):
        server = Server(replace(PAIRS, conv_kernel=taps), 3, poison, seed=taps)
        request = server.arrive(first + 10, slot=5)
        server.step((request, first, first))
        for _ in range(4):
            server.step((request, 1, 1))
        server.step((request, 4, 2))
        server.check_state(request)
        if first < taps - 1:
            server.expect("history across the start")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("then", [pytest.param(3, id="rows"), pytest.param(9, id="chunk")])
def test_any_number_of_pending_rows_is_folded(heads: GdnHeads, then: int) -> None:
    """Pending 0..R, more than a step can leave, from ring rows laid down here by position."""
    drafts = 3
    R, L = ring_rows(drafts), heads.conv_kernel - 1 + drafts
    weights = random_weights(heads, seeded(70))
    limit = tolerance(torch.float32, 3 * R, heads) + 2 * stored(torch.float32)
    wraps = 0
    for pending in range(R + 1):
        for base in (0, 5, 2 * R - 3):
            start = base + pending
            stream = random_stream(heads, start + then, seeded(71 + pending))
            o, _ = oracle(weights, heads, stream, torch.float32)
            _, k, v, _, _ = oracle_rows(weights, heads, stream, torch.float32)
            pages = poisoned_pages(heads, drafts, 3, NAN)
            for p in range(max(0, start - L), start):
                pages.conv[2, p % L] = stream.qkv[p]
            for p in range(base, start):
                pages.k[2, p % R], pages.v[2, p % R] = k[p].float(), v[p].float()
                pages.a[2, p % R], pages.b[2, p % R] = stream.a[p], stream.b[p]
            if base:
                pages.ssm[2] = oracle(weights, heads, stream[:base], torch.float32)[1].float()
            before = snapshot(pages)
            out = torch.full((then, heads.value_heads, heads.value_dim), STALE)
            new = stream[start:]
            rows = step_rows([(2, base, start, then)])
            replay_step(pages, weights, heads, new.qkv, new.a, new.b, rows, drafts + 1, out)
            name = f"pending {pending} from {base}"
            assert_close(f"o, {name}", out, o[start:], limit, first=start)
            after = start + then if then > drafts + 1 else start
            if after > base:
                want = oracle(weights, heads, stream[:after], torch.float32)[1]
                assert_close(f"state, {name}", pages.ssm[2], want, limit)
            else:
                assert torch.equal(int_bits(pages.ssm), int_bits(before.ssm)), name
            for f in fields(Pages):
                old, got = getattr(before, f.name)[:2], getattr(pages, f.name)[:2]
                assert torch.equal(int_bits(old), int_bits(got)), f"{f.name} of a neighbour, {name}"
            wraps += base % R + pending > R
    assert wraps > R


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_together_equal_the_whole_layer(tp: int) -> None:
    """Heads of each rank through `GdnHeads.shard`; a schedule with folds, drafts and a chunk."""
    whole = GdnHeads(8, 16, 8, 8, 4)
    heads = whole.shard(tp)
    drafts = 3
    weights = random_weights(whole, seeded(80))
    stream = random_stream(whole, 30, seeded(81))
    want, _ = oracle(weights, whole, stream, torch.float32)
    keys, values = whole.key_heads * whole.key_dim, whole.value_heads * whole.value_dim
    limit = tolerance(torch.float32, 30, whole) + 2 * stored(torch.float32)
    folds = 0
    parts = []
    for rank in range(tp):

        def own(tensor: torch.Tensor, dim: int, rank: int = rank) -> torch.Tensor:
            """This rank's channels of q, k and v, which lie side by side along `dim`."""
            blocks = tensor.split((keys, keys, values), dim)
            return torch.cat([x.chunk(tp, dim)[rank] for x in blocks], dim)

        mine = Weights(
            own(weights.conv_weight, 0),
            own(weights.conv_bias, 0),
            weights.A_log.chunk(tp)[rank],
            weights.dt_bias.chunk(tp)[rank],
        )
        part = Stream(own(stream.qkv, 1), stream.a.chunk(tp, 1)[rank], stream.b.chunk(tp, 1)[rank])
        pages = poisoned_pages(heads, drafts, 2, NAN)
        assert pages.k.shape[1:] == replay_layout(heads, drafts, input_dtype="float32")["k"].shape
        out = torch.full((30, heads.value_heads, heads.value_dim), STALE)
        base = start = 0
        for count in (2, 7, 4, 1, 4, 3, 9):
            rows = slice(start, start + count)
            new = part[rows]
            buffers = step_rows([(1, base, start, count)])
            replay_step(pages, mine, heads, new.qkv, new.a, new.b, buffers, drafts + 1, out[rows])
            folds += start > base
            base, start = (start + count,) * 2 if count > drafts + 1 else (start, start + count)
        parts.append(out)
    assert folds == 5 * tp
    assert_close(f"o of {tp} ranks", torch.cat(parts, 1), want, limit)


def test_rows_are_rounded_to_the_rings_dtype_when_verified_and_when_folded() -> None:
    """A fold of rounded rows after a verification of unrounded ones would be another model.

    Inputs and taps are small multiples of powers of two and nothing is activated, so that the
    convolution is exact in float32 and rounds to the same bfloat16 row in arm and oracle: the
    limit is that of float32.
    """
    heads, drafts = PAIRS, 7
    generator = seeded(90)

    def grid(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator) / 64

    stream = Stream(grid(40, heads.conv_channels), grid(40, 4), grid(40, 4))
    stream = Stream(*(getattr(stream, f.name).bfloat16() for f in fields(Stream)))
    weights = replace(
        random_weights(heads, generator, bias=False),
        conv_weight=grid(heads.conv_channels, heads.conv_kernel),
        activation=None,
    )
    exact = oracle_rows(weights, heads, stream, torch.float64)[1]
    assert not torch.equal(exact, exact.bfloat16().double()), "no row had to be rounded"
    assert torch.equal(exact, exact.float().double()), "the convolution is not exact in float32"
    want, _ = oracle(weights, heads, stream, torch.bfloat16)
    limit = tolerance(torch.float32, 40, heads)

    pages = poisoned_pages(heads, drafts, 2, NAN, torch.bfloat16)
    out = torch.full((40, 4, heads.value_dim), STALE)
    base = start = folds = 0
    for count in (8, 8, 1, 8, 14, 1):
        rows = slice(start, start + count)
        new = stream[rows]
        buffers = step_rows([(1, base, start, count)])
        replay_step(pages, weights, heads, new.qkv, new.a, new.b, buffers, 8, out[rows])
        assert_close(f"rows {rows}", out[rows], want[rows], limit, first=start)
        folds += start > base
        base, start = (start + count,) * 2 if count > 8 else (start, start + count)
    assert folds == 4
    _, state = oracle(weights, heads, stream[:base], torch.bfloat16)
    assert_close("state", pages.ssm[1], state, limit)


@pytest.mark.parametrize("form", [block, loop])
def test_c7_states_near_ten_thousand_give_finite_float16_outputs(form: Callable) -> None:
    """vllm#54308: entries near 1e4 are fine in a float32 state and must stay out of float16."""
    heads, drafts = PAIRS, 5
    server = Server(heads, drafts, NAN, dtype=torch.float16, seed=7)
    stream = random_stream(heads, 30, seeded(91), torch.float16)
    signs = torch.randint(0, 2, (4, heads.value_dim, heads.key_dim), generator=seeded(92)) * 2.0 - 1
    pages, weights = server.pages, server.weights
    # The recurrence forgets: a head that decays slowly keeps its size through all steps.
    weights = replace(weights, A_log=torch.full((4,), math.log(0.01)))
    pages.ssm[1] = 1e4 * signs
    pages.conv[1] = 0
    q, k, v, g, beta = oracle_rows(weights, heads, stream, torch.float16)
    want, _ = loop(pages.ssm[1].double(), q, k, v, g, beta)
    out = torch.full((30, 4, heads.value_dim), STALE, dtype=torch.float16)
    base = start = 8
    folds = 0
    for count in (6, 6, 1, 12, 5):
        rows = slice(start - 8, start - 8 + count)
        new = stream[rows]
        buffers = step_rows([(1, base, start, count)])
        replay_step(pages, weights, heads, new.qkv, new.a, new.b, buffers, 6, out[rows], rule=form)
        assert out[rows].isfinite().all(), f"not finite in rows {rows}"
        folds += start > base
        base, start = (start + count,) * 2 if count > 6 else (start, start + count)
    assert folds == 3
    assert want.abs().max() > 5e3
    assert pages.ssm[1].abs().max() > 1e3
    # Rows of k and v rounded to float16, now and then to another neighbour than in float64.
    limit = tolerance(torch.float32, 30, heads) + 2 * stored(torch.float16)
    assert_close("o", out, want, limit)


# Refusals


def refused(match: str, *requests: tuple[int, int, int, int], drafts: int = 3, **changes) -> None:
    """The step is refused with this text, and no page and no output was touched."""
    server = Server(PAIRS, drafts)
    request = server.arrive(12, slot=1)
    server.step((request, 6, 6))
    rows = step_rows([(1, 6, 6, 2), *requests])
    stream = random_stream(PAIRS, max(int(rows.row_start[-1]), 2), seeded(1))
    stream = stream[: changes.pop("tokens", None)]
    max_rows = changes.pop("max_rows", drafts + 1)
    pages = replace(server.pages, **changes)
    before = snapshot(pages)
    out = torch.full((len(stream), 4, 6), STALE)
    with pytest.raises(RuntimeError, match=match):
        replay_step(
            pages, server.weights, PAIRS, stream.qkv, stream.a, stream.b, rows, max_rows, out
        )
    for f in fields(Pages):
        assert torch.equal(int_bits(getattr(pages, f.name)), int_bits(getattr(before, f.name)))
    assert out.eq(STALE).all()


def test_more_pending_rows_than_the_ring_has_are_refused() -> None:
    refused(r"row 1: 33 pending rows.*slot=2, base=4, start=37, T=3, R=32", (2, 4, 37, 3))


def test_a_base_beyond_the_start_is_refused() -> None:
    refused(r"row 1: -1 pending rows.*slot=2, base=5, start=4, T=3, R=32", (2, 5, 4, 3))


def test_a_negative_base_is_refused() -> None:
    refused(r"row 1: .*slot=2, base=-1, start=4, T=3, R=32", (2, -1, 4, 3))


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_slot_outside_the_pages_is_refused(slot: int) -> None:
    refused(rf"row 1: the slot is outside the 6 pages: slot={slot}, base=0", (slot, 0, 0, 3))


def test_rows_beyond_the_batch_are_refused() -> None:
    refused(r"row 1: rows 2 to 5 are outside the 4 of the batch", (2, 0, 0, 3), tokens=4)


def test_rows_that_go_backwards_are_refused() -> None:
    refused(r"row 1: rows 2 to 1 are outside.*T=-1", (2, 0, 0, -1))


def test_a_ring_that_new_rows_would_overrun_is_refused() -> None:
    refused("33 rows a step need a ring of as many rows.*R=32", max_rows=33)


def test_a_window_that_new_rows_would_overrun_is_refused() -> None:
    conv = torch.zeros(6, 5, PAIRS.conv_channels)
    refused("4 rows a step need.*conv window of 6 columns.*5 columns", conv=conv)


def test_padding_may_hold_any_numbers() -> None:
    """Rows of the null slot and empty rows are not planned: nothing of theirs is looked at."""
    server = Server(PAIRS, 3)
    request = server.arrive(12, slot=1)
    server.step((request, 6, 6))
    before = snapshot(server.pages)
    rows = step_rows([(0, 900, 3, 2), (9, 44, 2, 0), (3, -5, 900, 0)])
    out = torch.full((4, 4, 6), STALE)
    new = random_stream(PAIRS, 4, seeded(2))
    replay_step(server.pages, server.weights, PAIRS, new.qkv, new.a, new.b, rows, 4, out)
    for f in fields(Pages):
        old, got = getattr(before, f.name), getattr(server.pages, f.name)
        assert torch.equal(int_bits(old), int_bits(got)), f.name
    assert not out[:2].any()
    assert out[2:].eq(STALE).all()


def test_the_rule_asked_for_folds_and_computes() -> None:
    rows_seen = []

    def rule(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows_seen.append(len(inputs[1]))
        return loop(*inputs)

    server = Server(PAIRS, 3, rule=rule)
    request = server.arrive(20, slot=1)
    server.step((request, 7, 7))
    server.step((request, 4, 2))
    server.step((request, 3, 3))
    assert rows_seen == [7, 4, 2, 3]


def test_a_step_builds_no_gradient() -> None:
    server = Server(PAIRS, 3)
    server.weights = replace(server.weights, A_log=server.weights.A_log.requires_grad_())
    request = server.arrive(12, slot=1)
    request.outputs = request.outputs.detach()
    server.step((request, 6, 6))
    server.step((request, 4, 4))
    server.step((request, 1, 1))
    assert not server.pages.ssm.requires_grad


def test_step_rows_are_int32() -> None:
    rows = step_rows([(1, 2, 3, 4)])
    assert isinstance(rows, StepRows)
    assert rows.row_start.equal(ints([0, 4]))
