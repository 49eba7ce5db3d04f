"""Reads a target's or drafter's shape from a Hugging Face config, or from the packaged facts.

Both come out in one shape. A file from a stranger is expected to be wrong in every way: it is
limited in size and nesting, and whatever is wrong with it becomes one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from vllm_gaudi_ext.planner.errors import IllegalValue, PlanError
from vllm_gaudi_ext.planner.facts import (
    ModelFacts,
    find_drafter,
    find_model,
    load_facts,
    nearest,
)
from vllm_gaudi_ext.planner.textfile import read_small_text

MAX_CONFIG_BYTES = 5_000_000
MAX_NESTING = 32

# Wider than any public model by two orders of magnitude; a value beyond is a typing error.
Count = Annotated[StrictInt, Field(ge=1, le=100_000)]
Tokens = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]
Experts = Annotated[StrictInt, Field(ge=0, le=100_000)]


class _HfTarget(BaseModel):
    """Keys of a GDN hybrid's (text) config; everything else in the file is ignored."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: Count
    layer_types: list[str] | None = None
    full_attention_interval: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count
    head_dim: Count | None = None
    hidden_size: Count | None = None
    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count
    dtype: str | None = None
    mamba_ssm_dtype: str | None = None
    num_experts: Experts | None = None
    mtp_num_hidden_layers: Experts | None = None
    vocab_size: Tokens | None = None
    max_position_embeddings: Tokens | None = None


class _HfDrafter(BaseModel):
    """Keys of a drafter's config."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: Count
    layer_types: list[str] | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count
    head_dim: Count | None = None
    hidden_size: Count | None = None
    sliding_window: Tokens | None = None
    block_size: Count | None = None
    vocab_size: Tokens | None = None
    dflash_config: dict[str, Any] = {}


class TargetConfig(BaseModel):
    """A GDN hybrid, as far as the planner needs it.

    `unknown` names the config keys that have no value, with what hints there are; `inferred` the
    keys whose packaged value was not read from this model's own file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    origin: str
    architecture: str | None
    gdn_layers: int
    attention_layers: int
    num_attention_heads: int | None
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    dtype: str | None
    mamba_ssm_dtype: str | None
    num_experts: int | None
    mtp_layers: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    quantised_kv: str | None
    unknown: dict[str, str]
    inferred: dict[str, str]

    @property
    def layers(self) -> int:
        """All layers."""
        return self.gdn_layers + self.attention_layers


class DrafterConfig(BaseModel):
    """A drafter's attention layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    origin: str
    architecture: str | None
    full_layers: int
    sliding_layers: int
    window: int | None
    num_key_value_heads: int
    head_dim: int
    block_size: int | None
    window_ignored: bool
    inferred: dict[str, str]

    @property
    def layers(self) -> int:
        """All layers."""
        return self.full_layers + self.sliding_layers


class DrafterOverrides(BaseModel):
    """What the command line says about a drafter; each replaces the config's value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    sliding_layers: int | None = None
    window: int | None = None

    @property
    def given(self) -> bool:
        """Whether any was given."""
        return any(value is not None for value in self.model_dump().values())


_DRAFTER_OPTION = {
    "num_hidden_layers": "--drafter-layers",
    "num_key_value_heads": "--drafter-kv-heads",
    "head_dim": "--drafter-head-dim",
    "layer_types": "--drafter-sliding-layers (0 when all are full attention)",
    "sliding_window": "--drafter-window",
}


def _nesting(value: Any) -> int:
    depth = 0
    level = [value]
    while level:
        depth += 1
        if depth > MAX_NESTING:
            return depth
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return depth


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object of a config file, or of the config.json in a folder.

    Raises:
        PlanError: it is missing, not a regular file, over 5 MB, not JSON, or nested too deeply.
    """
    try:
        if path.is_dir():
            if not (path / "config.json").exists():
                raise PlanError(f"{path}: the folder holds no config.json")
            path = path / "config.json"
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    text = read_small_text(path, "config.json", MAX_CONFIG_BYTES)
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise PlanError(f"{path}: nested deeper than {MAX_NESTING} levels") from None
    except ValueError as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise PlanError(f"{path}: not valid JSON{where}: {detail}") from None
    if not isinstance(parsed, dict):
        raise PlanError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    if _nesting(parsed) > MAX_NESTING:
        raise PlanError(f"{path}: nested deeper than {MAX_NESTING} levels")
    return parsed


def _one_line(error: ValidationError, origin: str, unknown: dict[str, str]) -> PlanError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        hint = f" ({unknown[key]})" if key in unknown else ""
        return PlanError(f"{origin}: {key} is not given{hint}")
    return PlanError(f"{origin}: {key}: {first['msg']}, got {str(first['input'])[:60]!r}")


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, with the outer dtype where it has none itself."""
    inner = raw.get("text_config")
    text = dict(inner) if isinstance(inner, dict) else dict(raw)
    for source in (text, raw):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                text.setdefault("dtype", source[key].removeprefix("torch."))
    text.setdefault("vocab_size", raw.get("vocab_size"))
    return text


