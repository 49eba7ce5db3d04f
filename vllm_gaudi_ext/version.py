"""The package's version, in the one place where code and packaging read it."""

__version__ = "0.1.0"
