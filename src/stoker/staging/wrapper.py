"""A dataset around another one: all attributes but a few of its own are those of the dataset inside.

In a ``worker_init_fn``, ``info.dataset.rng = ...`` means the script's dataset, whatever stands around it. Kept in the
outer object, the value would reach neither the samples nor the comparison that looks for changes.
"""

from __future__ import annotations

import sys

from torch.utils.data import Dataset

from ..core.types import Sample
from .library_objects import Held

OWN_CODE = ("stoker", "stoker_ray")


class Wrapper(Dataset[Sample]):
    """Passes attributes on to ``dataset``. A subclass calls ``_seal`` when all of its own are set."""

    dataset: Held  # the one inside

    def _seal(self) -> None:
        """From now on, attributes with other names belong to the dataset inside."""
        self.__dict__["_own"] = frozenset((*self.__dict__, "_own"))

    def _pass_on(self) -> None:
        """Moves what was set by ``vars(wrapper)["rng"] = ...`` into the dataset inside. Call before each use of it."""
        held = self.__dict__
        own = held.get("_own")
        if own is not None and len(held) > len(own):  # as a rule not
            inner: object = self.dataset
            for name in held.keys() - own:
                vars(inner)[name] = held.pop(name)

    def _is_own(self, name: str) -> bool:
        """Whether a name is meant for this object. If both have it, only stoker's code means this one."""
        own = self.__dict__.get("_own")
        if own is None or name.startswith("__"):
            return True
        if name not in own and not hasattr(type(self), name):
            return False
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        return caller.partition(".")[0] in OWN_CODE or not hasattr(self.dataset, name)

    def __getattr__(self, name: str) -> Held:
        # .classes, .targets and other attributes that scripts read from their dataset
        if name.startswith("__") or "dataset" not in self.__dict__ or name in self.__dict__.get("_own", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._pass_on()
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._pass_on()
            setattr(self.dataset, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            self._pass_on()
            delattr(self.dataset, name)
