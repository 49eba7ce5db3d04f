"""Stands in for `vllm serve` and for its client; what they do hangs on the name of the model.

`deaf`: the server is never ready and hears no SIGTERM. It has an engine of its own, whose process
is in `engine.pid` beside the file of flags. All others serve, and say in their metrics whether
prefix caching was switched off on the command line. The client of `killed` kills its server and
goes on for ever; that of `sick` makes its server answer 503, and ends well with a result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

FOR_EVER = 600


def value(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def tell(file: Path, pid: int) -> None:
    part = file.with_suffix(".part")
    part.write_text(str(pid))
    part.rename(file)


def deaf(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOR_EVER})"])
    tell(folder / "engine.pid", engine.pid)
    time.sleep(FOR_EVER)


class Answers(BaseHTTPRequestHandler):
    well = True

    def do_GET(self) -> None:
        caching = "--no-enable-prefix-caching" not in sys.argv
        labels = f'num_gpu_blocks="64",enable_prefix_caching="{caching}"'
        said = {
            "/health": "",
            "/metrics": f"vllm:cache_config_info{{{labels}}} 1.0\n",
            "/version": json.dumps({"version": "stub"}),
        }
        self.answer(200 if self.well else 503, said[self.path])

    def do_POST(self) -> None:
        type(self).well = False
        print("RuntimeError: the engine is sick", flush=True)
        self.answer(200, "")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def client(model: str) -> None:
    folder = Path(value("--result-dir"))
    if model == "killed":
        tell(folder / "client.pid", os.getpid())
        os.kill(int((folder / "server.pid").read_text()), signal.SIGKILL)
        time.sleep(FOR_EVER)
    urllib.request.urlopen(value("--base-url") + "/sick", data=b"").close()
    Path(folder / value("--result-filename")).write_text("{}")


if sys.argv[1] == "bench":
    client(value("--model"))
else:
    flags = Path(value("--config"))
    if yaml.safe_load(flags.read_text())["model"] == "deaf":
        deaf(flags.parent)
    tell(flags.with_name("server.pid"), os.getpid())
    ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Answers).serve_forever()
