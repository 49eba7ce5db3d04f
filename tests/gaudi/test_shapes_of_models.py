"""Other shapes than the dense one: experts, Qwen3-Next, image prompts and LoRA adapters.

Chunks are one block each, so a hit must equal a cold run to the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driving
import harness
import pytest
import torch

Run = Callable[[str], harness.Result]
B = 384


def assert_hits_equal_cold(engine: Any, run: Run, cached: int) -> harness.Result:
    """Runs one prompt cold, to fill the cache, and on a hit with every slot poisoned.

    Args:
        run: runs the prompt with the salt that it is given.
        cached: tokens that the hit must take from the cache.

    Returns:
        The cold result.
    """
    salt = driving.salt()
    cold, first = run(driving.salt()), run(salt)
    driving.fill_slots(engine, math.nan)
    hit, again = run(salt), run(salt)
    assert [r.cached_tokens for r in (cold, first, hit, again)] == [0, 0, cached, cached]
    for result in (first, hit, again):
        assert result.distance(cold) == 0.0
    return cold


@pytest.mark.parametrize(
    ("name", "block", "ssm", "experts"),
    [("MOE", 384, torch.float32, 8), ("NEXT", 256, torch.bfloat16, 8)],
    ids=["Qwen3.5-MoE", "Qwen3-Next"],
)
def test_hits_of_other_architectures_equal_cold(
    engines: Any, name: str, block: int, ssm: torch.dtype, experts: int
) -> None:
    import tiny_models

    model = getattr(tiny_models, name)
    assert model.text["num_experts"] == experts
    engine = engines(model, max_num_batched_tokens=block + 128)
    assert driving.block_tokens(engine) == block
    assert {tensor.dtype for tensor in driving.states(engine)} == {torch.bfloat16, ssm}
    assert len(engine.runner._layout.gdn_groups) == 3
    for blocks, extra in ((1, 1), (2, 50)):
        tokens = harness.prompt(10 * blocks, blocks * block + extra)

        def run(salt: str, tokens: list[int] = tokens) -> harness.Result:
            return engine.run([tokens], salt=salt)[0]

        assert_hits_equal_cold(engine, run, blocks * block)
    # Two hits on a shared block, together in a step.
    shared, salt = harness.prompt(30, block + 20), driving.salt()
    queries = [shared + harness.prompt(seed, 25) for seed in (31, 32)]
    cold = [driving.cold(engine, tokens, 5) for tokens in queries]
    engine.run([shared], max_tokens=1, salt=salt)
    results = engine.run(queries, max_tokens=5, salt=salt)
    assert [r.cached_tokens for r in results] == [block, block]
    assert [r.distance(c) for r, c in zip(results, cold, strict=True)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("layers", "groups"), [("lflf", [2]), ("lllfllf", [2, 2, 1])], ids=["one group", "uneven"]
)
def test_hits_of_other_layer_patterns_equal_cold(
    engines: Any, layers: str, groups: list[int]
) -> None:
    """One GDN group; and three of which the last is one layer short."""
    import dataclasses

    import tiny_models

    kinds = [{"l": "linear_attention", "f": "full_attention"}[kind] for kind in layers]
    text = dict(tiny_models.DENSE.text)
    text |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    model = dataclasses.replace(tiny_models.DENSE, name=f"tiny-{layers}", text=text)
    engine = engines(model, max_num_batched_tokens=512)
    assert [len(group.layers) for group in engine.runner._layout.gdn_groups] == groups
    tokens = harness.prompt(40, 2 * B + 30)
    assert_hits_equal_cold(engine, lambda salt: engine.run([tokens], salt=salt)[0], 2 * B)


def generate(engine: Any, inputs: dict[str, Any], salt: str, **options: Any) -> harness.Result:
    """Runs one request that `Engine.run` has no words for, greedily, to six tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1
    )
    (output,) = engine.llm.generate(
        [inputs | {"cache_salt": salt}], params, use_tqdm=False, **options
    )
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    chosen = zip(tokens, completion.logprobs, strict=True)
    logprobs = tuple(entry[token].logprob for token, entry in chosen)
    return harness.Result(tokens, logprobs, output.num_cached_tokens or 0)


@pytest.fixture
def image_engine(engines: Any) -> Any:
    return engines(
        max_num_batched_tokens=512,
        limit_mm_per_prompt={"image": 2, "video": 0},
        # Stock code's other way fails in the vision tower: it returns attention of three
        # dimensions where the tower expects four.
        env={"VLLM_PROMPT_USE_FUSEDSDPA": "1"},
    )


