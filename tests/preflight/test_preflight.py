"""Preflight where vLLM can't be imported: structure, refusals, planner and exit codes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_helpers import text_config, write_config
from typer.testing import CliRunner

from vllm_gaudi_ext.cli.app import app
from vllm_gaudi_ext.gdn.refusals import ServingFacts, config_problems
from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.preflight.arguments import Asked
from vllm_gaudi_ext.preflight.report import PreflightReport
from vllm_gaudi_ext.preflight.run import preflight
from vllm_gaudi_ext.preflight.serving import options_without_vllm
from vllm_gaudi_ext.recipes import find_recipe, recipe_names

GAUDI = {"VLLM_PLUGINS": "gaudi_ext", "VLLM_CONTIGUOUS_PA": "false"}
BASE = {
    "model": "Qwen/Qwen3.5-4B",
    "max-model-len": 32768,
    "max-num-seqs": 128,
    "max-num-batched-tokens": 4608,
    "enable-prefix-caching": True,
}
ABSENT = "vLLM can't be imported here (No module named 'vllm')"


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM must not be imported into the pytest process, and is absent in half of CI."""

    def absent() -> None:
        raise PlanError(ABSENT)

    monkeypatch.setattr("vllm_gaudi_ext.preflight.run.load_parser", absent)
    for variable in ("VLLM_PLUGINS", "VLLM_CONTIGUOUS_PA", "VLLM_COMPACT_GDN", "VLLM_DEFRAG"):
        monkeypatch.delenv(variable, raising=False)


