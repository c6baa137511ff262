"""Workers that outlive the iterator that they were started for, and serve the loader's next one.

torch starts the workers of a loader without ``persistent_workers`` again for each epoch. A fork takes some milliseconds
for each worker, and pages that the script's process then writes to are copied. If nothing that samples are made from
has changed since, new workers would equal those of the last epoch. Tasks then come with a base seed, for which a worker
sets its random generators to where a new worker's would begin. A worker that waits for half a second leaves: it has
copies of all pipes that the script had open.

The engine asks for it only where its caller (``tuning.kept_epochs``) has set ``LoaderState.keeps_workers``.
"""

from __future__ import annotations

import types
import weakref
from dataclasses import fields

from torch.utils.data import Subset

from ..core import reclaim
from ..workers.process_pool import ProcessPool
from ..workers.protocol import Pool, WorkerSpec

OF_AN_ITERATOR = ("base_seed", "part_epochs", "tokens")  # fields of a spec that differ between iterators


class KeptWorkers:
    """The workers of an iterator that has ended. ``pool``: the same, or what pins their batches."""

    def __init__(self, workers: ProcessPool, pool: Pool, spec: WorkerSpec) -> None:
        self.workers, self.pool, self.spec = workers, pool, spec
        workers.park()
        self.close = weakref.finalize(self, pool.close)
        reclaim.add(self)

    def give_back(self, reason: str) -> int:
        """Ends the workers where memory is short. Returns the bytes of memory that they had for themselves."""
        nbytes = sum(self.workers.pss().values()) if self.close.alive else 0
        self.close()
        return nbytes

    def can_serve(self, spec: WorkerSpec) -> bool:
        """Whether they can serve an iterator whose workers would be started with ``spec``. If not, they are ended."""
        same = all(
            _is_same(getattr(spec, f.name), getattr(self.spec, f.name))
            for f in fields(WorkerSpec)
            if f.name not in OF_AN_ITERATOR
        )
        if same and self.workers.unpark(spec.num_workers):
            return True
        self.close()
        return False

    def release(self) -> None:
        """From now on, an iterator ends them."""
        self.close.detach()


def _is_same(x: object, y: object) -> bool:
    """Whether two settings are the same. Objects of the user's are compared by identity: bound methods by what they are
    bound to, subsets by what they contain."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, types.MethodType) and isinstance(y, types.MethodType):
        return x.__func__ is y.__func__ and x.__self__ is y.__self__
    if type(x) is Subset and type(y) is Subset:
        return x.indices is y.indices and _is_same(x.dataset, y.dataset)
    return isinstance(x, (int, float, str, tuple)) and x == y
