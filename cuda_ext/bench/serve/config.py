"""The one YAML of a serving benchmark: vLLM's flags, the load, and what the two arms share.

Both arms are made from it, and they differ in `VLLM_PLUGINS` and in this package's own option
alone. Every problem of a file is reported at once, each with its key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_gaudi_ext.config import KEY
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.facts import load_facts
from vllm_gaudi_ext.planner.serve_args import read_yaml
from vllm_gaudi_ext.problems import counted, numbered

Arm = Literal["stock", "replay"]
ARMS: tuple[Arm, Arm] = ("stock", "replay")
CONFIGS = Path(__file__).resolve().parent / "configs"

Whole = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Range = Annotated[tuple[Whole, Whole], Field(description="the least and the most, both included")]
Place = Annotated[
    str,
    Field(
        pattern=r"^[1-9]\d*x[1-9]\d*(x[1-9]\d*)?$",
        description="requests in flight x output tokens, and x waves where they are others",
    ),
]


class ConfigError(ValueError):
    """A YAML that can't be run; lists every problem with its key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DrafterShape(_Strict):
    """A DFlash drafter with dummy weights."""

    layers: Whole
    heads: Whole
    kv_heads: Whole
    head_dim: Whole
    intermediate_size: Whole
    target_layers: list[Count] = Field(description="layers whose hidden states the drafter reads")


class Shape(_Strict):
    """A model whose config.json is written from the planner's facts, with dummy weights."""

    model: str = Field(description="a model that the planner has the whole shape of")
    layers: Whole | None = Field(default=None, description="fewer layers than the model has")
    vocab_size: Whole | None = Field(
        default=None, description="another vocabulary than the model's"
    )
    drafter: DrafterShape | None = None


class WarmUp(_Strict):
    """What each arm serves before anything is measured."""

    requests: Whole = 8
    output_tokens: Whole = 64
    before_each_point: Count = Field(
        default=5,
        description="requests, of 32 tokens each, sent at once: five of 3,300 tokens and more fill "
        "a step of 16,384, leave a mixed one, and then decode",
    )


class Gate(_Strict):
    """The correctness gate's prompts, the same in both arms."""

    prompts: Whole = 6
    prompt_tokens: Range = (40, 1200)
    output_tokens: Whole = 96
    slack: float = Field(
        default=1.5,
        ge=1,
        description="how much larger than stock's own a distance may be, as a ratio",
    )
    acceptance: float = Field(
        default=0.02, gt=0, description="relative error of the acceptance length"
    )


class Load(_Strict):
    """What is asked of both arms."""

    points: list[Place] = Field(
        default=[],
        description="closed loop, in this order and no other point: 64x512, 256x3072x2",
    )
    concurrency: list[Whole] = Field(default=[], description="closed loop: requests kept in flight")
    request_rates: list[Rate] = Field(
        default=[], description="open loop: requests a second, at random"
    )
    open_requests: Whole = Field(default=64, description="requests of an open-loop point")
    waves: Whole = Field(
        default=1,
        description="requests of a closed-loop point, for each in flight: a new one starts when "
        "one ends, and 1 is a single burst",
    )
    prompt_tokens: Range
    output_tokens: list[Whole] = Field(min_length=1)
    token_ids: Range | None = Field(
        None, description="default: 10 to nine tenths of the vocabulary"
    )
    seed: Count = 0
    warm_up: WarmUp = WarmUp()


class Profile(_Strict):
    """What each arm is profiled at, once all points are measured."""

    concurrency: list[Whole] = Field(
        default=[], description="requests that decode; none, no profile"
    )
    steps: Whole = Field(default=10, description="of decoding, timed and then recorded")


