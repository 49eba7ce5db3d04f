"""Correct prefix caching for Gated DeltaNet hybrids on Intel Gaudi, from outside of vllm-gaudi.

Importing this package imports neither torch, nor vLLM, nor vllm-gaudi: vLLM imports it while it
looks for platform plugins, when none of them may be imported yet.
"""

from vllm_gaudi_ext.version import __version__

__all__ = ["__version__"]
