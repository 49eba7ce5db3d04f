"""Every recipe in the repository: its rules, and that its expectations are the planner's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from cuda_ext.capture_sizes import uncaptured
from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.facts import find_platform, load_facts
from vllm_gaudi_ext.planner.findings import findings
from vllm_gaudi_ext.planner.plan import Plan, make_plan
from vllm_gaudi_ext.planner.request import Options, make_deployment, options_from_args
from vllm_gaudi_ext.planner.serve_args import serve_args
from vllm_gaudi_ext.preflight import structure
from vllm_gaudi_ext.preflight.serving import options_without_vllm
from vllm_gaudi_ext.recipes import RECIPES, Recipe, find_recipe, read_recipe, recipe_names
from vllm_gaudi_ext.versions import VLLM_FOR_REPLAY

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NAMES = recipe_names(REPOSITORY / "recipes")

DENSE = ["qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.6-27b"]
MOE = ["qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "qwen3.6-35b-a3b"]
WITHOUT_DRAFTER = ("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-397b-a17b")
PROMPT_BUDGET = 16384
"""Tokens of prompts in a step where ReplaySSM serves, beside all decodes."""


def serve_of(name: str) -> dict[str, Any]:
    content = yaml.safe_load((find_recipe(name) / "serve.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def recipe_of(name: str) -> Recipe:
    return read_recipe(find_recipe(name) / "recipe.yaml")


def replays(name: str) -> bool:
    """Whether the recipe is served with ReplaySSM."""
    options = serve_of(name).get("additional-config", {}).get("gaudi_ext", {})
    return bool(options.get("replay") == "on")


def plan_of(name: str, *, reading: bool = True, **typed: Any) -> Plan:
    path = find_recipe(name) / "serve.yaml"
    recipe = recipe_of(name)
    passed = recipe.plan.options() if reading and recipe.plan is not None else {}
    options = Options.model_validate({**passed, "serve": path, **typed})
    args = serve_args(options_without_vllm(serve_of(name)), path)
    return make_plan(make_deployment(options_from_args(options, args)), findings)


def test_every_model_and_platform_of_the_issue_has_a_recipe() -> None:
    wanted = {f"{model}-gaudi3" for model in [*DENSE, *MOE, "qwen3-next-80b-a3b"]}
    for model in [*DENSE, *MOE]:
        method = "mtp" if model in WITHOUT_DRAFTER else "dflash"
        wanted |= {f"{model}-{card}-{method}" for card in ("b200", "h200")}
    wanted |= {"qwen3.5-4b-gaudi3-router", "qwen3.5-397b-a17b-h200-multinode"}
    assert set(NAMES) == wanted


def test_the_package_finds_the_recipes_of_the_repository() -> None:
    assert recipe_names() == NAMES
    for name in NAMES:
        for file in ("serve.yaml", "recipe.yaml"):
            packaged = (RECIPES / name / file).read_bytes()
            assert packaged == (REPOSITORY / "recipes" / name / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_serve_yaml_says_nothing_that_vllm_drops_or_guesses(name: str) -> None:
    path = find_recipe(name) / "serve.yaml"
    content = serve_of(name)
    assert structure.duplicate_problems(path.read_text(encoding="utf-8")) == []
    for key, value in content.items():
        assert key == key.lower(), key
        assert "_" not in key, key
        assert len(key) > 2, f"{key}: the long flag"
        assert value is not None, key
        assert value is not False, key
        assert value != [], key
    for key in (
        "model",
        "max-model-len",
        "tensor-parallel-size",
        "max-num-seqs",
        "max-num-batched-tokens",
        "mamba-ssm-cache-dtype",
    ):
        assert key in content, key
    caching = {"enable-prefix-caching", "no-enable-prefix-caching"} & content.keys()
    assert caching == {f"{'no-' if replays(name) else ''}enable-prefix-caching"}


@pytest.mark.parametrize("name", NAMES)
def test_recipe_yaml_describes_the_serve_yaml_beside_it(name: str) -> None:
    recipe, content = recipe_of(name), serve_of(name)
    assert recipe.model.id == content["model"]
    assert recipe.model.id in load_facts().models
    speculative = content.get("speculative-config", {})
    drafter = recipe.drafter.id if recipe.drafter is not None else None
    assert drafter == speculative.get("model")
    if drafter is not None:
        assert drafter in load_facts().drafters
    short = recipe.model.id.split("/")[1].removesuffix("-Instruct").lower()
    assert name.startswith(f"{short}-{recipe.platform}")
    assert any("--config serve.yaml" in command for command in recipe.start)
    assert recipe.check[0] == "gaudi-ext preflight serve.yaml"
    # It compares hits with cold runs, which have to be cached.
    checked = any(command.startswith("gaudi-ext check ") for command in recipe.check)
    assert checked == ("enable-prefix-caching" in content)
    assert recipe.limits


@pytest.mark.parametrize("name", NAMES)
def test_expect_is_what_the_planner_says(name: str) -> None:
    plan = plan_of(name)
    assert recipe_of(name).expect.model_dump() == plan.expect.model_dump()
    assert plan.serving == ("replay" if replays(name) else "native")


@pytest.mark.parametrize("name", NAMES)
def test_plan_serve_takes_the_recipes_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user runs it, `gaudi-ext plan --serve` needs nothing typed, and says what it assumes."""
    args = options_without_vllm(serve_of(name))
    monkeypatch.setattr("vllm_gaudi_ext.planner.serve_args.parse_serve_yaml", lambda path: args)
    plan = make_plan(make_deployment(Options(serve=find_recipe(name) / "serve.yaml")), findings)
    recipe = recipe_of(name)
    assert plan.expect.block_tokens == recipe.expect.block_tokens
    said = [f.text for f in plan.findings if f.code == "recipe-reading"]
    assert len(said) == (recipe.plan is not None)
    assert recipe.plan is None or recipe.plan.arguments() in said[0]


