"""Time fold-and-verify against vLLM's own kernels, on the same inputs and in one run.

The gate comes first: over 4,096 tokens with drafts accepted at random, errors of outputs and states
against the loop in float64 may be at most twice those of vLLM's kernel against the same loop. Red
means that nothing is timed. Then both sides are captured in CUDA graphs over states that rotate
through more memory than the L2 holds, and replayed in turns.

The other side is `fused_sigmoid_gating_delta_rule_update` and, for a whole layer, its
`causal_conv1d_update` and the copies between the two, as vLLM 0.31.0 calls them for a step with
drafts.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_ext.bench import plot
from cuda_ext.bench.provenance import commit as checkout
from cuda_ext.ops import launch, reference
from cuda_ext.ops.conv_update import conv_update
from cuda_ext.ops.fold_verify import CudaBuild, compile_cuda, fold_verify
from cuda_ext.ops.reference import Pages, StepRows, Weights
from cuda_ext.ring import ring_rows

DIM, TAPS = 128, 4
COPY_BYTES_PER_US = {"NVIDIA H200": 4.28e6, "NVIDIA B200": 8.0e6}
"""Bytes read and written a microsecond: the H200's by a measured device copy, the B200's by its
datasheet."""
ACCEPTED = 10
"""Pending rows of a timed step, where it has as many: about the acceptance of a DFlash drafter."""
ROTATE_BYTES = 192 << 20
"""Three times an H200's L2."""
GATE_TOKENS = 4096
GATE_HEADS = {"errors": (144, 288), "errors_small_batch": (4, 8)}
"""H and HV of the gate's one request: once more tiles than an H200 holds at a time, in the launch
of the table's larger lines; once few, in that of small batches."""
MAY_BE_WORSE = 2.0


@dataclass(frozen=True)
class Shape:
    """One line of the table: N requests of T rows with P pending, H key and HV value heads."""

    requests: int
    rows: int
    pending: int
    key_heads: int = 16
    value_heads: int = 32

    @property
    def max_rows(self) -> int:
        """T_max of a server in whose steps the shape occurs."""
        return max(self.rows, self.pending)

    def floor_bytes(self) -> int:
        """Bytes that fold and verify must move: the state read and, where rows are pending,
        written; the rows of both kinds read; the outputs written."""
        H, HV = self.key_heads, self.value_heads
        state = self.requests * HV * DIM * DIM * 4 * (2 if self.pending else 1)
        row = 2 * (H * DIM + HV * DIM + 2 * HV)
        new = row + 2 * (H * DIM + HV * DIM)
        return state + self.requests * (self.pending * row + self.rows * new)


def _shapes() -> list[Shape]:
    def shape(requests: int, rows: int, *heads: int) -> Shape:
        return Shape(requests, rows, min(rows, ACCEPTED), *heads)

    sizes = [(16, 16), (64, 16), (128, 16), (16, 17), (16, 24), (16, 32), (16, 4), (16, 8)]
    sizes += [(16, 1), (16, 2), (64, 1), (1, 16), (4, 16), (64, 32)]
    shapes = [shape(*size) for size in sizes]
    # Wider models, and shards of all three on four ranks.
    for heads in ((16, 48), (16, 64), (4, 8), (4, 12), (4, 16)):
        shapes += [shape(16, 16, *heads), shape(64, 16, *heads)]
    return shapes


