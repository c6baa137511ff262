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
_MODULES = ("chunks", "image", "readahead")  # stoker.staging.image.read
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
    from .commands.stats import mean_std
    from .core.errors import StokerError, StokerWarning
    from .core.shared import share
    from .device.prefetch import to_device
    from .diagnosis.session import watch
    from .loader.dataloader import DataLoader
    from .loader.install import install, installed, uninstall
    from .sampling import chunks, readahead
    from .sampling.chunks import ChunkSampler
    from .sampling.order import FeistelSampler
    from .staging import image
    from .staging.dataset import Staged
    from .staging.estimate import worth
    from .staging.split import split
    from .tuning.api import tune
    from .workers.collate import empty


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