Check = Callable[..., PreflightReport]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Writes BASE with changes (None removes a key) and checks it."""

    def run(
        changes: dict[str, Any] | None = None,
        *,
        environment: dict[str, str] = GAUDI,
        platform: str = "gaudi3",
        name: str = "serve.yaml",
        **options: Any,
    ) -> PreflightReport:
        content = {k: v for k, v in {**BASE, **(changes or {})}.items() if v is not None}
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return preflight(path, platform=platform, **options)

    return run


def whats(report: PreflightReport) -> str:
    return "\n".join(problem.what for problem in report.problems)


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_has_a_problem(name: str) -> None:
    """Its flags are unchecked here, which is why the exit code is 2 and not 0."""
    report = preflight(find_recipe(name) / "serve.yaml")
    assert report.problems == []
    assert report.unchecked == [
        f"whether vLLM knows these flags and takes their values ({ABSENT}); run preflight where "
        "the server will run"
    ]
    assert report.exit_code == 2
    assert report.block_tokens is not None


# One line for every fact that a file or a variable can make wrong, with the fact it must become.
WRONG: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    ({}, {"VLLM_CONTIGUOUS_PA": "true"}, {"contiguous_pa": True}),
    ({}, {"VLLM_COMPACT_GDN": "0"}, {"compact_gdn": False}),
    ({}, {"VLLM_DEFRAG": "1"}, {"defragmenter": True}),
    (
        {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
        {},
        {"speculative": "mtp"},
    ),
    ({"prefix-match-unit": 128}, {}, {"prefix_match_unit": 128}),
    ({"kv-transfer-config": {"kv_connector": "Nixl"}}, {}, {"kv_connector": "Nixl"}),
    (
        {"kv-offloading-size": 4, "kv-offloading-backend": "native"},
        {},
        {"kv_offload": "native"},
    ),
    ({"decode-context-parallel-size": 2}, {}, {"context_parallel": 2}),
    ({"prefill-context-parallel-size": 2}, {}, {"context_parallel": 2}),
    ({"runner": "pooling"}, {}, {"pooling": True}),
    ({"worker-cls": "a.B"}, {}, {"foreign_worker": "a.B"}),
    ({"scheduler-cls": "a.S"}, {}, {"foreign_scheduler": "a.S"}),
    ({"mamba-cache-mode": "all"}, {}, {"mamba_cache_mode": "all"}),
    ({"max-num-batched-tokens": 640}, {}, {"max_num_batched_tokens": 640}),
    ({"disable-chunked-mm-input": True}, {}, {"disable_chunked_mm_input": True}),
    ({"long-prefill-token-threshold": 512}, {}, {"long_prefill_token_threshold": 512}),
]

FINE = ServingFacts(
    contiguous_pa=False,
    compact_gdn=True,
    speculative=None,
    defragmenter=False,
    prefix_match_unit=None,
    mamba_opt_ins=[],
    kv_connector=None,
    kv_offload=None,
    pipeline_parallel=1,
    context_parallel=1,
    pooling=False,
    max_num_batched_tokens=4608,
    max_num_seqs=128,
    long_prefill_token_threshold=0,
    block_tokens=640,
)


@pytest.mark.parametrize(
    ("changes", "environment", "fact"),
    WRONG,
    ids=[next(iter(w[2])) + str(i) for i, w in enumerate(WRONG)],
)
def test_the_engines_refusal_is_said_in_the_engines_words(
    check: Check, changes: dict[str, Any], environment: dict[str, str], fact: dict[str, Any]
) -> None:
    report = check(changes, environment={**GAUDI, **environment})
    refused = config_problems(dataclasses.replace(FINE, **fact))
    assert len(refused) == 1
    assert [(p.what, p.fix) for p in report.problems] == [(p.what, p.fix) for p in refused]
    assert report.exit_code == 1


def test_every_fact_that_a_file_can_make_wrong_is_tried() -> None:
    tried = {name for _, _, fact in WRONG for name in fact}
    # Opt-ins exist in no release that we serve; pipeline stages and sizes have tests of their own.
    elsewhere = {
        "mamba_opt_ins",
        "pipeline_parallel",
        "max_num_seqs",
        "budget_unit",
        "block_tokens",
    }
    assert tried | elsewhere == {field.name for field in dataclasses.fields(ServingFacts)}


def test_pipeline_stages_are_refused_though_the_planner_has_no_formula(check: Check) -> None:
    report = check({"pipeline-parallel-size": 2})
    assert "pipeline parallelism is 2" in whats(report)
    assert any("pipeline-parallel-size 2" in line for line in report.unchecked)
    assert report.exit_code == 1


def test_all_problems_come_at_once(check: Check) -> None:
    report = check(
        {
            "kv-transfer-config": {"kv_connector": "Nixl"},
            "max-num-batched-tokens": 600,
            "async-scheduling": False,
        },
        environment={"VLLM_CONTIGUOUS_PA": "1"},
    )
    said = whats(report)
    for part in (
        "async-scheduling: false is dropped",
        "VLLM_PLUGINS does not name gaudi_ext",
        "VLLM_CONTIGUOUS_PA is on",
        "KV transfer is on",
        "leaves 472 after one",
        "no multiple of 128",
    ):
        assert part in said
    assert len(report.problems) == 6


def test_the_fix_of_a_small_budget_is_a_budget_that_passes(check: Check) -> None:
    (problem,) = check({"max-num-batched-tokens": 640}).problems
    fixed = int(problem.fix.split()[1])
    assert fixed == 768
    assert check({"max-num-batched-tokens": fixed}).problems == []
    assert check({"max-num-batched-tokens": fixed - 128}).problems != []


def test_a_budget_off_the_chunk_unit_is_a_problem_on_gaudi_only(check: Check) -> None:
    assert "no multiple of 128" in whats(check({"max-num-batched-tokens": 4600}))
    assert check({"max-num-batched-tokens": 4600}, platform="h200").problems == []


def test_on_nvidia_the_planners_errors_are_problems(check: Check) -> None:
    report = check({"max-num-batched-tokens": 512}, platform="h200", environment={})
    assert "below the block of 528 tokens" in whats(report)
    speculating = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}
    assert check(speculating, platform="h200", environment={}).problems == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max-num-seqs": -4}, "--max-num-seqs must be between"),
        ({"max-num-batched-tokens": 0}, "--max-num-batched-tokens must be between"),
        ({"max-model-len": -5}, "--tokens must be between"),
        ({"tensor-parallel-size": 0}, "--tp must be between"),
        ({"tensor-parallel-size": 3}, "does not divide"),
        ({"gpu-memory-utilization": 1.5}, "--utilisation must be above 0"),
        ({"enable-expert-parallel": True}, "has no experts"),
    ],
)
def test_a_number_that_vllm_refuses_is_a_problem_and_not_unchecked(
    check: Check, changes: dict[str, Any], words: str
) -> None:
    report = check(changes)
    assert words in whats(report)
    assert report.exit_code == 1
    assert not any("block size and token budget" in line for line in report.unchecked)


def test_a_length_left_to_vllm_to_fit_is_planned_at_the_default(check: Check) -> None:
    report = check({"max-model-len": -1})
    assert report.problems == []
    assert report.block_tokens == 640


def test_sizes_left_to_vllm_are_a_problem_with_caching_on(check: Check) -> None:
    report = check({"max-num-seqs": None, "max-num-batched-tokens": None})
    assert "max-num-batched-tokens and max-num-seqs are not written out" in whats(report)
    off = {"max-num-seqs": None, "enable-prefix-caching": None, "no-enable-prefix-caching": True}
    assert check(off).problems == []


def test_with_caching_off_the_refusals_do_not_apply(check: Check) -> None:
    off = {"enable-prefix-caching": None, "no-enable-prefix-caching": True}
    report = check(
        {**off, "kv-transfer-config": {"kv_connector": "Nixl"}},
        environment={"VLLM_CONTIGUOUS_PA": "true"},
    )
    assert report.problems == []


def test_caching_left_to_vllm_is_said(check: Check) -> None:
    report = check({"enable-prefix-caching": None})
    assert any("enable-prefix-caching is not written out" in w.what for w in report.warnings)


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        (
            "max-num-seqs: 4\nmax-num-seqs: 8\n",
            "max-num-seqs is given twice, on lines 5 and 6",
            "one",
        ),
        ("max_num_seqs: 8\nmax-num-seqs: 4\n", "max-num-seqs is given twice", "one"),
        ("a-config: {x: 1, x: 2}\n", "a-config.x is given twice", "one"),
        ("seed:\n", "seed has no value (null)", "remove the line seed"),
        ("seed: ~\n", "seed has no value (null)", "remove the line seed"),
        ("async-scheduling: false\n", "async-scheduling: false", "`no-async-scheduling: true`"),
        ("allowed-origins: []\n", "allowed-origins: []", "list a value"),
        ("config: other.yaml\n", "names another config file", "into this file"),
        ("--seed: 1\n", "--seed starts with a dash", "write seed"),
    ],
)
def test_what_vllm_drops_or_misreads_is_found(
    tmp_path: Path, text: str, says: str, fix: str
) -> None:
    path = tmp_path / "serve.yaml"
    base = "".join(f"{k}: {json.dumps(v)}\n" for k, v in BASE.items() if k != "max-num-seqs")
    path.write_text(base + ("" if "max-num-seqs" in text else "max-num-seqs: 8\n") + text)
    report = preflight(path, platform="h200")
    assert says in whats(report)
    assert fix in "\n".join(problem.fix for problem in report.problems)
    assert len(report.problems) == 1
    assert report.exit_code == 1


@pytest.mark.parametrize("name", ["serve.YAML", "serve.json", "serve", "serve.yaml.bak"])
def test_a_suffix_that_vllm_refuses_is_a_problem(check: Check, name: str) -> None:
    report = check(name=name)
    assert "takes yaml or yml only" in whats(report)
    assert len(report.problems) == 1


def test_yml_is_a_suffix_that_vllm_takes(check: Check) -> None:
    assert check(name="serve.yml").problems == []


def test_a_model_that_nobody_knows_leaves_the_budget_unchecked(
    check: Check, tmp_path: Path
) -> None:
    changes = {"model": "someone/finetune"}
    report = check(changes)
    assert report.problems == []
    assert report.block_tokens is None
    assert any(
        "'someone/finetune' is neither a file nor a known model" in u for u in report.unchecked
    )
    keys = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    folder = write_config(tmp_path / "tune", {**keys, **text_config("Qwen/Qwen3.5-27B")})
    assert check(changes, model_config=str(folder)).block_tokens == 896


DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 4096,
}


def test_a_served_drafter_config_replaces_the_recipes_reading(tmp_path: Path) -> None:
    path = find_recipe("qwen3.5-9b-b200-dflash") / "serve.yaml"
    assumed = preflight(path)
    assert "--drafter-kv-heads 8" in assumed.assumed[0]
    served = preflight(path, drafter_config=str(write_config(tmp_path / "drafter", DRAFTER)))
    assert served.assumed == []
    # 16 KV heads need twice the target's bytes a token, so the drafter sets the page.
    assert any("the drafter needs more bytes a token" in w.what for w in served.warnings)
    assert not any("the drafter needs more" in w.what for w in assumed.warnings)


def test_the_platform_and_variables_come_from_the_recipe_beside_it(tmp_path: Path) -> None:
    source = find_recipe("qwen3.5-4b-gaudi3")
    for name in ("serve.yaml", "recipe.yaml"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    report = preflight(tmp_path / "serve.yaml")
    assert (report.platform, report.problems) == ("gaudi3", [])
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["env"] = {"VLLM_CONTIGUOUS_PA": "true"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = whats(preflight(tmp_path / "serve.yaml"))
    assert "VLLM_PLUGINS does not name" in said
    assert "VLLM_CONTIGUOUS_PA is on" in said


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["preflight", *arguments])


BOMB = "a: &a [x, x]\nb: [*a, *a]\n"


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (None, ["--platform", "h200"], "No such file"),
        ("model: [1\n", ["--platform", "h200"], "not valid YAML"),
        ("- model\n", ["--platform", "h200"], "expected a mapping"),
        (BOMB, ["--platform", "h200"], "aliases"),
        ("#" * 1_000_001, ["--platform", "h200"], "too large"),
        ("model: Qwen/Qwen3.5-4B\n", [], "no platform given"),
        ("model: Qwen/Qwen3.5-4B\n", ["--platform", "tpu"], "platform 'tpu' is not known"),
    ],
    ids=["missing", "cut", "list", "bomb", "large", "no-platform", "odd-platform"],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str | None, arguments: list[str], says: str
) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    done = command(str(path), *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_the_command_prints_problem_and_fix_and_json(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({**BASE, "max-num-batched-tokens": 512}))
    done = command(str(path), "--platform", "h200")
    assert done.exit_code == 1
    assert "problem 1: vLLM refuses --max-num-batched-tokens 512" in done.stdout
    assert "  fix: " in done.stdout
    assert "not checked: " in done.stdout
    assert "1 problem\n" in done.stdout
    as_json = json.loads(command(str(path), "--platform", "h200", "--json").stdout)
    assert as_json["block_tokens"] == 528
    assert len(as_json["problems"]) == 1


def test_without_vllm_a_clean_file_is_not_called_clean(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(BASE))
    done = command(str(path), "--platform", "h200")
    assert done.exit_code == 2
    assert "no problem found, but not everything could be checked" in done.stdout


def test_words_where_numbers_belong_are_no_traceback(check: Check) -> None:
    for key in ("max-num-seqs", "max-num-batched-tokens", "max-model-len", "block-size"):
        report = check({key: "many"})
        assert any(key in line for line in report.unchecked)
        assert report.exit_code == 2
    for key in ("dtype", "speculative-config", "kv-transfer-config", "gpu-memory-utilization"):
        for value in (["x"], {"a": 1}, 7, "x"):
            assert check({key: value}).exit_code in (1, 2)


def test_a_mapping_may_be_written_as_json(check: Check) -> None:
    mapping = {"method": "mtp", "num_speculative_tokens": 1}
    assert (
        whats(check({"speculative-config": json.dumps(mapping)}))
        == whats(check({"speculative-config": mapping}))
        != ""
    )


DRAFTS = {
    "speculative-config": {
        "method": "dflash",
        "model": "z-lab/Qwen3.5-4B-DFlash",
        "num_speculative_tokens": 15,
    }
}


def of_replay(report: PreflightReport) -> list[str]:
    words = ("ReplaySSM", "replay", "drafts were", "draft tokens", "unknown option", "KV transfer")
    return [p.what for p in report.problems if any(word in p.what for word in words)]


def test_what_replay_would_refuse_on_nvidia_is_said_all_at_once(check: Check) -> None:
    changes = DRAFTS | {
        "additional-config": {"gaudi_ext": {"backend": "reference"}},
        "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "decode-context-parallel-size": 2,
    }
    said = whats(check(changes, platform="b200"))
    for words in (
        "the reference backend can't be captured in graphs",
        "prefix caching is asked for",
        "KV transfer is on (connector 'NixlConnector')",
        "decode context parallelism is 2",
    ):
        assert words in said


def test_replay_that_is_off_or_not_loaded_refuses_nothing(check: Check) -> None:
    off = DRAFTS | {"additional-config": {"gaudi_ext": {"replay": "off"}}}
    assert of_replay(check(off, platform="b200")) == []
    assert of_replay(check(DRAFTS, platform="b200", environment={"VLLM_PLUGINS": "other"})) == []


def test_block_is_that_of_the_layer_that_serves(check: Check) -> None:
    """A page of ReplaySSM is larger than one copy of a state, and so is B."""
    served = DRAFTS | {"enable-prefix-caching": False}
    off = served | {"additional-config": {"gaudi_ext": {"replay": "off"}}}
    ours, stock = (check(asked, platform="b200").block_tokens for asked in (served, off))
    unnamed = check(served, platform="b200", environment={"VLLM_PLUGINS": "other"}).block_tokens
    assert ours is not None
    assert stock is not None
    assert ours > stock == unnamed


def test_drafts_are_served_with_replay_where_nothing_speaks_against_it(check: Check) -> None:
    served = DRAFTS | {"enable-prefix-caching": False}
    assert of_replay(check(served, platform="b200")) == []
    assert of_replay(check(served | {"data-parallel-size": 2}, platform="b200")) == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a vLLM of that version take every file as it is written."""

    def install(version: str) -> None:
        def ask(parser: None, version: str, path: Path, content: dict[str, Any]) -> Asked:
            return Asked(version, options_without_vllm(content))

        monkeypatch.setattr("vllm_gaudi_ext.preflight.run.load_parser", lambda: (None, version))
        monkeypatch.setattr("vllm_gaudi_ext.preflight.run.ask", ask)

    return install


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.26.0", "0.32.0"])
def test_the_vllm_that_is_installed_decides_whether_replay_is_served(
    check: Check, installed: Callable[[str], None], version: str
) -> None:
    installed(version)
    served = DRAFTS | {"enable-prefix-caching": False}
    found = [p for p in check(served, platform="b200").problems if "ReplaySSM" in p.what]
    if version in ("0.31.0", "0.33.0"):
        assert found == []
    else:
        assert [p.what.split(" with ")[0] for p in found] == [
            f"vllm {version}, ReplaySSM is served"
        ]
        assert "install one of these, set replay to 'off'" in found[0].fix
    off = served | {"additional-config": {"gaudi_ext": {"replay": "off"}}}
    assert of_replay(check(off, platform="b200")) == []
    assert of_replay(check(platform="gaudi3")) == []


