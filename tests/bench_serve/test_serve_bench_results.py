"""The result file, and what may be made one result of several."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import bench_data
import pytest
from rich.console import Console

from cuda_ext.bench import provenance
from cuda_ext.bench.serve import report
from cuda_ext.bench.serve.results import (
    MergeRefused,
    Results,
    collect,
    load_results,
    load_summary,
    merge,
    read_checks,
    write_summary,
)

COMMITTED = sorted(Path(__file__).parents[2].glob("cuda_ext/bench/results/serve-*.json"))
PROFILE: dict[str, Any] = {"kind": "decode", "concurrency": 4, "ms": {"attention": 1.0}}


def half(arm: str, **origin: Any) -> Results:
    whole = bench_data.results()
    return Results(
        config=whole.config,
        origin={**whole.origin, "command": f"bench --arm {arm}", **origin},
        facts={arm: whole.facts[arm]},
        gates={arm: whole.gates[arm]},
        runs=[run for run in whole.runs if run.arm == arm],
    )


def test_the_file_has_what_the_issue_asks_for(tmp_path: Path) -> None:
    path = bench_data.results().save(tmp_path)
    assert path.name == "serve-test.json"
    found = load_summary(path)
    assert {"gate", "command", "commit", "versions", "device", "date"} <= set(found)
    assert found["fit_8k"] == {"stock": 77.5, "replay": 201.5}
    assert [point["arm"] for point in found["points"]] == ["stock", "replay"]
    wanted = "arm concurrency output_tok_s ttft_p50_s ttft_p99_s tpot_p50_ms running_max "
    wanted += "preemptions acceptance_length ttft_p90_s tpot_p99_ms e2e_p50_s kv_usage_max "
    wanted += "waiting_max requests wall_s output_tokens waves commit date gate session"
    assert set(wanted.split()) <= set(found["points"][0])


def test_what_was_saved_is_read_back_whole(tmp_path: Path) -> None:
    results = bench_data.results(
        left_out=["x"], failure="killed", profiles={"stock": [PROFILE], "replay": [PROFILE]}
    )
    assert load_results(results.save(tmp_path)) == results


def test_a_save_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    results = bench_data.results()
    results.save(tmp_path)
    results.failure = "later"
    path = results.save(tmp_path)
    assert json.loads(path.read_text())["failure"] == "later"
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["serve-test.json", "serve-test.runs.json"]


def test_two_arms_of_one_session_become_one_result(tmp_path: Path) -> None:
    paths = [half(arm).save(tmp_path / arm) for arm in ("stock", "replay")]
    assert [load_summary(path)["gate"] for path in paths] == ["red", "red"]
    whole = merge([load_results(path) for path in paths])
    assert whole.summary()["gate"] == "green"
    assert whole.summary()["ratios"] == bench_data.results().summary()["ratios"]
    assert whole.origin["command"] == "bench --arm stock && bench --arm replay"


@pytest.mark.parametrize(
    "changes",
    [
        {"session": "another"},
        {"machine": {"device": "a GPU", "id": "2"}},
        {"versions": {"vllm": "0.33.0"}},
        {"mode": "server"},
    ],
    ids=["session", "machine", "versions", "mode"],
)
def test_a_merge_is_refused_where_the_origin_differs(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(MergeRefused, match=f"1. {name}: "):
        merge([half("stock"), half("replay", **changes)])


def test_a_merge_is_refused_with_every_difference() -> None:
    other = half("replay", session="another", mode="server")
    other.config = bench_data.config(load=bench_data.CONTENT["load"] | {"seed": 1})
    with pytest.raises(MergeRefused) as caught:
        merge([half("stock"), other])
    told = [line.strip().split(": ")[0] for line in str(caught.value).splitlines()[1:]]
    assert told == ["1. session", "2. mode", "3. flags or load"]


def test_the_same_arm_twice_is_refused() -> None:
    with pytest.raises(MergeRefused, match="measured twice: stock at 4 in flight, 32 out, run 0"):
        merge([half("stock"), half("stock")])


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeRefused, match=r"none\.runs\.json"):
        load_results(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("[]")
    (tmp_path / "x.runs.json").write_text('{"config": {}}')
    with pytest.raises(MergeRefused, match="not the runs of a serving benchmark"):
        load_results(tmp_path / "x.json")
    with pytest.raises(MergeRefused, match="not the result of a serving benchmark"):
        load_summary(tmp_path / "x.json")


def test_checks_made_elsewhere_are_read(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    file.write_text('[{"name": "tokens in fp32", "ok": false, "value": 3}]')
    (check,) = read_checks(file)
    assert (check.name, check.ok, check.value) == ("tokens in fp32", False, 3)
    assert bench_data.results(extra=[check]).summary()["gate"] == "red"
    for wrong in ("{}x", '[{"name": "a"}]', '[{"name": "a", "ok": 1}]', '["a"]'):
        file.write_text(wrong)
        with pytest.raises(MergeRefused, match=r"checks\.json"):
            read_checks(file)


def other_points(session: str, **changes: Any) -> dict[str, Any]:
    label = "16 in flight, 32 out"
    runs = [bench_data.run(arm, label) for arm in ("stock", "replay")]
    results = bench_data.results(runs=runs, **changes)
    results.origin["session"] = session
    return results.summary()


def test_leases_with_other_points_are_collected_each_ratio_from_its_own() -> None:
    whole = collect([bench_data.results().summary(), other_points("t")])
    assert whole["gate"] == "green"
    places = [(p["arm"], p["concurrency"], p["session"]) for p in whole["points"]]
    assert places == [
        ("stock", 4, "s"),
        ("replay", 4, "s"),
        ("stock", 16, "t"),
        ("replay", 16, "t"),
    ]
    ratios = [(one["session"], one["concurrency"]) for one in whole["ratios"]["points"]]
    assert ratios == [("s", 4), ("t", 16)]
    assert [one["session"] for one in whole["sessions"]] == ["s", "t"]


def test_a_collection_of_several_commits_and_waves_says_so_at_each_point() -> None:
    load = bench_data.CONTENT["load"] | {"waves": 2}
    other = other_points("t", config=bench_data.config(load=load))
    other["commit"] = other["points"][0]["commit"] = other["points"][1]["commit"] = "d"
    first = bench_data.results(profiles={"stock": [PROFILE]}).summary()
    whole = collect([first, other])
    assert whole["commit"] == "c, d"
    assert [(p["commit"], p["waves"], p["gate"]) for p in whole["points"]] == [
        ("c", 1, "green"),
        ("c", 1, "green"),
        ("d", 2, "green"),
        ("d", 2, "green"),
    ]
    assert all(point["date"] for point in whole["points"])
    assert [(line["arm"], line["session"]) for line in whole["profile"]] == [("stock", "s")]
    assert [one["commit"] for one in whole["sessions"]] == ["c", "d"]
    assert whole["sessions"][1]["arms"] == other["arms"]


def test_to_a_collection_another_lease_is_added() -> None:
    whole = collect([bench_data.results().summary(), other_points("t")])
    label = "8 in flight, 32 out"
    load = bench_data.CONTENT["load"] | {"concurrency": [8]}
    third = bench_data.results(
        config=bench_data.config(load=load),
        runs=[bench_data.run(arm, label) for arm in ("stock", "replay")],
    )
    third.origin["session"] = "u"
    found = collect([whole, third.summary()])
    assert [one["session"] for one in found["sessions"]] == ["s", "t", "u"]
    assert [p["session"] for p in found["points"]] == ["s", "s", "t", "t", "u", "u"]
    assert [one["session"] for one in found["ratios"]["points"]] == ["s", "t", "u"]
    # As collections once were: with what was the first session's alone.
    first = bench_data.results().summary()
    own = ("session", "machine", "interleave", "config_digest", "config")
    old = whole | {name: first[name] for name in own}
    assert collect([old, third.summary()]) == found


def session_of_two_points(session: str = "s") -> dict[str, Any]:
    runs = [
        bench_data.run(arm, label)
        for label in ("4 in flight, 32 out", "16 in flight, 32 out")
        for arm in ("stock", "replay")
    ]
    profiles = {
        arm: [PROFILE, PROFILE | {"concurrency": 16}, PROFILE | {"concurrency": None}]
        for arm in ("stock", "replay")
    }
    results = bench_data.results(runs=runs, profiles=profiles)
    results.origin["session"] = session
    return results.summary()


@pytest.mark.parametrize("collected", [False, True], ids=["single", "collected"])
def test_a_point_that_was_measured_better_later_is_left_out_and_told(collected: bool) -> None:
    first = session_of_two_points()
    bad = dict(first["points"][2])
    if collected:
        label = "64 in flight, 32 out"
        runs = [bench_data.run(arm, label) for arm in ("stock", "replay")]
        load = bench_data.CONTENT["load"] | {"concurrency": [64]}
        third = bench_data.results(runs=runs, config=bench_data.config(load=load))
        third.origin["session"] = "u"
        first = collect([first, third.summary()])
    better = other_points("t")
    with pytest.raises(MergeRefused, match=r"stock', 16, None, 32\) in s and t; --without"):
        collect([first, better])
    whole = collect([first, better], ["s:16x32"])
    between = [("u", 64)] if collected else []
    wanted = [("s", 4), *between, ("t", 16)]
    assert [(p["session"], p["concurrency"]) for p in whole["points"]] == [
        place for place in wanted for _ in range(2)
    ]
    ratios = whole["ratios"]["points"]
    assert [(one["session"], one["concurrency"]) for one in ratios] == wanted
    assert [(line["arm"], line["concurrency"]) for line in whole["profile"]] == [
        ("stock", 4),
        ("stock", None),
        ("replay", 4),
        ("replay", None),
    ]
    (told,) = whole["left_out"]
    assert told.startswith("by --without s:16x32: stock ")
    for figure in ("output_tok_s", "ttft_p50_s", "tpot_p50_ms"):
        assert f" {bad[figure]} " in told
    assert "replay" in told
    assert told.endswith("profiles of stock and replay at 16")


def test_what_is_left_out_stays_told_in_a_later_collection() -> None:
    whole = collect([session_of_two_points()], ["s:16x32"])
    again = collect([whole, other_points("t")], ["s:4x32"])
    assert [told.split(": ")[0] for told in again["left_out"]] == [
        "by --without s:16x32",
        "by --without s:4x32",
    ]
    assert {point["session"] for point in again["points"]} == {"t"}


def test_nothing_is_left_out_that_is_not_there() -> None:
    given = [session_of_two_points(), other_points("t")]
    wrong = ["t:4x32", "s:16x64", "s", "s:0x32", "s:16x32"]
    with pytest.raises(MergeRefused) as caught:
        collect(given, wrong)
    told = [line.split(". ", 1)[1] for line in str(caught.value).splitlines()[1:]]
    there = "no such point; there are s:16x32, s:4x32, t:16x32"
    form = "write SESSION:CONCURRENCYxOUTPUT, as in a1b2:4x512"
    assert told == [
        f"--without t:4x32: {there}",
        f"--without s:16x64: {there}",
        f"--without s: {form}",
        f"--without s:0x32: {form}",
    ]
    assert len(given[0]["points"]) == 4


def test_a_collection_says_of_the_whole_what_is_true_of_the_whole(tmp_path: Path) -> None:
    load = bench_data.CONTENT["load"] | {"concurrency": [16], "seed": 0}
    other = other_points("t", config=bench_data.config(load=load, profile={"concurrency": [16]}))
    other["date"] = "2026-11-30T00:00:00+00:00"
    other["machine"] = {"device": "a GPU", "id": "2"}
    first = bench_data.results().summary()
    whole = collect([first, other])
    assert not {"session", "machine", "interleave", "config_digest"} & set(whole)
    assert not {"profile", "interleave"} & set(whole["config"])
    assert set(whole["config"]["load"]) == {"prompt_tokens", "token_ids", "seed", "warm_up"}
    assert whole["date"] == f"{first['date']}, {other['date']}"
    for entry, one in zip(whole["sessions"], (first, other), strict=True):
        for name in ("session", "machine", "interleave", "config_digest"):
            assert entry[name] == one[name]
        for name in ("load", "profile", "interleave"):
            assert entry["config"][name] == one["config"][name]
    # Where the seeds differ, none is that of the whole.
    other["config"] = json.loads(json.dumps(other["config"]))
    first["config"] = json.loads(json.dumps(first["config"]))
    other["config"]["load"]["seed"] = 1
    assert "seed" not in collect([first, other])["config"]["load"]


def test_a_collection_can_be_read_shown_and_drawn(tmp_path: Path) -> None:
    whole = collect([session_of_two_points(), other_points("t")], ["s:16x32"])
    read = load_summary(write_summary(whole, tmp_path))
    assert read == json.loads(json.dumps(whole))
    assert collect([read])["points"] == read["points"]
    text = io.StringIO()
    lines = [line | {"error": "x"} for line in read["profile"]]
    report.print_summary(read | {"profile": lines}, Console(file=text, width=200))
    assert "left out: ['by --without s:16x32" in text.getvalue()
    pytest.importorskip("matplotlib", reason="needs matplotlib, not installed here")
    from cuda_ext.bench.serve import plots

    plots.draw(read, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_can_be_collected(path: Path) -> None:
    found = load_summary(path)
    names = list(dict.fromkeys(point["session"] for point in found["points"]))
    whole = collect([found])
    assert [entry["session"] for entry in whole["sessions"]] == names
    assert whole["points"] == found["points"]
    point = found["points"][-1]
    gone = (point["session"], point["concurrency"], point["output_tokens"])
    left = collect([found], ["{}:{}x{}".format(*gone)])
    assert len(left["points"]) == len(found["points"]) - 2
    assert len(left["ratios"]["points"]) == len(found["ratios"]["points"]) - 1


def test_a_collection_is_refused_with_every_reason() -> None:
    first = bench_data.results().summary()
    flags = bench_data.CONTENT["serve"] | {"max-num-seqs": 8}
    other = other_points("t", config=bench_data.config(serve=flags), gates={})
    other["device"] = "another GPU"
    other["points"] += first["points"][:1]
    with pytest.raises(MergeRefused) as caught:
        collect([first, other])
    text = str(caught.value)
    for reason in ("the gate is red", "device: ", "flags of s and t differ", "measured twice"):
        assert reason in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gate": {"slack": 9.0}}, "gates of s and t differ"),
        ({"load": {"prompt_tokens": [60, 80]}}, r"load.prompt_tokens: \(30, 40\) and \(60, 80\)"),
    ],
    ids=["gate", "prompts"],
)
def test_a_collection_is_of_one_gate_and_load(changes: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {}
    if "gate" in changes:
        given["config"] = bench_data.config(gate=changes["gate"])
    if "load" in changes:
        given["config"] = bench_data.config(load=bench_data.CONTENT["load"] | changes["load"])
    other = other_points("t", **given)
    with pytest.raises(MergeRefused, match=told) as caught:
        collect([bench_data.results().summary(), other])
    assert len(str(caught.value).splitlines()) == 2


def test_a_collection_is_of_one_pool_and_holds_where_all_sessions_do() -> None:
    first, other = bench_data.results().summary(), other_points("t")
    first["bf16"], other["bf16"] = {"holds": True, "x": 1}, {"holds": False, "x": 2}
    whole = collect([first, other])
    assert whole["bf16"] == {"holds": False, "x": 1}
    assert [one["bf16"]["holds"] for one in whole["sessions"]] == [True, False]
    other["fit_8k"] = other["fit_8k"] | {"replay": other["fit_8k"]["replay"] * 1.03}
    with pytest.raises(MergeRefused, match=r"fit_8k of replay: 201\.5 and 207"):
        collect([first, other])


def test_a_result_from_before_the_weights_were_scaled_is_refused_by_name() -> None:
    """In either order."""
    first, other = bench_data.results().summary(), other_points("t")
    del other["config"]["dummy_weights"]
    for given in ([first, other], [other, first]):
        with pytest.raises(MergeRefused, match=r"flags of . and . differ"):
            collect(given)


def test_a_point_of_one_arm_is_not_collected() -> None:
    whole = bench_data.results(
        runs=[*bench_data.results().runs, bench_data.run("stock", "16 in flight, 32 out")]
    ).summary()
    assert whole["gate"] == "green"
    with pytest.raises(MergeRefused, match=r"session s: stock alone at \(16, None, 32\)"):
        collect([whole])


def test_a_collection_keeps_why_a_session_ended_early_and_what_it_left_out() -> None:
    first = bench_data.results(left_out=["x"]).summary()
    whole = collect([first, other_points("t", failure="no answer", left_out=["y"])])
    assert whole["failure"] == "t: no answer"
    assert collect([whole])["failure"] == "t: no answer"
    assert whole["left_out"] == ["x", "y"]
    assert "failure" not in collect([first])


def test_arms_that_ran_a_point_unequally_often_give_no_ratio() -> None:
    label = "16 in flight, 32 out"
    runs = [*bench_data.results().runs, bench_data.run("stock", number=1)]
    runs += [bench_data.run(arm, label) for arm in ("stock", "replay")]
    summary = bench_data.results(runs=runs).summary()
    assert summary["gate"] == "green"
    assert [one["concurrency"] for one in summary["ratios"]["points"]] == [16]
    assert summary["notes"] == [
        "no ratio at concurrency 4, output_tokens 32: runs are 2 of stock and 1 of replay"
    ]


def test_the_result_says_where_torch_is_not_the_one_that_vllm_pins() -> None:
    note = provenance.torch_note("2.11.0+cu130", "2.13.0")
    assert note == "run with torch 2.11.0+cu130; this vLLM pins torch 2.13.0"
    assert provenance.torch_note("2.13.0+cpu", "2.13.0") is None
    assert provenance.torch_note("2.13.0", None) is None


def test_provenance_is_complete() -> None:
    found = provenance.provenance(["a", "b"], None)
    assert found["command"] == "a b"
    assert {"vllm", "torch", "torch_pinned_by_vllm", "triton", "cuda_driver"} <= set(
        found["versions"]
    )
    assert found["commit"]
    assert found["device"] == found["machine"]["device"]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, not installed here")
    from cuda_ext.bench.serve import plots

    facts = {
        arm: facts | {"bytes_per_8k_request": 2**30}
        for arm, facts in bench_data.results().facts.items()
    }
    summary = bench_data.results(facts=facts).summary()
    plots.draw(summary, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
