"""No step makes the host wait: neither its plan nor a layer reads a tensor of the device.

On a GPU CUDA itself tells (`test_the_host_waits_for_nothing` of test_chunk.py). Here tensors on
torch's `meta` device stand for the GPU's: they have shapes and no values, so whoever reads one
fails, and kernels are noted instead of launched. `no_waiting` adds the ways of waiting that `meta`
knows nothing of.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest
import torch
from steps import ODD, REAL
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm", reason="the layer's seams are vLLM's")

from vllm.forward_context import override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from cuda_ext.activation import torch_dtypes
from cuda_ext.backend.replay_attn import ReplayBackend, ReplayMetadata
from cuda_ext.backend.step_plan import plan_step_torch
from cuda_ext.layers.gdn_replay import ReplayGatedDeltaNetAttention
from cuda_ext.layers.kernel_steps import KernelSteps
from cuda_ext.ops import chunk, conv_update, cursor, fold_verify
from cuda_ext.ring import GdnHeads, replay_layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU CUDA tells who waits")

DEVICE = torch.device("meta")
SLOTS, MAX_REQUESTS = 12, 8
NAME = "model.layers.0.linear_attn"
aten = torch.ops.aten


class Waits(AssertionError):
    """The host would wait for the device."""


def on_device(values: Any) -> list[bool]:
    """Of each tensor in there, whether the device has it.

    But for the host's single numbers, which a kernel takes as arguments.
    """
    found = [x for x in tree_leaves(values) if isinstance(x, Tensor) and (x.is_meta or x.dim())]
    return [x.is_meta for x in found]


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.index.Tensor, aten.index_put_.default) and args[0].is_meta:
            # `meta` gives the entries of a mask that is written to no number; CUDA counts them.
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise Waits(f"{func} with a mask")
        if func is aten._to_copy.default and not args[0].is_meta:
            self._upload(func, kwargs.get("device"), kwargs.get("non_blocking"))
        elif func is aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self._upload(func, DEVICE, args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        elif len({*on_device((args, kwargs))}) > 1:
            raise Waits(f"{func} of tensors of host and device")
        return func(*args, **kwargs)

    def _upload(self, func: Any, device: torch.device | None, non_blocking: bool | None) -> None:
        if device == DEVICE and not non_blocking:
            raise Waits(f"{func} to the device, blocking")


def _has_list(index: Any) -> bool:
    return any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,)))


class _Functions(TorchFunctionMode):
    """What reaches no operator: lists that go to the device, and text of a tensor."""

    MADE = (torch.tensor, torch.as_tensor, torch.asarray)
    OF = (Tensor.new_tensor, Tensor.__repr__, Tensor.__format__)
    AT = (Tensor.__getitem__, Tensor.__setitem__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.MADE:
            waits = torch.device(kwargs.get("device") or "cpu") == DEVICE
        elif func in self.AT:
            waits = args[0].is_meta and _has_list(args[1])
        else:
            waits = func in self.OF and args[0].is_meta
        if waits:
            raise Waits(f"{func} on the device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whoever makes the host wait for the device in here fails."""
    with _Operators(), _Functions():
        yield


