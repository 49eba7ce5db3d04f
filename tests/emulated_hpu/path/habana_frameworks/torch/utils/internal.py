"""Which execution mode the bridge is in."""


def is_lazy() -> bool:
    """False: eager mode, the one that PT_HPU_LAZY_MODE=0 selects on a device."""
    return False
