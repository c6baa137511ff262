"""Tasks of an epoch that are drawn and not yet delivered, by number, and the one that is due."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ..core.types import Index
from ..workers.protocol import Result


class TaskState(enum.Enum):
    """Where a task in flight is."""

    WITH_WORKER = enum.auto()
    HERE = enum.auto()  # reserved for this process
    ARRIVED = enum.auto()  # its result waits for its turn


@dataclass(slots=True)
class InFlight:
    """One task."""

    state: TaskState
    worker: int | None  # worker that has it; None: any worker may take it
    indices: Index  # None if each task belongs to one worker


class TasksInFlight:
    """Numbers tasks in the order in which they are drawn."""

    def __init__(self, first: int = 0) -> None:
        self.drawn = first  # number of the next task to draw
        self.due = first  # number of the next task to deliver
        self._tasks: dict[int, InFlight] = {}
        self._results: dict[int, Result] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: InFlight) -> None:
        """Adds the next drawn task."""
        self._tasks[self.drawn] = task
        self.drawn += 1

    def remove(self, number: int) -> Index:
        """Removes a task that was delivered or lost. Returns its indices, if known."""
        task = self._tasks.pop(number, None)
        return None if task is None else task.indices

    def find_due(self, is_active: Callable[[int], bool]) -> InFlight | None:
        """Returns the next task that can still arrive; None if there is none. Drops tasks of inactive workers."""
        while self.due < self.drawn:
            task = self._tasks.get(self.due)
            if task is not None:
                if task.worker is None or task.state is TaskState.ARRIVED or is_active(task.worker):
                    return task
                del self._tasks[self.due]
            self.due += 1
        return None

    def keep(self, result: Result) -> None:
        """Stores a result that arrived before its turn."""
        self._results[result.task] = result
        task = self._tasks.get(result.task)
        if task is not None:
            task.state = TaskState.ARRIVED

    def has_result(self, in_order: bool) -> bool:
        return self.due in self._results or (not in_order and bool(self._results))

    def take_result(self, in_order: bool) -> Result | None:
        """Takes the result of the due task; without ``in_order``, otherwise the first that arrived."""
        number = self.due if in_order or self.due in self._results else next(iter(self._results), self.due)
        return self._results.pop(number, None)

    def worker_of(self, number: int) -> int | None:
        task = self._tasks.get(number)
        return None if task is None else task.worker

    def is_awaited(self, number: int) -> bool:
        """Whether a task is still unanswered: after a worker's death some run twice, with bitwise identical results."""
        task = self._tasks.get(number)
        return task is not None and task.state is not TaskState.ARRIVED

    def with_workers(self) -> dict[int, Index]:
        return {n: task.indices for n, task in self._tasks.items() if task.state is TaskState.WITH_WORKER}

    def take_home(self) -> None:
        """Reserves all tasks for this process from now on."""
        self.drop_results()
        for task in self._tasks.values():
            task.state = TaskState.HERE

    def drop_results(self) -> None:
        """Frees the slots of waiting results."""
        for result in self._results.values():
            result.drop()
        self._results = {}
