"""Keeps vllm-gaudi from warning of a slot leak that is none.

Target: the warning "GDN_COMPACT free finished req=%s has NO slot! Possible leak." that
`HPUModelRunner._update_states` of vllm-gaudi 0.26.0 logs for a finished request without a slot.
Why: a preempted request has handed its slot back already, and may finish while it waits. How: a
filter that drops the warning for such requests and lets every other one through. Remove when
vllm-gaudi hands slots back on preemption by itself.
"""

from __future__ import annotations

import logging

_TEXT = "has NO slot! Possible leak"


class ReleasedSlots(logging.Filter):
    """Remembers requests that have no slot and need none: preempted, or ended before they ran."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: set[str] = set()

    def release(self, request_id: str) -> None:
        self._waiting.add(request_id)

    def settle(self, request_ids: object) -> None:
        """These requests have a slot again, or are gone."""
        self._waiting.difference_update(request_ids)  # type: ignore[arg-type]

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and _TEXT in record.msg and isinstance(record.args, tuple):
            return not any(arg in self._waiting for arg in record.args if isinstance(arg, str))
        return True

    def attach(self) -> None:
        """Makes this the one such filter of the logger that vllm-gaudi's runner uses."""
        from vllm_gaudi.v1.worker import hpu_model_runner

        logger = hpu_model_runner.logger
        for earlier in [f for f in logger.filters if isinstance(f, ReleasedSlots)]:
            logger.removeFilter(earlier)
        logger.addFilter(self)
