"""stoker keeps the accelerator fed: a drop-in for ``torch.utils.data.DataLoader``."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "ChunkSampler",
    "DataLoader",
    "FeistelSampler",
    "Staged",
    "StokerError",
    "StokerWarning",
    "empty",
    "install",
    "installed",
    "mean_std",
    "share",
    "split",
    "to_device",
    "tune",
    "uninstall",
    "watch",
    "worth",
]
_MODULES = ("chunks", "image", "readahead")  # stoker.image.read
_ROOMS = {
    "StokerError": ".errors",
    "StokerWarning": ".errors",
    "ChunkSampler": ".chunks",
    "FeistelSampler": ".source",
    "mean_std": ".stats",
    "empty": ".collate",
    "install": ".installation",
    "installed": ".installation",
    "uninstall": ".installation",
    "Staged": ".staging.staged",
    "share": ".shared",
    "split": ".staging.split",
    "to_device": ".device",
    "tune": ".tuning.entry",
    "watch": ".session",
    "worth": ".staging.worth",
}  # all else is in .loader

if TYPE_CHECKING:
    from . import chunks as chunks
    from . import image as image
    from . import readahead as readahead
    from .chunks import ChunkSampler
    from .collate import empty
    from .device import to_device
    from .errors import StokerError, StokerWarning
    from .installation import install, installed, uninstall
    from .loader import DataLoader
    from .session import watch
    from .shared import share
    from .source import FeistelSampler
    from .staging.split import split
    from .staging.staged import Staged
    from .staging.worth import worth
    from .stats import mean_std
    from .tuning.entry import tune


def __getattr__(name: str) -> Any:
    # Looked up when first used: ``stoker check`` and a worker that starts need no torch loader of ours.
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ROOMS.get(name, ".loader"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
