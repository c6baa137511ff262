"""The version, where modules that need it can import it without the package's names."""

__version__ = "0.1.0"
