"""Decides how to retry the task that a dead worker was doing, and which of its samples to blame. See ``restart``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from ..core.dataset_tree import file_of
from ..core.errors import SampleTimeoutError, StokerError, WorkerDiedError
from ..core.types import Index
from ..sampling.order import Task
from ..transport.arena import TaskId
from .faults.policy import Failure, called, plain
from .protocol import RetryTask, TaskPhase, WorkerSpec
from .worker_handle import WorkerHandle

logger = logging.getLogger(__name__)
MIN_DEATHS = 3  # during one task before one of its samples is blamed


class _History:
    """What is known about a task whose workers died."""

    def __init__(self, bad: dict[int, Failure]) -> None:
        self.bad = dict(bad)  # samples that are not tried, by position
        self.timeouts = 0  # at samples that could not be identified
        self.deaths_after_probe = 0
        self.deaths_at: Counter[int] = Counter()  # by position of the sample
        self.pids: list[int | None] = []  # of the workers that died
        self.last_death = ""


class Retries:
    """Decides how the task that a dead worker was doing is retried, or why it is not."""

    def __init__(self, spec: WorkerSpec, known: dict[Index, Failure]) -> None:
        self._spec, self._known = spec, known
        self._histories: dict[TaskId, _History] = {}
        self._skips = spec.on_error is not None and spec.on_error.action != "raise"
        self.refunds = 0.0  # tokens to give back for deaths that the policy for samples already bounds

    def keys(self, indices: Index) -> list[Index]:
        """Returns a task's indices as a list, one for each sample."""
        indices = _without_retry(indices)
        return list(indices) if self._spec.auto_collation else [indices]

    def known_failures(self, indices: Index) -> dict[int, Failure]:
        """Returns by position those of a task's samples that have killed workers before and are not retried."""
        if not self._known or not self._skips:
            return {}
        keys = [plain(i) for i in self.keys(indices)]
        return {k: self._known[key] for k, key in enumerate(keys) if key in self._known}

    def sample_at(self, dead: WorkerHandle, indices: Index) -> tuple[int, Index, str] | None:
        """Returns position in the task, index and file of the sample that the dead worker was loading, if known."""
        keys, k = self.keys(indices), dead.position.sample
        if k is None or k >= len(keys):
            return None
        return k, keys[k], file_of(self._spec.dataset, keys[k])

    def retry(self, dead: WorkerHandle, task: Task) -> RetryTask | StokerError:
        """Returns another try of the task that a worker was doing when it died, or an error for its batch."""
        history = self._histories.setdefault(task_id(task), _History(self.known_failures(task.indices)))
        if dead.timeout_stack:
            return self._after_timeout(dead, history, task)
        history.pids.append(dead.process.pid)
        history.last_death = dead.how_it_ended()
        sample = self.sample_at(dead, task.indices)
        if dead.position.phase is TaskPhase.PROBED:
            history.deaths_after_probe += 1
            if history.deaths_after_probe > 1:
                del self._histories[task_id(task)]
                return WorkerDiedError(
                    f"{_pids(history.pids)} exited unexpectedly, each time during task {task.number}; the last worker "
                    f"{history.last_death}. Each sample can be loaded alone, so the cause is collate_fn or the memory "
                    f"that the batch needs. Its samples: {str(self.keys(task.indices))[:200]}",
                    [dead.id],
                    [task.number],
                )
        elif sample is not None:
            history.deaths_at[sample[0]] += 1
            if history.deaths_at[sample[0]] > 1 and len(history.pids) >= MIN_DEATHS:
                return self._blame(history, task, *sample)
        return try_again(task, history.bad, probe=len(history.pids) > 1, others=history.timeouts)

    def _after_timeout(self, dead: WorkerHandle, history: _History, task: Task) -> RetryTask | StokerError:
        """Handles a worker killed because a sample took too long. If the sample is known, it is not retried."""
        self.refunds += 1
        limit = self._spec.sample_timeout
        sample = self.sample_at(dead, task.indices)
        if sample is None:
            history.timeouts += 1
            if history.timeouts <= MIN_DEATHS:
                # The whole batch was loaded at once, or a replacement took too long: load the samples one by one.
                return try_again(task, history.bad, probe=True, others=history.timeouts)
            which = f"one of {str(self.keys(task.indices))[:200]}, or its replacement,"
        else:
            which = called(*sample[1:])
        if sample is None or not self._skips:
            del self._histories[task_id(task)]
            return SampleTimeoutError(
                f"{which} was not loaded within sample_timeout={limit:g} seconds, so its worker (pid "
                f"{dead.process.pid}) was killed and replaced. The worker's stack was:\n{dead.timeout_stack}"
            )
        k, index, file = sample
        history.bad[k] = Failure(plain(index), file, f"SampleTimeout: not loaded within {limit:g} s", "timeout")
        logger.warning(f"{which}: not loaded within {limit:g} s; the worker's stack was:\n{dead.timeout_stack}")
        return try_again(task, history.bad, others=history.timeouts)

    def _blame(self, history: _History, task: Task, k: int, index: Index, file: str) -> RetryTask | StokerError:
        if plain(index) not in self._known:
            self.refunds += len(history.pids)
        del self._histories[task_id(task)]
        if not self._skips:
            return WorkerDiedError(
                f"{_pids(history.pids)} exited unexpectedly: {called(index, file)} kills the worker that loads it; "
                f'the last one {history.last_death}. on_error="skip" continues without it; stoker verify finds all '
                "such samples",
                [],
                [task.number],
            )
        failure = Failure(plain(index), file, f"WorkerDied: the worker that loads it {history.last_death}", "death")
        self._known[plain(index)] = failure
        return try_again(task, {**history.bad, k: failure})


def task_id(task: Task) -> TaskId:
    return TaskId(task.epoch, task.number)


def try_again(
    task: Task, bad: Mapping[int, Failure], replay: bool = False, probe: bool = False, others: int = 0
) -> RetryTask:
    """Makes the indices for another try of a task. See ``RetryTask``."""
    return RetryTask(_without_retry(task.indices), dict(bad), replay, probe, others)


def _without_retry(indices: Index) -> Index:
    return indices.indices if type(indices) is RetryTask else indices


def _pids(pids: list[int | None]) -> str:
    return f"DataLoader worker (pid(s) {', '.join(map(str, pids))})"
