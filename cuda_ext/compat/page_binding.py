"""Differs: how a layer is handed the views of its pages.

`MambaBase.bind_kv_cache` does it in 0.31.0 and 0.33.0 (model_executor/layers/mamba/abstract.py);
0.26.0 has no such method and assigns `kv_cache` from outside (`bind_kv_cache`, v1/worker/utils.py).
Both end in that attribute, so it is the attribute that is watched.

Until: 0.26.0, which only the override of versions starts, is no longer looked up in
tests/replay/test_compat.py. `bind_kv_cache` can then be overridden instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class WatchedPages:
    """Mixed in before a vLLM layer with states, to learn when it gets its pages."""

    _views: Sequence[torch.Tensor]

    @property
    def kv_cache(self) -> Sequence[torch.Tensor]:
        """One view [slots, ...] for each state, in page order."""
        return self._views

    @kv_cache.setter
    def kv_cache(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        # vLLM takes pages away again by something empty.
        if len(views):
            self.pages_bound(views)

    def pages_bound(self, views: Sequence[torch.Tensor]) -> None:
        """Called each time that the layer has got pages.

        Args:
            views: what `kv_cache` now holds.
        """
