"""Tiny checkpoints on disk, as a user would have real ones: config, weights, tokenizer, template.

Three shapes: the dense Qwen3.5 (`DENSE`), the Qwen3.5 MoE (`MOE`), both with their vision tower,
and Qwen3-Next (`NEXT`). The `CPU_` shapes are the same families for vLLM's own CPU backend, whose
GDN prefill kernel wants heads of 128, dense and MoE also without the tower; `DFLASH` is a drafter
for any of them. Weight names and layouts are those of the published checkpoints, so vLLM
loads them with `load_format="auto"`. Values are random, a function of seed and weight name alone,
at scales that keep activations near 1 and make every layer matter: with the usual tiny
initialisation all logits would be alike, and a wrong recurrent state would change no token.

The rows of `lm_head` that belong to special tokens are 0, so no run ever stops early or emits an
image token; lengths are set by `max_tokens` alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

VOCAB = 512
EMBEDDING_ROWS = 4096
"""Rows of the embedding; those past `VOCAB` are 0, as real checkpoints are padded too.

vllm-gaudi's warm-up makes prompts of the ids 0, 1, 2, ... up to the longest prompt, whatever the
vocabulary; on a CPU an id outside the table is an error.
"""
END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
FIRST_PLAIN, LAST_PLAIN = 3, 507
"""Token ids of plain text, for prompts made of ids."""
VISION_START, VISION_END, IMAGE, VIDEO = 508, 509, 510, 511
SPECIAL_TOKENS = {
    END_OF_TEXT: "<|endoftext|>",
    TURN_START: "<|im_start|>",
    TURN_END: "<|im_end|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_CORPUS = """\
A server that answers many people keeps the work it has done. When a prompt begins like one that
was seen before, the blocks of keys and values are already there and only the rest is computed.
A linear layer has no keys and values to keep. It carries one state, which each token changes, and
which at every block boundary must be written down, or the next request that begins there has
nothing to begin from. Whoever restores a state must restore the right one: the answer will look
fluent either way. So we test what cannot be seen by reading. We send the same question twice, once
to an empty cache and once to a full one, and we ask for the same numbers. We fill free memory with
values that spread when they are touched. We stop a request in the middle, take its slot away, give
it back, and ask again. What is the weather like today? Please write a short story about a river,
a bridge and an old mill. How do I sort a list of names in Python? Translate this sentence into
French, and explain the grammar. The quick brown fox jumps over the lazy dog, 0123456789 times.
"""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """A shape to be written.

    Args:
        text, vision: the text config, and the tower's, if there is one.
        echo: weight of the embedding in `lm_head`, beside the random rows' 1. With some, greedy
            decoding says a token several times before it turns to another, so that drafts are
            accepted; which token comes next, and when, still hangs on the state.
        dtype: of config and weights.
    """

    name: str
    architecture: str
    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    echo: float = 0.0
    dtype: str = "bfloat16"

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        shared: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        shared |= {"dtype": self.dtype, "tie_word_embeddings": False}
        if not self.vision:
            return dict(self.text) | shared
        return shared | {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "text_config": dict(self.text),
            "vision_config": dict(self.vision),
        }


_TEXT: dict[str, Any] = {
    "vocab_size": EMBEDDING_ROWS,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "eos_token_id": END_OF_TEXT,
    "dtype": "bfloat16",
}
_MROPE: dict[str, Any] = {
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}

DENSE = TinyModel(
    "tiny-qwen3.5",
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    _TEXT | _MROPE | {"model_type": "qwen3_5_text", "intermediate_size": 256},
    _VISION | {"model_type": "qwen3_5"},
)
MOE = TinyModel(
    "tiny-qwen3.5-moe",
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    _TEXT | _MROPE | _EXPERTS | {"model_type": "qwen3_5_moe_text"},
    _VISION | {"model_type": "qwen3_5_moe"},
)
NEXT = TinyModel(
    "tiny-qwen3-next",
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _TEXT
    | _EXPERTS
    | {
        "intermediate_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
)


_CPU_TEXT: dict[str, Any] = _TEXT | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    # Blocks of some 300 tokens in fp32.
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_CPU_DENSE_TEXT = _CPU_TEXT | _MROPE | {"model_type": "qwen3_5_text", "intermediate_size": 256}
_CPU_MOE_TEXT = _CPU_TEXT | _MROPE | _EXPERTS | {"model_type": "qwen3_5_moe_text"}
# Of 64 * 0.25 / 2 rotary frequencies.
_CPU_DENSE_TEXT["rope_parameters"] = _CPU_MOE_TEXT["rope_parameters"] = _MROPE[
    "rope_parameters"
] | {"mrope_section": [4, 2, 2]}
ECHO = 1.3

CPU_DENSE = TinyModel(
    "tiny-cpu-qwen3.5",
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _CPU_DENSE_TEXT,
    echo=ECHO,
)
CPU_DENSE_VISION = TinyModel(
    "tiny-cpu-qwen3.5-vision",
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    _CPU_DENSE_TEXT,
    _VISION | {"model_type": "qwen3_5"},
    echo=ECHO,
)
CPU_MOE = TinyModel(
    "tiny-cpu-qwen3.5-moe",
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    _CPU_MOE_TEXT,
    echo=ECHO,
)
CPU_MOE_VISION = TinyModel(
    "tiny-cpu-qwen3.5-moe-vision",
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    _CPU_MOE_TEXT,
    _VISION | {"model_type": "qwen3_5_moe"},
    echo=ECHO,
)
CPU_NEXT = TinyModel(
    "tiny-cpu-qwen3-next",
    "Qwen3NextForCausalLM",
    "qwen3_next",
    dict(NEXT.text) | _CPU_TEXT,
    echo=ECHO,
)
DFLASH = TinyModel(
    "tiny-dflash",
    "DFlashDraftModel",
    "qwen3",
    {
        "vocab_size": EMBEDDING_ROWS,
        "hidden_size": _CPU_TEXT["hidden_size"],
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_target_layers": 4,
        "block_size": 16,
        # A row of the embedding that is 0.
        "dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 2]},
    },
)
"""A DFlash drafter for the `CPU_` shapes: it drafts the last token over and over.

