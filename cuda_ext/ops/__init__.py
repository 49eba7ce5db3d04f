"""The arithmetic of a ReplaySSM step: a reference in plain torch, and the kernels that serve.

Importing this package imports neither torch, nor Triton, nor vLLM; its modules do.
"""
