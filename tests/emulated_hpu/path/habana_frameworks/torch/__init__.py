"""The emulated bridge; importing it installs device "hpu" and `torch.hpu` in this process."""

import sys

import torch  # re-exported: vllm-gaudi imports torch from this package
from hpu_emulation import compile_backend, device, ops, torchvision_schema, vllm_distribution

from habana_frameworks.torch import core, hpex, hpu, internal, utils

__all__ = ["core", "hpex", "hpu", "internal", "torch", "utils"]

torch.hpu = hpu
sys.modules["torch.hpu"] = hpu
compile_backend.register()
device.install()
ops.define()
torchvision_schema.install()
vllm_distribution.provide()