class BenchConfig(_Strict):
    """The whole file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="stem of the result's files")
    about: str = ""
    shape: Shape | None = None
    serve: dict[str, Any] = Field(description="flags of `vllm serve`, as a serve.yaml has them")
    acceptance_length: float | None = Field(
        default=None, ge=1, description="synthetic acceptance; needs speculative-config"
    )
    dummy_weights: Literal["scaled", "vllm"] = Field(
        default="scaled",
        description="where weights are dummy ones: of the size that trained ones have (weights.py),"
        " or as vLLM makes them, with which log-probabilities say nothing of GDN",
    )
    environment: dict[str, str] = Field(default={}, description="variables of both arms")
    interleave: Literal["sleep", "restart"] = "sleep"
    load: Load
    gate: Gate = Gate()
    profile: Profile = Profile()

    def digest(self) -> str:
        """Stands for everything that both arms of a comparison must share."""
        text = json.dumps(
            self.model_dump(exclude={"about", "interleave", "profile"}), sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def flag(self, name: str) -> Any:
        """A flag of vLLM, with dashes or underscores; None where it is not written."""
        return next(
            (v for k, v in self.serve.items() if k.replace("_", "-") == name),
            None,
        )


def find_config(name: str) -> Path:
    """The file of that path, or the packaged one of that name.

    Raises:
        ConfigError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    packaged = CONFIGS / f"{name}.yaml"
    if packaged.is_file():
        return packaged
    known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    raise ConfigError(f"{name!r} is no file, and none of the packaged ones ({known})")


def load_config(path: Path) -> BenchConfig:
    """The checked content of a YAML.

    Raises:
        ConfigError: lists every problem, each with its key.
    """
    try:
        content = read_yaml(path)
    except PlanError as error:
        raise ConfigError(str(error)) from None
    return checked_config(content, str(path))


def checked_config(content: Mapping[str, Any], name: str) -> BenchConfig:
    """The config of a YAML's content.

    Args:
        content: as parsed.
        name: of the file, for the message.

    Raises:
        ConfigError: lists every problem, each with its key.
    """
    try:
        config = BenchConfig.model_validate(dict(content))
    except ValidationError as error:
        raise refusal(name, [_problem(item) for item in error.errors(include_url=False)]) from None
    found = _problems(config)
    if found:
        raise refusal(name, found)
    return config


def refusal(name: str, found: Sequence[str], where: str = "") -> ConfigError:
    """The error that lists all problems of a config.

    Args:
        name: of the file.
        found: the problems.
        where: they are some, as in " in server mode".
    """
    return ConfigError(f"{name}: {counted(found)}{where}{numbered(found)}")


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key}: missing"
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    return f"{key}: {item['msg']}, found {item['input']!r}"


def _problems(config: BenchConfig) -> list[str]:
    """What the fields say together."""
    found = []
    load = config.load
    if not (load.points or load.concurrency or load.request_rates):
        found.append("load: name points or a concurrency (closed loop), or request_rates (open)")
    places = [tuple(place.split("x")[:2]) for place in load.points]
    found += [
        f"load.points: {'x'.join(place)} is there twice"
        for place in sorted(set(places))
        if places.count(place) > 1
    ]
    for key, pair in (
        ("load.prompt_tokens", load.prompt_tokens),
        ("load.token_ids", load.token_ids),
        ("gate.prompt_tokens", config.gate.prompt_tokens),
    ):
        if pair is not None and pair[0] > pair[1]:
            found.append(f"{key}: from {pair[0]} to {pair[1]} is empty")
    longest = config.flag("max-model-len")
    needed = max(
        load.prompt_tokens[1] + max(_outputs(load)),
        config.gate.prompt_tokens[1] + config.gate.output_tokens,
    )
    if not isinstance(longest, int):
        found.append("serve.max-model-len: write the number out, prompts are checked against it")
    elif longest < needed:
        found.append(f"serve.max-model-len: {longest}, and the longest request is {needed} tokens")
    if config.flag("enable-prefix-caching") is not False:
        found.append(
            "serve.enable-prefix-caching: write false: ReplaySSM turns it off, and both arms must "
            "have the same"
        )
    if (config.shape is None) == (config.flag("model") is None):
        found.append("serve.model: name a checkpoint here, or a shape under `shape`, not both")
    drafts = config.flag("speculative-config")
    if config.acceptance_length is not None:
        count = drafts.get("num_speculative_tokens") if isinstance(drafts, Mapping) else None
        if not isinstance(count, int):
            found.append("acceptance_length: needs serve.speculative-config with its drafts")
        elif config.acceptance_length > count + 1:
            found.append(
                f"acceptance_length: {config.acceptance_length}, at most {count + 1} with "
                f"{count} drafts"
            )
    extra = config.flag("additional-config")
    ours = extra.get(KEY) if isinstance(extra, Mapping) else None
    if isinstance(ours, Mapping) and "replay" in ours:
        found.append(f"serve.additional-config.{KEY}.replay: the arm says this")
    if config.flag("enable-sleep-mode") is not None:
        found.append("serve.enable-sleep-mode: the way arms are interleaved says this")
    if "VLLM_PLUGINS" in config.environment:
        found.append("environment.VLLM_PLUGINS: the arm says this")
    if config.shape is not None:
        found += _shape_problems(config)
    return found