@dataclass
class Launches:
    """Stands for the kernels, and notes which were launched."""

    names: list[str] = field(default_factory=list)

    def kernel(self, name: str) -> Any:
        """A Triton kernel."""

        def launch(*args: Any, **constants: Any) -> None:
            for value in (*args, *constants.values()):
                assert value is None or isinstance(value, bool | int | float | Tensor), value
                assert not isinstance(value, Tensor) or value.is_meta, f"{name}: {value}"
            self.names.append(name)

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                assert all(type(size) is int for size in grid), grid
                return launch

        return Kernel()

    def cuda(self, build: fold_verify.CudaBuild) -> Any:
        """The CUDA kernel."""

        def launch(grid: Any, threads: int, arguments: Any, overlap: bool) -> None:
            assert all(type(size) is int for size in (*grid, threads)), grid
            assert overlap == build.overlap
            self.names.append("_cuda_kernel")

        return types.SimpleNamespace(launch=launch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A GPU of compute capability 9.0, as far as the host sees one."""
    found = Launches()
    for module in (cursor, conv_update, fold_verify, chunk):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, found.kernel(name))
    monkeypatch.setattr(fold_verify, "_cuda_kernel", found.cuda)
    monkeypatch.setattr(fold_verify, "_largest_launch", lambda device: (132, 227 << 10))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def make_layer(heads: GdnHeads, drafts: int, chunk_kernels: str) -> ReplayGatedDeltaNetAttention:
    """A layer with what a step asks it for; vLLM's constructor wants a whole model."""
    layer = object.__new__(ReplayGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    layer.replay = replay_layout(
        heads, drafts, conv_dtype="bfloat16", ssm_dtype="float32", input_dtype="bfloat16"
    )
    layer.prefix, layer.activation = NAME, "silu"
    layer.replay_backend, layer.chunk_kernels, layer.chunks_at_once = "kernels", chunk_kernels, 2
    layer._views = [
        empty(SLOTS, *state.shape, dtype=dtype)
        for state, dtype in zip(layer.replay.states, torch_dtypes(layer.replay), strict=True)
    ]
    layer.conv1d = types.SimpleNamespace(
        weight=empty(heads.conv_channels, 1, heads.conv_kernel), bias=None
    )
    layer.A_log = empty(heads.value_heads, dtype=torch.float32)
    layer.dt_bias = empty(heads.value_heads)

    def chunk_op(*, v: Tensor, initial_state: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        assert others["chunk_indices"].is_meta
        assert others["chunk_offsets"].is_meta
        return torch.empty_like(v), initial_state

    layer._steps = KernelSteps(heads, chunk_op, chunk_kernels)
    return layer


def make_builder(layer: ReplayGatedDeltaNetAttention, drafts: int) -> Any:
    config = MagicMock()
    config.speculative_config.num_speculative_tokens = drafts
    config.speculative_config.parallel_drafting = False
    config.num_speculative_tokens = drafts
    config.scheduler_config.max_num_seqs = MAX_REQUESTS
    config.compilation_config.max_cudagraph_capture_size = None
    config.parallel_config.decode_context_parallel_size = 1
    config.compilation_config.static_forward_context = {NAME: layer}
    return ReplayBackend.get_builder_cls()(MagicMock(), [NAME], config, DEVICE)


def batch(lens: list[int]) -> CommonAttentionMetadata:
    """As a model runner gives it, with the values that it keeps on the host beside."""
    ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    count = len(lens)
    return CommonAttentionMetadata(
        query_start_loc=empty(count + 1, dtype=torch.int32),
        query_start_loc_cpu=ends,
        seq_lens=empty(count, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=999,
        block_table_tensor=empty(count, 3, dtype=torch.int32),
        slot_mapping=empty(sum(lens), dtype=torch.int64),
    )


def forward(layer: ReplayGatedDeltaNetAttention, metadata: ReplayMetadata, tokens: int) -> None:
    """The core of a layer's step."""
    HV, V = layer._views[1].shape[1:3]
    mixed = empty(tokens, layer.conv1d.weight.shape[0])
    context: Any = types.SimpleNamespace(attn_metadata={NAME: metadata})
    with override_forward_context(context):
        layer._forward_core(mixed, empty(tokens, HV), empty(tokens, HV), empty(tokens, HV, V))


def stand_in_for_vllms_kernels(monkeypatch: pytest.MonkeyPatch, heads: GdnHeads) -> None:
    ops = pytest.importorskip(
        "vllm.third_party.flash_linear_attention.ops", reason="needs vLLM's chunk kernels"
    )
    H, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim

    def prepare(*, conv_output: Tensor, **others: Any) -> tuple[Tensor, ...]:
        tokens = len(conv_output)
        rows = [empty(tokens, *shape) for shape in ((H, K), (H, K), (HV, V))]
        return *rows, empty(tokens, HV), empty(tokens, HV)

    monkeypatch.setattr(ops, "fused_post_conv_prep", prepare)


DRAFTS = 15
T_MAX = DRAFTS + 1
BATCHES = {
    "drafts alike": [T_MAX] * 4,
    "ragged": [3, T_MAX, 1, 7],
    "no drafts": [1, 1, 1],
    "padding": [T_MAX, T_MAX, 0, 0],
    "chunks last": [T_MAX, 1, 40, 17],
    "chunks apart": [40, T_MAX, 100, 2],
    "chunks alone": [64, 65, 300],
}
"""Rows of each request."""
CHUNK = ["_chunk_conv_kernel", "_chunk_start_kernel", "_chunk_commit_kernel"]


def expected(lens: list[int], fold: str, chunk_kernels: str) -> list[str]:
    """Kernels of a layer's step: two for rows that can be taken back, some for each two chunks."""
    chunks = sum(rows > T_MAX for rows in lens)
    names = ["_conv_kernel", fold] if chunks < len(lens) else []
    rule = ["_chunk_rule_kernel"] if chunk_kernels == "portable" else []
    return names + (CHUNK[:2] + rule + CHUNK[2:]) * -(-chunks // 2)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("plan", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("heads", "fold"), [(REAL, "_cuda_kernel"), (ODD, "_block_kernel")], ids=["cuda", "triton"]
)
@pytest.mark.parametrize("chunk_kernels", ["portable", "triton"])
def test_a_step_reads_nothing_from_the_device(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plan: str,
    heads: GdnHeads,
    fold: str,
    chunk_kernels: str,
) -> None:
    """From the builder to the launches, for a step, and for the capture of one."""
    if chunk_kernels == "triton":
        stand_in_for_vllms_kernels(monkeypatch, heads)
    layer = make_layer(heads, DRAFTS, chunk_kernels)
    builder = make_builder(layer, DRAFTS)
    if plan == "torch":
        builder._plan_step = plan_step_torch
    lens = BATCHES[name]
    drafts = torch.tensor([rows - 1 if 0 < rows <= T_MAX else -1 for rows in lens])
    planner = builder.planner
    launches.names.clear()
    planned = ["_plan_kernel"] if plan == "kernel" else []
    for steps in (1, 2):
        with no_waiting():
            metadata = builder.build(0, batch(lens), num_decode_draft_tokens_cpu=drafts)
            forward(layer, metadata, sum(lens))
        assert launches.names == (planned + expected(lens, fold, chunk_kernels)) * steps
    assert builder.planner is planner
    assert metadata.rows.slot.is_meta
    launches.names.clear()
    captured = [T_MAX] * 4
    with no_waiting():
        forward(layer, builder.build_for_cudagraph_capture(batch(captured)), sum(captured))
    assert launches.names == [*planned, "_conv_kernel", fold]


def test_single_rows_read_nothing_either(launches: Launches) -> None:
    """Without drafts, or with few, another kernel takes them."""
    for drafts in (0, 1):
        layer = make_layer(REAL, drafts, "portable")
        builder = make_builder(layer, drafts)
        assert builder.planner.max_rows == drafts + 1
        launches.names.clear()
        with no_waiting():
            forward(layer, builder.build(0, batch([1, 1, 1])), 3)
        assert launches.names == ["_plan_kernel", "_conv_kernel", "_recurrent_kernel"]


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, host: x[0].item(),
    "tolist": lambda x, host: x.tolist(),
    "int": lambda x, host: int(x[1]),
    "if": lambda x, host: 1 if (x > 0).any() else 0,
    "a slice's end": lambda x, host: host[: x[0]],
    "cpu": lambda x, host: x.cpu(),
    "to": lambda x, host: x.to("cpu", non_blocking=True),
    "copy to the host": lambda x, host: host.copy_(x),
    "numpy": lambda x, host: numpy.asarray(x),
    "equal": lambda x, host: torch.equal(x, x),
    "in": lambda x, host: 3 in x,
    "max": lambda x, host: max(x),
    "nonzero": lambda x, host: x.nonzero(),
    "where": lambda x, host: torch.where(x > 0),
    "masked_select": lambda x, host: x.masked_select(x > 0),
    "read by a mask": lambda x, host: x[x > 0],
    "written by a mask": lambda x, host: x.__setitem__(x > 0, 5 * x),
    "unique": lambda x, host: x.unique(),
    "repeat_interleave": lambda x, host: torch.repeat_interleave(x),
    "bincount": lambda x, host: x.bincount(),
    "text": lambda x, host: f"{x}",
    "the host's by the device's": lambda x, host: host[x.long()],
    "the device's by the host's": lambda x, host: x[host.long()],
    "a list as an index": lambda x, host: x[[0, 1]],
    "tensor": lambda x, host: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x, host: x.new_tensor([1, 2]),
    "blocking to": lambda x, host: host.to(x.device),
    "blocking copy": lambda x, host: x.copy_(host),
    "blocking number": lambda x, host: x.__setitem__(0, host[0]),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_that_waits_is_noticed(launches: Launches, name: str) -> None:
    """Each would pass here where the device's tensors were the host's."""
    host = torch.tensor([1, 2, 1], dtype=torch.int32)
    READS[name](host.clone(), host.clone())
    with no_waiting(), pytest.raises((Waits, RuntimeError, TypeError, NotImplementedError)):
        READS[name](empty(3, dtype=torch.int32), host)


def test_what_the_host_may_do_is_let_be(launches: Launches) -> None:
    x, host = empty(3, dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
    with no_waiting():
        assert host.tolist() == [1, 2, 3]
        assert bool((host > 2).any())
        assert host.to(DEVICE, non_blocking=True).is_meta
        x.copy_(host, non_blocking=True)
        x[0] = 0
        assert (x * host[0]).is_meta
        assert torch.where(x > 0, x, 0).shape == (3,)
