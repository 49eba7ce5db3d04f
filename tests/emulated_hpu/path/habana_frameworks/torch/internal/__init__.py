"""Bridge internals."""

from habana_frameworks.torch.internal import bridge_config

__all__ = ["bridge_config"]
