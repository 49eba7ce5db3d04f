"""Each verdict, from a real HTTP server that has the property which the verdict names."""

from __future__ import annotations

from typing import Any

import pytest
from fake_openai_server import FakeServer, serve

from vllm_gaudi_ext.check import CaseResult, CheckOptions, CheckReport, Verdict, run_check
from vllm_gaudi_ext.check.scenarios import SCENARIO_NAMES

# Short answers and suffixes: the fake model is plain Python.
QUICK: dict[str, Any] = {
    "answer_tokens": 8,
    "suffixes": (10, 40, 130),
    "repeats": 4,
    "timeout": 20,
    "use_proxies": False,
}


def run(server: FakeServer, **options: Any) -> CheckReport:
    return run_check(server.url, CheckOptions(**{**QUICK, **options}))


def check(options: dict[str, Any] | None = None, **settings: Any) -> CheckReport:
    with serve(**settings) as server:
        return run(server, **(options or {}))


def case(report: CheckReport, name: str) -> CaseResult:
    return next(c for c in report.cases if c.case == name)


def verdicts(report: CheckReport) -> set[Verdict]:
    return {c.verdict for c in report.cases}


def test_a_correct_server_is_equal_in_every_case() -> None:
    report = check()
    assert report.exit_code == 0, report
    assert report.block_tokens == 96
    assert report.block_source == "learned"
    assert report.prompts_as == "token ids"
    assert verdicts(report) == {Verdict.EQUAL, Verdict.NEVER_CACHED, Verdict.NO_HIT}
    assert {c.scenario for c in report.cases} == {"probe", *SCENARIO_NAMES} - {"noise"}
    # Equal verdicts rest on hits.
    equal = [c for c in report.cases if c.verdict is Verdict.EQUAL]
    assert len(equal) >= 30
    assert all(max(c.cached_tokens) > 0 for c in equal)  # type: ignore[type-var]
    assert report.noise.alone == report.noise.together == 0


def test_cached_tokens_at_the_boundaries_are_whole_blocks_below_the_prompt() -> None:
    """C14: the last token is always computed."""
    report = check(budget=96)
    for k in (1, 2, 3):
        for name, blocks in ((f"{k}*B-1", k - 1), (f"{k}*B", k - 1), (f"{k}*B+1", k)):
            assert case(report, name).cached_tokens == (blocks * 96,) * 2, name


def test_a_prompt_shorter_than_a_block_is_no_fault() -> None:
    """C13."""
    report = check()
    result = case(report, "1*B-1")
    assert result.verdict is Verdict.NEVER_CACHED
    assert "shorter than one block" in result.detail
    assert "exactly one block" in case(report, "1*B").detail


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 96},
        {"budget": 960},
        {"budget": 300, "eagle": True},
        {"block": 128, "budget": 128},
        {"block": 384, "budget": 800},
        {"details": "nonzero"},
        {"token_id_answers": False},
        {"top_logprobs": False},
        {"tokenizer": False},
        {"bos": True},
        {"token_id_prompts": False},
        {"token_id_prompts": False, "bos": True},
        {"extras_refused": True},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_a_correct_server_of_another_kind_passes_and_its_faulty_twin_does_not(
    settings: dict[str, Any],
) -> None:
    report = check(**settings)
    assert report.exit_code == 0, report
    assert report.block_tokens == settings.get("block", 96)
    faulty = check({"scenarios": ("boundary",)}, **settings, stale_slot=True)
    assert faulty.exit_code == 1, faulty


def test_stale_state_on_a_hit_is_different_and_its_hits_disagree() -> None:
    """The stock engine's fault: a hit resumes from what the slot's last owner left."""
    report = check(stale_slot=True)
    assert report.exit_code == 1
    result = case(report, "3*B+1")
    assert result.verdict is Verdict.DIFFERENT
    assert result.different_from == 0
    assert result.largest_difference is not None
    assert result.largest_difference > 0.1
    assert "from answer token 0 on" in result.detail
    assert any("disagree with each other" in c.detail for c in report.cases)
    # Cold requests are unaffected, so the noise is not inflated by the fault.
    assert report.noise.alone == 0


def test_hits_that_disagree_are_caught_where_they_equal_the_cold_run_within_noise() -> None:
    """Rounding may hide a small fault from the cold run, not from a second hit."""
    report = check(rounding=3e-3, stale_after_other=True, options={"scenarios": ("a-b-a",)})
    assert report.exit_code == 1


