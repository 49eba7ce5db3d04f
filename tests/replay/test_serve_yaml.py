"""A serve.yaml is read as the program `vllm serve --config` of this vLLM reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_gaudi_ext.planner.serve_args import parse_serve_yaml, vllm_argument_parser
from vllm_gaudi_ext.preflight.arguments import ask

CONTENT: dict[str, dict[str, Any]] = {
    "false": {"model": "some/model", "enable-prefix-caching": False, "seed": 3},
    "no-form": {"model": "some/model", "no-enable-prefix-caching": True, "seed": 3},
    "true": {"model": "some/model", "enable-prefix-caching": True, "seed": 3},
}


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", CONTENT)
def test_the_planner_reads_what_the_program_reads(name: str, tmp_path: Path) -> None:
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    program = FlexibleArgumentParser(prog="vllm")
    (serve,) = cmd_init()
    serve.subparser_init(program.add_subparsers(dest="subparser"))
    path = written(tmp_path, CONTENT[name])
    theirs = program.parse_args(["serve", "--config", str(path)])
    ours = parse_serve_yaml(path)
    assert ours.seed == theirs.seed == 3
    assert ours.enable_prefix_caching is theirs.enable_prefix_caching
    assert ours.enable_prefix_caching is {"false": None, "no-form": False, "true": True}[name]


def test_preflight_says_that_a_false_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, CONTENT["false"])
    asked = ask(vllm_argument_parser(), "this", path, CONTENT["false"])
    (problem,) = asked.problems
    assert problem.what == "enable-prefix-caching: False is dropped without a word by vLLM this"
    assert problem.fix == "write `no-enable-prefix-caching: true`"
    assert asked.parsed is not None
    assert asked.parsed.enable_prefix_caching is None
