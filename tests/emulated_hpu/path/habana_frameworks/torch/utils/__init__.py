"""Bridge utilities."""

from habana_frameworks.torch.utils import experimental, internal

__all__ = ["experimental", "internal"]