# Each fault, and the scenarios that must meet it.
FAULTS = {
    "stale_after_other": {"a-b-a"},
    "wrong_in_batch": {"concurrent"},
    "wrong_decode_checkpoint": {"decode-made"},
    "wrong_last_token": {"boundary", "decode-made"},
    "wrong_after_resume": {"chat"},
    "one_state_per_session": {"short-after-long"},
    "hash_ignores_tokens": {"divergent"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_scenario(fault: str) -> None:
    report = check(**{fault: True})
    assert report.exit_code == 1
    found = {c.scenario for c in report.cases if c.verdict.is_difference}
    assert FAULTS[fault] <= found
    # Exact repeats alone, which is what people try first, do not show these.
    assert "repeat" not in found


def test_noise_of_the_server_is_measured_and_granted() -> None:
    report = check(noise=1e-3)
    assert report.exit_code == 0, report
    assert case(report, "2*B+1").verdict is Verdict.EQUAL_WITHIN_NOISE
    assert report.noise.alone is not None
    assert 1e-4 < report.noise.alone < 3e-3


def test_noise_does_not_hide_stale_state() -> None:
    assert check(noise=1e-3, stale_slot=True).exit_code == 1


def test_noise_that_only_batches_have_is_granted_to_batches_only() -> None:
    report = check(noise_together=1e-2)
    assert report.exit_code == 0, report
    assert case(report, "concurrent, the same").verdict is Verdict.EQUAL_WITHIN_NOISE
    assert case(report, "2*B+1").verdict is Verdict.EQUAL
    assert report.noise.alone == 0


def test_a_server_that_repeats_nothing_cannot_be_judged() -> None:
    report = check(noise=4.0)
    assert report.exit_code == 2, report
    assert case(report, "2*B+1").verdict is Verdict.TOO_NOISY


def test_states_that_decoding_made_are_granted_prefill_against_decode_noise() -> None:
    report = check(rounding=1e-3, budget=96)
    assert report.exit_code == 0, report
    for k in (1, 2, 3):
        result = case(report, f"decoded across {k}*B")
        assert result.verdict is Verdict.EQUAL_WITHIN_ROUNDING
        assert "decoding made the state" in result.detail
    # What prefill made, with the same cuts, is equal to the bit.
    assert all(case(report, f"{k}*B+1").verdict is Verdict.EQUAL for k in (1, 2, 3))


def test_cuts_same_grants_nothing_to_states_that_prefill_made() -> None:
    codes = {
        cuts: check({"cuts": cuts, "scenarios": ("chat",)}, rounding=1e-3, budget=960).exit_code
        for cuts in ("same", "auto", "any")
    }
    assert codes == {"same": 1, "auto": 0, "any": 0}


def test_rounding_does_not_hide_stale_state() -> None:
    assert check(rounding=1e-3, stale_slot=True).exit_code == 1
    assert check({"cuts": "any"}, rounding=1e-3, stale_slot=True).exit_code == 1


def test_a_small_block_belongs_to_a_model_without_state() -> None:
    """Attention alone keeps every block, so that a hit is cut where no cold run is."""
    settings = {"block": 16, "budget": 4096, "plain": True, "rounding": 1e-3}
    few = {"scenarios": ("boundary", "repeat")}
    report = check(few, **settings)
    assert report.exit_code == 0, report
    assert report.block_tokens == 16
    assert case(report, "3*B+1").verdict is Verdict.EQUAL_WITHIN_ROUNDING
    assert any("too small for a GDN hybrid" in n for n in report.notes)
    assert check({**few, "cuts": "same"}, **settings).exit_code == 1
    assert check(few, **settings, stale_slot=True).exit_code == 1


@pytest.mark.parametrize("options", [{}, {"block_tokens": 96}])
def test_caching_off_is_said(options: dict[str, Any]) -> None:
    report = check(options, caching=False)
    assert report.exit_code == 2
    result = case(report, "the server")
    assert result.verdict is Verdict.CACHING_OFF
    assert "--enable-prefix-caching" in result.detail


@pytest.mark.parametrize("options", [{}, {"block_tokens": 96}])
def test_cached_tokens_not_reported_is_said(options: dict[str, Any]) -> None:
    report = check(options, details="never")
    assert report.exit_code == 2
    result = case(report, "the server")
    assert result.verdict is Verdict.CACHED_TOKENS_NOT_REPORTED
    assert "--enable-prompt-tokens-details" in result.detail


@pytest.mark.parametrize("options", [{}, {"block_tokens": 96}])
def test_a_difference_is_found_where_cached_tokens_are_not_reported(
    options: dict[str, Any],
) -> None:
    assert check(options, details="never", stale_slot=True).exit_code == 1


@pytest.mark.parametrize("how", ["null", "refuse"])
def test_logprobs_not_offered_is_said(how: str) -> None:
    report = check(logprobs=how)
    assert report.exit_code == 2
    assert case(report, "2*B+1").verdict is Verdict.LOGPROBS_NOT_OFFERED


@pytest.mark.parametrize("token_id_answers", [True, False])
def test_other_tokens_are_found_without_logprobs(token_id_answers: bool) -> None:
    report = check(logprobs="null", token_id_answers=token_id_answers, stale_slot=True)
    assert report.exit_code == 1


def test_a_server_that_ignores_the_salt_offers_no_cold_run() -> None:
    report = check(salt_honoured=False)
    assert report.exit_code == 2
    assert Verdict.SALT_IGNORED in verdicts(report)
    assert not any(v.passed for v in verdicts(report) - {Verdict.EQUAL})


def test_a_logprob_that_is_no_number_on_a_hit_is_a_fault() -> None:
    report = check(not_finite_on_hit=True)
    assert report.exit_code == 1
    result = case(report, "2*B+1")
    assert result.verdict is Verdict.NOT_FINITE
    assert result.different_from == 2
    assert "the hit" in result.detail


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"says_all_cached": True}, "the last one must always be computed"),
        ({"hash_ignores_tokens": True}, "were ever sent with this cache salt"),
    ],
)
def test_a_hit_that_cannot_be_is_a_fault(settings: dict[str, Any], says: str) -> None:
    report = check({"block_tokens": 96}, **settings)
    assert report.exit_code == 1
    assert any(c.verdict is Verdict.IMPOSSIBLE_HIT and says in c.detail for c in report.cases)


