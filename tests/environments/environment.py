"""Makes the project's virtual environments, and runs a command in one of them.

    python3 tests/environments/environment.py dev -- ruff check .
    python3 tests/environments/environment.py gaudi -- python -m pytest
    python3 tests/environments/environment.py gaudi-or-dev -- python -m pytest
    python3 tests/environments/environment.py cpu-or-dev -- python -m pytest tests/replay

`gaudi` holds vLLM 0.26.0 and vllm-gaudi, `cpu` vLLM 0.31.0 for CPUs, `dev` no engine. Each is a
folder below .venvs/ with the packages of its pinned list beside this file and this project
(editable). A stamp holds hashes of the pins and of pyproject.toml, so that a later call finds it
made, at the cost of two small reads; what no longer fits its stamp is installed anew.

`gaudi-or-dev` takes `dev` where vllm-gaudi can't be had, and tells the command why in the variable
GAUDI_ENV_MISSING. Only two reasons count: no Python that vLLM and vllm-gaudi run on, and no
vllm-gaudi, neither as a wheel in pip's find-links folders nor from its public repository. Anything
else that fails is an error. `cpu-or-dev` does the same for `cpu`, which only a missing Python can
excuse, with CPU_ENV_MISSING. The standard library is enough to run this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENVS = ROOT / ".venvs"
PIP = "pip==26.2"
GAUDI_VERSION = "0.26.0"
GAUDI_REPOSITORY = "https://github.com/vllm-project/vllm-gaudi"
GAUDI_TAG = f"v{GAUDI_VERSION}"
# The commit that the tag named when the test suite was first run; a tag can be moved.
GAUDI_COMMIT = "b059f9c95d6a07f19eb00aa06d1ec8b87b296437"

REACH_SECONDS = 20
INSTALL_SECONDS = 3000
PROGRESS_SECONDS = 15
PRINT_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


class EnvironmentFailure(Exception):
    """An environment could not be made; the text says why."""


class EngineMissing(EnvironmentFailure):
    """An environment with an engine can't be had on this machine, for a reason that is excused."""


@dataclass(frozen=True)
class Environment:
    """What goes into a virtual environment.

    Args:
        name: its folder below .venvs/.
        pythons: versions it may be made with, the preferred first.
        pins: pinned list, installed with the packages' own dependencies.
        bare_pins: pinned list, installed without them; None for none.
        engine: whether an engine is its purpose, so that tests may go on without it.
        gaudi: whether vllm-gaudi belongs in it.
        site_files: files below the project's root that its site-packages get a copy of.
    """

    name: str
    pythons: tuple[str, ...]
    pins: str
    bare_pins: str | None = None
    engine: bool = False
    gaudi: bool = False
    site_files: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return VENVS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def stamp(self) -> dict[str, str]:
        """Hashes of all that the environment is made from."""
        recipe = hashlib.sha256(repr((PIP, self.gaudi and GAUDI_COMMIT)).encode())
        for name in filter(None, (self.pins, self.bare_pins)):
            recipe.update((HERE / name).read_bytes())
        for name in self.site_files:
            recipe.update((ROOT / name).read_bytes())
        package = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
        # An editable install and the scripts of an environment hold the path of their folder.
        return {
            "pins": recipe.hexdigest(),
            "package": package.hexdigest(),
            "folder": str(self.folder),
        }


ENVIRONMENTS = {
    # 3.11 first: a CPU build of torch is more often at hand for it.
    "gaudi": Environment(
        "gaudi",
        ("3.11", "3.12", "3.10"),
        "gaudi.txt",
        "gaudi-no-deps.txt",
        engine=True,
        gaudi=True,
    ),
    "cpu": Environment(
        "cpu",
        ("3.11", "3.12", "3.10", "3.13"),
        "cpu.txt",
        "cpu-no-deps.txt",
        engine=True,
        site_files=(
            # What these two mend has nothing to do with the emulated device.
            "tests/emulated_hpu/path/hpu_emulation/torchvision_schema.py",
            "tests/emulated_hpu/path/hpu_emulation/vllm_distribution.py",
            "tests/environments/cpu.pth",
        ),
    ),
    "dev": Environment("dev", ("3.11", "3.12", "3.13", "3.10"), "dev.txt"),
}
OR_DEV = {
    f"{name}-or-dev": name for name, environment in ENVIRONMENTS.items() if environment.engine
}
"""For each name with a way out, the environment that it prefers to `dev`."""


