"""Stands in for the engine's process: the same lines, no engine. What it does is in `STUB`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
how = os.environ["STUB"]


def say(event: str, **content: object) -> None:
    print(json.dumps({"event": event, **content}), flush=True)


print("something that another library prints")
say("ready")
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "stop":
        say("done", result={})
        break
    if how == "dies":
        print("the last words", file=sys.stderr)
        os._exit(7)
    if how == "fails":
        say("failed", error="ValueError: no memory")
        sys.exit(1)
    if how == "hangs":
        time.sleep(600)
    if command["do"] == "start":
        shown = {name: os.environ.get(name) for name in ("VLLM_PLUGINS", "EXTRA")}
        say("done", result={"environment": shown, "job": job})
    elif command["do"] == "point":
        say("progress", done=1, of=2)
        record = {
            "prompt_tokens": 3,
            "asked_tokens": 4,
            "tokens": 4,
            "ttft_s": 0.1,
            "e2e_s": 0.2,
            "error": None,
        }
        engine = {"running_max": 1, "drafts": 2, "accepted": 3}
        run = {
            "arm": command["arm"],
            "run": command["run"],
            "label": "x",
            "wall_s": 1.0,
            "prompts": "p",
        }
        say("done", result={**run, "records": [record], "engine": engine})
    else:
        say("done", result={"seconds": 0.0})
