"""Runs the tests, each part in its environment: `make test` and `make test-full`.

    python3 tests/environments/suite.py [--full] [ARGUMENTS OF PYTEST]

Three parts: `tests/replay` needs vLLM 0.31.0 for CPUs (environment `cpu`); `tests/kernels` runs in
the same, but in processes of its own, where nothing imports Triton before its interpreter is asked
for; all else runs beside vllm-gaudi (`gaudi`). Paths among the arguments choose: a part that none
of them lies in is left out, and no file runs in two. The exit code is pytest's of the first part
that failed; where -k or -m left no test in one part, the others decide. The standard library is
enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from environment import HERE, ROOT, say
from wheels import VERSIONS, folder

REST = "gaudi-or-dev"
APART = {"tests/replay": "cpu-or-dev", "tests/kernels": "cpu-or-dev"}
"""Folders that are parts of their own, and the environment of each."""
NO_TESTS = 5
# Two processes, a file of tests to each: a file's tests share an engine.
PYTEST = ("python", "-m", "pytest", "-n", "2", "--dist", "loadfile")
WHEELS_MISSING = "VLLM_WHEELS_MISSING"
# Options of pytest whose value is the next argument, and could be read as a path.
TAKES_VALUE = frozenset(
    """
    -k -m -p -c -o -W -r -n --deselect --ignore --ignore-glob --rootdir --confcutdir --basetemp
    --junitxml --junit-xml --log-file --maxfail --durations --timeout --dist --tb --capture
    """.split()  # noqa: SIM905 - as a list, a line for each
)


@dataclass(frozen=True)
class Part:
    """One run of pytest.

    Args:
        name: what it is called.
        environment: a name that environment.py takes.
        arguments: of pytest, after those of `PYTEST`.
    """

    name: str
    environment: str
    arguments: tuple[str, ...]


def split_paths(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of pytest apart: options with their values, and paths (with `::` and names)."""
    options, paths = [], []
    value = False
    for argument in arguments:
        is_path = (
            not value and not argument.startswith("-") and (ROOT / argument.split("::")[0]).exists()
        )
        (paths if is_path else options).append(argument)
        value = argument in TAKES_VALUE
    return options, paths


def parts(arguments: Sequence[str]) -> list[Part]:
    """The parts that `arguments` ask for, in the order to be run."""
    options, paths = split_paths(arguments)
    apart: dict[str, list[str]] = {name: [] for name in APART}
    rest: list[str] = []
    for path in paths or ["tests"]:
        place = (ROOT / path.split("::")[0]).resolve()
        inside = [name for name in APART if (ROOT / name) in (place, *place.parents)]
        for name in APART:
            if name in inside:
                apart[name].append(path)
            elif place in (ROOT / name).parents:
                apart[name].append(name)
        if not inside:
            rest.append(path)
    found = []
    if rest:
        ignored = [f"--ignore={name}" for name in APART]
        found.append(Part("tests", REST, (*options, *ignored, *rest)))
    for name, environment in APART.items():
        if apart[name]:
            found.append(Part(name, environment, (*options, *dict.fromkeys(apart[name]))))
    return found


def verdict(codes: Sequence[int]) -> int:
    """The exit code of the whole, from those of the parts."""
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    if failed:
        return failed[0]
    return 0 if 0 in codes else NO_TESTS


def _words(code: int) -> str:
    return {0: "passed", NO_TESTS: "no test chosen"}.get(code, f"exit code {code}")


def _in_environment(name: str, command: Sequence[str]) -> list[str]:
    """Runs a command in an environment; none: makes it."""
    return [sys.executable, str(HERE / "environment.py"), name, "--", *command]


def _make_environments(names: Sequence[str]) -> None:
    """Make several at once: pip has work for one core, and for the net.

    One that fails says so, and again when a part asks for it, which is where it counts.
    """
    makers = [subprocess.Popen(_in_environment(name, ())) for name in names]
    for maker in makers:
        maker.wait()


def _provide_wheels() -> dict[str, str]:
    """Unpacked wheels for the tests of other versions; else a variable that says why not."""
    missing = [version for version in VERSIONS if not folder(version).is_dir()]
    if not missing:
        return {}
    # Made first, where its progress shows; its Python surely has pip.
    if subprocess.run(_in_environment("cpu-or-dev", ["true"]), check=False).returncode != 0:
        return {WHEELS_MISSING: "the environment that would fetch them could not be made"}
    say(f"Python files of vLLM {', '.join(missing)} ...")
    command = _in_environment("cpu-or-dev", ["python", str(HERE / "wheels.py"), *missing])
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return {}
    reason = done.stderr.strip()
    say(reason)
    return {WHEELS_MISSING: " ".join(reason.split()[-60:])}


def main(arguments: Sequence[str]) -> int:
    """See the module's text."""
    full = list(arguments[:1]) == ["--full"]
    given = list(arguments[full:])
    marks = [] if full else ["-m", "not slow"]
    # As many processes as cores: a second thread of each costs more than it brings.
    variables: Mapping[str, str] = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    chosen = parts([*marks, *given])
    _make_environments(list(dict.fromkeys(part.environment for part in chosen)))
    if any(part.name == "tests/replay" for part in chosen):
        variables = dict(variables) | _provide_wheels()
    codes = []
    for part in chosen:
        say(f"== {part.name}, in {part.environment}")
        command = _in_environment(part.environment, [*PYTEST, *part.arguments])
        codes.append(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)
    for part, code in zip(chosen, codes, strict=True):
        say(f"== {part.name}: {_words(code)}")
    return verdict(codes)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
