"""stoker keeps the accelerator fed: a drop-in for ``torch.utils.data.DataLoader``."""

from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

__all__ = [
    "AllRanks",
    "DataLoader",
    "FeistelSampler",
    "Staged",
    "StokerError",
    "StokerWarning",
    "empty",
    "install",
    "installed",
    "mean_std",
    "shard",
    "share",
    "split",
    "to_device",
    "tune",
    "uninstall",
    "watch",
]
_MODULES = {
    "bench": ".commands.bench",
}  # documented as stoker.bench.measure and so on
_HOMES = {
    "AllRanks": ".loader.all_ranks",
    "StokerError": ".core.errors",
    "StokerWarning": ".core.errors",
    "FeistelSampler": ".sampling.order",
    "mean_std": ".commands.stats",
    "empty": ".workers.collate",
    "install": ".staging.install",
    "installed": ".staging.install",
    "uninstall": ".staging.install",
    "Staged": ".staging.dataset",
    "shard": ".sampling.shard",
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
    from .loader.all_ranks import AllRanks
    from .loader.dataloader import DataLoader
    from .sampling.order import FeistelSampler
    from .sampling.shard import shard
    from .staging.dataset import Staged
    from .staging.install import install, installed, uninstall
    from .staging.split import split
    from .tuning.api import tune
    from .workers.collate import empty


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext stoker``: the magics ``%%stoker`` and ``%stoker_apply`` (docs/notebooks.md)."""
    from .integrations import notebook

    notebook.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext stoker``."""
    from .integrations import notebook

    notebook.unload(shell)


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
