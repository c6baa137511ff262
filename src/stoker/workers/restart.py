"""Replaces dead worker processes: reassigns their tasks, and finds the sample to blame.

The replacement has the dead worker's id, seed and memory. The dead worker's tasks are handled as follows:

1. Tasks that it had answered need nothing if each task has its own seed. If workers are seeded as torch's are
   (``_OwnTasks``), the replacement starts from the last saved random state and repeats the tasks answered since then,
   without delivering them. So its next draw is the one that the dead worker would have made.
2. The task that it was doing (``Retries``):

    first death       another worker runs it unchanged, and records which sample it is at
    second death      another worker first loads each sample alone; the random state is restored
    third death, the second at one sample    that sample is to blame, and ``on_error`` decides

3. Tasks that it had not begun go to the replacement; if tasks are shared (``_SharedTasks``), to any worker.

Deaths cost tokens and batches earn them. So a crash loop ends with an error, but one crash a day does not.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from ..core.errors import StokerError, WorkerDiedError
from ..core.metrics import LoaderMetrics
from ..core.types import Index
from ..core.warn import warn_user
from ..sampling.order import Task
from ..transport.arena import TaskId
from .faults.policy import Failure, called, plain
from .process_pool import ProcessPool
from .protocol import RetryTask, WorkerSpec
from .retries import MIN_DEATHS, Retries, task_id, try_again
from .worker_handle import WorkerHandle

logger = logging.getLogger(__name__)
MAX_TOKENS = 10.0  # deaths in a row that are tolerated
TOKENS_PER_BATCH = 1 / 16
MAX_DEATHS_ON_START = 5  # consecutive deaths of workers that had not even started, without a batch in between
DROP_EVERY = 8  # new tasks of a worker after which those that no replacement would repeat are dropped
MAX_REPORTED = 8  # deaths in the report


class _SharedTasks:
    """Tasks with their own seeds, which any worker takes. Only the dead worker's current task is run again."""

    def __init__(self, pool: ProcessPool, retries: Retries) -> None:
        self._pool, self._retries = pool, retries

    def find(self, dead: WorkerHandle, unanswered: Mapping[int, Index]) -> Task | None:
        """Returns the task that the dead worker was doing, if it is still needed."""
        task = dead.current_task
        if task is None or task.number not in unanswered:
            return None
        return Task(*task, unanswered[task.number])

    def for_replacement(
        self, dead: WorkerHandle, epoch: int, unanswered: Mapping[int, Index], lost: dict[int, StokerError]
    ) -> Sequence[Task]:
        """Returns the tasks that the replacement does first. Adds tasks that are not retried to ``lost``."""
        if dead.current_task is None:
            # It died between two tasks, or after it took one off the queue but before it published which. So all
            # unanswered tasks are done again; the scheduler drops results that come twice.
            again = [Task(epoch, number, indices) for number, indices in unanswered.items()]
            if self._pool.finishing:
                return again
            for task in again:
                self._pool.submit(None, task)
            return []
        current = self.find(dead, unanswered)
        if current is None or current.epoch != epoch:
            return []
        retry = self._retries.retry(dead, current)
        if isinstance(retry, StokerError):
            lost[current.number] = retry
            return []
        return [current._replace(indices=retry)]


class _Assigned:
    """Tasks of one worker, oldest first."""

    def __init__(self) -> None:
        self.answered: deque[Task] = deque()  # those that may have to be repeated
        self.waiting: deque[Task] = deque()  # for an answer
        self.limit = 0  # number of tasks above which old ones are dropped

    def begun(self) -> list[Task]:
        """Returns the tasks that the worker may have begun."""
        return [*self.answered, *itertools.islice(self.waiting, 1)]

    def first_to_repeat(self, checkpoint: TaskId | None) -> int:
        """Returns how many of the answered tasks precede the last saved random state."""
        begun = [task_id(task) for task in self.begun()]
        return begun.index(checkpoint) if checkpoint in begun else 0


