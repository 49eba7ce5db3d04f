"""Out-of-tree layers: vLLM's Gated DeltaNet layer with one state and a ring."""
