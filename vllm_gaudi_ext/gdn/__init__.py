"""GDN checkpoints in attention pages: layout and plan on ints, motion on tensors."""
