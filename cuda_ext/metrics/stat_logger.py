"""The entry point of `vllm.stat_logger_plugins`: hears of each engine step in the front end.

vLLM makes it for the API server (`AsyncLLM`, vllm/v1/engine/async_llm.py) beside its own loggers,
one for all engines of data parallelism; not for the offline `LLM`, which has no /metrics page. It
filters this group by `VLLM_PLUGINS` like every other, so the entry point is called `gaudi_ext` too,
and where ReplaySSM does not serve the logger does nothing: with an HPU stack, where `VLLM_PLUGINS`
is unset and vLLM loads every plugin, and where replay is off.

Any logger of a plugin makes vLLM collect statistics even with `--disable-log-stats` (it then logs
none of them): a class has to stand here before a configuration can be looked at. But engines that
were not started by this process, because there are several API servers or the engines are headless,
then collect none. Tokens still arrive, so their rows would look like rows without drafts: an
engine's figures are therefore kept back until its scheduler has reported once. After elastic
scaling of expert parallelism vLLM makes its own loggers only, and these figures stand still.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from cuda_ext.activation import active_layout, checked_facts
from cuda_ext.metrics import exposition
from cuda_ext.metrics.counts import Step, read_step
from cuda_ext.metrics.exposition import ReplayMetrics
from cuda_ext.refusals import backend_of
from vllm_gaudi_ext import __version__, envs, plugin
from vllm_gaudi_ext.log import logger_for

logger = logger_for(__name__)


class ReplayStatLogger(AggregateStatLoggerBase):
    """Keeps the metrics of ReplaySSM, where it is active.

    Args:
        vllm_config: a vllm.config.VllmConfig.
        engine_indexes: of the engines that this process hears of.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes or [0])
        self._config = vllm_config
        self._engines = tuple(engine_indexes or [0])
        self._metrics = self._make_metrics()
        # What tokens alone told of engines whose scheduler has not reported yet.
        self._kept_back = dict.fromkeys(self._engines, Step())

    def _make_metrics(self) -> ReplayMetrics | None:
        if not envs.named_in_vllm_plugins(plugin.PLUGIN) or plugin.hpu_stack_present():
            return None
        facts, page = checked_facts(self._config), active_layout(self._config)
        if facts is None or page is None:
            return None
        info = {
            "version": __version__,
            "backend": str(backend_of(facts)),
            "drafts": str(facts.drafts),
            "ring_rows": str(page.ring_rows),
            "page_bytes": str(page.nbytes),
        }
        name = self._config.model_config.served_model_name
        return ReplayMetrics(name, self._engines, page.ring_rows, info)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add what one step of an engine did. All arguments as vLLM's loggers get them."""
        if self._metrics is None or engine_idx not in self._engines:
            return
        try:
            step = read_step(scheduler_stats, iteration_stats)
        except AttributeError as error:
            # vLLM calls these statistics unstable, and an exception here would end its serving.
            logger.warning(
                "gaudi_ext: no more metrics of ReplaySSM, this vLLM reports otherwise (%s)", error
            )
            exposition.withdraw()
            self._metrics = None
            return
        kept_back = self._kept_back.get(engine_idx)
        if kept_back is not None:
            step = step.after(kept_back)
            if scheduler_stats is None:
                self._kept_back[engine_idx] = step
                return
            del self._kept_back[engine_idx]
        self._metrics.observe(engine_idx, step)

    def log_engine_initialized(self) -> None:
        """Say how large the pool is, which is known now."""
        # vLLM adds the blocks of all engines up here, and does not say whose are how many.
        if self._metrics is None or len(self._engines) > 1:
            return
        if blocks := self._config.cache_config.num_gpu_blocks:
            self._metrics.set_pool(self._engines[0], blocks - 1)