def _architecture(raw: dict[str, Any]) -> str | None:
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _quantised_kv(raw: dict[str, Any]) -> str | None:
    """How a quantised checkpoint says its KV cache should be stored, if it does."""
    for holder in (raw, raw.get("text_config")):
        quantisation = holder.get("quantization_config") if isinstance(holder, dict) else None
        if not isinstance(quantisation, dict):
            continue
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if quantisation.get(key):
                return f"{key} in its quantization_config"
    return None


def _derived_head_dim(hidden_size: int, heads: int, origin: str) -> int:
    if hidden_size < heads:
        raise PlanError(f"{origin}: hidden_size {hidden_size} is below its {heads} heads")
    return hidden_size // heads


def target_from_hf(raw: dict[str, Any], name: str, origin: str) -> TargetConfig:
    """A target from the object of a config.json.

    Raises:
        PlanError: it has no Gated DeltaNet layer, or a key is missing, malformed or absurd.
    """
    return _target(raw, name, origin, unknown={}, inferred={})


def _target(
    raw: dict[str, Any],
    name: str,
    origin: str,
    unknown: dict[str, str],
    inferred: dict[str, str],
) -> TargetConfig:
    text = _text_config(raw)
    kinds = text.get("layer_types")
    if "linear_num_value_heads" not in text or (
        isinstance(kinds, list) and "linear_attention" not in kinds
    ):
        what = _architecture(raw) or text.get("model_type") or "no architecture named"
        raise PlanError(
            f"{origin}: no Gated DeltaNet layer ({what}); the planner is for hybrids such as "
            "Qwen3.5, Qwen3.6 and Qwen3-Next"
        )
    try:
        hf = _HfTarget.model_validate(text)
    except ValidationError as error:
        raise _one_line(error, origin, unknown) from None
    if hf.layer_types is not None:
        odd = set(hf.layer_types) - {"linear_attention", "full_attention"}
        if odd:
            raise PlanError(f"{origin}: layer type {sorted(odd)[0]!r} is not one we can plan for")
        if len(hf.layer_types) != hf.num_hidden_layers:
            raise PlanError(
                f"{origin}: {len(hf.layer_types)} layer_types for {hf.num_hidden_layers} layers"
            )
        gdn = hf.layer_types.count("linear_attention")
    else:
        # Transformers' default when neither key is in the file.
        interval = hf.full_attention_interval or 4
        gdn = hf.num_hidden_layers - hf.num_hidden_layers // interval
    if gdn in (0, hf.num_hidden_layers):
        raise PlanError(
            f"{origin}: {gdn} of {hf.num_hidden_layers} layers are Gated DeltaNet; "
            "a hybrid has both kinds"
        )
    head_dim = hf.head_dim
    if head_dim is None:
        if hf.hidden_size is None or hf.num_attention_heads is None:
            raise PlanError(f"{origin}: head_dim is not given and can't be derived")
        head_dim = _derived_head_dim(hf.hidden_size, hf.num_attention_heads, origin)
    return TargetConfig(
        name=name,
        origin=origin,
        architecture=_architecture(raw),
        gdn_layers=gdn,
        attention_layers=hf.num_hidden_layers - gdn,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        linear_num_key_heads=hf.linear_num_key_heads,
        linear_num_value_heads=hf.linear_num_value_heads,
        linear_key_head_dim=hf.linear_key_head_dim,
        linear_value_head_dim=hf.linear_value_head_dim,
        linear_conv_kernel_dim=hf.linear_conv_kernel_dim,
        dtype=hf.dtype,
        mamba_ssm_dtype=hf.mamba_ssm_dtype,
        num_experts=hf.num_experts,
        mtp_layers=hf.mtp_num_hidden_layers,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        quantised_kv=_quantised_kv(raw),
        unknown=unknown,
        inferred=inferred,
    )


