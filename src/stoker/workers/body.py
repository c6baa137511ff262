"""What a worker does with a task, of whatever kind the worker is: seed, fetch, collate, and what counts as an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _DatasetKind

from .. import seeding
from ..collate import SlotCollate
from ..faults.guard import Guard, Mark
from ..stage import Stages
from ..transport.record import Times
from .protocol import Again, WorkerSpec

FORKED = "Cannot re-initialize CUDA in forked subprocess"  # torch.cuda._lazy_init
REMEDY = (
    "A forked worker cannot use the device. Let the dataset give tensors of the CPU and the loader move them "
    '(device="cuda"); '
    "tensors that lie on the device are gathered by the main process if they are in a TensorDataset; and "
    'multiprocessing_context="spawn" starts workers that may use it.'
)


class Body:
    """The inside of one worker.

    Args:
        spec: what to do.
        worker: this worker's id.
        dataset: this worker's dataset.
        collate: the collate function with a slot at hand.
        where: "process" or "thread", for errors.
        mark: is told the position of each sample before it is loaded, where that is wanted.
        seed_task: sets the random state that this worker's code sees, from base seed, epoch and task.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        worker: int,
        dataset: Any,
        collate: SlotCollate,
        where: str,
        seed_task: Callable[[int, int, int], None],
        mark: Mark,
    ) -> None:
        self.spec, self.id, self.dataset, self.collate = spec, worker, dataset, collate
        self.exhausted = False
        self._where = f"in DataLoader worker {where} {worker}"
        self._seed_task, self._mark = seed_task, mark
        self._stages: Stages | None = None
        self._failed: ExceptionWrapper | None = None
        self._shared_rng = torch.Generator()
        self.share_seed(spec.shared_seed)

    def share_seed(self, shared_seed: int | None) -> None:
        """torch's seed that all workers of a datapipe have in common."""
        if isinstance(self.dataset, IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, self._shared_rng)

    def start(self) -> None:
        """Calls ``worker_init_fn`` and prepares the first epoch. What fails is told with the first task."""
        try:
            if self.spec.init_fn is not None:
                self.spec.init_fn(self.id)
            self._begin()
        except Exception:
            self._failed = self.error()

    def resume(self, shared_seed: int | None) -> None:
        """A new epoch begins."""
        self.exhausted = False
        self.share_seed(shared_seed)
        try:
            self._begin()
        except Exception:
            self._failed = self.error()

    def _begin(self) -> None:
        spec = self.spec
        self._stages = Stages(
            spec.kind,
            self.dataset,
            spec.auto_collation,
            self.collate,
            spec.drop_last,
            spec.on_error,
            self._mark if spec.timed else None,
        )

    def error(self) -> ExceptionWrapper:
        """The exception at hand, as torch wraps it."""
        e = sys.exc_info()[1]
        if isinstance(e, RuntimeError) and FORKED in str(e):
            e.args = (f"{e}\n{REMEDY}",)
        return ExceptionWrapper(where=self._where)

    def run(self, epoch: int, number: int, indices: Any) -> Any:
        """The batch of a task, or the error in its place. Sets ``exhausted`` when an iterable dataset has ended."""
        if self._failed is not None:
            data, self._failed = self._failed, None
            return data
        try:
            if self.spec.task_seeds:
                self._seed_task(self.spec.base_seed, epoch, number)
            if self._stages is None:
                # The reason was told with the first task. torch stumbles over a local it never set, and scripts
                # see that type.
                raise UnboundLocalError("no 'fetcher': this worker failed while it was starting")
            if type(indices) is Again:
                guard = self._stages.watched(self._mark)
                self._tell(guard, epoch, number)
                return self._stages.again(guard, indices.indices, indices.bad)
            if self._stages.guard is not None:
                self._tell(self._stages.guard, epoch, number)
            return self._stages.run(indices)
        except Exception as e:
            if isinstance(e, StopIteration) and self.spec.kind == _DatasetKind.Iterable:
                self.exhausted = True
                return None
            return self.error()

    def probe(self, task: Again) -> None:
        """Loads each sample of a task alone. The random state is as it was before."""
        if self._stages is not None:
            before = seeding.snapshot()
            self._stages.watched(self._mark).probe(task.indices, task.bad)
            seeding.restore(before)

    def _tell(self, guard: Guard, epoch: int, number: int) -> None:
        spec = self.spec
        reseed = functools.partial(self._seed_task, spec.base_seed, epoch, number) if spec.task_seeds else None
        guard.begin(spec.base_seed, epoch, number, reseed)

    def times(self, transport_ns: int, cpu_ns: int) -> Times:
        """What the last task cost."""
        stages = self._stages
        return (stages.fetch_ns if stages else 0, stages.collate_ns if stages else 0, transport_ns, cpu_ns)
