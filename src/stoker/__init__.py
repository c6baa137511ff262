"""stoker keeps the accelerator fed: a drop-in for ``torch.utils.data.DataLoader``."""

from .errors import StokerError
from .loader import DataLoader, install, installed, uninstall

__version__ = "0.1.0"
__all__ = ["DataLoader", "StokerError", "install", "installed", "uninstall"]
