"""The tested windows of vLLM and vllm-gaudi, and the refusal outside them."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest

from vllm_gaudi_ext import versions

OVERRIDE = "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS"

CASES = [
    ("0.26.0", True),
    ("0.26.0+cpu", True),
    ("0.26.0+gaudi.1", True),
    ("0.26.0rc0", False),
    ("0.26.1rc0", False),
    ("0.26.1.dev3+g1", False),
    ("0.26.0.post1.dev2+g1", False),
    ("0.26.1", False),
    ("0.26.1.post1", False),
    ("0.25.9", False),
    ("0.27.0", False),
    ("0.30.0", False),
    ("1.26.0", False),
    ("dev", False),
    ("", False),
    (None, False),
]


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, vllm: str | None, vllm_gaudi: str | None) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: vllm)
    monkeypatch.setattr(versions, "installed_vllm_gaudi", lambda: vllm_gaudi)


@pytest.mark.parametrize("window", [versions.VLLM, versions.VLLM_GAUDI], ids=lambda w: w.project)
@pytest.mark.parametrize(("found", "admitted"), CASES)
def test_a_window_admits_what_was_tested(
    window: versions.Window, found: str | None, admitted: bool
) -> None:
    assert window.admits(found) == admitted


def test_tested_versions_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0+cpu", "0.26.0")
    assert versions.version_problems() == []
    versions.require_tested_versions()


@pytest.mark.parametrize(
    ("vllm", "vllm_gaudi", "fragments"),
    [
        ("0.30.0", "0.26.0", ["vllm 0.30.0,"]),
        ("0.26.0", "0.26.1.dev3+g1", ["vllm-gaudi 0.26.1.dev3+g1,"]),
        (None, "0.26.0", ["vllm is not installed,"]),
        ("0.26.0", None, ["vllm-gaudi is not installed,"]),
        ("dev", "0.25.9", ["vllm dev,", "vllm-gaudi 0.25.9,"]),
    ],
)
def test_each_version_outside_its_window_is_named_with_the_supported_one(
    monkeypatch: pytest.MonkeyPatch, vllm: str, vllm_gaudi: str, fragments: list[str]
) -> None:
    install(monkeypatch, vllm, vllm_gaudi)
    problems = versions.version_problems()
    assert len(problems) == len(fragments)
    for problem, fragment in zip(problems, fragments, strict=True):
        assert problem.startswith(fragment)
        assert ">=0.26.0" in problem
        assert "<0.26.1" in problem
        assert f"{OVERRIDE}=1" in problem
    with pytest.raises(RuntimeError, match="refuses to start") as error:
        versions.require_tested_versions()
    assert all(problem in str(error.value) for problem in problems)


@pytest.mark.parametrize(
    ("value", "overrides"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_the_override_variable_lets_any_version_start(
    monkeypatch: pytest.MonkeyPatch, value: str, overrides: bool
) -> None:
    install(monkeypatch, None, "0.30.0")
    monkeypatch.setenv(OVERRIDE, value)
    assert (versions.version_problems() == []) == overrides
    if overrides:
        versions.require_tested_versions()


def test_vllm_is_asked_for_its_version_and_not_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.26.0+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    assert versions.installed_vllm() == "0.26.0+cpu"
    # None in this table makes every import of the name fail.
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert versions.installed_vllm() is None


def test_vllm_gaudi_is_looked_up_by_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def version(name: str) -> str:
        asked.append(name)
        return "0.26.0"

    monkeypatch.setattr(metadata, "version", version)
    assert versions.installed_vllm_gaudi() == "0.26.0"
    assert asked == ["vllm-gaudi"]

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert versions.installed_vllm_gaudi() is None