@pytest.mark.parametrize("options", [{}, {"block_tokens": 96}])
def test_a_hit_off_the_block_grid_is_a_fault(options: dict[str, Any]) -> None:
    report = check(options, says_off_block=True)
    assert report.exit_code == 1
    assert any(c.verdict is Verdict.IMPOSSIBLE_HIT for c in report.cases)


def test_a_block_learned_too_large_is_mended() -> None:
    """The stock engine cuts on 128 tokens with blocks of 384, so that few block ends are kept."""
    report = check(block=96, chunk_unit=64, budget=1024)
    assert report.block_tokens == 96
    assert any("started again with B = 96" in n for n in report.notes), report.notes
    assert report.exit_code == 0, report
    assert case(report, "2*B+1").prompt_tokens == 193


def test_a_block_given_too_small_is_noted() -> None:
    report = check({"block_tokens": 48, "scenarios": ("boundary",)})
    assert any("B may be 96, not 48" in n for n in report.notes)
    report = check({"block_tokens": 96, "scenarios": ("boundary", "concurrent")})
    assert report.exit_code == 0
    assert report.block_source == "given"
    assert not report.notes


def test_a_server_that_fails_on_a_hit_is_no_success() -> None:
    report = check({"block_tokens": 96, "retries": 0}, fail_on_hit=True)
    assert report.exit_code == 2
    result = case(report, "1*B+1")
    assert result.verdict is Verdict.FAILED
    assert result.detail.startswith("a hit: ")
    assert "answered 500" in result.detail
    assert any("stopped after 2 scenarios" in n for n in report.notes)


def test_prompts_too_long_for_the_server_are_left_out_and_the_rest_is_checked() -> None:
    report = check(max_model_len=220)
    assert report.exit_code == 0, report
    assert case(report, "2*B+1").verdict is Verdict.EQUAL
    assert case(report, "3*B").verdict is Verdict.LEFT_OUT


def test_prompts_are_no_longer_than_allowed() -> None:
    with serve() as server:
        report = run(server, max_prompt_tokens=200)
        longest = max(len(r["prompt"]) for r in server.log.requests)
    assert report.exit_code == 0
    assert 193 <= longest <= 200


def test_text_prompts_are_said_and_have_exact_lengths() -> None:
    with serve(token_id_prompts=False, bos=True) as server:
        report = run(server)
        accepted = [r for r in server.log.requests if isinstance(r["prompt"], str)]
    assert report.prompts_as == "text"
    assert any("as text" in n for n in report.notes)
    # The server counts its BOS token, too.
    assert case(report, "2*B+1").prompt_tokens == 193
    assert "decode-made" not in {c.scenario for c in report.cases}
    assert accepted


def test_scenarios_can_be_chosen() -> None:
    report = check({"scenarios": ("chat",)})
    assert {c.scenario for c in report.cases} == {"probe", "chat"}


def test_requests_are_greedy_and_each_cold_run_has_a_new_salt() -> None:
    with serve() as server:
        run(server)
        requests = server.log.requests
    assert all(r["temperature"] == 0 and r["ignore_eos"] for r in requests)
    salts = [r["cache_salt"] for r in requests]
    assert all(len(s) >= 32 for s in salts)
    # 10 times the same: one cold run and a chain of ten; the chain's salt is used ten times.
    assert 30 < len(set(salts)) < len(salts)
