"""Graph capture helpers."""


def input_hash(inputs: object) -> int:
    """A key for `inputs`; only its equality for equal inputs matters."""
    return hash(str(inputs))