def test_data_parallelism_on_gaudis_vllm_stays_refused_under_the_override(
    check: Check, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("0.26.0")
    monkeypatch.setenv("VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS", "1")
    served = DRAFTS | {"enable-prefix-caching": False}
    assert whats(check(served, platform="b200")) == ""
    said = whats(check(served | {"data-parallel-size": 2}, platform="b200"))
    assert said.startswith("data parallelism is 2 on vllm 0.26.0")


def test_replay_asked_for_without_the_plugin_is_a_problem(check: Check) -> None:
    on = DRAFTS | {"additional-config": {"gaudi_ext": {"replay": True}}}
    report = check(on, platform="b200", environment={"VLLM_PLUGINS": "other"})
    assert of_replay(report) == [
        "replay is 'on', and VLLM_PLUGINS does not name gaudi_ext, so stock vLLM would serve"
    ]


def test_replay_is_no_option_on_gaudi(check: Check) -> None:
    on = {"additional-config": {"gaudi_ext": {"replay": "on"}}}
    assert of_replay(check(on)) == ["replay is 'on', and ReplaySSM is not served on Gaudi"]


@pytest.mark.parametrize("platform", ["b200", "gaudi3"])
def test_an_unknown_option_of_ours_is_a_problem(check: Check, platform: str) -> None:
    changes = {"additional-config": json.dumps({"gaudi_ext": {"replays": "on"}})}
    said = of_replay(check(changes, platform=platform))
    assert len(said) == 1
    assert "unknown option 'replays' (known: replay, backend, packing)" in said[0]