class _OwnTasks:
    """Tasks that each belong to one worker. With torch's seeding, a task's draws depend on the worker's earlier tasks,
    so tasks answered since the random state was saved are repeated for their draws."""

    def __init__(self, pool: ProcessPool, spec: WorkerSpec, retries: Retries) -> None:
        self._pool, self._saves_rng, self._retries = pool, spec.saves_rng, retries
        self._assigned = [_Assigned() for _ in range(spec.num_workers)]
        self._deaths_in_repeat: Counter[TaskId] = Counter()
        self.draws_changed = False  # random draws may have changed since this was last reported

    def given(self, worker: int, task: Task) -> None:
        assigned = self._assigned[worker]
        assigned.waiting.append(task)
        if len(assigned.answered) + len(assigned.waiting) > assigned.limit:
            for _ in range(assigned.first_to_repeat(self._pool.workers[worker].rng_checkpoint)):
                assigned.answered.popleft()
            assigned.limit = len(assigned.answered) + len(assigned.waiting) + DROP_EVERY

    def answered(self, worker: int) -> None:
        task = self._assigned[worker].waiting.popleft()
        if self._saves_rng:
            self._assigned[worker].answered.append(task)

    def find(self, dead: WorkerHandle, unanswered: Mapping[int, Index]) -> Task | None:
        """See ``_SharedTasks.find``."""
        begun = self._assigned[dead.id].begun()
        return next((task for task in begun if task_id(task) == dead.current_task), None)

    def for_replacement(
        self, dead: WorkerHandle, epoch: int, unanswered: Mapping[int, Index], lost: dict[int, StokerError]
    ) -> Sequence[Task]:
        """See ``_SharedTasks.for_replacement``."""
        assigned = self._assigned[dead.id]
        out: list[Task] = []
        if self._saves_rng:
            self._skip_what_fails_in_repeat(dead, assigned)
            for task in list(assigned.answered)[assigned.first_to_repeat(dead.rng_checkpoint) :]:
                out.append(task._replace(indices=try_again(task, _bad(task), replay=True)))
        rest = list(assigned.waiting)
        if rest and dead.current_task == task_id(rest[0]):
            current = rest.pop(0)
            again = self._retries.retry(dead, current)
            if isinstance(again, StokerError):
                if current.epoch == epoch:  # else it belongs to an epoch that was left early
                    lost[current.number] = again
                assigned.waiting.popleft()
            else:
                assigned.waiting[0] = current._replace(indices=again._replace(probe=False))
                out.append(current._replace(indices=again))
        return [*out, *rest]

    def _skip_what_fails_in_repeat(self, dead: WorkerHandle, assigned: _Assigned) -> None:
        """Skips a sample that loaded once, but kills or hangs its worker when the task is repeated for its draws (a
        file server may have gone). Later draws may then differ."""
        at = next((k for k, task in enumerate(assigned.answered) if task_id(task) == dead.current_task), None)
        if at is None:
            return
        task = assigned.answered[at]
        self._deaths_in_repeat[task_id(task)] += 1
        if not dead.timeout_stack and self._deaths_in_repeat[task_id(task)] < MIN_DEATHS:
            return  # perhaps it was killed by chance
        sample = self._retries.sample_at(dead, task.indices)
        if sample is None:
            del assigned.answered[at]
        else:
            k, index, file = sample
            bad = {**_bad(task), k: Failure(plain(index), file, "failed when it was loaded again")}
            assigned.answered[at] = task._replace(indices=try_again(task, bad))
        self.draws_changed = True


