"""Runs preflights in a process that may import vLLM: JSON in, JSON out.

In: a list of [path, platform or null]. Out, on the last line: a list of reports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_gaudi_ext.preflight.run import preflight


def main() -> None:
    """Reads the list from the file that the first argument names."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    reports = [preflight(Path(path), platform=platform) for path, platform in asked]
    print(json.dumps([{**r.model_dump(), "exit_code": r.exit_code} for r in reports]))


if __name__ == "__main__":
    main()