Embedding and `lm_head` are the target's, as in the published drafters. The masked positions start
from 0, and the two attention layers carry the last token's embedding to them; what the target's
hidden states would add is weighted with 0.
"""


class _Values:
    """Random values that depend on the seed and on the weight's name, not on the order of calls."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def normal(
        self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0
    ) -> tuple[str, torch.Tensor]:
        values = torch.randn(shape, generator=self._generator(name))
        return name, (values * scale + mean).to(torch.bfloat16)

    def linear(self, name: str, *shape: int) -> tuple[str, torch.Tensor]:
        """A projection [..., out, in] that multiplies the RMS of its input by 1.5."""
        return self.normal(f"{name}.weight", *shape, scale=1.5 * shape[-1] ** -0.5)

    def log_decay(self, name: str, heads: int) -> tuple[str, torch.Tensor]:
        """`A_log`: decays between 0.02 and 0.32 per unit of the gate, so the memory is long."""
        decay = torch.rand(heads, generator=self._generator(name)) * 0.3 + 0.02
        return name, decay.log()


def _gdn(values: _Values, prefix: str, text: Mapping[str, Any], fused: bool) -> Iterator[Any]:
    hidden, value_heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    outs = value_heads * text["linear_value_head_dim"]
    if fused:
        yield values.linear(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * outs, hidden)
        yield values.linear(f"{prefix}.in_proj_ba", 2 * value_heads, hidden)
    else:
        yield values.linear(f"{prefix}.in_proj_qkv", 2 * keys + outs, hidden)
        yield values.linear(f"{prefix}.in_proj_z", outs, hidden)
        yield values.linear(f"{prefix}.in_proj_b", value_heads, hidden)
        yield values.linear(f"{prefix}.in_proj_a", value_heads, hidden)
    width = text["linear_conv_kernel_dim"]
    yield values.normal(f"{prefix}.conv1d.weight", 2 * keys + outs, 1, width, scale=0.5)
    yield values.log_decay(f"{prefix}.A_log", value_heads)
    yield values.normal(f"{prefix}.dt_bias", value_heads, scale=0.1, mean=-3.0)
    yield values.normal(
        f"{prefix}.norm.weight", text["linear_value_head_dim"], scale=0.05, mean=1.0
    )
    yield values.linear(f"{prefix}.out_proj", hidden, outs)


def _attention(values: _Values, prefix: str, text: Mapping[str, Any]) -> Iterator[Any]:
    hidden, size = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    # The output gate is interleaved with the queries in one projection.
    yield values.linear(f"{prefix}.q_proj", 2 * queries, hidden)
    yield values.linear(f"{prefix}.k_proj", keys, hidden)
    yield values.linear(f"{prefix}.v_proj", keys, hidden)
    yield values.linear(f"{prefix}.o_proj", hidden, queries)
    # These norms and the layer norms scale by 1 + weight.
    yield values.normal(f"{prefix}.q_norm.weight", size, scale=0.05)
    yield values.normal(f"{prefix}.k_norm.weight", size, scale=0.05)


