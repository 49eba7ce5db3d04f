"""`gaudi-ext preflight`: whether a serve.yaml is legal, before anything is started.

structure.py checks the file as YAML, arguments.py asks the installed vLLM's own parser, serving.py
asks the engine's refusals and the planner, and run.py puts the three together.
"""
