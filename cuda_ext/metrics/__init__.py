"""ReplaySSM's figures on the /metrics page of vLLM's own API server.

- `counts.py` turns what vLLM reports of one engine step into increments, on plain ints.
- `exposition.py` holds the prometheus_client objects.
- `stat_logger.py` is what vLLM loads, in the front-end process: its `vllm.stat_logger_plugins`.

Nothing runs in the engine, let alone on the device: vLLM has no public way to carry a worker's own
numbers to the front end, but it tells every stat logger, step by step, how many rows the scheduler
had verified and how many of them were accepted. What follows from that is exported, and each
metric's help says how it is counted; what does not, the planner's own cursors say, is not.
"""
