"""Device identification."""

import enum

import torch


class synDeviceType(enum.Enum):
    """Device kinds by the bridge's own names; the numbers have no meaning here."""

    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5
    synDeviceInvalid = 99


def _get_device_type() -> synDeviceType:
    """An invalid device: vllm-gaudi must not think that it tuned itself to a Gaudi."""
    return synDeviceType.synDeviceInvalid


def _data_ptr(tensor: torch.Tensor) -> int:
    """The address of the first element."""
    return tensor.data_ptr()
