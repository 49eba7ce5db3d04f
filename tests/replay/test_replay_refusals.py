"""Whether ReplaySSM is to be active, and every reason why it can't be, on plain facts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from cuda_ext.facts import ARCHITECTURES, ReplayFacts
from cuda_ext.refusals import (
    MAX_DRAFTS,
    refuse,
    replay_layout,
    replay_problems,
    wants_replay,
)
from cuda_ext.ring import GdnHeads
from vllm_gaudi_ext import envs, versions
from vllm_gaudi_ext.config import ExtOptions, read_options

OVERRIDE = "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS"
HEADS = GdnHeads(16, 32, 128, 128, 4)
GOOD = ReplayFacts(
    options=ExtOptions(),
    vllm="0.31.0",
    device="cpu",
    architecture="Qwen3_5ForConditionalGeneration",
    drafts=15,
    method="dflash",
    drafter_has_states=False,
    heads=HEADS,
    dtype="bfloat16",
    conv_dtype="bfloat16",
    state_dtype="float32",
)

# One change each, and what its refusal must name: what was found, and the flag that changes it.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "version": (
        {"vllm": "0.32.0"},
        ["vllm 0.32.0,", "0.31.0", "0.33.0", f"{OVERRIDE}=1", "set replay to 'off'"],
    ),
    "vllm serves it itself": (
        {"native_replay": True},
        ["vllm 0.31.0 serves Qwen3_5ForConditionalGeneration", "'off'", "--use-replayssm"],
    ),
    "vllm's own flag": (
        {"native_flag": True},
        ["--use-replayssm is set", "remove --use-replayssm"],
    ),
    "device": ({"device": "tpu"}, ["'tpu'", "'off'"]),
    "AMD's GPUs": ({"device": "rocm"}, ["'rocm'", "'off'"]),
    "an old GPU": (
        {"device": "cuda", "capability": (7, 5)},
        ["is 7.5", "need 8.0", "'off'", "'reference'", "--enforce-eager"],
    ),
    "reference on another device": (
        {"device": "tpu", "options": ExtOptions(backend="reference"), "eager": True},
        ["'tpu'", "reference", "cpu, cuda", "'off'"],
    ),
    "reference in graphs": (
        {"device": "cuda", "options": ExtOptions(backend="reference")},
        ["reference", "--enforce-eager", "'auto'"],
    ),
    "decode kernel": (
        {"fused_decode_kernel": True},
        ["writes a state for each row", "unset VLLM_GDN_DECODE_KERNEL"],
    ),
    "too many drafts": ({"drafts": 32}, ["32 draft tokens", "31", "num_speculative_tokens"]),
    "a drafter with states": (
        {"drafter_has_states": True, "method": "draft_model"},
        ["'draft_model'", "DFlash, MTP, ngram, suffix"],
    ),
    "prefix caching": ({"prefix_caching": True}, ["--no-enable-prefix-caching"]),
    "connector": ({"kv_connector": "NixlConnector"}, ["'NixlConnector'", "--kv-transfer-config"]),
    "pipeline": ({"pp": 2}, ["pipeline parallelism is 2", "remove --pipeline-parallel-size"]),
    "decode context": ({"dcp": 4}, ["is 4", "remove --decode-context-parallel-size"]),
    "prefill context": ({"pcp": 8}, ["is 8", "remove --prefill-context-parallel-size"]),
    "micro-batches": ({"dual_batch_overlap": True}, ["--enable-dbo", "--ubatch-size"]),
    "state dtype": (
        {"state_dtype": "float16"},
        ["'float16'", "float32, bfloat16", "--mamba-ssm-cache-dtype float32"],
    ),
    "conv dtype": (
        {"conv_dtype": "float32"},
        ["'float32'", "'bfloat16'", "--mamba-cache-dtype auto"],
    ),
    "heads and ranks": (
        {"tp": 3},
        ["tensor parallel size 3", "16 linear key heads", "--tensor-parallel-size"],
    ),
    "offsets": (
        {"heads": GdnHeads(1, 2, 2, 3, 4), "drafts": 0},
        ["byte 60", "multiple of 16", "--tensor-parallel-size"],
    ),
}


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)


def facts(**changes: Any) -> ReplayFacts:
    return replace(GOOD, **changes)


def asking(replay: str, found: ReplayFacts = GOOD) -> ReplayFacts:
    return replace(found, options=found.options.model_copy(update={"replay": replay}))


# Whether it is wanted


@pytest.mark.parametrize(
    ("replay", "drafts", "hybrid", "wanted"),
    [
        ("auto", 15, True, True),
        ("auto", 1, True, True),
        ("auto", 0, True, False),
        ("auto", 15, False, False),
        ("auto", 0, False, False),
        ("on", 15, True, True),
        ("on", 0, True, True),
        ("off", 15, True, False),
        ("off", 0, True, False),
        ("off", 15, False, False),
    ],
)
def test_what_turns_it_on(replay: str, drafts: int, hybrid: bool, wanted: bool) -> None:
    architecture = GOOD.architecture if hybrid else "Qwen3ForCausalLM"
    found = asking(replay, facts(drafts=drafts, architecture=architecture))
    assert wants_replay(found) == wanted
    assert replay_problems(found) == []


@pytest.mark.parametrize("drafts", [0, 7])
def test_on_for_a_model_without_such_layers_is_refused(drafts: int) -> None:
    found = asking("on", facts(architecture="Qwen3ForCausalLM", drafts=drafts, heads=None))
    assert not wants_replay(found)
    (problem,) = replay_problems(found)
    assert "Qwen3ForCausalLM" in problem.what
    assert problem.fix == "set replay to 'auto'"
    assert all(name in problem.what for name in ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_of_the_table_is_served(architecture: str) -> None:
    found = facts(architecture=architecture)
    assert wants_replay(found)
    assert replay_problems(found) == []


# Refusals


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("replay", ["auto", "on"])
def test_a_refusal_names_what_was_found_and_the_way_out(name: str, replay: str) -> None:
    changes, told = REFUSED[name]
    found = facts(**changes)
    if not found.drafts:
        found = asking("on", found)
    else:
        found = asking(replay, found)
    assert wants_replay(found), "asked for and not active must mean no start"
    (problem,) = replay_problems(found)
    assert all(fragment in str(problem) for fragment in told), problem
    # The flag stands in the fix, where an operator looks for it.
    assert told[-1] in problem.fix


@pytest.mark.parametrize("name", REFUSED)
def test_off_starts_stock_vllm_whatever_else_is_asked(name: str) -> None:
    assert replay_problems(asking("off", facts(**REFUSED[name][0]))) == []


@pytest.mark.parametrize("name", REFUSED)
def test_auto_without_drafts_starts_stock_vllm_too(name: str) -> None:
    found = asking("auto", facts(**{**REFUSED[name][0], "drafts": 0}))
    assert not wants_replay(found)
    assert replay_problems(found) == []


def test_all_problems_are_told_at_once_and_numbered() -> None:
    # vLLM's flag is told with its own replay, a device's by its backend or for another device, and
    # there is no page to lay out while a dtype or the number of drafts is wrong.
    alone = {
        "vllm's own flag",
        "AMD's GPUs",
        "an old GPU",
        "reference on another device",
        "reference in graphs",
        "heads and ranks",
        "offsets",
    }
    together = {name: case for name, case in REFUSED.items() if name not in alone}
    changes = {key: value for case, _ in together.values() for key, value in case.items()}
    problems = replay_problems(facts(**changes))
    assert len(problems) == len(together)
    with pytest.raises(RuntimeError) as error:
        refuse(problems)
    text = str(error.value)
    assert text.startswith(f"gaudi_ext cannot serve with ReplaySSM ({len(together)} problems):\n")
    for _, told in together.values():
        assert all(fragment.replace("0.31.0 serves", "0.32.0 serves") in text for fragment in told)
    numbers = re.findall(r"^  (\d+)\. ", text, re.MULTILINE)
    assert numbers == [str(n + 1) for n in range(len(together))]


def test_a_refusal_ends_with_the_flag_that_serves_without_it() -> None:
    with pytest.raises(RuntimeError) as error:
        refuse(replay_problems(facts(pp=2)))
    flag, value = shlex.split(str(error.value).splitlines()[-1].partition(": ")[2])
    assert flag == "--additional-config"
    options = read_options(json.loads(value))
    assert options.replay == "off"
    assert replay_problems(facts(pp=2, options=options)) == []


def test_nothing_is_raised_where_there_is_no_problem() -> None:
    refuse([])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_may_be_fp32_or_bf16(dtype: str) -> None:
    assert replay_problems(facts(state_dtype=dtype)) == []


def test_a_reference_run_on_a_gpu_is_possible_without_graphs() -> None:
    reference = ExtOptions(backend="reference")
    assert replay_problems(facts(device="cuda", options=reference, eager=True)) == []


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0), (12, 0)])
def test_gpus_since_ampere_are_served(capability: tuple[int, int] | None) -> None:
    assert replay_problems(facts(device="cuda", capability=capability)) == []


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_data_parallelism_is_served(version: str) -> None:
    assert replay_problems(facts(dp=2, vllm=version)) == []


@pytest.mark.parametrize("method", ["dflash", "mtp", "ngram", "suffix", "custom_class"])
@pytest.mark.parametrize("drafts", range(1, MAX_DRAFTS + 1))
def test_every_method_and_draft_length_is_served(method: str, drafts: int) -> None:
    assert replay_problems(facts(method=method, drafts=drafts)) == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_ranks_that_divide_the_heads_are_served(tp: int) -> None:
    found = facts(tp=tp)
    assert replay_problems(found) == []
    assert replay_layout(found).nbytes * tp == replay_layout(GOOD).nbytes


@pytest.mark.parametrize(
    ("value", "asks"), [("cuda", True), (" CUDA", True), ("triton", False), ("", False)]
)
def test_the_kernel_that_is_asked_for_is_vllms_variable(value: str, asks: bool) -> None:
    assert envs.fused_gdn_decode_kernel({"VLLM_GDN_DECODE_KERNEL": value}) == asks
    assert envs.fused_gdn_decode_kernel({}) is False


# Versions


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.31.0", True),
        ("0.31.0+cpu", True),
        ("0.33.0", True),
        ("0.33.0+cu130", True),
        ("0.26.0", False),
        ("0.26.0+cpu", False),
        ("0.30.0", False),
        ("0.31.0rc1", False),
        ("0.31.1", False),
        ("0.31.1.dev3+g1", False),
        ("0.32.0", False),
        ("0.33.1", False),
        ("0.34.0", False),
        ("unknown", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("override", [None, "1", "0"])
def test_versions_in_and_out_of_the_tested_windows(
    monkeypatch: pytest.MonkeyPatch, version: str, served: bool, override: str | None
) -> None:
    if override is not None:
        monkeypatch.setenv(OVERRIDE, override)
    problems = replay_problems(facts(vllm=version))
    if served or override == "1":
        assert problems == []
        return
    (problem,) = problems
    shown = version or "is not installed"
    assert problem.what.startswith(f"vllm {shown}, ReplaySSM is served with ")
    for window in versions.VLLM_FOR_REPLAY:
        assert str(window.supported) in problem.what
    assert f"{OVERRIDE}=1" in problem.fix


@pytest.mark.parametrize("replay", ["auto", "on"])
def test_the_vllm_of_gaudi_is_refused_and_the_ways_out_are_told(replay: str) -> None:
    found = asking(replay, facts(vllm="0.26.0", device="cuda", capability=(9, 0)))
    with pytest.raises(RuntimeError) as error:
        refuse(replay_problems(found))
    windows = " or ".join(str(window.supported) for window in versions.VLLM_FOR_REPLAY)
    assert str(error.value).splitlines()[:2] == [
        "gaudi_ext cannot serve with ReplaySSM (1 problem):",
        f"  1. vllm 0.26.0, ReplaySSM is served with {windows} -> install one of these, set replay "
        f"to 'off', or set {OVERRIDE}=1 to go on without any promise",
    ]
    assert replay_problems(asking("off", found)) == []
    assert replay_problems(asking("auto", replace(found, drafts=0))) == []


def test_no_vllm_at_all_is_said_so() -> None:
    problem = versions.replay_version_problem(None)
    assert problem is not None
    assert problem.what.startswith("vllm is not installed, ")
    # Where a file is checked on a machine without vLLM, its version says nothing of the server's.
    assert replay_problems(facts(vllm=None)) == []


def test_the_override_lifts_no_other_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    assert len(replay_problems(facts(vllm="9.9", pp=2, prefix_caching=True))) == 2


def test_nor_does_it_let_dummy_steps_reach_the_rows_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    (problem,) = replay_problems(facts(dp=2, vllm="0.26.0"))
    assert problem.what.startswith("data parallelism is 2 on vllm 0.26.0")
    assert "--enforce-eager" in problem.fix
    assert "vllm 0.31.0" in problem.fix
    for change in ({"eager": True}, {"vllm": "0.31.0"}, {"vllm": "9.9"}, {"dp": 1}):
        assert replay_problems(facts(**{"dp": 2, "vllm": "0.26.0"} | change)) == []
