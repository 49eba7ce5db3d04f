"""The command as a user runs it: output, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import FakeServer, serve

from vllm_gaudi_ext.check.report import to_json, to_junit
from vllm_gaudi_ext.check.verdict import CaseResult, CheckReport, Noise, Verdict

FEW = ["--scenario", "boundary", "--answer-tokens", "8", "--no-proxy"]


def gaudi_ext(
    *args: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from vllm_gaudi_ext.cli import main; main()", "check", *args],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def prompts_of(server: FakeServer) -> list[str]:
    """Pieces of the sent prompts, as they would show in JSON."""
    return [json.dumps(r["prompt"][5:15])[1:-1] for r in server.log.requests]


def test_equal_is_exit_code_0_and_writes_no_file(tmp_path: Path) -> None:
    with serve() as server:
        done = gaudi_ext(server.url, *FEW, cwd=tmp_path)
    assert done.returncode == 0, done
    assert "2*B+1" in done.stdout
    assert "B = 96 tokens (learned)" in done.stdout
    assert "equal: " in done.stdout.splitlines()[-1]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_exit_code_1_and_says_what_to_do(tmp_path: Path) -> None:
    with serve(stale_slot=True) as server:
        done = gaudi_ext(server.url, *FEW, cwd=tmp_path)
    assert done.returncode == 1
    assert "from answer token 0 on" in done.stdout
    assert "serve without prefix caching" in done.stdout


def test_nothing_to_compare_is_exit_code_2(tmp_path: Path) -> None:
    with serve(caching=False) as server:
        done = gaudi_ext(server.url, *FEW, cwd=tmp_path)
    assert done.returncode == 2
    assert "caching off" in done.stdout


def test_json_and_junit_say_the_same_and_hold_no_prompt(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    with serve(stale_slot=True) as server:
        done = gaudi_ext(server.url, *FEW, "--json", "--junit", str(junit), cwd=tmp_path)
        prompts = prompts_of(server)
    data = json.loads(done.stdout)
    assert data["exit_code"] == done.returncode == 1
    assert data["outcome"] == "different"
    assert data["block_tokens"] == 96
    suite = ElementTree.parse(junit).getroot()
    assert int(suite.attrib["tests"]) == len(data["cases"]) == len(suite.findall("testcase"))
    different = {c["case"] for c in data["cases"] if c["verdict"] == "different"}
    failed = {t.attrib["name"] for t in suite.findall("testcase") if t.find("failure") is not None}
    assert different == failed
    assert int(suite.attrib["failures"]) == len(failed) > 5
    assert int(suite.attrib["skipped"]) == 2
    for text in (done.stdout, done.stderr, junit.read_text()):
        assert not any(p in text for p in prompts)
    assert [p.name for p in tmp_path.iterdir()] == ["junit.xml"]


def test_prompts_are_saved_when_asked(tmp_path: Path) -> None:
    with serve() as server:
        done = gaudi_ext(server.url, *FEW, "--save-prompts", "kept/here", cwd=tmp_path)
        sent = {tuple(r["prompt"]) for r in server.log.requests[1:]}
    assert done.returncode == 0
    saved = [json.loads(p.read_text()) for p in (tmp_path / "kept/here").iterdir()]
    assert {tuple(s["prompt"]) for s in saved} == sent
    assert all(s["answer"]["token_ids"] for s in saved)


def test_the_key_is_taken_from_the_environment_and_never_shown(tmp_path: Path) -> None:
    env = {"GAUDI_EXT_API_KEY": "very-secret"}
    with serve(api_key="very-secret") as server:
        done = gaudi_ext(server.url, *FEW, "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done
    assert "very-secret" not in done.stdout + done.stderr
    assert "very-secret" not in gaudi_ext("--help", cwd=tmp_path, env=env).stdout


@pytest.mark.parametrize(
    ("settings", "args", "says"),
    [
        ({}, ["--block-tokens", "-5"], "--block-tokens -5"),
        ({}, ["--block-tokens", "99999999999"], "--block-tokens 99999999999"),
        ({}, ["--scenario", "nonsense"], "no scenario named 'nonsense'"),
        ({}, ["--cuts", "sometimes"], "--cuts 'sometimes'"),
        ({}, ["--timeout", "nan"], "--timeout nan"),
        ({}, ["--max-answer-mib", "0"], "--max-answer-mib 0"),
        ({}, ["--header", "no-colon-secret"], "NAME:VALUE"),
        ({}, ["--ca-file", "missing.pem"], "cannot load missing.pem"),
        ({}, ["--junit", "no/such/folder/x.xml"], "cannot write no/such/folder/x.xml"),
        ({"api_key": "x"}, [], "an API key is needed"),
        ({"delay": 60.0}, ["--timeout", "0.3"], "within 0.3 s"),
        ({"body": "malformed"}, [], "is no JSON"),
        ({"body": "huge"}, ["--max-answer-mib", "1"], "longer than"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    settings: dict[str, Any], args: list[str], says: str, tmp_path: Path
) -> None:
    with serve(**settings) as server:
        done = gaudi_ext(server.url, *FEW, "--retries", "0", *args, cwd=tmp_path)
    assert done.returncode == 2, done
    [line] = done.stderr.splitlines()
    assert line.startswith("gaudi-ext check: ")
    assert says in line
    assert done.stdout == ""
    assert "secret" not in line


@pytest.mark.parametrize("url", ["localhost:8000", "http://user:secret@h", "http://127.0.0.1:1"])
def test_a_bad_address_is_one_line_and_exit_code_2(url: str, tmp_path: Path) -> None:
    done = gaudi_ext(url, "--retries", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert "secret" not in done.stderr


def test_a_failure_is_in_json_and_junit_too(tmp_path: Path) -> None:
    done = gaudi_ext(
        "http://127.0.0.1:1", "--retries", "0", "--json", "--junit", "j.xml", cwd=tmp_path
    )
    assert done.returncode == 2
    data = json.loads(done.stdout)
    assert data["outcome"] == "could not check"
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert suite.attrib["errors"] == "1"
    error = suite.find("testcase/error")
    assert error is not None
    assert "cannot reach" in error.attrib["message"]


def test_the_command_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    code = (
        "import sys; import vllm_gaudi_ext.check, vllm_gaudi_ext.check.report; "
        "import vllm_gaudi_ext.cli.check; "
        "bad = {'torch', 'vllm', 'vllm_gaudi'} & set(sys.modules); sys.exit(bool(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


def test_the_command_line_starts_without_the_http_client(tmp_path: Path) -> None:
    code = "import sys; import vllm_gaudi_ext.cli.check; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


def test_reports_are_valid_json_and_xml_whatever_the_server_said() -> None:
    case = CaseResult(
        case='a "case" <x>',
        scenario="boundary",
        verdict=Verdict.DIFFERENT,
        detail="bell \x07, half a pair \ud800, a tag </failure>",
        largest_difference=float("inf"),
    )
    report = CheckReport(url="http://h", noise=Noise(alone=float("inf")), cases=(case,))
    data = json.loads(to_json(report))
    assert data["cases"][0]["largest_difference"] is None
    assert data["noise"]["alone"] is None
    failure = ElementTree.fromstring(to_junit(report)).find("testcase/failure")
    assert failure is not None
    assert "a tag </failure>" in failure.attrib["message"]
