"""Puts the data of this folder's tests on the path. Nothing here needs torch or vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