def test_what_is_typed_beside_a_recipe_wins_over_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "qwen3.5-27b-h200-dflash"
    args = options_without_vllm(serve_of(name))
    monkeypatch.setattr("vllm_gaudi_ext.planner.serve_args.parse_serve_yaml", lambda path: args)
    options = Options(
        serve=find_recipe(name) / "serve.yaml", overrides=DrafterOverrides(kv_heads=4)
    )
    deployment = make_deployment(options)
    assert deployment.drafter is not None
    assert (deployment.drafter.num_key_value_heads, deployment.drafter.head_dim) == (4, 128)
    assert "--drafter-kv-heads" not in deployment.assumed[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_budget_is_whole_blocks_beside_all_decodes(name: str) -> None:
    plan = plan_of(name)
    assert [f.text for f in plan.findings if f.level == "error"] == []
    deployment, budget = plan.deployment, plan.budget
    if replays(name):
        # Chunks end anywhere where nothing is cached.
        assert deployment.max_num_seqs is not None
        decodes = deployment.max_num_seqs * (1 + deployment.drafts)
        assert deployment.max_num_batched_tokens == PROMPT_BUDGET + decodes
        return
    assert budget is not None
    asked = deployment.max_num_batched_tokens
    assert asked == budget.recommended
    assert asked is not None
    decodes = budget.decode_tokens
    blocks, rest = divmod(asked - decodes, plan.served.block_tokens)
    assert blocks >= 1
    assert rest < budget.multiple_of
    assert asked % (128 if deployment.gaudi else 1) == 0


VLLMS_LARGEST_GRAPH = {"h200": 512, "b200": 1024}
"""Tokens of vLLM's largest graph where a configuration names none (config/vllm.py, 0.31.0)."""


@pytest.mark.parametrize("name", [name for name in NAMES if replays(name)])
def test_graphs_cover_all_decodes_where_replay_serves(name: str) -> None:
    deployment = plan_of(name).deployment
    assert deployment.max_num_seqs is not None
    assert deployment.max_num_batched_tokens is not None
    config = serve_of(name).get("compilation-config", {})
    captured = config.get(
        "cudagraph_capture_sizes", [VLLMS_LARGEST_GRAPH[recipe_of(name).platform]]
    )
    rows = 1 + deployment.drafts
    missing = uncaptured(captured, rows, deployment.max_num_seqs, deployment.max_num_batched_tokens)
    assert missing is None


FIT = re.compile(
    r"(\d+) requests of 8192 tokens fit by the planner if all but the cache takes ([\d.]+) GiB"
)
WITHOUT = re.compile(r"without ReplaySSM (\d+) would fit")


@pytest.mark.parametrize("name", NAMES)
def test_the_requests_in_the_comments_are_the_planners(name: str) -> None:
    text = (find_recipe(name) / "serve.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
    found = FIT.search(text)
    assert found is not None
    plan = plan_of(name, tokens=8192, non_kv_gib=float(found[2]))
    assert plan.served.capacity is not None
    assert plan.served.capacity.requests == int(found[1])
    assert plan.deployment.max_num_seqs is not None
    assert plan.deployment.max_num_seqs <= plan.served.capacity.requests
    assert [f.text for f in plan.findings if f.code.startswith("seqs-above")] == []
    without = WITHOUT.search(text)
    assert (without is not None) == replays(name)
    if without is not None:
        assert plan.native.capacity is not None
        assert plan.native.capacity.requests == int(without[1])


@pytest.mark.parametrize("name", [n for n in NAMES if recipe_of(n).plan is not None])
def test_a_reading_is_passed_only_where_the_planner_asks_for_it(name: str) -> None:
    with pytest.raises(PlanError, match="unknown"):
        plan_of(name, reading=False)
    assert recipe_of(name).status == "untested"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_the_versions_and_variables_of_its_platform(name: str) -> None:
    recipe = recipe_of(name)
    if find_platform(recipe.platform).vendor == "gaudi":
        assert recipe.env == {"VLLM_PLUGINS": "gaudi_ext", "VLLM_CONTIGUOUS_PA": "false"}
        assert "0.26.0" in SpecifierSet(recipe.requires["vllm"])
        assert "0.31.0" not in SpecifierSet(recipe.requires["vllm"])
    else:
        assert recipe.env == ({"VLLM_PLUGINS": "gaudi_ext"} if replays(name) else {})
        assert "0.31.0" in SpecifierSet(recipe.requires["vllm"])
    if replays(name):
        served = [window.supported for window in VLLM_FOR_REPLAY]
        assert SpecifierSet(recipe.requires["vllm"]) in served
    for command in recipe.start:
        if "vllm serve" in command:
            for variable, value in recipe.env.items():
                assert f"{variable}={value}" in command


@pytest.mark.parametrize("name", [n for n in NAMES if "speculative-config" in serve_of(n)])
def test_drafts_say_whether_replay_serves_them(name: str) -> None:
    """With the plugin `auto` would refuse those that cache prefixes."""
    assert replays(name) == ("dflash" in name)
    assert replays(name) or serve_of(name)["additional-config"] == {"gaudi_ext": {"replay": "off"}}


@pytest.mark.parametrize("name", NAMES)
def test_no_recipe_claims_a_run_that_nobody_made(name: str) -> None:
    recipe = recipe_of(name)
    assert (recipe.status == "verified") == bool(recipe.evidence)


def test_qwen3_next_asks_for_the_float32_state_that_its_config_does_not() -> None:
    assert serve_of("qwen3-next-80b-a3b-gaudi3")["mamba-ssm-cache-dtype"] == "float32"
    assert plan_of("qwen3-next-80b-a3b-gaudi3").deployment.state_dtype == "float32"
