"""ReplaySSM for Gated DeltaNet layers on NVIDIA GPUs: one state and a short ring of inputs.

Nothing here serves a request yet: `ring.py` accounts for the page that will hold state and ring, so
that the planner can reckon with it; the layer, its kernels and their benchmarks are still to come.
Importing this package imports neither torch, nor Triton, nor vLLM.
"""
