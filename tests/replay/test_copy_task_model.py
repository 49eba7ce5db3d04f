"""The copy task's model and training: texts, shapes, gradients, what leaks and what falls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from cuda_ext.bench.copy_task import model as copy_model
from cuda_ext.bench.copy_task import task, train
from cuda_ext.ops import reference

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Also puts transformers' own rule back."""
    threads, rule = torch.get_num_threads(), modeling_qwen3_5.torch_chunk_gated_delta_rule
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = rule


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> copy_model.CopyModel:
    monkeypatch.setattr(copy_model, "CONFIG", copy_model.CONFIG | SMALL)
    torch.manual_seed(0)
    return copy_model.CopyModel()


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("words", [1, 7, 40])
def test_batches_are_texts_of_the_task(words: int) -> None:
    tokens, first = train.batch(9, words, source())
    assert tokens.shape[1] % 64 == 0
    end = first + words * task.WORD_TOKENS
    assert 0 <= tokens.shape[1] - end < 64
    for row in tokens.tolist():
        chosen = [
            tuple(row[at : at + task.WORD_TOKENS - 1]) for at in range(first, end, task.WORD_TOKENS)
        ]
        assert row[:first] == task.prompt(chosen)
        assert row[first:end] == task.answer(chosen)
        assert set(row[end:]) <= {task.END_OF_TEXT}


def test_half_of_the_texts_draw_from_all_classes_and_half_from_few() -> None:
    tokens, first = train.batch(64, 100, source(1))
    classes = tokens[:, first : first + 100 * task.WORD_TOKENS : task.WORD_TOKENS]
    counts = [len(set(row.tolist())) for row in classes]
    assert sum(count > 16 for count in counts) > 20
    assert sum(count <= 16 for count in counts) > 20
    assert min(counts) == 2
    # Few classes, but not the same ones in every text.
    assert len(classes.unique()) == task.CLASSES


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
def test_chunk_rule_equals_the_token_loop(tokens: int) -> None:
    generator = source(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, tokens, *shape, generator=generator)

    q, k, v = normal(3, 16), normal(3, 16), normal(3, 8)
    g, beta = -torch.nn.functional.softplus(normal(3)), normal(3).sigmoid()
    out, _ = copy_model.chunk_rule(q, k, v, g, beta)
    for row in range(2):
        wanted, _ = reference.loop(
            torch.zeros(3, 8, 16, dtype=torch.float64), q[row], k[row], v[row], g[row], beta[row]
        )
        assert (out[row] - wanted).norm() < 1e-5 * wanted.norm()


def test_chunk_rule_survives_a_gate_that_forgets_all() -> None:
    q, k, v = (torch.randn(1, 100, 1, 16, generator=source(n)) for n in range(3))
    g = torch.zeros(1, 100, 1)
    g[:, 40] = -500.0
    g.requires_grad_()
    out, _ = copy_model.chunk_rule(q, k, v, g, torch.full((1, 100, 1), 0.5))
    out.sum().backward()
    fresh, _ = copy_model.chunk_rule(q[:, 40:], k[:, 40:], v[:, 40:], g[:, 40:] * 0 + 0.0,
                                     torch.full((1, 60, 1), 0.5))  # fmt: skip
    assert torch.allclose(out[:, 40:], fresh, atol=1e-5)
    assert g.grad is not None
    assert g.grad.isfinite().all()


def test_gradients_are_compared_and_a_wrong_one_is_seen() -> None:
    right = copy_model.worst_gradient(copy_model.chunk_rule, "cpu", 70)
    assert max(right.values()) < train.GRADIENTS_MAY_DIFFER

    def without_decay(query, key, value, g, beta):  # type: ignore[no-untyped-def]
        out, state = copy_model.chunk_rule(query, key, value, g.detach(), beta)
        return out + 0 * g.sum(), state

    wrong = copy_model.worst_gradient(without_decay, "cpu", 70)
    assert wrong["out"] < train.GRADIENTS_MAY_DIFFER
    assert wrong["g"] > 0.5