def say(text: str) -> None:
    """One line of progress, on stderr, so that a command's own output stays clean."""
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Runs the commands that make one environment, with a line for each and one log file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = VENVS / f"{name}.log"
        self.log.unlink(missing_ok=True)
        self.started = time.monotonic()

    def run(
        self,
        what: str,
        command: Sequence[str | Path],
        *,
        limit: float = INSTALL_SECONDS,
        env: dict[str, str] | None = None,
    ) -> None:
        """Run a command quietly, and say how long it takes.

        Raises:
            EnvironmentFailure: it failed or ran past `limit` seconds; with the end of its output.
        """
        began = time.monotonic()
        say(f"[{self.name}] {what} ...")
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            mark = log.tell()
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=dict(os.environ) | (env or {}),
                start_new_session=True,
            )
            try:
                code = self._wait(process, what, began, limit)
            finally:
                if process.poll() is None:
                    # With what it started: a build, a git.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.monotonic() - began
        if code != 0:
            reason = f"exit code {code}" if code is not None else f"no end after {limit:.0f} s"
            raise EnvironmentFailure(f"{what}: {reason}\n{self._tail(mark)}")
        say(f"[{self.name}] {what}: {seconds:.0f} s")

    def _wait(
        self, process: subprocess.Popen[bytes], what: str, began: float, limit: float
    ) -> int | None:
        while True:
            left = began + limit - time.monotonic()
            if left <= 0:
                return None
            try:
                return process.wait(min(PROGRESS_SECONDS, left))
            except subprocess.TimeoutExpired:
                say(f"[{self.name}] {what} ... {time.monotonic() - began:.0f} s")

    def _tail(self, mark: int) -> str:
        with self.log.open(errors="replace") as log:
            log.seek(mark)
            lines = [line for line in log.read().splitlines() if not _noise(line)]
        return "\n".join([f"    {line[:300]}" for line in lines[-12:]] + [f"    (log: {self.log})"])


def _noise(line: str) -> bool:
    return not line.strip() or "is ignored: it is neither a file nor a directory" in line


def usable_pythons(versions: Sequence[str]) -> Iterator[str]:
    """Interpreters on PATH of one of `versions` that can make a virtual environment."""
    names = [f"python{version}" for version in versions] + ["python3", "python"]
    for name in dict.fromkeys(names):
        # Called rather than only found: a version manager leaves names that start nothing.
        if _output([name, "-c", f"import ensurepip; {PRINT_VERSION}"]) in versions:
            yield name


