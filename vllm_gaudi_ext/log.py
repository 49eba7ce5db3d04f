"""Loggers below vLLM's, so that its format, level and handlers apply to ours too."""

from __future__ import annotations

import logging


def logger_for(name: str) -> logging.Logger:
    """A logger in vLLM's name tree for a module of this package.

    Args:
        name: the module's `__name__`.
    """
    from vllm.logger import init_logger

    return init_logger(f"vllm.{name}")
