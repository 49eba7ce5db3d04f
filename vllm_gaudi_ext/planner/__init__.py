"""What a deployment will need, computed before it starts: pure integers, neither torch nor vLLM."""
