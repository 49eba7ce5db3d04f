"""Where the bytes of a ReplaySSM page lie: one state, the conv window, and a ring of raw inputs.

The layer, the model class and the planner all take their numbers from here, so that the page that
vLLM allocates, the views that the kernels read and the memory that an operator is told agree.

A page of one request in one layer holds, in this order: the conv window, the recurrent state, and
one ring for each raw input of the recurrence (k, v and the two gate inputs a and b). The row of a
token is its position modulo R. vLLM lays the states of a page back to back (0.26.0 by strides over
`MambaSpec.shapes`, 0.31.0 and later in `MambaBase.bind_kv_cache`), so nothing may be put between
them: an offset that is not aligned is refused instead of padded.

Pure integers: imports neither torch, nor Triton, nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

# Vector loads and TMA need 16-byte addresses; each state of a page therefore starts on one.
ALIGNMENT = 16
# Rows of one block of the kernel's triangular solve.
BLOCK_ROWS = 16
MIN_RING_ROWS = 32

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        ValueError: the dtype is not one that a state or a ring may have.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        allowed = ", ".join(ITEM_BYTES)
        raise ValueError(f"state dtype {dtype!r} is not one of {allowed}") from None


@dataclass(frozen=True)
class GdnHeads:
    """Heads of one Gated DeltaNet layer, on one rank once `shard` was called.

    Args:
        key_heads: H, key heads of the linear attention.
        value_heads: HV, value heads; a multiple of H.
        key_dim: K, elements of a key head.
        value_dim: V, elements of a value head.
        conv_kernel: W, taps of the causal convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution sees: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def shard(self, tp: int) -> GdnHeads:
        """Heads of one of `tp` ranks.

        Raises:
            ValueError: `tp` does not divide both head counts; vLLM refuses the same.
        """
        if tp < 1:
            raise ValueError(f"tensor parallel size must be at least 1, got {tp!r}")
        if self.key_heads % tp or self.value_heads % tp:
            raise ValueError(
                f"tensor parallel size {tp} does not divide {self.key_heads} linear key heads "
                f"and {self.value_heads} linear value heads"
            )
        return GdnHeads(
            self.key_heads // tp,
            self.value_heads // tp,
            self.key_dim,
            self.value_dim,
            self.conv_kernel,
        )


@dataclass(frozen=True)
class PageState:
    """One state inside a page: its shape, dtype and byte offset from the page's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of this state."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class PageLayout:
    """The states of one page, back to back from offset 0.

    Args:
        states: in page order.
        ring_rows: R, rows of each ring; 0 for a page without rings.
    """

    states: tuple[PageState, ...]
    ring_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of the page before vLLM pads it, where it does."""
        last = self.states[-1]
        return last.offset + last.nbytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of all rings together."""
        return sum(state.nbytes for state in self.states[2:])

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the rings; 0 for a page without rings."""
        return self.ring_bytes // self.ring_rows if self.ring_rows else 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in page order, as `get_state_shape` returns them."""
        return tuple(state.shape for state in self.states)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtype names in page order."""
        return tuple(state.dtype for state in self.states)

    def __getitem__(self, name: str) -> PageState:
        for state in self.states:
            if state.name == name:
                return state
        raise KeyError(name)


def ring_rows(num_drafts: int) -> int:
    """R, the rows of a ring for `num_drafts` draft tokens a step: max(32, 2*T rounded up to 16).

    T = num_drafts + 1 rows are verified in a step while up to T accepted ones wait to be folded,
    and neither may overwrite the other.
    """
    if num_drafts < 0:
        raise ValueError(f"number of draft tokens must not be negative, got {num_drafts!r}")
    rows = 2 * (num_drafts + 1)
    return max(MIN_RING_ROWS, -(-rows // BLOCK_ROWS) * BLOCK_ROWS)


def _back_to_back(
    states: list[tuple[str, tuple[int, ...], str]], rows: int, alignment: int
) -> PageLayout:
    placed: list[PageState] = []
    offset = 0
    for name, shape, dtype in states:
        if offset % alignment:
            raise ValueError(
                f"state {name!r} would start at byte {offset}, which is not a multiple of "
                f"{alignment}; choose head counts and dims whose products are multiples of 8"
            )
        placed.append(PageState(name, shape, dtype, offset))
        offset += placed[-1].nbytes
    return PageLayout(tuple(placed), rows)


def _conv_and_state(
    heads: GdnHeads, num_drafts: int, conv_dtype: str, ssm_dtype: str, conv_dim_first: bool
) -> list[tuple[str, tuple[int, ...], str]]:
    if num_drafts < 0:
        raise ValueError(f"number of draft tokens must not be negative, got {num_drafts!r}")
    columns = heads.conv_kernel - 1 + num_drafts
    conv = (heads.conv_channels, columns) if conv_dim_first else (columns, heads.conv_channels)
    return [
        ("conv", conv, conv_dtype),
        ("ssm", (heads.value_heads, heads.value_dim, heads.key_dim), ssm_dtype),
    ]


def native_layout(
    heads: GdnHeads,
    num_drafts: int = 0,
    *,
    conv_dtype: str = "bfloat16",
    ssm_dtype: str = "float32",
    conv_dim_first: bool = False,
) -> PageLayout:
    """The page of vLLM's own layer: the conv window, widened by the drafts, and the state.

    Mirrors `MambaStateShapeCalculator.gated_delta_net_state_shape` (vLLM 0.26.0).

    Args:
        heads: of one rank.
        num_drafts: draft tokens a step; the window keeps the inputs of each.
        conv_dtype, ssm_dtype: dtype names.
        conv_dim_first: vLLM's DS order of the window, [channels, columns].

    Returns:
        conv [W - 1 + drafts, channels], ssm [HV, V, K].
    """
    states = _conv_and_state(heads, num_drafts, conv_dtype, ssm_dtype, conv_dim_first)
    # vLLM asks no alignment of its own states.
    return _back_to_back(states, 0, alignment=1)


def replay_layout(
    heads: GdnHeads,
    num_drafts: int,
    *,
    conv_dtype: str = "bfloat16",
    ssm_dtype: str = "float32",
    input_dtype: str = "bfloat16",
    conv_dim_first: bool = False,
) -> PageLayout:
    """The page of our layer: conv window, one state, and rings of the raw inputs.

    Args:
        heads: of one rank.
        num_drafts: draft tokens a step, fixed when the server starts.
        conv_dtype, ssm_dtype: dtype names of the window and the state.
        input_dtype: dtype of the rings: the model's, so that a row is kept as it came. Corrected
            values in bf16 would double the state's error, so none are kept.
        conv_dim_first: vLLM's DS order of the window, [channels, columns].

    Returns:
        conv [W - 1 + drafts, channels], ssm [HV, V, K], k [R, H, K], v [R, HV, V],
        a [R, HV], b [R, HV].

    Raises:
        ValueError: an offset is not a multiple of 16 bytes, or a dtype or count is not valid.
    """
    rows = ring_rows(num_drafts)
    states = _conv_and_state(heads, num_drafts, conv_dtype, ssm_dtype, conv_dim_first)
    states += [
        ("k", (rows, heads.key_heads, heads.key_dim), input_dtype),
        ("v", (rows, heads.value_heads, heads.value_dim), input_dtype),
        ("a", (rows, heads.value_heads), input_dtype),
        ("b", (rows, heads.value_heads), input_dtype),
    ]
    return _back_to_back(states, rows, ALIGNMENT)
