"""Reads a small text file that an operator named, or says in one line why it can't be read."""

from __future__ import annotations

import stat
from pathlib import Path

from vllm_gaudi_ext.planner.errors import PlanError


def read_small_text(path: Path, what: str, limit: int) -> str:
    """The text of a regular UTF-8 file.

    Args:
        path: the file.
        what: what it should be, such as "config.json"; for the messages.
        limit: the most bytes that it may have; nothing of a larger one is read.

    Raises:
        PlanError: it is missing, not a regular file, too large, or not UTF-8.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise PlanError(f"{path}: not a regular file")
        if info.st_size > limit:
            raise PlanError(
                f"{path}: {info.st_size / 1e6:.1f} MB is too large for a {what} "
                f"(limit {limit / 1e6:.0f} MB)"
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8 text, so not a {what}") from None
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
