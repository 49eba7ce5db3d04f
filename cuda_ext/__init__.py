"""ReplaySSM for Gated DeltaNet layers: one state and a short ring of inputs a request.

`plugin.py` is where vLLM comes in, `ring.py` says what a page holds, `cursor.py` what a step does
with it, `ops/` does it. Importing this package imports neither torch, nor Triton, nor vLLM.
"""
