"""Asks the installed vLLM's own parser about every key of a serve.yaml, one at a time.

vLLM stops at the first error and says nothing about what it drops. Each key is therefore written
into a file of its own and given to vLLM's `load_config_file` and `parse_args`: what becomes of it
is read off the answer, so no rule of any release is repeated here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import io
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_gaudi_ext.planner.errors import PlanError
from vllm_gaudi_ext.planner.serve_args import vllm_argument_parser
from vllm_gaudi_ext.preflight.report import Found
from vllm_gaudi_ext.preflight.structure import empty_list, flag_of


@dataclass
class Asked:
    """What vLLM's parser made of a file.

    Args:
        version: of the vLLM that was asked.
        parsed: its arguments for the keys that it takes, None where it refuses these together.
        problems, warnings: what was found.
    """

    version: str
    parsed: argparse.Namespace | None = None
    problems: list[Found] = field(default_factory=list)
    warnings: list[Found] = field(default_factory=list)


def load_parser() -> tuple[argparse.ArgumentParser, str]:
    """vLLM's parser and version. vLLM logs while it is imported; that is held back.

    Raises:
        PlanError: vLLM is not installed, or cannot build its parser on this machine.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            parser = vllm_argument_parser()
            version = str(importlib.import_module("vllm").__version__)
    except PlanError as error:
        # Less what it advises a caller of the planner to do.
        raise PlanError(str(error).split("; ")[0]) from None
    except Exception as error:
        # Defaults of many options are computed from the platform, so building the parser fails
        # where vLLM finds no device that it knows.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlanError(f"vLLM can't build its parser on this machine ({first})") from None
    return parser, version


def ask(parser: Any, version: str, path: Path, content: Mapping[str, Any]) -> Asked:
    """What vLLM makes of the file, with every problem that its parser shows.

    Args:
        parser: vLLM's FlexibleArgumentParser for `vllm serve`.
        version: of that vLLM.
        path: the file, with a suffix that vLLM takes.
        content: its mapping.
    """
    asked = Asked(version)
    options = set(parser._option_string_actions)
    legal: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "serve.yaml"
        for key, value in content.items():
            if value is None or key == "config" or key.startswith("-"):
                # structure.py has said so.
                continue
            base = flag_of(key).split(".")[0]
            if base not in options and not _abbreviation(asked, key, base, options):
                continue
            alone.write_text(yaml.safe_dump({key: value}), encoding="utf-8")
            # A false, whatever this parser makes of it: see `without_false`.
            if value is False or not parser.load_config_file(str(alone)):
                asked.problems.append(_dropped(key, value, options, version))
                continue
            parsed, refused = _parse(parser, alone)
            if refused is not None:
                asked.problems.append(_refused(key, value, refused))
            elif getattr(parsed, "model_tag", None) is not None and key != "model_tag":
                # The switch took no value, so the value became the positional model.
                asked.problems.append(_refused(key, value, "it takes no value"))
            else:
                legal[key] = value
        given = path
        if legal != dict(content):
            given = alone
            given.write_text(yaml.safe_dump(legal), encoding="utf-8")
        # What is left can only be wrong together, so no message is a repetition.
        asked.parsed, refused = _parse(parser, given)
    if refused is not None:
        asked.problems.append(
            Found(what=f"vLLM's parser refuses the file: {refused}", fix="see vllm serve --help")
        )
    asked.problems += _speculative_problems(content.get("speculative-config"))
    return asked


def _abbreviation(asked: Asked, key: str, flag: str, options: Iterable[str]) -> bool:
    """Whether vLLM completes the key to a flag; says so, or that it is none."""
    longer = [option for option in options if option.startswith(flag)]
    if len(longer) != 1:
        _unknown(asked, key, flag, options)
        return False
    asked.warnings.append(
        Found(
            what=f"{key} is short for {longer[0][2:]}; it stops working when vLLM gets another "
            "flag that starts so",
            fix=f"write {longer[0][2:]}",
        )
    )
    return True


def _unknown(asked: Asked, key: str, flag: str, options: Iterable[str]) -> None:
    close = difflib.get_close_matches(flag, [o for o in options if o.startswith("--")], n=2)
    meant = " or ".join(option[2:] for option in close)
    asked.problems.append(
        Found(
            what=f"{key} is no flag of vllm serve {asked.version}",
            fix=f"did you mean {meant}? Otherwise remove the line"
            if meant
            else "remove the line; facts about a deployment belong into recipe.yaml",
        )
    )


def _dropped(key: str, value: Any, options: Iterable[str], version: str) -> Found:
    if value == []:
        return empty_list(key)
    opposite = f"no-{key}"
    if flag_of(opposite) in set(options):
        fix = f"write `{opposite}: true`"
    else:
        fix = f"remove the line: there is no --{opposite}, and false is the default"
    return Found(what=f"{key}: {value!r} is dropped without a word by vLLM {version}", fix=fix)


def _refused(key: str, value: Any, reason: str) -> Found:
    shown = str(value) if len(str(value)) < 60 else str(value)[:57] + "..."
    return Found(
        what=f"{key}: {shown} is refused by vLLM: {reason}",
        fix=f"see vllm serve --help={key.split('.')[0]}",
    )


def _parse(parser: Any, path: Path) -> tuple[argparse.Namespace | None, str | None]:
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            return parser.parse_args(["--config", str(path)]), None
    except SystemExit:
        lines = [line for line in held.getvalue().splitlines() if ": error: " in line]
        return None, lines[-1].split(": error: ", 1)[1] if lines else "no reason given"
    except Exception as error:
        # Validators of single options raise what they like.
        return None, (str(error).splitlines() or [type(error).__name__])[0]


def _speculative_problems(given: Any) -> list[Found]:
    """Keys of speculative-config that vLLM has no field for; it refuses them only at start-up."""
    if not isinstance(given, Mapping):
        return []
    try:
        config = importlib.import_module("vllm.config").SpeculativeConfig
        fields = {f.name for f in dataclasses.fields(config)}
    except (ImportError, AttributeError, TypeError):
        return []
    found = []
    for key in given:
        if str(key) not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            found.append(
                Found(
                    what=f"speculative-config.{key} is no field of vLLM's SpeculativeConfig",
                    fix=f"did you mean {close[0]}?" if close else "remove it",
                )
            )
    return found
