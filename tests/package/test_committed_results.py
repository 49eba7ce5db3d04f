"""Every committed result says where it comes from; none is of a run whose gate was not green."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cuda_ext.bench import provenance

RESULTS = Path(provenance.__file__).with_name("results")
FILES = sorted(RESULTS.glob("*.json"))
HOUSE = Path(__file__).parents[2]


def test_there_are_results() -> None:
    assert {path.stem for path in FILES} >= {"serve-h200-4b", "serve-h200-35b"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    text = path.read_text()
    found = json.loads(text)
    for name in ("command", "commit", "versions", "device", "date"):
        assert found[name], name
    assert not re.search(r"[\"' ]/(tmp|work|root|home)/", text), "a path of the machine it ran on"
    # A recipe's run compares nothing: it has no gate.
    if not path.stem.startswith("recipe-"):
        assert found["gate"] == "green"
        assert all(check["ok"] for check in found.get("checks", []))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_reader_is_told_of_it(path: Path) -> None:
    told = [HOUSE / "README.md", HOUSE / "cuda_ext/bench/NOTES.md", *HOUSE.glob("recipes/*/*.yaml")]
    shown = "".join(file.read_text() for file in told)
    assert path.name in shown or path.with_suffix(".png").name in shown
