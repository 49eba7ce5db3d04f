"""A CPU emulation of the parts of `habana_frameworks` that vllm-gaudi uses; see ../../README.md."""

from hpu_emulation.activation import require_active

require_active(__name__)