def _mlp(values: _Values, prefix: str, hidden: int, width: int) -> Iterator[Any]:
    yield values.linear(f"{prefix}.gate_proj", width, hidden)
    yield values.linear(f"{prefix}.up_proj", width, hidden)
    yield values.linear(f"{prefix}.down_proj", hidden, width)


def _moe(values: _Values, prefix: str, text: Mapping[str, Any], stacked: bool) -> Iterator[Any]:
    hidden, width, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield values.linear(f"{prefix}.gate", experts, hidden)
    if stacked:
        name, gate_up = values.linear(f"{prefix}.experts.gate_up_proj", experts, 2 * width, hidden)
        yield name.removesuffix(".weight"), gate_up
        name, down = values.linear(f"{prefix}.experts.down_proj", experts, hidden, width)
        yield name.removesuffix(".weight"), down
    else:
        for expert in range(experts):
            yield from _mlp(values, f"{prefix}.experts.{expert}", hidden, width)
    shared = text["shared_expert_intermediate_size"]
    yield from _mlp(values, f"{prefix}.shared_expert", hidden, shared)
    yield values.linear(f"{prefix}.shared_expert_gate", 1, hidden)


def _vision(values: _Values, prefix: str, vision: Mapping[str, Any]) -> Iterator[Any]:
    hidden, width = vision["hidden_size"], vision["intermediate_size"]
    patch, merged = vision["patch_size"], hidden * vision["spatial_merge_size"] ** 2

    def affine(name: str, *shape: int) -> Iterator[Any]:
        yield values.linear(name, *shape)
        yield values.normal(f"{name}.bias", shape[0], scale=0.02)

    def norm(name: str) -> Iterator[Any]:
        yield values.normal(f"{name}.weight", hidden, scale=0.05, mean=1.0)
        yield values.normal(f"{name}.bias", hidden, scale=0.02)

    kernel = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    inputs = kernel[0] * kernel[1] * kernel[2] * kernel[3]
    name = f"{prefix}.patch_embed.proj"
    yield values.normal(f"{name}.weight", hidden, *kernel, scale=1.5 * inputs**-0.5)
    yield values.normal(f"{name}.bias", hidden, scale=0.02)
    positions = vision["num_position_embeddings"]
    yield values.normal(f"{prefix}.pos_embed.weight", positions, hidden)
    for index in range(vision["depth"]):
        block = f"{prefix}.blocks.{index}"
        yield from norm(f"{block}.norm1")
        yield from norm(f"{block}.norm2")
        yield from affine(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from affine(f"{block}.attn.proj", hidden, hidden)
        yield from affine(f"{block}.mlp.linear_fc1", width, hidden)
        yield from affine(f"{block}.mlp.linear_fc2", hidden, width)
    yield from norm(f"{prefix}.merger.norm")
    yield from affine(f"{prefix}.merger.linear_fc1", merged, merged)
    yield from affine(f"{prefix}.merger.linear_fc2", vision["out_hidden_size"], merged)


def weights(model: TinyModel) -> Weights:
    """All weights of `model` by checkpoint name, in its dtype, but for the fp32 `A_log`."""
    found = _drafter(model) if model.architecture == DFLASH.architecture else _target(model)
    if model.dtype != "bfloat16":
        found = {name: value.to(getattr(torch, model.dtype)) for name, value in found.items()}
    return found


def _drafter(model: TinyModel) -> Weights:
    values, text = _Values(model.seed), model.text
    hidden, size = text["hidden_size"], text["head_dim"]
    width, aux = text["intermediate_size"], len(text["dflash_config"]["target_layer_ids"])
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    if keys != hidden:
        raise ValueError(f"{keys} elements of V can't carry an embedding of {hidden} unchanged")
    one = torch.ones((), dtype=torch.bfloat16)
    result: Weights = {
        "fc.weight": one.new_zeros(hidden, aux * hidden),
        "hidden_norm.weight": one.new_ones(hidden),
        "norm.weight": one.new_ones(hidden),
    }
    # From each V head by the first of the query heads that share it.
    out = one.new_zeros(hidden, queries)
    shared = queries // keys
    for row in range(hidden):
        head, element = divmod(row, size)
        out[row, head * shared * size + element] = 1
    for index in range(text["num_hidden_layers"]):
        layer = f"layers.{index}"
        result |= dict(_mlp(values, f"{layer}.mlp", hidden, width))
        result[f"{layer}.mlp.down_proj.weight"].zero_()
        result |= dict(
            [
                values.linear(f"{layer}.self_attn.q_proj", queries, hidden),
                values.linear(f"{layer}.self_attn.k_proj", keys, hidden),
                (f"{layer}.self_attn.v_proj.weight", torch.eye(hidden, dtype=one.dtype)),
                (f"{layer}.self_attn.o_proj.weight", out.clone()),
            ]
        )
        for name, count in (("self_attn.q_norm", size), ("self_attn.k_norm", size)):
            result[f"{layer}.{name}.weight"] = one.new_ones(count)
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{layer}.{name}.weight"] = one.new_ones(hidden)
    return result


def _target(model: TinyModel) -> Weights:
    values, text = _Values(model.seed), model.text
    result: Weights = {}
    next_style = model.model_type == "qwen3_next"
    stem = "model.language_model" if model.vision else "model"
    hidden = text["hidden_size"]

    def add(items: Iterator[tuple[str, torch.Tensor]]) -> None:
        result.update(items)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows.new_zeros(EMBEDDING_ROWS - VOCAB, hidden)])

    def top() -> Iterator[tuple[str, torch.Tensor]]:
        name, embedding = values.normal(f"{stem}.embed_tokens.weight", VOCAB, hidden)
        yield name, padded(embedding)
        yield values.normal(f"{stem}.norm.weight", hidden, scale=0.05)
        name, head = values.linear("lm_head", VOCAB, hidden)
        if model.echo:
            head = head + (model.echo * 1.5 * hidden**-0.5 * embedding).to(head.dtype)
        head[list(SPECIAL_TOKENS)] = 0
        yield name, padded(head)

    add(top())
    for index, kind in enumerate(text["layer_types"]):
        layer = f"{stem}.layers.{index}"
        if kind == "linear_attention":
            add(_gdn(values, f"{layer}.linear_attn", text, fused=next_style))
        else:
            add(_attention(values, f"{layer}.self_attn", text))
        if "num_experts" in text:
            add(_moe(values, f"{layer}.mlp", text, stacked=not next_style))
        else:
            add(_mlp(values, f"{layer}.mlp", hidden, text["intermediate_size"]))
        add(values.normal(f"{layer}.{name}.weight", hidden, scale=0.05)
            for name in ("input_layernorm", "post_attention_layernorm"))  # fmt: skip
    if model.vision:
        add(_vision(values, "model.visual", model.vision))
    return result


