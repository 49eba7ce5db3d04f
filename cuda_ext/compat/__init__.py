"""vLLM behaviour that is replaced or differs by version: one small file for each target.

Each says what it replaces, why, in which versions, and when it can go.
"""
