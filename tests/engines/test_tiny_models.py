"""The checkpoints on disk: complete, repeatable, and with a tokenizer that loses nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the weights are made with torch")
pytest.importorskip("transformers", reason="the tokenizer is read back as a user would read it")

import tiny_models
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

MODELS = [
    tiny_models.DENSE,
    tiny_models.MOE,
    tiny_models.NEXT,
    tiny_models.CPU_DENSE,
    tiny_models.CPU_DENSE_VISION,
    tiny_models.CPU_MOE,
    tiny_models.CPU_MOE_VISION,
    tiny_models.CPU_NEXT,
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_folder_holds_what_a_user_would_have(model: tiny_models.TinyModel, cache: Path) -> None:
    folder = tiny_models.write(model, cache)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [model.architecture]
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert ("preprocessor_config.json" in names) == bool(model.vision)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tiny_models.weights(model))
        head = file.get_tensor("lm_head.weight")
    assert not head[list(tiny_models.SPECIAL_TOKENS)].any()
    assert len(head) == config.get("text_config", config)["vocab_size"]
    assert not head[tiny_models.VOCAB :].any()
    assert head[tiny_models.FIRST_PLAIN : tiny_models.LAST_PLAIN + 1].any(dim=1).all()


def test_is_written_once_and_depends_on_the_seed(cache: Path) -> None:
    folder = tiny_models.write(tiny_models.DENSE, cache)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_models.write(tiny_models.DENSE, cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    for changes in ({"seed": 2}, {"echo": 1.0}, {"dtype": "float32"}):
        other = tiny_models.write(replace(tiny_models.DENSE, **changes), cache)
        assert other != folder
        written = (other / "model.safetensors").read_bytes()
        assert written != (folder / "model.safetensors").read_bytes()


def test_dtype_is_that_of_the_weights() -> None:
    wide = tiny_models.weights(replace(tiny_models.CPU_DENSE, dtype="float32"))
    assert {str(value.dtype) for value in wide.values()} == {"torch.float32"}
    for name, value in tiny_models.weights(tiny_models.CPU_DENSE).items():
        assert wide[name].equal(value.float()), name


def test_echo_makes_a_hidden_state_like_an_embedding_say_its_token() -> None:
    def says_itself(model: tiny_models.TinyModel) -> int:
        found = tiny_models.weights(model)
        (name,) = [name for name in found if name.endswith("embed_tokens.weight")]
        plain = slice(tiny_models.FIRST_PLAIN, tiny_models.LAST_PLAIN + 1)
        said = (found[name].float() @ found["lm_head.weight"].float().T).argmax(dim=1)[plain]
        return int((said == torch.arange(tiny_models.VOCAB)[plain]).sum())

    plain_tokens = tiny_models.LAST_PLAIN + 1 - tiny_models.FIRST_PLAIN
    assert says_itself(tiny_models.CPU_DENSE) == plain_tokens
    assert says_itself(replace(tiny_models.CPU_DENSE, echo=0.0)) < plain_tokens // 20


def test_a_drafter_has_what_published_ones_have_and_leaves_the_rest_to_the_target(
    cache: Path,
) -> None:
    folder = tiny_models.write(tiny_models.DFLASH, cache)
    config = json.loads((folder / "config.json").read_text())
    target = tiny_models.CPU_DENSE.text
    # The mask's row of the target's embedding, from which every masked position starts, is 0.
    mask = config["dflash_config"]["mask_token_id"]
    assert tiny_models.VOCAB <= mask < config["vocab_size"] == target["vocab_size"]
    assert config["hidden_size"] == target["hidden_size"]
    assert max(config["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    assert not {"embed_tokens.weight", "lm_head.weight"} & names
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    assert len(layers) == config["num_hidden_layers"]


def test_bytes_repeat_in_another_folder(cache: Path, tmp_path: Path) -> None:
    first, second = (tiny_models.write(tiny_models.MOE, where) for where in (cache, tmp_path))
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_tokenizer_keeps_any_text_and_renders_a_chat(cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_models.write(tiny_models.DENSE, cache))
    assert len(tokenizer) == tiny_models.VOCAB
    for text in ("The river, the mill: 42%.", "naïve Ωμέγα 漢字 🙂\n\ttabs", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids.count(tiny_models.TURN_START) == 3
    # A chat that grows turn by turn must grow as tokens too, or it could not hit the cache.
    shorter = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert ids[: len(tokenizer.encode(shorter))] == tokenizer.encode(shorter)
