"""Measurements of ReplaySSM's kernels; none prints a speed-up on a red correctness gate."""
