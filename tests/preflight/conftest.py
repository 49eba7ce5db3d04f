"""Puts this folder's helpers, and the planner tests' engine process, on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "planner")]