def _looks_like_path(reference: str) -> bool:
    return reference.startswith((".", "/", "~")) or reference.endswith(".json")


def load_target(reference: str) -> TargetConfig:
    """A target by folder, config.json or known name.

    Raises:
        PlanError: there is no such file and no such known model, or the config is not usable.
    """
    if not reference.strip():
        raise PlanError("no model given: pass a folder, a config.json or a known model's name")
    path = Path(reference).expanduser()
    if _looks_like_path(reference) or path.exists():
        return target_from_hf(read_config_file(path), path.name, str(path))
    found = find_model(reference)
    if found is None:
        raise PlanError(
            f"{reference!r} is neither a file nor a known model; known are "
            f"{nearest(reference, load_facts().models)}; or pass its config.json"
        )
    name, facts = found
    return _target(facts.config, name, name, dict(facts.unknown), dict(facts.inferred))


def _sliding_layers(hf: _HfDrafter, architecture: str | None) -> tuple[int, int | None]:
    """How many of a drafter's layers slide, and their window.

    For DFlash as vLLM resolves it (vllm/model_executor/models/qwen3_dflash.py:72, 0.26.0): a
    `use_swa` in dflash_config makes all layers slide unless layer_types names some.
    """
    kinds = hf.layer_types
    window = hf.sliding_window
    sliding = 0 if kinds is None else kinds.count("sliding_attention")
    if (architecture or "").startswith("DFlash"):
        if not sliding and hf.dflash_config.get("use_swa") is True:
            sliding = hf.num_hidden_layers
        configured = hf.dflash_config.get("swa_window_size", window)
        window = configured if isinstance(configured, int) and configured > 0 else None
    return sliding, window


def _with_overrides(
    raw: dict[str, Any], overrides: DrafterOverrides
) -> tuple[dict[str, Any], set[str]]:
    """The config with the command line's values in it, and the keys that those settle."""
    merged = dict(raw)
    settled: set[str] = set()
    for key, value in (
        ("num_hidden_layers", overrides.layers),
        ("num_key_value_heads", overrides.kv_heads),
        ("head_dim", overrides.head_dim),
        ("sliding_window", overrides.window),
    ):
        if value is not None:
            merged[key] = value
            settled.add(key)
    layers = merged.get("num_hidden_layers")
    if overrides.window is not None:
        dflash = dict(merged.get("dflash_config") or {})
        dflash.pop("swa_window_size", None)
        merged["dflash_config"] = dflash
    if overrides.sliding_layers is not None:
        if isinstance(layers, int) and not 0 <= overrides.sliding_layers <= layers:
            raise PlanError(
                f"--drafter-sliding-layers {overrides.sliding_layers} is not between 0 and the "
                f"drafter's {layers} layers"
            )
        if isinstance(layers, int):
            full = layers - overrides.sliding_layers
            merged["layer_types"] = ["sliding_attention"] * overrides.sliding_layers + [
                "full_attention"
            ] * full
            dflash = dict(merged.get("dflash_config") or {})
            dflash.pop("use_swa", None)
            merged["dflash_config"] = dflash
        settled.add("layer_types")
        if overrides.sliding_layers == 0:
            settled.add("sliding_window")
    elif overrides.layers is not None:
        kinds = merged.get("layer_types")
        if isinstance(kinds, list) and len(kinds) != overrides.layers:
            if set(kinds) != {"full_attention"}:
                raise PlanError(
                    "--drafter-layers changes how many layers slide: "
                    "pass --drafter-sliding-layers too"
                )
            merged["layer_types"] = ["full_attention"] * overrides.layers
    return merged, settled


