"""The emulated device behind this folder's `habana_frameworks`; see ../README.md.

Modules: `activation` (when any of this may run), `device` (device "hpu" becomes memory of the
CPU), `rules` (what tests switch on: shape counts, host-sync refusal, an ordered log), `ops`
(`torch.ops.hpu`), `torchvision_schema` (an import repair that has nothing to do with devices).
This file imports nothing, because every Python process started with the folder on PYTHONPATH
passes through it.
"""
