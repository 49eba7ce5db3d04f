"""The attention backend of ReplaySSM layers: the plan of a step, made once for a KV group."""
