"""Bridge metrics: nothing is compiled, so every count is 0."""

import contextlib
from collections.abc import Iterator


class Metric:
    """A metric that never counted anything."""

    def stats(self) -> list[tuple[str, int]]:
        """The (name, value) pairs."""
        return [("TotalNumber", 0)]


def metric_global(name: str) -> Metric:
    """The process-wide metric `name`."""
    return Metric()


@contextlib.contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """The metric `name` for the length of the block."""
    yield Metric()