class Restarts:
    """Replaces the dead workers of one pool."""

    def __init__(
        self, pool: ProcessPool, spec: WorkerSpec, known: dict[Index, Failure], metrics: LoaderMetrics
    ) -> None:
        self.known = known  # samples that have killed workers, by index; grows
        self._pool, self._metrics = pool, metrics
        self._retries = Retries(spec, known)
        self.own = None if spec.shared else _OwnTasks(pool, spec, self._retries)
        self._tasks: _OwnTasks | _SharedTasks = self.own or _SharedTasks(pool, self._retries)
        self._tokens = MAX_TOKENS
        self._batches_counted = metrics.tasks
        self._died_on_start = 0  # in a row
        self._deaths: list[str] = []
        self._warnings: list[str] = []

    def mark_known(self, indices: Index) -> Index:
        """Returns a task's indices, with samples marked that are known to kill workers."""
        bad = self._retries.known_failures(indices)
        return RetryTask(indices, bad) if bad else indices

    def replace_dead(self, e: WorkerDiedError, epoch: int, unanswered: Mapping[int, Index]) -> dict[int, StokerError]:
        """Starts a replacement for each worker that ``e`` reports dead. ``unanswered``: if workers share tasks, those
        without an answer. Returns why tasks are not retried, by number. Raises WorkerDiedError if too many died."""
        lost: dict[int, StokerError] = {}
        for place in e.places:
            dead = self._pool.workers[place]
            death = self._record_death(dead, unanswered)
            tasks = self._tasks.for_replacement(dead, epoch, unanswered, lost)
            self._tokens += self._retries.refunds
            self._retries.refunds = 0.0
            self._spend_token(dead, death, e)
            self._pool.replace(place, tasks)
        return lost

    def emit_warnings(self) -> None:
        """Warns about the deaths. Not part of ``replace_dead``, because a filter may turn warnings into errors."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            logger.warning(text)
            warn_user(text)

    def _record_death(self, dead: WorkerHandle, unanswered: Mapping[int, Index]) -> str:
        """Counts a death. Returns a description of how the worker died and where it was."""
        text = f"worker {dead.id} (pid {dead.process.pid}) "
        text += "was killed for a timeout" if dead.timeout_stack else dead.how_it_ended()
        if not dead.reader.arena.ready:
            text += ", while it was starting"
        elif dead.current_task is not None:
            text += f", during task {dead.current_task.number}"
            task = self._tasks.find(dead, unanswered)
            sample = None if task is None else self._retries.sample_at(dead, task.indices)
            if sample is not None:
                text += f", at {called(*sample[1:])}"
        self._deaths.append(text)
        faults = self._metrics.faults
        kind = "timeouts" if dead.timeout_stack else "deaths"
        faults[kind] = faults.get(kind, 0) + 1
        faults["died"] = [*faults.get("died", []), text][-MAX_REPORTED:]
        return text

    def _spend_token(self, dead: WorkerHandle, death: str, e: WorkerDiedError) -> None:
        """Takes a token for a death. Raises WorkerDiedError if none is left."""
        batches = self._metrics.tasks - self._batches_counted
        self._batches_counted = self._metrics.tasks
        self._tokens = min(max(MAX_TOKENS, self._tokens), self._tokens + batches * TOKENS_PER_BATCH) - 1
        # If batches came, a worker killed while it starts proves nothing about the dataset.
        self._died_on_start = 0 if dead.reader.arena.ready else 1 if batches else self._died_on_start + 1
        if self._tokens >= 0 and self._died_on_start < MAX_DEATHS_ON_START:
            same = "no batch changes"
            if self.own is not None and self.own.draws_changed:
                self.own.draws_changed = False
                same = "a sample failed when it was loaded again, so later random numbers may differ"
            what = "It was about to exit" if dead.leaving else "A replacement has been started"
            self._warnings.append(f"{death}. {what}; {same}")
            return
        how = Counter(w.partition(") ")[2].partition(";")[0].partition(",")[0] for w in self._deaths)
        counts = "; ".join(f"{n} {w}" for w, n in how.most_common(3))
        started = ""
        if self._died_on_start >= MAX_DEATHS_ON_START:
            started = " None of them finished starting: can the dataset be loaded in a worker process?"
        raise WorkerDiedError(
            f"{e}: {len(self._deaths)} workers died faster than batches were delivered, so no more are started "
            f"({counts}).{started} The last one: {death}",
            e.workers,
            e.tasks,
            e.places,
        )


def _bad(task: Task) -> dict[int, Failure]:
    """Returns by position the samples of a task that are not tried."""
    return task.indices.bad if type(task.indices) is RetryTask else {}
