"""Random state of the device, which is that of the CPU."""

import torch


def manual_seed_all(seed: int) -> None:
    """Seed the generator."""
    torch.manual_seed(seed)
