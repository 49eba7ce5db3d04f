"""Behaviour of other projects that had to be replaced: one small file a target.

| file | target | why | can go when |
|---|---|---|---|
| runner_class.py | `vllm_gaudi.v1.worker.hpu_worker.HPUModelRunner` | the worker has no hook for it | it has |
| slot_warning.py | a log line of `HPUModelRunner._update_states` | says leak where none is | it is gone |
"""
