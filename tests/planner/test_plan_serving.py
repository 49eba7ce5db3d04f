"""Which side of a plan serves, and that expectations and findings are that side's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plan_helpers import DRAFTER_4B, DRAFTER_35B, EIGHT_LAYERS, codes, plan_of, serve_yaml
from typer.testing import CliRunner

from vllm_gaudi_ext.cli.app import app
from vllm_gaudi_ext.planner.findings import findings
from vllm_gaudi_ext.planner.plan import Plan, make_plan
from vllm_gaudi_ext.planner.request import Options, make_deployment
from vllm_gaudi_ext.planner.serve_args import recipe_names_plugin

NAMED = "env:\n  VLLM_PLUGINS: other,gaudi_ext\n"


def plan_4b(**options: Any) -> Plan:
    given = {"platform": "h200", "drafter": DRAFTER_4B, "drafts": 15, **options}
    return plan_of("Qwen3.5-4B", **given)


def text_of(plan: Plan, code: str) -> str:
    return next(finding.text for finding in plan.findings if finding.code == code)


def of_serve_yaml(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    recipe: str | None = None,
    arguments: dict[str, Any] | None = None,
    **typed: Any,
) -> Plan:
    """The plan of a serve.yaml of the 4B, with the arguments that vLLM's parser makes of it."""
    path = serve_yaml(folder, monkeypatch, recipe, **(arguments or {}))
    return make_plan(make_deployment(Options(serve=path, platform="h200", **typed)), findings)


@pytest.mark.parametrize(
    ("options", "serving"),
    [
        ({"replay": "on"}, "replay"),
        ({"replay": "on", "drafts": 0, "drafter": None}, "replay"),
        ({"replay": "on", "platform": None, "unit": 16}, "replay"),
        ({"replay": "on", "platform": "cpu"}, "replay"),
        ({"replay": "on", "platform": "gaudi3", "caching": False}, "native"),
        ({"replay": "off"}, "native"),
        ({"replay": "off", "plugin": True}, "native"),
        ({"replay": "auto"}, "native"),
        ({"replay": "auto", "plugin": True}, "replay"),
        ({"plugin": True}, "replay"),
        ({"plugin": True, "drafts": 0, "drafter": None}, "native"),
        ({"plugin": True, "platform": "gaudi3", "caching": False}, "native"),
        ({}, "native"),
    ],
)
def test_who_serves(options: dict[str, Any], serving: str) -> None:
    plan = plan_4b(**options)
    assert plan.serving == serving
    assert plan.served == (plan.replay if serving == "replay" else plan.native)
    assert plan.expect.block_tokens == plan.served.block_tokens
    assert plan.expect.state_copies == plan.served.state_copies
    assert plan.expect.state_mib_per_request == plan.served.state_mib_per_request


@pytest.mark.parametrize(
    ("replay", "recipe", "serving"),
    [
        ("on", None, "replay"),
        # A bare on of YAML.
        (True, None, "replay"),
        ("auto", None, "native"),
        ("auto", NAMED, "replay"),
        ("auto", "env:\n  VLLM_PLUGINS: other\n", "native"),
        ("auto", "env:\n  VLLM_PLUGINS: [gaudi_ext]\n", "native"),
        ("auto", "env: VLLM_PLUGINS=gaudi_ext\n", "native"),
        ("off", NAMED, "native"),
        # Refused by the server and by preflight; the plan goes by the default.
        ("always", NAMED, "replay"),
        ("always", None, "native"),
    ],
)
def test_the_option_is_the_serve_yamls_and_the_plugin_the_recipes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replay: Any,
    recipe: str | None,
    serving: str,
) -> None:
    # What plans is not what serves.
    monkeypatch.setenv("VLLM_PLUGINS", "gaudi_ext")
    arguments = {"additional_config": {"gaudi_ext": {"replay": replay}}}
    plan = of_serve_yaml(tmp_path, monkeypatch, recipe=recipe, arguments=arguments)
    assert plan.serving == serving
    assert recipe_names_plugin(tmp_path / "serve.yaml") == (recipe == NAMED)


