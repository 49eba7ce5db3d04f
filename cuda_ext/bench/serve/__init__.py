"""`gaudi-ext bench serve`: stock vLLM and ReplaySSM side by side, from one YAML."""
