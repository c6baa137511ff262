"""The version, in a module that can be imported without the package's names."""

__version__ = "0.1.0"
