"""Proof, from outside, that a prefix-cache hit equals a cold run on a running server.

`run_check` plays the scenarios against an OpenAI-compatible server and returns a `CheckReport`.
What is sent lies in `scenarios.py` (pure), how in `client.py`, what it means in `verdict.py`
(pure), how it reads in `report.py`; `runner.py` joins them. Nothing here imports torch or vLLM.
"""

from vllm_gaudi_ext.check.runner import CheckOptions, run_check
from vllm_gaudi_ext.check.verdict import CaseResult, CheckReport, Noise, Verdict

__all__ = ["CaseResult", "CheckOptions", "CheckReport", "Noise", "Verdict", "run_check"]