def _tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of exactly `VOCAB` entries: any text encodes, and decodes to itself."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    first = [SPECIAL_TOKENS[number] for number in range(FIRST_PLAIN)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=LAST_PLAIN + 1,
        special_tokens=first,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_special_tokens([SPECIAL_TOKENS[n] for n in range(LAST_PLAIN + 1, VOCAB)])
    found = {number: tokenizer.id_to_token(number) for number in SPECIAL_TOKENS}
    if tokenizer.get_vocab_size() != VOCAB or found != SPECIAL_TOKENS:
        raise RuntimeError(
            f"tokenizer has {tokenizer.get_vocab_size()} entries and special tokens {found}; "
            f"wanted {VOCAB} and {SPECIAL_TOKENS}: the corpus is too short for its merges"
        )
    return tokenizer


def _small_files(model: TinyModel) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {
        "config.json": model.config(),
        "generation_config.json": {
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": [TURN_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.text["max_position_embeddings"],
            "eos_token": SPECIAL_TOKENS[TURN_END],
            "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    if model.vision:
        pixels = {
            "patch_size": model.vision["patch_size"],
            "temporal_patch_size": model.vision["temporal_patch_size"],
            "merge_size": model.vision["spatial_merge_size"],
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            # 4 to 64 merged patches of 32 x 32 pixels.
            "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32},
            "processor_class": "Qwen3VLProcessor",
        }
        files["preprocessor_config.json"] = pixels | {
            "image_processor_type": "Qwen2VLImageProcessorFast"
        }
        files["video_preprocessor_config.json"] = pixels | {
            "video_processor_type": "Qwen3VLVideoProcessor"
        }
    return files


def write(model: TinyModel, cache: Path) -> Path:
    """Write `model` below `cache` and return its folder, or the one written before.

    The folder's name carries a hash of everything that its content depends on: the model, this
    file, and the versions of the libraries that make it.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes())
    recipe.update(json.dumps([model.config(), model.seed, model.echo]).encode())
    recipe.update(f"{torch.__version__} {tokenizers.__version__}".encode())
    folder = cache / f"{model.name}-{recipe.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Made elsewhere and renamed, so that a folder of this name is always complete.
    making = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=cache))
    try:
        for name, content in _small_files(model).items():
            (making / name).write_text(json.dumps(content, indent=1) + "\n")
        _tokenizer().save(str(making / "tokenizer.json"))
        save_file(weights(model), making / "model.safetensors", metadata={"format": "pt"})
        making.chmod(0o755)
        try:
            making.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder
