"""What can be wrong with a serve.yaml before any flag is understood. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vllm_gaudi_ext.preflight.report import Found

# vLLM compares what follows the last dot, case included (load_config_file, argparse_utils.py).
SUFFIXES = ("yaml", "yml")


def flag_of(key: str) -> str:
    """The option that vLLM makes of a key; it reads underscores as dashes."""
    return "--" + key.replace("_", "-")


def suffix_problems(path: Path) -> list[Found]:
    """A name that vLLM's --config refuses."""
    suffix = path.name.split(".")[-1]
    if suffix in SUFFIXES:
        return []
    return [
        Found(
            what=f"the file's name ends in {suffix!r}, and vLLM's --config takes yaml or yml only",
            fix=f"rename it to {path.with_suffix('.yaml').name}",
        )
    ]


def duplicate_problems(text: str) -> list[Found]:
    """Keys that stand twice; YAML's loader keeps the last and says nothing.

    Args:
        text: the file's text, already known to be a YAML mapping without aliases.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return []
    return [
        Found(
            what=f"{name} is given twice, on lines {first} and {second}; vLLM takes the last",
            fix="keep one of them",
        )
        for name, first, second in _repeated(root, "")
    ]


def _repeated(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int, int]]:
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _repeated(child, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name = str(key.value)
        # Only at the top are keys flags, and max_num_seqs the same as max-num-seqs.
        same = name if prefix else flag_of(name)
        line = key.start_mark.line + 1
        if same in seen:
            yield prefix + name, seen[same], line
        seen[same] = line
        yield from _repeated(value, f"{prefix}{name}.")


def value_problems(content: Mapping[str, Any]) -> list[Found]:
    """Values that vLLM turns into something else than what was written."""
    found = []
    for key, value in content.items():
        if value is None:
            found.append(
                Found(
                    what=f"{key} has no value (null): vLLM passes the word None",
                    fix=f"write a value, or remove the line {key}",
                )
            )
        elif key == "config":
            found.append(
                Found(
                    what="the file names another config file, which vLLM does not read",
                    fix="put its flags into this file",
                )
            )
        elif key.startswith("-"):
            found.append(
                Found(
                    what=f"{key} starts with a dash, and vLLM puts two before every key",
                    fix=f"write {key.lstrip('-')}",
                )
            )
    return found


def dropped_without_vllm(content: Mapping[str, Any]) -> list[Found]:
    """Values that some release drops without a word, where no parser can be asked."""
    found = []
    for key, value in content.items():
        if value is False:
            found.append(
                Found(
                    what=f"{key}: false is dropped without a word by vllm serve",
                    fix=f"write `no-{key}: true`, or remove the line where false is the default",
                )
            )
        elif value == []:
            found.append(empty_list(key))
    return found


def empty_list(key: str) -> Found:
    """An empty list, which every release drops."""
    return Found(
        what=f"{key}: [] is dropped without a word by vLLM",
        fix=f"list a value, or remove the line {key}",
    )
