"""The tasks of an epoch that are drawn and not delivered, by number, and which of them is due."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ..core.types import Index
from ..workers.protocol import Result


class TaskState(enum.Enum):
    """Where a task in flight is."""

    WITH_WORKER = enum.auto()
    HERE = enum.auto()  # kept for this process
    ARRIVED = enum.auto()  # its result waits for its turn


@dataclass(slots=True)
class InFlight:
    """One task."""

    state: TaskState
    worker: int | None  # that has it; None: any worker may take it
    indices: Index  # None where each task belongs to one worker


class TasksInFlight:
    """Numbers are given in the order in which tasks are drawn."""

    def __init__(self, first: int = 0) -> None:
        self.drawn = first  # the number of the next task to be drawn
        self.due = first  # the number of the next task to be delivered
        self._tasks: dict[int, InFlight] = {}
        self._results: dict[int, Result] = {}  # in the order in which they arrived

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: InFlight) -> None:
        """The next task is drawn."""
        self._tasks[self.drawn] = task
        self.drawn += 1

    def remove(self, number: int) -> Index:
        """A task is delivered, or lost. Returns its indices, where they are known."""
        task = self._tasks.pop(number, None)
        return None if task is None else task.indices

    def find_due(self, is_active: Callable[[int], bool]) -> InFlight | None:
        """The next task that can still come; None if there is none. Tasks of workers that are not active are lost."""
        while self.due < self.drawn:
            task = self._tasks.get(self.due)
            if task is not None:
                if task.worker is None or task.state is TaskState.ARRIVED or is_active(task.worker):
                    return task
                del self._tasks[self.due]
            self.due += 1
        return None

    def keep(self, result: Result) -> None:
        """A result has arrived before its turn."""
        self._results[result.task] = result
        task = self._tasks.get(result.task)
        if task is not None:
            task.state = TaskState.ARRIVED

    def has_result(self, in_order: bool) -> bool:
        return self.due in self._results or (not in_order and bool(self._results))

    def take_result(self, in_order: bool) -> Result | None:
        """The result of the task that is due; without ``in_order`` else the first that arrived."""
        number = self.due if in_order or self.due in self._results else next(iter(self._results), self.due)
        return self._results.pop(number, None)

    def worker_of(self, number: int) -> int | None:
        task = self._tasks.get(number)
        return None if task is None else task.worker

    def is_awaited(self, number: int) -> bool:
        """Whether a task is not answered yet: after a death some are run twice, and are the same to the bit."""
        task = self._tasks.get(number)
        return task is not None and task.state is not TaskState.ARRIVED

    def with_workers(self) -> dict[int, Index]:
        return {n: task.indices for n, task in self._tasks.items() if task.state is TaskState.WITH_WORKER}

    def take_home(self) -> None:
        """All of them are for this process from now on."""
        self.drop_results()
        for task in self._tasks.values():
            task.state = TaskState.HERE

    def drop_results(self) -> None:
        """Frees the slots of the results that wait."""
        for result in self._results.values():
            result.drop()
        self._results = {}
