"""What both modes of `gaudi-ext bench serve` are run with on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import replay_engine
import yaml

from cuda_ext.bench.serve import run as runs

SERVE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce-eager": True,
    "max-model-len": 512,
    "max-num-seqs": 4,
    "max-num-batched-tokens": 256,
    "num-gpu-blocks-override": 64,
    "enable-prefix-caching": False,
}
COMMON: dict[str, Any] = {
    "interleave": "restart",
    "environment": {
        name: replay_engine.ENVIRONMENT[name]
        for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    }
    # vLLM compiles a ranking of log-probabilities, which takes longer than all requests here.
    | {"TORCHDYNAMO_DISABLE": "1"},
    # Prompts in one chunk each, so stock's distance from itself is that of decoding alone, and that
    # of two implementations in bf16 is no smaller.
    "gate": {"prompts": 2, "prompt_tokens": [40, 90], "output_tokens": 24, "slack": 3},
}


def run(content: Mapping[str, Any], folder: Path, *arguments: str) -> Path:
    """Run a benchmark whose gate must be green, and give the folder of its results.

    Args:
        content: of the YAML.
        folder: of the YAML; the results lie below it.
        arguments: further ones of the command.
    """
    file, out = folder / "bench.yaml", folder / "out"
    file.write_text(yaml.safe_dump(dict(content)))
    code = runs.main([str(file), "--out", str(out), "--session", "s", "--commit", "c", *arguments])
    found = json.loads((out / f"{content['name']}.json").read_text())
    assert code == 0, json.dumps(found.get("failure") or found["checks"], indent=1)
    return out


def checked_points(result: Any) -> Any:
    """The points of a result, of which each loop has one of each arm, with its figures."""
    points = result["points"]
    assert [(point["loop"], point["arm"]) for point in points] == [
        ("closed", "stock"),
        ("closed", "replay"),
        ("open", "stock"),
        ("open", "replay"),
    ]
    for point in points:
        assert 0 < point["ttft_p50_s"] < point["e2e_p50_s"]
        assert point["output_tok_s"] > 0
        assert point["tpot_p50_ms"] > 0
        assert point["kv_usage_max"] < 1
        assert point["preemptions"] == 0
    assert len(result["ratios"]["points"]) == 2
    return points