def test_logits_see_no_later_token(small: copy_model.CopyModel) -> None:
    """Entry j at index t may read tokens up to t + j: all that vLLM knows when it asks for it."""
    copy_model.use_rule(copy_model.chunk_rule)
    tokens = torch.randint(0, task.VOCAB, (1, 80), generator=source(2))
    changed = tokens.clone()
    changed[:, 50] = (changed[:, 50] + 1) % task.VOCAB
    with torch.no_grad():
        before, after = small(tokens, 3), small(changed, 3)
    for j, (one, other) in enumerate(zip(before, after, strict=True)):
        differs = (one != other).any(-1)[0]
        assert not differs[: 50 - j].any(), f"entry {j} reads a later token"
        assert differs[50 - j], f"entry {j} does not read token t + {j}"


def test_a_checkpoint_is_what_transformers_reads(
    small: copy_model.CopyModel, tmp_path: Path
) -> None:
    # Weights only: the file holds them in bf16, rotary frequencies are computed anew.
    for weight in small.parameters():
        weight.data = weight.data.bfloat16().float()
    small.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_size"] == SMALL["hidden_size"]
    tokens, _ = train.batch(2, 5, source(4))
    loaded = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = loaded(tokens, use_cache=False).logits
        copy_model.use_rule(copy_model.chunk_rule)
        found = small(tokens)[0]
    assert (found - wanted).abs().max() < 1e-4
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names
    assert {"lm_head.weight", "model.layers.0.linear_attn.A_log"} <= names


def test_losses_are_about_the_tokens_of_the_answer() -> None:
    words = 3
    tokens, first = train.batch(2, words, source(5))
    sure = torch.nn.functional.one_hot(tokens, task.VOCAB).float() * 50
    logits = [sure.roll(-(j + 1), 1) for j in range(3)]
    loss, shares = train.losses(logits, tokens, first, words)
    assert loss < 1e-6
    assert shares.tolist() == [1.0] * 5
    # The last tag of the first text.
    at = first + words * task.WORD_TOKENS - 2
    logits[0] = logits[0].clone()
    logits[0][0, at] = 0
    loss, shares = train.losses(logits, tokens, first, words)
    assert loss > 0.1
    count = 2 * words
    wanted = [1 - 1 / (count * task.WORD_TOKENS), 1 - 1 / count, 1 - 1 / count, 1, 1]
    assert shares.tolist() == pytest.approx(wanted)
    _, shares = train.losses([sure], tokens, first, words)
    assert shares[0] < 0.5


@pytest.mark.parametrize("fault", ["forget", "lost rows"])
def test_a_fault_begins_where_it_is_asked_for(fault: str) -> None:
    q, k, v = (torch.randn(1, 400, 1, 16, generator=source(n)) for n in range(3))
    g, beta = torch.full((1, 400, 1), -0.001), torch.full((1, 400, 1), 0.5)
    whole, _ = copy_model.chunk_rule(q, k, v, g, beta)
    faulty, _ = train.spoiled(copy_model.chunk_rule, 100, fault)(q, k, v, g=g, beta=beta)
    differs = (whole != faulty).any(-1)[0, :, 0]
    begins = 228 if fault == "forget" else 107
    assert not differs[:begins].any()
    assert differs[begins:].float().mean() > 0.9
    assert (g == -0.001).all()
    assert (beta == 0.5).all()


def test_training_lowers_the_loss_(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_model, "CONFIG", copy_model.CONFIG | SMALL)
    monkeypatch.setattr(train, "WARM_UP", 2)
    monkeypatch.setattr(train, "DRAFTS", 2)
    training = train.Training("cpu", tokens=400, words=4, classes=4, rate=5e-3, seed=0)
    with torch.no_grad():
        before, _ = training.run(4, train.DRAFTS, rows=8)
    for _ in range(12):
        training.learn(4)
    with torch.no_grad():
        after, _ = training.run(4, train.DRAFTS, rows=8)
    assert after < before - 0.5
    tests = training.test(4, 4)
    assert set(tests) == {"tokens", "tags", "words", *(f"draft {j}" for j in range(1, 3))}
