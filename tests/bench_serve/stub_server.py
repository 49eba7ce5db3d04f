"""Stands in for `vllm serve`: never ready, deaf to SIGTERM, and with an engine of its own.

Beside the file of flags it writes `engine.pid`, the process of that engine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
told = Path(sys.argv[sys.argv.index("--config") + 1]).with_name("engine.pid")
part = told.with_suffix(".part")
part.write_text(str(engine.pid))
part.rename(told)
time.sleep(600)
