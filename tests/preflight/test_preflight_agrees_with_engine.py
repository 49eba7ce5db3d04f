"""Preflight reads out of a serve.yaml what the engine reads out of vLLM's configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.engine

HERE = Path(__file__).resolve().parent
BASE = {
    "max-model-len": 2048,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 1024,
    "enable-prefix-caching": True,
}

LEGAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "threshold": {"long-prefill-token-threshold": 768},
    "sync": {"no-async-scheduling": True},
    "sizes": {"max-num-seqs": 16, "max-num-batched-tokens": 2048},
}
ILLEGAL: dict[str, dict[str, Any]] = {
    "drafts": {
        "speculative-config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "connector": {"kv-transfer-config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    "images": {"disable-chunked-mm-input": True},
    "worker": {"worker-cls": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"},
    "several": {
        "worker-cls": "vllm_gaudi.v1.worker.hpu_worker.HPUWorker",
        "scheduler-cls": "vllm.v1.core.sched.scheduler.Scheduler",
        "speculative-config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        },
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    # They need torch and tokenizers, which are there where vLLM is.
    import harness
    import tiny_models

    folder = tmp_path_factory.mktemp("serve")
    model = tiny_models.write(tiny_models.DENSE, tmp_path_factory.mktemp("model"))
    for name, changes in {**LEGAL, **ILLEGAL}.items():
        content = {"model": str(model), "dtype": "bfloat16", **BASE, **changes}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    environment = harness.environment({"VLLM_PLUGINS": "gaudi_ext"})
    path = [environment["PYTHONPATH"], str(HERE.parent.parent)]
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_facts_process.py"), str(folder)],
        env={**environment, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_file_gives_the_engines_facts(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    answer = answers[name]
    assert "refused" not in answer, answer
    assert answer["read"] == answer["engine"]
    assert answer["preflight"] == []


@pytest.mark.parametrize("name", ILLEGAL)
def test_preflight_says_what_the_engine_refuses_with(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    answer = answers[name]
    assert answer["refused"]
    assert answer["preflight"] == answer["refused"]