def _outputs(load: Load) -> list[int]:
    return [int(place.split("x")[1]) for place in load.points] or load.output_tokens


def _shape_problems(config: BenchConfig) -> list[str]:
    shape = config.shape
    assert shape is not None
    known = load_facts().models.get(shape.model)
    if known is None:
        return [f"shape.model: {shape.model!r} is not among the planner's models"]
    found = [
        f"shape.model: {key} of {shape.model} is unknown ({why})"
        for key, why in known.unknown.items()
        if key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    ]
    layers = known.config.get("num_hidden_layers", 0)
    if shape.layers is not None and shape.layers > layers:
        found.append(f"shape.layers: {shape.layers}, and {shape.model} has {layers}")
    wanted = config.flag("speculative-config")
    dflash = isinstance(wanted, Mapping) and wanted.get("method") == "dflash"
    if dflash and shape.drafter is None:
        found.append("shape.drafter: needed for serve.speculative-config.method dflash")
    if shape.drafter is not None:
        most = (shape.layers or layers) - 1
        if any(layer > most for layer in shape.drafter.target_layers):
            found.append(f"shape.drafter.target_layers: the target's last layer is {most}")
    return found


def arm_flags(
    config: BenchConfig,
    arm: Arm,
    *,
    model: str | None = None,
    drafter: str | None = None,
    sleep: bool = False,
) -> dict[str, Any]:
    """The flags of one arm's `vllm serve`, as a serve.yaml has them.

    Args:
        config: of both arms.
        arm: decides `additional-config`'s replay, and nothing else.
        model, drafter: folders that stand for the config's shape.
        sleep: whether both arms share a GPU by vLLM's sleep mode.
    """
    flags = {name.replace("_", "-"): value for name, value in config.serve.items()}
    if model is not None:
        flags |= {"model": model, "load-format": "dummy", "skip-tokenizer-init": True}
    if sleep:
        flags["enable-sleep-mode"] = True
    if flags.get("speculative-config"):
        speculative = dict(flags["speculative-config"])
        if drafter is not None:
            speculative["model"] = drafter
        if config.acceptance_length is not None:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = config.acceptance_length
        flags["speculative-config"] = speculative
    extra = dict(flags.get("additional-config") or {})
    extra[KEY] = dict(extra.get(KEY) or {}) | {"replay": "on" if arm == "replay" else "off"}
    flags["additional-config"] = extra
    return flags


def arm_environment(config: BenchConfig, arm: Arm) -> dict[str, str]:
    """The variables of one arm, over those of this process.

    An empty `VLLM_PLUGINS` loads no plugin at all.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **config.environment,
        "VLLM_PLUGINS": "gaudi_ext" if arm == "replay" else "",
    }
