"""Many requests for many minutes, each answer checked: `python -m cuda_ext.bench.soak MODEL`.

`MODEL` is a checkpoint of the copy task, trained (bench/copy_task), or any other with `--prompts
random`. A first process answers a fixed set of prompts without drafts; a second one serves them
with ReplaySSM and drafts, in random order, at random lengths, from a pool that is too small for
all, some aborted on the way. Texts have the length that copy_task.train trains for, unless told
otherwise. job.py is what both are told, load.py draws the requests and measures the pool, engine.py
is the two processes, checks.py the gate.
"""
