"""A preflight of one serve.yaml: structure, then vLLM's parser, then refusals and planner."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from vllm_gaudi_ext import envs
from vllm_gaudi_ext.planner.errors import IllegalValue, PlanError
from vllm_gaudi_ext.planner.facts import Platform, find_platform
from vllm_gaudi_ext.planner.plan import Plan
from vllm_gaudi_ext.planner.request import Options, options_from_args
from vllm_gaudi_ext.planner.serve_args import read_yaml, serve_args
from vllm_gaudi_ext.preflight import replay, serving, structure
from vllm_gaudi_ext.preflight.arguments import ask, load_parser
from vllm_gaudi_ext.preflight.report import Found, PreflightReport
from vllm_gaudi_ext.recipes import Recipe, read_recipe


def preflight(
    path: Path,
    *,
    platform: str | None = None,
    model_config: str | None = None,
    drafter_config: str | None = None,
) -> PreflightReport:
    """Everything that is wrong with a serve.yaml.

    Args:
        path: the file.
        platform: the card; None to take it from the recipe.yaml beside the file.
        model_config: folder or config.json to plan with, where the file names a model by an id
            that is not among the packaged facts.
        drafter_config: the same for the drafter.

    Raises:
        PlanError: the file is no YAML mapping, or no known platform is named; exit code 2.
    """
    content = read_yaml(path)
    text = path.read_text(encoding="utf-8-sig")
    recipe = _recipe_beside(path)
    if platform is None and recipe is not None:
        platform = recipe.platform
    if platform is None:
        raise PlanError(
            f"{path}: no platform given, and no recipe.yaml beside it names one; pass --platform"
        )
    card = find_platform(platform)
    report = PreflightReport(file=str(path), platform=card.name, vllm=None)
    report.problems += structure.suffix_problems(path)
    report.problems += structure.duplicate_problems(text)
    report.problems += structure.value_problems(content)
    parsed = _ask_vllm(report, path, text, content)
    if recipe is not None:
        report.warnings += _requirement_warnings(recipe, report.vllm)
    if parsed is not None:
        _check_serving(report, path, parsed, card, recipe, (model_config, drafter_config))
    return report


def _recipe_beside(path: Path) -> Recipe | None:
    beside = path.with_name("recipe.yaml")
    return read_recipe(beside) if beside.is_file() else None


def _ask_vllm(
    report: PreflightReport, path: Path, text: str, content: Mapping[str, Any]
) -> argparse.Namespace | None:
    """vLLM's arguments; where its parser can't be had, the values as they are written."""
    try:
        parser, report.vllm = load_parser()
    except PlanError as error:
        report.unchecked.append(
            f"whether vLLM knows these flags and takes their values ({error}); run preflight where "
            "the server will run"
        )
        report.problems += structure.dropped_without_vllm(content)
        return _values_as_written(report, content)
    with tempfile.TemporaryDirectory() as folder:
        given = path
        if structure.suffix_problems(path):
            given = Path(folder) / "serve.yaml"
            given.write_text(text, encoding="utf-8")
        asked = ask(parser, report.vllm, given, content)
    report.problems += asked.problems
    report.warnings += asked.warnings
    if asked.parsed is None:
        # A flag that vLLM refuses says nothing about the sizes, which are checked all the same.
        return _values_as_written(report, content)
    return asked.parsed


def _values_as_written(
    report: PreflightReport, content: Mapping[str, Any]
) -> argparse.Namespace | None:
    try:
        return serving.options_without_vllm(content)
    except PlanError as error:
        report.unchecked.append(f"block size and token budget: {error}")
        return None


def _check_serving(
    report: PreflightReport,
    path: Path,
    parsed: argparse.Namespace,
    card: Platform,
    recipe: Recipe | None,
    configs: tuple[str | None, str | None],
) -> None:
    caching, said = serving.caching_of(parsed, report.vllm)
    if said is not None:
        report.warnings.append(said)
    plan = _plan(report, path, parsed, card, recipe, configs, bool(caching))
    gaudi = card.vendor == "gaudi"
    environment = envs.with_overrides(recipe.env if recipe is not None else {})
    report.problems += serving.version_problems(report.vllm, gaudi=gaudi)
    if caching is not False:
        missing = serving.missing_sizes(parsed, report.block_tokens)
        report.problems += missing
        if gaudi and not missing:
            report.problems += serving.gaudi_problems(parsed, environment, report.block_tokens)
    options, wrong = replay.options_of(parsed)
    report.problems += wrong
    if options is not None and gaudi:
        report.problems += replay.gaudi_option_problems(options)
    elif options is not None and plan is not None:
        asked = (parsed, options, environment, plan, report.vllm)
        report.problems += replay.nvidia_problems(*asked)
        if plan.replay is not None and replay.serves(*asked):
            report.block_tokens = plan.replay.block_tokens
    elif options is not None:
        report.unchecked.append("what ReplaySSM would refuse, which needs the block size's facts")
    if plan is not None:
        report.problems += serving.planner_problems(plan, refusals_asked=gaudi and bool(caching))
        report.warnings += serving.planner_warnings(plan)


def _plan(
    report: PreflightReport,
    path: Path,
    parsed: argparse.Namespace,
    card: Platform,
    recipe: Recipe | None,
    configs: tuple[str | None, str | None],
    caching: bool,
) -> Plan | None:
    reading = recipe.plan if recipe is not None else None
    if reading is not None:
        # A config that is passed says more than what the recipe reads out of hearsay.
        reading = reading.without(mtp=configs[0] is not None, drafter=configs[1] is not None)
        report.assumed = reading.sentences()
    given = {
        **(reading.options() if reading is not None else {}),
        "serve": path,
        "platform": card.name,
        "caching": caching,
    }
    served = {"model": configs[0], "drafter": configs[1]}
    try:
        options = options_from_args(Options.model_validate(given), serve_args(parsed, path))
        options = Options.model_validate(
            {**dict(options), **{key: value for key, value in served.items() if value is not None}}
        )
        plan = serving.plan_of(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        report.unchecked.append(f"block size and token budget: {first['loc'][0]}: {first['msg']}")
        return None
    except IllegalValue as error:
        fix = "vLLM refuses it at start-up: correct it in the file"
        report.problems.append(Found(what=str(error), fix=fix))
        return None
    except PlanError as error:
        report.unchecked.append(f"block size and token budget: {error}")
        return None
    report.block_tokens = plan.native.block_tokens
    return plan


def _requirement_warnings(recipe: Recipe, vllm: str | None) -> list[Found]:
    """A vLLM beside the one that the recipe was made for."""
    wanted = recipe.requires.get("vllm")
    if wanted is None or vllm is None:
        return []
    try:
        inside = SpecifierSet(wanted).contains(Version(vllm).public, prereleases=True)
    except InvalidVersion:
        inside = False
    if inside:
        return []
    return [
        Found(
            what=f"the recipe requires vllm {wanted}, and the flags were read by {vllm}",
            fix=f"run preflight again where vllm {wanted} is installed",
        )
    ]
