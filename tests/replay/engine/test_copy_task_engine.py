"""A checkpoint of the copy task in the engine: its tokens are transformers', with MTP drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import replay_engine
import torch

from cuda_ext.bench.copy_task import model as copy_model
from cuda_ext.bench.copy_task import score, task

DRAFTS = 3
TOKENS = 40
LENGTHS = (3, 7)
"""Words of the prompts."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("copy-task")
    copy_model.CopyModel().save(folder)
    return folder


@pytest.fixture
def engine(checkpoint: Path, engines: Any) -> Any:
    engines.stop()
    job = score.Job(str(checkpoint), 2, 60, DRAFTS, {}, seed=0)
    options = score.engine_options(job, score.ARMS["replay"])
    del options["model"], options["max_model_len"]
    started = replay_engine.Engine(checkpoint, **options)
    yield started
    started.shutdown()


def test_tokens_are_those_of_transformers(engine: Any, checkpoint: Path) -> None:
    from transformers import Qwen3_5ForCausalLM

    prompts = [task.prompt(task.words(count, seed=count)) for count in LENGTHS]
    with replay_engine.planned(engine) as plans:
        results = engine.run(prompts, max_tokens=TOKENS)
    assert score._layers(engine.llm)["layers"] == "ReplayGatedDeltaNetAttention"
    reached = plans.reached()
    for path in ("folds", "drafts rejected"):
        assert reached[path] > 0, f"no step reached: {path}"
    reader = Qwen3_5ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, result in zip(prompts, results, strict=True):
        answer = list(result.tokens)
        with torch.no_grad():
            logits = reader(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        spoken = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert spoken.argmax(-1).tolist() == answer
        wanted = spoken.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        worst = max(abs(a - b) for a, b in zip(result.logprobs, wanted, strict=True))
        assert worst <= replay_engine.TOLERANCE
        assert len(set(answer)) > TOKENS // 4, "tokens that repeat say little"