class Inputs:
    """Rows, weights and plan of a shape on the device, and states to rotate through."""

    def __init__(self, shape: Shape, seed: int = 0, ring: int | None = None) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        N, T, H, HV = shape.requests, shape.rows, shape.key_heads, shape.value_heads
        bf16 = torch.bfloat16
        self.ring = ring or ring_rows(shape.max_rows - 1)
        slots, tokens = N + 1, N * T
        channels = 2 * H * DIM + HV * DIM
        window = TAPS - 1 + shape.max_rows - 1
        state = N * HV * DIM * DIM * 4
        self.pages = [
            Pages(
                conv=normal(slots, window, channels).to(bf16),
                ssm=normal(slots, HV, DIM, DIM) * 0.5,
                k=normal(slots, self.ring, H, DIM).to(bf16),
                v=normal(slots, self.ring, HV, DIM).to(bf16),
                a=normal(slots, self.ring, HV).to(bf16),
                b=normal(slots, self.ring, HV).to(bf16),
            )
            for _ in range(max(3, -(-ROTATE_BYTES // state)))
        ]
        self.weights = Weights(
            conv_weight=normal(channels, TAPS).to(bf16),
            conv_bias=None,
            A_log=torch.rand(HV, generator=generator, device="cuda") * 2 - 2,
            # vLLM keeps A_log in float32 and this in the model's dtype.
            dt_bias=torch.rand(HV, generator=generator, device="cuda").bfloat16(),
        )
        self.qkv = normal(tokens, channels).to(bf16)
        self.a, self.b = normal(tokens, HV).to(bf16), normal(tokens, HV).to(bf16)
        self.q = normal(tokens, H, DIM).to(bf16)
        self.k, self.v = normal(1, tokens, H, DIM).to(bf16), normal(1, tokens, HV, DIM).to(bf16)
        self.out = torch.empty(tokens, HV, DIM, dtype=bf16, device="cuda")
        numbers = torch.arange(N, dtype=torch.int32, device="cuda")
        base = 1000 + 37 * numbers
        self.rows = StepRows(
            slot=numbers + 1,
            base=base,
            start=base + shape.pending,
            row_start=torch.arange(N + 1, dtype=torch.int32, device="cuda") * T,
        )

    def ours(self, pages: Pages) -> None:
        """Fold and verify, the rows being in the rings."""
        shape = self.shape
        fold_verify(
            pages, self.weights, self.q, self.rows, shape.max_rows, self.out, step_rows=shape.rows
        )

    def our_layer(self, pages: Pages) -> None:
        """Convolution, then fold and verify."""
        shape = self.shape
        q = conv_update(
            pages,
            self.weights,
            self.qkv,
            self.a,
            self.b,
            self.rows,
            shape.max_rows,
            step_rows=shape.rows,
            overlap=True,
        )
        fold_verify(
            pages,
            self.weights,
            q,
            self.rows,
            shape.max_rows,
            self.out,
            step_rows=shape.rows,
            overlap=True,
        )


class Stock:
    """vLLM's own kernels on the same inputs, with a state for every row as it keeps them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, shape = inputs, inputs.shape
        N, T, HV = shape.requests, shape.rows, shape.value_heads
        bytes_a_set = N * T * HV * DIM * DIM * 4
        self.states = [
            torch.randn(N * T + 1, HV, DIM, DIM, device="cuda") * 0.5
            for _ in range(max(2, -(-ROTATE_BYTES // bytes_a_set)))
        ]
        numbers = torch.arange(N * T, dtype=torch.int32, device="cuda")
        self.slots = (numbers + 1).view(N, T)
        self.accepted = torch.full((N,), max(1, shape.pending), dtype=torch.int32, device="cuda")
        self.mixed = torch.empty_like(inputs.qkv)
        self.windows = [page.conv.transpose(1, 2) for page in inputs.pages]

    def update(self, state: Tensor) -> None:
        """The update kernel; q, k and v come contiguous."""
        given = self.inputs
        self._update(state, given.q[None], given.k, given.v)

    def layer(self, state: Tensor, window: Tensor) -> None:
        """The convolution, the copies that make q, k and v contiguous, and the update."""
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        given, shape = self.inputs, self.inputs.shape
        H, HV = shape.key_heads, shape.value_heads
        mixed = causal_conv1d_update(
            given.qkv,
            window,
            given.weights.conv_weight,
            None,
            "silu",
            conv_state_indices=given.rows.slot,
            num_accepted_tokens=self.accepted,
            query_start_loc=given.rows.row_start,
            max_query_len=shape.rows,
            out=self.mixed,
        )
        q, k, v = mixed.split((H * DIM, H * DIM, HV * DIM), 1)
        self._update(
            state,
            *(
                x.contiguous().view(1, len(mixed), heads, DIM)
                for x, heads in ((q, H), (k, H), (v, HV))
            ),
        )

    def _update(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        given = self.inputs
        self.out = stock_update(
            given.weights,
            given.a,
            given.b,
            q,
            k,
            v,
            state,
            given.rows.row_start,
            self.slots,
            self.accepted,
        )


def stock_update(
    weights: Weights,
    a: Tensor,
    b: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    row_start: Tensor,
    slots: Tensor,
    accepted: Tensor,
) -> Tensor:
    """vLLM's kernel as its layer calls it for rows with drafts; outputs [tokens, HV, V]."""
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import (
        fused_sigmoid_gating_delta_rule_update,
    )

    out, _ = fused_sigmoid_gating_delta_rule_update(
        weights.A_log,
        a,
        b,
        weights.dt_bias,
        q,
        k,
        v,
        initial_state=state,
        cu_seqlens=row_start,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def gate(
    key_heads: int,
    value_heads: int,
    tokens: int = GATE_TOKENS,
    max_rows: int = 16,
    seed: int = 0,
) -> dict[str, Any]:
    """Errors of both sides over `tokens` tokens of one request, drafts accepted at random.

    Returns:
        `green`, and for each of ours and stock the RMS errors of all outputs and the largest RMS
        error of a state, both relative to the loop in float64; `first_worse_step`, the first step
        at which our state's error was more than twice the largest that stock had up to there.
    """
    shape = Shape(1, max_rows, 0, key_heads, value_heads)
    given = Inputs(shape, seed)
    pages, weights, ring = given.pages[0], given.weights, given.ring
    for tensor in vars(pages).values():
        tensor.fill_(float("nan"))
    generator = torch.Generator().manual_seed(seed)
    H, HV = shape.key_heads, shape.value_heads
    exact = torch.zeros(HV, DIM, DIM, dtype=torch.float64, device="cuda")
    states = torch.zeros(max_rows + 1, HV, DIM, DIM, device="cuda")
    slots = torch.arange(1, max_rows + 1, dtype=torch.int32, device="cuda")[None]
    A_log, dt_bias = weights.A_log.double(), weights.dt_bias.double()
    square = {"ours": 0.0, "stock": 0.0, "wanted": 0.0}
    worst = {"ours": 0.0, "stock": 0.0}
    first_worse: int | None = None
    position = pending = step = 0
    source = torch.Generator("cuda").manual_seed(seed)

    def fresh(*size: int) -> Tensor:
        return torch.randn(*size, generator=source, device="cuda").bfloat16()

    old: tuple[Tensor, ...] = ()
    kept = states[0]
    while position < tokens:
        T = max_rows if step % 3 else int(torch.randint(1, max_rows + 1, (), generator=generator))
        q, k, v = fresh(T, H, DIM), fresh(T, H, DIM), fresh(T, HV, DIM)
        a, b = fresh(T, HV), fresh(T, HV)
        at = torch.arange(position, position + T, device="cuda") % ring
        for tensor, new in ((pages.k, k), (pages.v, v), (pages.a, a), (pages.b, b)):
            tensor[1, at] = new
        base, start, row_start = (
            torch.tensor(x, dtype=torch.int32, device="cuda")
            for x in ([position - pending], [position], [0, T])
        )
        rows = StepRows(slots[0, :1], base, start, row_start)
        out = torch.full((T, HV, DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
        fold_verify(pages, weights, q, rows, max_rows, out)
        accepted = torch.tensor([max(1, pending)], dtype=torch.int32, device="cuda")
        other = stock_update(
            weights, a, b, q[None], k[None], v[None], states, row_start, slots, accepted
        )
        if pending:
            _, exact = reference.loop(exact, old[0], *old)
            ours_state = _error(pages.ssm[1], exact)
            # vLLM's is the state that it wrote after the last accepted row.
            stock_state = _error(kept, exact)
            worst["ours"] = max(worst["ours"], ours_state)
            worst["stock"] = max(worst["stock"], stock_state)
            if first_worse is None and ours_state > MAY_BE_WORSE * worst["stock"]:
                first_worse = step
        g, beta = reference.gates(a.double(), b.double(), A_log, dt_bias)
        wanted, _ = reference.loop(exact, q, k, v, g, beta)
        square["wanted"] += float(wanted.square().sum())
        square["ours"] += float((out.double() - wanted).square().sum())
        square["stock"] += float((other.double() - wanted).square().sum())
        pending = int(torch.randint(1, T + 1, (), generator=generator))
        kept = states[pending].clone()
        old = (k[:pending], v[:pending], g[:pending], beta[:pending])
        position += pending
        step += 1
    outputs = {name: (square[name] / square["wanted"]) ** 0.5 for name in ("ours", "stock")}
    green = all(
        side["ours"] <= MAY_BE_WORSE * side["stock"] for side in (outputs, worst)
    )  # NaN compares false
    return {
        "green": green,
        "heads": [key_heads, value_heads],
        "tokens": position,
        "steps": step,
        "outputs": outputs,
        "states": worst,
        "first_worse_step": first_worse,
    }


def _error(found: Tensor, wanted: Tensor) -> float:
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def capture(calls: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, each made once before, so that all is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def in_turns(
    arms: Mapping[str, Sequence[Callable[[], None]]], repeats: int
) -> dict[str, list[float]]:
    """Microseconds a call of each arm, the arms' graphs replayed in turns, the first one warm."""
    graphs = {name: capture(calls) for name, calls in arms.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if repeat:
                samples[name].append(begin.elapsed_time(end) * 1e3 / len(arms[name]))
    return samples


def table_arms(shape: Shape) -> dict[str, Sequence[Callable[[], None]]]:
    """Both sides of a line: the kernels alone."""
    given = Inputs(shape)
    stock = Stock(given)
    return {
        "stock": [functools.partial(stock.update, state) for state in stock.states],
        "ours": [functools.partial(given.ours, pages) for pages in given.pages],
    }


def layer_arms(shape: Shape) -> dict[str, Sequence[Callable[[], None]]]:
    """Both sides of a layer's step: convolution, gates, fold, verify."""
    given = Inputs(shape)
    stock = Stock(given)
    windows = [stock.windows[i % len(stock.windows)] for i in range(len(stock.states))]
    return {
        "stock": [
            functools.partial(stock.layer, s, w) for s, w in zip(stock.states, windows, strict=True)
        ],
        "ours": [functools.partial(given.our_layer, pages) for pages in given.pages],
    }


def curve(requests: int, longest: int, repeats: int) -> list[dict[str, Any]]:
    """Our time for every T from 1 to `longest` and every P from 0 to `longest`, and vLLM's for
    every T, which does not depend on P."""
    points = []
    most = Inputs(Shape(requests, longest, longest))
    for T in range(1, longest + 1):
        stock = Stock(Inputs(Shape(requests, T, min(T, ACCEPTED))))
        arms = {"stock": [functools.partial(stock.update, state) for state in stock.states]}
        stock_us = statistics.median(in_turns(arms, repeats)["stock"])
        del arms, stock
        most.rows.row_start.copy_(torch.arange(requests + 1) * T)
        ours = {}
        for P in range(longest + 1):
            shape = Shape(requests, T, P)
            most.rows.start.copy_(most.rows.base + P)
            calls = [
                functools.partial(
                    fold_verify,
                    pages,
                    most.weights,
                    most.q,
                    most.rows,
                    shape.max_rows,
                    most.out,
                    step_rows=T,
                )
                for pages in most.pages
            ]
            ours[P] = statistics.median(in_turns({"ours": calls}, repeats)["ours"])
        points.append({"rows": T, "stock_us": stock_us, "ours_us": list(ours.values())})
    return points


def compile_ahead(shapes: Sequence[Shape], longest: int) -> None:
    """Compile what the run will need, several at a time."""
    device = torch.cuda.current_device()
    wanted = set()

    def want(shape: Shape, ring: int, overlap: bool) -> None:
        H, HV = shape.key_heads, shape.value_heads
        size = launch.cuda_launch(shape.requests, HV, shape.rows, shape.max_rows)
        if size is not None:
            types = ("float", "float", "bf16")
            wanted.add(CudaBuild(size, H, HV, ring, *types, overlap, device))

    for shape in shapes:
        for overlap in (False, True):
            want(shape, ring_rows(shape.max_rows - 1), overlap)
    for T in range(1, longest + 1):
        for P in range(longest + 1):
            want(Shape(16, T, P), ring_rows(longest - 1), False)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_cuda, wanted))


def provenance(command: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Command, commit, versions, device and date of a run."""
    versions = {"cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "command": " ".join(command),
        "commit": checkout() if commit is None else commit,
        "versions": versions,
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def run(
    out: Path, *, repeats: int, longest: int, commit: str | None, command: Sequence[str]
) -> dict[str, Any]:
    """The gate, then the table, the layer's figures and the curve; written as they come.

    Args:
        out: folder of `kernel-<device>.json` and `.png`.
        repeats: samples of each arm.
        longest: T and P of the curve; 0 leaves it out.
        commit: for the record, where git can't say.
        command: likewise.
    """
    name = torch.cuda.get_device_name()
    stem = f"kernel-{name.removeprefix('NVIDIA ').lower().replace(' ', '-')}"
    rate = COPY_BYTES_PER_US.get(name)
    result: dict[str, Any] = {"gate": "red", **provenance(command, commit), "table": []}
    checked = {name: gate(*heads) for name, heads in GATE_HEADS.items()}
    green = all(errors["green"] for errors in checked.values())
    result["gate"] = "green" if green else "red"
    result.update(checked)
    path = out / f"{stem}.json"
    out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        path.write_text(json.dumps(result, indent=1) + "\n")

    write()
    print(f"gate {result['gate']}: {json.dumps(checked)}", flush=True)
    if not green:
        return result

    shapes = _shapes()
    compile_ahead(shapes, longest)
    result["layer"], result["samples"] = [], []
    for kind, arms, chosen in (
        ("table", table_arms, shapes),
        ("layer", layer_arms, [s for s in shapes if s.rows in (1, 4, 8, 16, 17, 32)]),
    ):
        for shape in chosen:
            samples = in_turns(arms(shape), repeats)
            torch.cuda.empty_cache()
            stock, ours = (statistics.median(samples[arm]) for arm in ("stock", "ours"))
            line = {
                "requests": shape.requests,
                "rows": shape.rows,
                "pending": shape.pending,
                "heads": [shape.key_heads, shape.value_heads],
                "stock_us": round(stock, 2),
                "ours_us": round(ours, 2),
                "floor_us": round(shape.floor_bytes() / rate, 2) if rate else None,
            }
            result[kind].append(line)
            result["samples"].append({"kind": kind, **line, **samples})
            spread = {arm: max(x) - min(x) for arm, x in samples.items()}
            print(
                f"{kind} {shape.requests:3} x {shape.rows:2}  P {shape.pending:2}  heads "
                f"{shape.key_heads:2},{shape.value_heads:2}  stock {stock:7.1f} "
                f"(spread {spread['stock']:.1f})  ours {ours:6.1f} (spread {spread['ours']:.1f})"
                f"  {stock / ours:.2f}x  floor {line['floor_us']}",
                flush=True,
            )
            write()
    if longest:
        result["curve"] = {"requests": 16, "heads": [16, 32], "points": curve(16, longest, 5)}
        write()
        try:
            plot.draw(result, out / f"{stem}.png")
        except ImportError as missing:
            print(f"no plot: {missing}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a green gate, 1 with a red one, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each arm")
    parser.add_argument("--longest", type=int, default=32, help="of the curve; 0 leaves it out")
    parser.add_argument("--commit", help="for the record, where git can't say")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench kernel needs an NVIDIA GPU", file=sys.stderr)
        return 2
    command = ["python -m cuda_ext.bench.kernel", *(sys.argv[1:] if argv is None else argv)]
    result = run(
        options.out,
        repeats=options.repeats,
        longest=options.longest,
        commit=options.commit,
        command=command,
    )
    return 0 if result["gate"] == "green" else 1


if __name__ == "__main__":
    sys.exit(main())
