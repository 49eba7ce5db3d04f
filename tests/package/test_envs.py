"""The one list of environment variables: lazy, typed, documented, and the only reader."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_gaudi_ext import envs

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "vllm_gaudi_ext" / "envs.py"
READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

variables = pytest.mark.parametrize("name", sorted(envs.environment_variables))


def environment_uses(source: str) -> list[int]:
    """Lines that reach for the process environment, by attribute of `os` or by import from it."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            lines += [node.lineno for alias in node.names if alias.name in READERS | {"*"}]
    return lines


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ",
        "from os import getenv as g",
        "from os import *",
        "import os\nos.environ['A'] = '1'",
    ],
)
def test_the_scan_sees_every_way_to_the_environment(source: str) -> None:
    assert environment_uses(source)


def test_the_scan_does_not_mistake_other_names() -> None:
    assert not environment_uses("from os import path\nself.environment\nenvs.environment_variables")


@pytest.mark.parametrize("package", ["vllm_gaudi_ext", "cuda_ext"])
def test_no_other_module_reads_the_environment(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    uses = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if file != ENVS and (lines := environment_uses(file.read_text(encoding="utf-8")))
    }
    assert uses == {}


def test_the_environment_is_only_asked() -> None:
    tree = ast.parse(ENVS.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "environ"]
    assert uses
    for use in uses:
        parent = parents[use]
        # Asked for a value, copied, or chosen as what a reader asks; a subscript or any other
        # method could write.
        asked = isinstance(parent, ast.Attribute) and parent.attr == "get"
        assert asked or isinstance(parent, ast.Dict | ast.IfExp), ast.unparse(parent)


def test_readers_take_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CONTIGUOUS_PA", "true")
    assert envs.contiguous_pa()
    assert not envs.contiguous_pa({})
    assert envs.contiguous_pa(envs.with_overrides({}))
    assert not envs.contiguous_pa(envs.with_overrides({"VLLM_CONTIGUOUS_PA": "false"}))


@variables
def test_every_variable_is_read_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    unset = getattr(envs, name)
    monkeypatch.setenv(name, "1")
    assert getattr(envs, name) != unset
    assert envs.environment_variables[name]() == getattr(envs, name)
    monkeypatch.delenv(name)
    assert getattr(envs, name) == unset


def typed() -> dict[str, ast.AnnAssign]:
    """The declarations under TYPE_CHECKING, by name."""
    tree = ast.parse(ENVS.read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        ast.unparse(node.target): node for node in block.body if isinstance(node, ast.AnnAssign)
    }


def test_exactly_the_variables_are_typed() -> None:
    assert typed().keys() == envs.environment_variables.keys()


@variables
def test_the_declared_default_is_the_value_of_an_unset_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    declared = typed()[name]
    assert declared.value is not None
    monkeypatch.delenv(name, raising=False)
    value = getattr(envs, name)
    assert value == ast.literal_eval(declared.value)
    assert type(value).__name__ in ast.unparse(declared.annotation)


@variables
def test_every_variable_is_documented_by_a_comment_above_it(name: str) -> None:
    lines = ENVS.read_text(encoding="utf-8").splitlines()
    (entry,) = [i for i, line in enumerate(lines) if line.strip().startswith(f'"{name}":')]
    comment = lines[entry - 1].strip()
    assert comment.startswith("#")
    assert len(comment) > 10


@variables
def test_every_variable_is_ours_by_its_name(name: str) -> None:
    assert name.startswith("VLLM_GAUDI_EXT_")


def test_variables_are_listed_by_dir() -> None:
    assert set(envs.environment_variables) <= set(dir(envs))


def test_an_unknown_variable_is_an_attribute_error_with_its_name() -> None:
    with pytest.raises(AttributeError, match=r"vllm_gaudi_ext\.envs.*VLLM_GAUDI_EXT_NO_SUCH"):
        _ = envs.VLLM_GAUDI_EXT_NO_SUCH


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((word, True) for word in ("1", "TRUE", " yes ", "on")),
        *((word, False) for word in ("0", "", "no", "2", None)),
    ],
)
def test_flags_are_words_for_yes(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    set_or_unset(monkeypatch, "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS", value)
    assert envs.VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS is on


def set_or_unset(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("gaudi_ext", True),
        ("other,gaudi_ext", True),
        ("hpu", False),
        ("gaudi_ext_2,my_gaudi_ext", False),
        ("", False),
        # vLLM takes every plugin when the variable is unset; this package wants to be named.
        (None, False),
        # vLLM strips no spaces, so neither may we: it would load nothing under this name.
        ("hpu, gaudi_ext", False),
    ],
)
def test_a_plugin_is_named_as_vllm_names_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, named: bool
) -> None:
    set_or_unset(monkeypatch, "VLLM_PLUGINS", value)
    assert envs.named_in_vllm_plugins("gaudi_ext") is named


# The words of vllm-gaudi 0.26.0 (extension/config.py, boolean), in any case and without stripping.
@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((word, True) for word in ("true", "T", "1", "Yes", "y", "ON")),
        *((word, False) for word in ("false", "0", "", None, "2", " 1")),
    ],
)
def test_contiguous_pa_is_read_as_vllm_gaudi_reads_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    set_or_unset(monkeypatch, "VLLM_CONTIGUOUS_PA", value)
    assert envs.contiguous_pa() is on


# On unless set to something else than yes: vllm-gaudi 0.26.0, hpu_model_runner.py, constructor.
@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((word, True) for word in (None, "", "1", " True ")),
        *((word, False) for word in ("0", "false", "yes", "on")),
    ],
)
def test_compact_gdn_is_read_as_vllm_gaudi_reads_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool
) -> None:
    set_or_unset(monkeypatch, "VLLM_COMPACT_GDN", value)
    assert envs.compact_gdn() is on
