"""Out-of-tree model classes: vLLM's own, with the page of a ReplaySSM layer.

vLLM asks the model class for the state's shapes before it builds a layer, to choose the block size;
the layer gives the same shapes for its KV-cache spec. Importing a module of this folder registers
the out-of-tree layer, which is always before a layer is made.
"""
