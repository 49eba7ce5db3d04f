"""Plots of a result: throughput and time to the first token against load, memory a request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuda_ext.bench.serve.config import ARMS

COLOURS = {"stock": "0.3", "replay": "C0"}
NAMES = {"stock": "vLLM", "replay": "ReplaySSM"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the closed-loop points, one line an arm and output length.

    Args:
        result: of `Results.summary`.
        path: of the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, wait, memory) = pyplot.subplots(
        1, 3, figsize=(14, 4.5), width_ratios=(3, 3, 1.6)
    )
    closed = [point for point in result["points"] if point["loop"] == "closed"]
    loads = sorted({point["concurrency"] for point in closed})
    lengths = sorted({point["output_tokens"] for point in closed})
    for number, length in enumerate(lengths):
        for arm in ARMS:
            line = [p for p in closed if p["arm"] == arm and p["output_tokens"] == length]
            line.sort(key=lambda point: point["concurrency"])
            name = f"{NAMES[arm]}, {length} tokens out"
            for axes, key in ((speed, "output_tok_s"), (wait, "ttft_p50_s")):
                axes.plot(
                    [point["concurrency"] for point in line],
                    [point[key] for point in line],
                    marker=".",
                    color=COLOURS[arm],
                    label=name,
                    linestyle=("-", "--", ":", "-.")[number % 4],
                )
    for axes, what in ((speed, "output tokens a second"), (wait, "time to first token, p50 (s)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])
        axes.minorticks_off()
        axes.set_xlabel("requests in flight")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    wait.set_yscale("log")
    arms = [arm for arm in ARMS if result["arms"].get(arm, {}).get("bytes_per_8k_request")]
    sizes = [result["arms"][arm]["bytes_per_8k_request"] / 2**20 for arm in arms]
    bars = memory.bar([NAMES[arm] for arm in arms], sizes, color=[COLOURS[arm] for arm in arms])
    labels = [
        f"{size:,.0f} MiB\n{result['fit_8k'][arm]:.0f} fit"
        for arm, size in zip(arms, sizes, strict=True)
    ]
    memory.bar_label(bars, labels, fontsize=8)
    memory.margins(y=0.2)
    memory.set_visible(bool(arms))
    memory.set_ylabel("MiB of the pool, a request of 8,192 tokens")
    note = f"; {result['torch_note']}" if result.get("torch_note") else ""
    figure.suptitle(
        f"{result['config']['name']}, {result['device']}, vLLM {result['versions']['vllm']}{note}, "
        f"gate {result['gate']}, {result['date'][:10]}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    chosen = parser.parse_args().result
    draw(json.loads(chosen.read_text()), chosen.with_suffix(".png"))
