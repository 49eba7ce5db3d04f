"""The prometheus_client objects of ReplaySSM, named and labelled as vLLM's own.

prometheus_client is a dependency of vLLM, and only the stat logger imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge

from cuda_ext.metrics.counts import Step

PREFIX = "gaudi_ext:replay_"
LABELS = ("model_name", "engine")

COUNTERS = {
    "verifications": (
        "Verifications: steps of a request after its prompt, with or without drafts. One too many "
        "for each request that was preempted after its first token."
    ),
    "folds": (
        "Steps of a request that started by folding the rows accepted in its last one. Derived: "
        "verifications, but for the last of each finished request; one too many for each aborted "
        "and up to two for each preempted request. A prompt's last chunk of no more rows than a "
        "verification is folded too, and not counted."
    ),
    "rows_verified": (
        "Rows that verifications computed: one each, and one for each draft that no grammar had "
        "ruled out."
    ),
    "rows_accepted": (
        "Rows that verifications left in the ring for the request's next step to fold: one each, "
        "and one for each accepted draft. Rows folded are these, but for the last ones (at most "
        "one more than the drafts of a step) of each request that finished, was aborted or "
        "preempted."
    ),
}
"""Counters, which are the fields of `Step` by the same name, and what they say of themselves."""

GAUGES = {
    "slots_in_use": (
        "Requests that hold a slot, after the last step; a slot is one block of each KV-cache "
        "group of GDN layers."
    ),
    "pool_slots": (
        "Blocks of the pool that slots are taken from, which attention shares; without the null "
        "block. Absent where this server serves several engines."
    ),
    "ring_occupancy_perc": (
        "Rows that wait in a ring for the next fold, of the rows of a ring: mean over the requests "
        "whose drafts the last step verified. 1 means 100 percent."
    ),
    "ring_occupancy_max_perc": (
        "The same of the request with most. At rest it stays at or below one half."
    ),
}
"""Gauges, and what they say of themselves."""

INFO = "What ReplaySSM was started with; the value is always 1."

_exposed: list[Any] = []


class ReplayMetrics:
    """Registers the metrics of one deployment with vLLM's registry, in place of any earlier ones.

    Args:
        model_name: the served model's.
        engines: index of each engine that this process hears of.
        ring_rows: R.
        info: labels of the metric that says what was started.
    """

    def __init__(
        self, model_name: str, engines: Sequence[int], ring_rows: int, info: Mapping[str, str]
    ) -> None:
        # A second engine in one process brings its own; vLLM drops its own in the same way.
        withdraw()
        self._ring_rows = ring_rows
        self._model = model_name
        self._counters = {
            name: Counter(PREFIX + name, text, LABELS) for name, text in COUNTERS.items()
        }
        self._gauges = {
            # As vLLM's own: of several API servers the one that heard last knows best.
            name: Gauge(PREFIX + name, text, LABELS, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        started = Gauge(PREFIX + "info", INFO, (*LABELS, *info), multiprocess_mode="mostrecent")
        _exposed.extend((*self._counters.values(), *self._gauges.values(), started))
        for engine in engines:
            started.labels(model_name, str(engine), *info.values()).set(1)

    def observe(self, engine: int, step: Step) -> None:
        """Add one report of an engine."""
        for name, counter in self._counters.items():
            counter.labels(self._model, str(engine)).inc(getattr(step, name))
        if step.slots_in_use is not None:
            self._set("slots_in_use", engine, step.slots_in_use)
        if step.waiting is not None:
            self._set("ring_occupancy_perc", engine, step.waiting.mean / self._ring_rows)
            self._set("ring_occupancy_max_perc", engine, step.waiting.most / self._ring_rows)

    def set_pool(self, engine: int, slots: int) -> None:
        """Say how many blocks the pool of an engine has, the null block left out."""
        self._set("pool_slots", engine, slots)

    def _set(self, name: str, engine: int, value: float) -> None:
        self._gauges[name].labels(self._model, str(engine)).set(value)


def withdraw() -> None:
    """Take all metrics of ReplaySSM off the page of this process."""
    while _exposed:
        REGISTRY.unregister(_exposed.pop())
