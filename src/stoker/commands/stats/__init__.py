"""Mean and standard deviation of an image dataset, a channel at a time, and what else its samples show: ranges, NaN,
shapes, and those that cannot be read. ``images`` runs in workers, which send ``moments`` and never pixels; ``reading``
merges them into a ``result``."""

from .reading import mean_std
from .result import Channels, ImageStats

__all__ = ["Channels", "ImageStats", "mean_std"]
