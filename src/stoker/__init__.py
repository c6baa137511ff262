"""stoker keeps the accelerator fed: a drop-in for ``torch.utils.data.DataLoader``."""

from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

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
]
_MODULES = {
    "bench": ".commands.bench",
    "chunks": ".sampling.chunks",
}  # documented as stoker.bench.measure and so on
_HOMES = {
    "StokerError": ".core.errors",
    "StokerWarning": ".core.errors",
    "ChunkSampler": ".sampling.chunks",
    "FeistelSampler": ".sampling.order",
    "mean_std": ".commands.stats",
    "empty": ".workers.collate",
    "install": ".staging.install",
    "installed": ".staging.install",
    "uninstall": ".staging.install",
    "Staged": ".staging.dataset",
    "share": ".core.shared",
    "split": ".staging.split",
    "to_device": ".device.prefetch",
    "tune": ".tuning.api",
    "watch": ".diagnosis.session",
}  # DataLoader is in .loader.dataloader

if TYPE_CHECKING:
    from .commands import bench as bench
    from .commands.stats import mean_std
    from .core.errors import StokerError, StokerWarning
    from .core.shared import share
    from .device.prefetch import to_device
    from .diagnosis.session import watch
    from .loader.dataloader import DataLoader
    from .sampling import chunks as chunks
    from .sampling.chunks import ChunkSampler
    from .sampling.order import FeistelSampler
    from .staging.dataset import Staged
    from .staging.install import install, installed, uninstall
    from .staging.split import split
    from .tuning.api import tune
    from .workers.collate import empty


def __getattr__(name: str) -> Any:
    # Looked up when first used: ``stoker check`` and a worker that starts need no torch loader of ours.
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name], __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, ".loader.dataloader"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
