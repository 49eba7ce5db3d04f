"""The options in `--additional-config`: what is read, and that nothing misspelt is ignored."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_gaudi_ext.config import ExtOptions, example, read_options


@pytest.mark.parametrize(
    "given_config",
    [None, {}, {"other": {"replay": "on"}}, object(), "gaudi_ext", {"gaudi_ext": {}}],
    ids=["none", "empty", "another plugin's", "an object", "a text", "no options"],
)
def test_where_nothing_is_asked_for_the_defaults_hold(given_config: Any) -> None:
    assert read_options(given_config) == ExtOptions()
    assert (ExtOptions().replay, ExtOptions().backend) == ("auto", "auto")
    assert ExtOptions().packing == "auto"


@pytest.mark.parametrize("replay", ["auto", "on", "off"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_every_value_is_read(replay: str, backend: str, packing: str) -> None:
    given = {"replay": replay, "backend": backend, "packing": packing}
    options = read_options({"gaudi_ext": given, "other": 1})
    assert (options.replay, options.backend, options.packing) == (replay, backend, packing)


@pytest.mark.parametrize(("word", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_a_bare_on_of_a_yaml_file_is_the_option(word: str, meant: str) -> None:
    config = yaml.safe_load(f"gaudi_ext:\n  replay: {word}\n")
    assert read_options(config).replay == meant


def test_a_bare_off_of_a_yaml_file_is_no_packing() -> None:
    assert read_options(yaml.safe_load("gaudi_ext:\n  packing: off\n")).packing == "off"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"replya": "on"}, ["unknown option 'replya'", "known: replay, backend, packing"]),
        ({"replay": "ON"}, ["replay is 'ON'", "'auto', 'on' or 'off'"]),
        ({"replay": None}, ["replay is None"]),
        ({"replay": 1}, ["replay is 1"]),
        ({"replay": ["on"]}, ["replay is ['on']"]),
        ({"backend": "triton"}, ["backend is 'triton'", "'auto' or 'reference'"]),
        ({"backend": True}, ["backend is True"]),
        ({"packing": "always"}, ["packing is 'always'", "'auto' or 'off'"]),
        (
            {"replya": "on", "replay": "yes", "backend": "cuda"},
            ["'replya'", "replay is 'yes'", "backend is 'cuda'"],
        ),
    ],
)
def test_a_wrong_option_is_refused_and_every_one_is_named(
    options: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ValueError, match="--additional-config, 'gaudi_ext': ") as error:
        read_options({"gaudi_ext": options})
    assert all(fragment in str(error.value) for fragment in told), str(error.value)


@pytest.mark.parametrize("held", [None, True, "on", ["replay"], 3, [["replay", "on"]]])
def test_options_that_are_no_mapping_are_refused_with_what_was_found(held: Any) -> None:
    with pytest.raises(ValueError, match="must hold a mapping of options") as error:
        read_options({"gaudi_ext": held})
    assert f"found {held!r}" in str(error.value)
    assert example(replay="on") in str(error.value)


@pytest.mark.parametrize("name", ["replay", "Replay", "gaudi-ext", "GAUDI_EXT"])
@pytest.mark.parametrize("beside", [{}, {"gaudi_ext": {"replay": "off"}}])
def test_options_in_a_place_that_nobody_reads_are_refused(
    name: str, beside: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="is not read") as error:
        read_options({name: "on", **beside})
    assert repr(name) in str(error.value)
    assert example(replay="on") in str(error.value)


def test_the_example_is_what_a_shell_and_vllm_take() -> None:
    flag, value = shlex.split(example(replay="on", backend="reference"))
    assert flag == "--additional-config"
    assert read_options(json.loads(value)) == ExtOptions(replay="on", backend="reference")


def test_options_that_were_read_stay_as_they_are() -> None:
    with pytest.raises(ValidationError):
        ExtOptions().replay = "on"  # type: ignore[misc]


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
        max_size=4,
    )
)
def test_whatever_else_is_given_is_refused_with_each_unknown_name(options: dict) -> None:  # type: ignore[type-arg]
    unknown = set(options) - set(ExtOptions.model_fields)
    # A known name that is drawn by chance may have a value that is allowed.
    if not unknown:
        return
    with pytest.raises(ValueError, match="'gaudi_ext': ") as error:
        read_options({"gaudi_ext": options})
    assert all(f"unknown option {name!r}" in str(error.value) for name in unknown)
