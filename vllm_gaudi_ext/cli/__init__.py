"""The command line `gaudi-ext`: one file a command, each imported only when it is called."""

from vllm_gaudi_ext.cli.app import main

__all__ = ["main"]