def test_what_fits_is_asked_of_replay_where_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of the 4B on an H200: 80 requests fit in stock vLLM, 232 with ReplaySSM."""
    found: dict[str, tuple[int, set[str]]] = {}
    for replay in ("on", "off"):
        plan = of_serve_yaml(
            tmp_path,
            monkeypatch,
            arguments={
                "additional_config": {"gaudi_ext": {"replay": replay}},
                "max_model_len": 32768,
                "max_num_seqs": 224,
                "gpu_memory_utilization": 0.9,
            },
            tokens=8192,
            non_kv_gib=15.5,
        )
        assert plan.served.capacity is not None
        assert plan.expect.slots == plan.served.capacity.state_slots
        found[replay] = (plan.served.capacity.requests, codes(plan, "warning"))
    assert found["on"] == (232, set())
    assert found["off"] == (80, {"seqs-above-slots", "copies-outweigh-kv"})


@pytest.mark.parametrize(
    ("seqs", "code"),
    [
        (223, None),
        (224, "seqs-above-fit"),
        (1564, "seqs-above-fit"),
        (1565, "seqs-above-slots"),
        (3130, "seqs-above-slots"),
        (3131, "seqs-above-blocks"),
    ],
)
def test_the_limits_of_max_num_seqs_are_those_of_replays_pool(seqs: int, code: str | None) -> None:
    plan = plan_4b(replay="on", pool_gib=106.8, max_num_seqs=seqs)
    assert plan.replay is not None
    assert plan.replay.capacity is not None
    fits = plan.replay.capacity
    assert (fits.requests, fits.state_slots, fits.pool_blocks) == (223, 1564, 3130)
    found = [f for f in plan.findings if f.code.startswith("seqs")]
    assert [f.code for f in found] == ([] if code is None else [code])
    limits = {
        "seqs-above-fit": "223 requests",
        "seqs-above-slots": "1564 sequences",
        "seqs-above-blocks": "the pool has 3130",
    }
    assert code is None or limits[code] in found[0].text


def test_a_pool_too_small_for_stock_vllm_may_hold_a_request_of_replays() -> None:
    assert "pool-too-small" in codes(plan_4b(pool_gib=0.8), "error")
    assert "pool-too-small" not in codes(plan_4b(pool_gib=0.8, replay="on"))
    text = text_of(plan_4b(pool_gib=0.4, replay="on"), "pool-too-small")
    assert "needs 489.1 MiB and the pool holds 11 blocks of 34.9 MiB" in text


def test_the_budget_and_the_refusal_of_caching_are_replays() -> None:
    options: dict[str, Any] = {"caching": True, "max_num_seqs": 32}
    stock, ours = plan_4b(**options), plan_4b(replay="on", **options)
    assert stock.budget is not None
    assert ours.budget is not None
    assert (stock.budget.least, ours.budget.least) == (592 + 512, 688 + 512)
    assert "*688 + 512" in text_of(ours, "budget")
    assert "k*688 +" in text_of(plan_4b(replay="on", caching=True), "budget-rule")
    assert "budget-starves-prefill" in codes(
        plan_4b(replay="on", max_num_batched_tokens=592 + 512, **options), "error"
    )
    assert "--no-enable-prefix-caching" in text_of(ours, "replay-caching")
    assert "hit-unit" in codes(stock)
    assert not {"hit-unit", "never-hits"} & codes(ours)
    on_gaudi = plan_of("Qwen3.5-4B", platform="gaudi3", replay="on", caching=True)
    assert "replay-caching" not in codes(on_gaudi)


def test_advice_to_turn_replay_on_is_not_given_to_those_who_have() -> None:
    assert "copies-outweigh-kv" in codes(plan_4b(), "warning")
    assert "copies-outweigh-kv" in codes(plan_4b(replay="off", plugin=True), "warning")
    assert "copies-outweigh-kv" not in codes(plan_4b(replay="on"))
    assert "copies-outweigh-kv" not in codes(plan_4b(plugin=True))


def test_the_layout_that_is_judged_is_the_one_that_serves() -> None:
    options: dict[str, Any] = {
        "platform": "h200",
        "drafter": DRAFTER_35B,
        "drafts": 15,
        "overrides": EIGHT_LAYERS,
    }
    assert "drafter-sets-page" in codes(plan_of("Qwen3.5-35B-A3B", **options), "warning")
    packed = plan_of("Qwen3.5-35B-A3B", replay="on", **options)
    assert "drafter-sets-page" not in codes(packed)
    usual = plan_of("Qwen3.5-35B-A3B", replay="on", packing="off", **options)
    assert "grows to 5.38 MiB" in text_of(usual, "drafter-sets-page")
    assert "groups of 8 layers cost 18.5 % more" in text_of(usual, "group-padding")
    assert "packed blocks of 69.88 MiB cost" in text_of(packed, "group-padding")


def test_a_plan_says_who_serves_and_when_replay_would() -> None:
    on = text_of(plan_4b(replay="on"), "replay")
    assert on.endswith("it serves, and these findings are about it.")
    auto = text_of(plan_4b(), "replay")
    assert "start with VLLM_PLUGINS=gaudi_ext)" in auto
    assert auto.endswith("the other findings are stock vLLM's.")
    assert "VLLM_PLUGINS=gaudi_ext, once prefix caching is off)" in text_of(
        plan_4b(caching=True), "replay"
    )
    off = text_of(plan_4b(replay="off"), "replay")
    assert "VLLM_PLUGINS" not in off
    assert off.endswith("in the same pool.")


@pytest.mark.parametrize("replay", ["on", "off"])
def test_the_table_marks_replay_where_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: str
) -> None:
    arguments = {"additional_config": {"gaudi_ext": {"replay": replay}}}
    of_serve_yaml(tmp_path, monkeypatch, arguments=arguments)
    result = CliRunner().invoke(
        app,
        ["plan", "--serve", str(tmp_path / "serve.yaml"), "--platform", "h200"],
        env={"COLUMNS": "250"},
    )
    assert result.exit_code == 0, result.output
    assert ("ReplaySSM (serves)" in result.stdout) == (replay == "on")