def _output(command: Sequence[str], limit: float = REACH_SECONDS) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            env=dict(os.environ) | {"GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def pip_of(environment: Environment) -> list[str | Path]:
    """The environment's pip, quiet and without questions."""
    return [environment.python, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]


def find_links(environment: Environment) -> list[str]:
    """pip's find-links places, from its files and from the variable, which hides the files'."""
    places = []
    for key in ("global.find-links", "install.find-links"):
        # Not by pip_of: a quiet pip does not print the value either.
        get = [str(environment.python), "-m", "pip", "config", "get", key]
        places += (_output(get) or "").split()
    return list(dict.fromkeys([*places, *os.environ.get("PIP_FIND_LINKS", "").split()]))


def gaudi_wheel(environment: Environment, steps: Steps) -> Path:
    """A wheel of vllm-gaudi, kept in .venvs/wheels.

    It is on no registry, so no registry is asked for it: whatever lay there under its name would be
    a stranger's.

    Raises:
        EngineMissing: neither pip's find-links places nor its public repository have it.
    """
    folder = VENVS / "wheels"
    folder.mkdir(exist_ok=True)

    def found() -> Path | None:
        return next(iter(sorted(folder.glob(f"vllm_gaudi-{GAUDI_VERSION}-*.whl"))), None)

    if wheel := found():
        return wheel
    pip, places = pip_of(environment), find_links(environment)
    get = [*pip, "wheel", "--no-deps", "--no-cache-dir", "-w", folder]
    links = [f"--find-links={place}" for place in places]
    reasons = [f"no wheel of it in pip's find-links ({' '.join(places) or 'none is set'})"]
    with contextlib.suppress(EnvironmentFailure):
        what = f"vllm-gaudi {GAUDI_VERSION} from pip's find-links"
        steps.run(what, [*get, "--no-index", *links, f"vllm-gaudi=={GAUDI_VERSION}"], limit=120)
    if wheel := found():
        return wheel
    # Asked with git first, which gives up soon where there is no network.
    tag = f"refs/tags/{GAUDI_TAG}"
    answer = _output(["git", "ls-remote", GAUDI_REPOSITORY, tag, f"{tag}^{{}}"])
    if not answer:
        reasons.append(f"{GAUDI_REPOSITORY} gave no {GAUDI_TAG} within {REACH_SECONDS} s")
        raise EngineMissing(f"vllm-gaudi {GAUDI_VERSION} can't be had: " + "; ".join(reasons))
    if GAUDI_COMMIT not in re.findall(r"^[0-9a-f]{40}", answer, re.MULTILINE):
        raise EnvironmentFailure(
            f"{GAUDI_TAG} of {GAUDI_REPOSITORY} is no longer {GAUDI_COMMIT} but {answer!r}"
        )
    source = f"git+{GAUDI_REPOSITORY}@{GAUDI_COMMIT}"
    version = {"SETUPTOOLS_SCM_PRETEND_VERSION": GAUDI_VERSION, "GIT_TERMINAL_PROMPT": "0"}
    steps.run(
        f"vllm-gaudi {GAUDI_VERSION} from its public tag", [*get, source], limit=600, env=version
    )
    if wheel := found():
        return wheel
    raise EnvironmentFailure(f"{source} built no wheel of version {GAUDI_VERSION}")


def make(environment: Environment) -> None:
    """Make the environment, or bring it up to its pins; nothing where its stamp says it is there.

    Raises:
        EngineMissing: it needs vllm-gaudi or a Python that can't be had.
        EnvironmentFailure: an install failed.
    """
    VENVS.mkdir(exist_ok=True)
    wanted = environment.stamp()
    if _read_stamp(environment) == wanted:
        return
    with (VENVS / f".{environment.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"[{environment.name}] waiting for another process that is making it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        had = _read_stamp(environment)
        if had == wanted:
            return
        steps = Steps(environment.name)
        _make_venv(environment, steps, keep=not had or had.get("folder") == wanted["folder"])
        pip = pip_of(environment)
        if had.get("pins") != wanted["pins"] or had.get("folder") != wanted["folder"]:
            _stamp_file(environment).unlink(missing_ok=True)
            # First, since this alone may be missing; it does with the pip that venv brought.
            wheel = gaudi_wheel(environment, steps) if environment.gaudi else None
            steps.run("pip", [*pip, "install", PIP])
            _install_pins(environment, steps)
            if wheel is not None:
                steps.run(f"install {wheel.name}", [*pip, "install", "--no-deps", wheel])
            _copy_site_files(environment)
        # The build tools are pinned too, so pip has nothing to fetch for this.
        here = ["--no-deps", "--no-build-isolation", "-e", ROOT]
        steps.run("install this project", [*pip, "install", *here])
        _stamp_file(environment).write_text(json.dumps(wanted, indent=1) + "\n")
        say(f"[{environment.name}] ready in {time.monotonic() - steps.started:.0f} s")


def _make_venv(environment: Environment, steps: Steps, *, keep: bool) -> None:
    """A virtual environment with a working Python; one that is there is kept if it may be."""
    if keep and _output([str(environment.python), "-c", PRINT_VERSION]) in environment.pythons:
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    failures = []
    for python in usable_pythons(environment.pythons):
        try:
            steps.run(f"venv with {python}", [python, "-m", "venv", environment.folder])
            return
        except EnvironmentFailure as failure:
            failures.append(str(failure))
            shutil.rmtree(environment.folder, ignore_errors=True)
    wanted = f"Python {' or '.join(sorted(environment.pythons, key=_number))}"
    if failures:
        raise EnvironmentFailure("\n".join(failures))
    missing = f"no {wanted} (with venv) on PATH"
    raise EngineMissing(missing) if environment.engine else EnvironmentFailure(missing)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _install_pins(environment: Environment, steps: Steps) -> None:
    install = [*pip_of(environment), "install"]
    # A CPU build of torch in a folder beats the index's CUDA build: same version, local part.
    links = [f"--find-links={place}" for place in find_links(environment)]
    count = sum("==" in line for line in (HERE / environment.pins).read_text().splitlines())
    pins = ["-r", HERE / environment.pins]
    steps.run(f"{count} pinned packages ({environment.pins})", [*install, *links, *pins])
    if environment.bare_pins:
        bare = ["--no-deps", "-r", HERE / environment.bare_pins]
        steps.run(f"pinned packages of {environment.bare_pins}", [*install, *links, *bare])


def _copy_site_files(environment: Environment) -> None:
    if not environment.site_files:
        return
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = _output([str(environment.python), "-c", ask])
    if not folder:
        raise EnvironmentFailure(f"{environment.python} does not say where its packages lie")
    for name in environment.site_files:
        shutil.copy(ROOT / name, folder)


def _stamp_file(environment: Environment) -> Path:
    return environment.folder / "made.json"


def _read_stamp(environment: Environment) -> dict[str, str]:
    try:
        stamp = json.loads(_stamp_file(environment).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and environment.python.exists() else {}


def prepare(name: str) -> tuple[Environment, dict[str, str]]:
    """Make the environment `name`, and give it with further variables for a command in it."""
    wanted = ENVIRONMENTS[OR_DEV.get(name, name)]
    try:
        make(wanted)
        return wanted, {}
    except EngineMissing as missing:
        if name not in OR_DEV:
            raise
        reason = " ".join(str(missing).split())
    say(f"[{wanted.name}] {reason}; going on without the engine")
    make(ENVIRONMENTS["dev"])
    return ENVIRONMENTS["dev"], {f"{wanted.name.upper()}_ENV_MISSING": reason}


def main(arguments: Sequence[str]) -> int:
    """See the module's text. A command that is given replaces this process."""
    names = [*ENVIRONMENTS, *OR_DEV]
    if not arguments or arguments[0] not in names or arguments[1:2] not in ([], ["--"]):
        say(f"usage: environment.py {'|'.join(names)} [-- COMMAND ...]")
        return 2
    try:
        environment, extra = prepare(arguments[0])
    except EnvironmentFailure as failure:
        say(f"environment {arguments[0]}: {failure}")
        return 1
    command = list(arguments[2:])
    if not command:
        return 0
    binaries = environment.python.parent
    variables = dict(os.environ) | extra | {"VIRTUAL_ENV": str(environment.folder)}
    variables["PATH"] = f"{binaries}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables.pop("PYTHONHOME", None)
    program = shutil.which(command[0], path=variables["PATH"])
    if program is not None:
        os.execve(program, command, variables)
    say(f"environment {environment.name}: no command {command[0]!r}")
    return 127


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
