"""Draw the curve of a kernel result: time against rows, with floors and what a B200 could do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DIM = 128
# Bytes a microsecond: a measured device copy of the H200, the datasheet of the B200.
H200, B200 = 4.28e6, 8.0e6


def floor_us(requests: int, heads: list[int], rows: int, pending: int, rate: float) -> float:
    """Time of the bytes that a step must move, as `kernel.Shape.floor_bytes` counts them."""
    H, HV = heads
    state = requests * HV * DIM * DIM * 4 * (2 if pending else 1)
    row = 2 * (H * DIM + HV * DIM + 2 * HV)
    new = row + 2 * (H * DIM + HV * DIM)
    return (state + requests * (pending * row + rows * new)) / rate


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Args:
        result: of `kernel.run`, with a curve.
        path: of the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = result["curve"]
    points, requests, heads = data["points"], data["requests"], data["heads"]
    rows = [point["rows"] for point in points]
    figure, (both, ours) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    both.plot(rows, [p["stock_us"] for p in points], "k.-", label="vLLM's own kernel")
    for pending in (0, 10, 16, 32):
        if pending >= len(points[0]["ours_us"]):
            continue
        times = [p["ours_us"][pending] for p in points]
        both.plot(rows, times, ".-", label=f"ReplaySSM, {pending} pending")
        ours.plot(rows, times, ".-", label=f"{pending} pending")
    both.set_yscale("log")
    for name, rate, style in (("H200", H200, "k--"), ("B200, a projection", B200, "k:")):
        floors = [floor_us(requests, heads, t, min(t, 10), rate) for t in rows]
        ours.plot(rows, floors, style, label=f"floor of the bytes, {name}")
    for axes in (both, ours):
        axes.set_xlabel("rows a request verifies (T)")
        axes.set_ylabel("microseconds a layer")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    # Room for the legend above the curves.
    ours.set_ylim(0, 1.35 * ours.get_ylim()[1])
    figure.suptitle(
        f"Fold and verify, {requests} requests, {heads[0]} key and {heads[1]} value heads, "
        f"{result['device']}, {result['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    chosen = parser.parse_args().result
    draw(json.loads(chosen.read_text()), chosen.with_suffix(".png"))
