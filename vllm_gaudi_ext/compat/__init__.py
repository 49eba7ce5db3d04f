"""Behaviour of other projects that had to be replaced: one small file a target.

- runner_class.py: `vllm_gaudi.v1.worker.hpu_worker.HPUModelRunner`, since the worker has no hook
  for its runner's class; can go when it has one.
- slot_warning.py: a log line of `HPUModelRunner._update_states`, which says leak where none is; can
  go with that line.
"""