def drafter_from_hf(
    raw: dict[str, Any],
    name: str,
    origin: str,
    target: TargetConfig,
    overrides: DrafterOverrides | None = None,
    facts: ModelFacts | None = None,
) -> DrafterConfig:
    """A drafter from the object of a config.json, checked against its target.

    Raises:
        PlanError: a key is missing or malformed, a layer is of a kind that the planner does not
            compute, or the drafter was made for another vocabulary or a deeper target.
    """
    merged, settled = _with_overrides(_text_config(raw), overrides or DrafterOverrides())
    if not isinstance(merged.get("dflash_config"), dict):
        merged["dflash_config"] = {}
    unknown = {k: v for k, v in (facts.unknown if facts else {}).items() if k not in settled}
    for key, option in _DRAFTER_OPTION.items():
        if key in unknown:
            raise PlanError(
                f"{name}: {key} is unknown ({unknown[key]}); pass the served config.json, "
                f"or {option}"
            )
    try:
        hf = _HfDrafter.model_validate(merged)
    except ValidationError as error:
        raise _one_line(error, origin, unknown) from None
    architecture = _architecture(raw)
    odd = set(hf.layer_types or []) - {"full_attention", "sliding_attention"}
    if odd:
        raise PlanError(
            f"{origin}: drafter layer type {sorted(odd)[0]!r} is not one we can plan for"
        )
    if hf.layer_types is not None and len(hf.layer_types) != hf.num_hidden_layers:
        raise PlanError(
            f"{origin}: {len(hf.layer_types)} layer_types for {hf.num_hidden_layers} layers"
        )
    _check_against_target(hf, origin, target)
    sliding, window = _sliding_layers(hf, architecture)
    if sliding and window is None:
        raise PlanError(
            f"{origin}: {sliding} layers slide but no sliding_window is given; "
            "pass --drafter-window"
        )
    head_dim = hf.head_dim
    if head_dim is None:
        if hf.hidden_size is None or hf.num_attention_heads is None:
            raise PlanError(f"{origin}: head_dim is not given; pass --drafter-head-dim")
        head_dim = _derived_head_dim(hf.hidden_size, hf.num_attention_heads, origin)
    block = hf.block_size
    nested = hf.dflash_config.get("block_size")
    if block is None and isinstance(nested, int) and nested > 0:
        block = nested
    inferred = dict(facts.inferred) if facts else {}
    return DrafterConfig(
        name=name,
        origin=origin,
        architecture=architecture,
        full_layers=hf.num_hidden_layers - sliding,
        sliding_layers=sliding,
        window=window if sliding else None,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        block_size=block,
        # transformers drops a top-level sliding_window unless this switch is in the file.
        window_ignored=facts is None
        and bool(sliding)
        and "swa_window_size" not in hf.dflash_config
        and merged.get("use_sliding_window") is not True,
        inferred={key: why for key, why in inferred.items() if key not in settled},
    )


def _check_against_target(hf: _HfDrafter, origin: str, target: TargetConfig) -> None:
    if (
        hf.vocab_size is not None
        and target.vocab_size is not None
        and hf.vocab_size != target.vocab_size
    ):
        raise IllegalValue(
            f"{origin}: the drafter's vocabulary has {hf.vocab_size} tokens, "
            f"{target.name}'s has {target.vocab_size}: it was made for another model"
        )
    mask = hf.dflash_config.get("mask_token_id")
    if isinstance(mask, int) and target.vocab_size is not None and mask >= target.vocab_size:
        raise IllegalValue(
            f"{origin}: the drafter's mask token {mask} is outside of {target.name}'s vocabulary "
            f"of {target.vocab_size}: it was made for another model"
        )
    taps = hf.dflash_config.get("target_layer_ids")
    if isinstance(taps, list):
        layers = [tap for tap in taps if isinstance(tap, int)]
        if layers and max(layers) >= target.layers:
            raise IllegalValue(
                f"{origin}: the drafter reads layer {max(layers)} of its target, but "
                f"{target.name} has {target.layers} layers: it was made for another model"
            )


def load_drafter(
    reference: str, target: TargetConfig, overrides: DrafterOverrides | None = None
) -> DrafterConfig:
    """A drafter by folder, config.json or known name.

    Raises:
        PlanError: as `drafter_from_hf`, or there is no such file and no such known drafter.
    """
    path = Path(reference).expanduser()
    if _looks_like_path(reference) or path.exists():
        raw = read_config_file(path)
        return drafter_from_hf(raw, path.name, str(path), target, overrides)
    found = find_drafter(reference)
    if found is None:
        raise PlanError(
            f"drafter {reference!r} is neither a file nor a known drafter; known are "
            f"{nearest(reference, load_facts().drafters)}; or pass its config.json"
        )
    name, facts = found
    return drafter_from_hf(facts.config, name, name, target, overrides, facts)
