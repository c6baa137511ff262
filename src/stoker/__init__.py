"""stoker keeps the accelerator fed: a drop-in for ``torch.utils.data.DataLoader``."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "DataLoader",
    "FeistelSampler",
    "StokerError",
    "StokerWarning",
    "install",
    "installed",
    "mean_std",
    "share",
    "tune",
    "uninstall",
    "watch",
]
_ROOMS = {
    "StokerError": ".errors",
    "StokerWarning": ".errors",
    "FeistelSampler": ".source",
    "mean_std": ".stats",
    "share": ".shared",
    "tune": ".tuning.entry",
    "watch": ".session",
}  # all else is in .loader

if TYPE_CHECKING:
    from .errors import StokerError, StokerWarning
    from .loader import DataLoader, install, installed, uninstall
    from .session import watch
    from .shared import share
    from .source import FeistelSampler
    from .stats import mean_std
    from .tuning.entry import tune


def __getattr__(name: str) -> Any:
    # Looked up when first used: ``stoker check`` and a worker that starts need no torch loader of ours.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_ROOMS.get(name, ".loader"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
