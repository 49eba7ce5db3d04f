"""Bridge configuration; there is no bridge to configure."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def env_setting(name: str, value: object) -> Iterator[None]:
    """Would set a bridge variable for the length of the block."""
    yield


def get_pt_compile_only_mode() -> bool:
    """Whether graphs are compiled without running: never."""
    return False