def image(seed: int) -> Any:
    """A picture of noise that differs from seed to seed: 20 tokens of 32 x 32 pixels each."""
    import numpy
    from PIL import Image

    values = numpy.random.default_rng(seed).integers(0, 255, (128, 160, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def image_run(engine: Any, before: int, after: int, picture: Any) -> Run:
    import tiny_models as t

    tokens = harness.prompt(50, before)
    tokens += [t.VISION_START, t.IMAGE, t.VISION_END, *harness.prompt(51, after)]
    inputs = {"prompt_token_ids": tokens, "multi_modal_data": {"image": picture}}
    return lambda salt: generate(engine, inputs, salt)


@pytest.mark.parametrize(
    ("before", "after", "cached"),
    [(350, 22, B), (375, 20, B), (B + 10, 30, B), (2 * B - 10, 12, 2 * B)],
    ids=["before the boundary", "across the boundary", "behind the hit", "across the second"],
)
def test_hits_of_image_prompts_equal_cold(
    image_engine: Any, before: int, after: int, cached: int
) -> None:
    """Cached tokens count the image's own tokens; a hit across it must hold its state."""
    answers = [
        assert_hits_equal_cold(
            image_engine, image_run(image_engine, before, after, image(k)), cached
        )
        for k in (1, 2)
    ]
    assert answers[0].tokens != answers[1].tokens, "the picture makes no difference here"


def test_other_picture_in_the_same_words_is_no_hit(image_engine: Any) -> None:
    salt = driving.salt()
    first, second = (image_run(image_engine, 350, 22, image(k)) for k in (3, 4))
    first(salt)
    assert first(salt).cached_tokens == B
    other = second(salt)
    assert other.cached_tokens == 0
    assert other.distance(second(driving.salt())) == 0.0


def lora_weights(seed: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """An adapter of rank 8 on attention, MLP and GDN projections of every layer."""
    import tiny_models

    shapes: dict[str, tuple[int, int]] = {}
    for layer, kind in enumerate(tiny_models.DENSE.text["layer_types"]):
        if kind == "linear_attention":
            parts = {"in_proj_qkv": (128, 384), "in_proj_z": (128, 256), "out_proj": (256, 128)}
            shapes |= {f"layers.{layer}.linear_attn.{n}": s for n, s in parts.items()}
        else:
            parts = {"q_proj": (128, 256), "v_proj": (128, 32), "o_proj": (128, 128)}
            shapes |= {f"layers.{layer}.self_attn.{n}": s for n, s in parts.items()}
        parts = {"gate_proj": (128, 256), "down_proj": (256, 128)}
        shapes |= {f"layers.{layer}.mlp.{n}": s for n, s in parts.items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (inputs, outputs) in shapes.items():
        stem = f"base_model.model.model.language_model.{name}"
        down = torch.randn(8, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, 8, generator=generator) * 8**-0.5
        weights[f"{stem}.lora_A.weight"] = down.bfloat16()
        weights[f"{stem}.lora_B.weight"] = up.bfloat16()
    return weights, {name.split(".")[-1] for name in shapes}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from safetensors.torch import save_file

    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"adapter{seed}")
        weights, targets = lora_weights(seed)
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
        config |= {"target_modules": sorted(targets), "task_type": "CAUSAL_LM"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        folders.append(folder)
    return folders


def test_hits_of_lora_requests_equal_cold_and_are_their_own(
    engines: Any, adapters: list[Path]
) -> None:
    """A block belongs to the adapter that made it: the same words with another one are no hit."""
    from vllm.lora.request import LoRARequest

    engine = engines(
        max_num_batched_tokens=512,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        num_gpu_blocks_override=60,
    )
    inputs = {"prompt_token_ids": harness.prompt(60, 2 * B + 30)}
    requests = [None] + [LoRARequest(f"a{i}", i, str(p)) for i, p in enumerate(adapters, 1)]

    def runner_for(request: Any) -> Run:
        return lambda salt: generate(engine, inputs, salt, lora_request=request)

    runs = [runner_for(request) for request in requests]
    cold = [assert_hits_equal_cold(engine, run, 2 * B) for run in runs]
    assert len({result.tokens for result in cold}) == 3, "the adapters make no difference here"
    salt = driving.salt()
    shared = [run(salt) for run in runs]
    assert [result.cached_tokens for result in shared] == [0, 0, 0]
    again = [run(salt) for run in runs]
    assert [result.cached_tokens for result in again] == [2 * B] * 3
    for result, expected in zip(shared + again, cold + cold, strict=True):
        assert result.distance(expected) == 0.0
