"""What the real engine's configuration finds in a serve.yaml, beside what preflight finds.

In: a folder with a tiny model and `*.yaml`. Out, on the last line, for each file: the facts that
the platform gathers from vLLM's configuration or the problems that it refuses with, and the facts
and problems of preflight.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_gaudi_ext import facts
from vllm_gaudi_ext.planner.serve_args import parse_serve_yaml
from vllm_gaudi_ext.preflight.run import preflight
from vllm_gaudi_ext.preflight.serving import serving_facts


def main() -> None:
    """Reads the folder that the first argument names."""
    answers: dict[str, Any] = {}
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        from vllm.engine.arg_utils import AsyncEngineArgs

        parsed = parse_serve_yaml(path)
        answer: dict[str, Any] = {
            "preflight": [
                f"{p.what} -> {p.fix}" for p in preflight(path, platform="gaudi3").problems
            ],
            "read": dataclasses.asdict(serving_facts(parsed, os.environ, None)),
        }
        try:
            config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            answer["refused"] = [line.split(". ", 1)[1] for line in lines]
        else:
            answer["engine"] = dataclasses.asdict(facts.serving_facts(config))
        answers[path.stem] = answer
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
