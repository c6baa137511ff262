"""A worker died: who goes on with its tasks, and which sample it was that kills.

The replacement is the same worker to whoever looks: id, seed, and, where workers are seeded as torch's, the random
state in which the dead one began a task of late; from there it does again what was answered already, so the next draw
is the one that would have come. What becomes of a task in whose midst workers die:

    once                                another worker runs it as it was, and notes which sample it is at
    twice                               another one first loads each sample alone; random state is put back
    three times, twice at one sample    that sample is to blame, and the policy for samples decides

Deaths cost tokens, batches earn them, so a loop of crashes ends with an error, and a crash a day does not.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..core.dataset_tree import file_of
from ..core.errors import SampleTimeoutError, StokerError, StokerWarning, WorkerDiedError
from ..core.metrics import LoaderMetrics
from ..sampling.order import Task
from .faults import exit_reason
from .faults.policy import Failure, plain
from .faults.sample_name import called
from .process_pool import ProcessPool
from .protocol import PROBED, Life, RetryTask, WorkerSpec

logger = logging.getLogger(__name__)
TOKENS = 10.0  # deaths in a row that are borne
EARNED = 1 / 16  # tokens for a batch
STARTS = 5  # deaths in a row, and no batch between, of workers that had not even started
SURE = 3  # deaths with one task in hand before a sample of it is blamed
LONG = 1 << 13  # more indices of a worker's tasks that are remembered, 40 bytes each, before those are let go ...
FEW, MANY = 8, 256  # ... that nobody needs; at least and at most so many tasks
LAST = 8  # deaths that are in the report
Given: TypeAlias = tuple[int, Task]
"""A task, and its epoch."""


class _Case:
    """A task whose worker died."""

    def __init__(self, bad: dict[int, Failure]) -> None:
        self.bad = dict(bad)
        self.deaths = self.late = 0
        self.whole = 0  # after all its samples could be loaded alone
        self.seen: Counter[int] = Counter()
        self.pids: list[int | None] = []
        self.words = ""


class Restarts:
    """Replaces the dead of one pool.

    Args:
        pool: of worker processes.
        spec: what workers were told.
        known: samples that have killed workers, by index; grows.
        metrics: where deaths are counted.

    Attributes:
        known: the same.
    """

    def __init__(self, pool: ProcessPool, spec: WorkerSpec, known: dict[Any, Failure], metrics: LoaderMetrics) -> None:
        self._pool, self._spec, self._metrics = pool, spec, metrics
        self.known = known
        self._given: list[deque[Given]] = [deque() for _ in range(spec.num_workers)]
        self._done = [0] * spec.num_workers  # of these, how many have been answered, and may have to be run again
        self._long = [0] * spec.num_workers
        self._cases: dict[tuple[int, int], _Case] = {}
        self._in_vain: dict[tuple[int, int], _Case] = {}  # tasks that were done again for their draws only
        self._drawn_otherwise = False
        self._tokens, self._earned_at = TOKENS, metrics.tasks
        self._unborn = 0
        self._died: list[str] = []
        self._untold: list[str] = []
        self._keeps = spec.keeps
        self._goes_on = spec.on_error is not None and spec.on_error.action != "raise"

    # -- what the scheduler tells

    def mark(self, indices: Any) -> Any:
        """A task's indices, with samples that are known to kill marked as such."""
        bad = self._bad(indices)
        return RetryTask(indices, bad) if bad else indices

    def _bad(self, indices: Any) -> dict[int, Failure]:
        if not self.known or not self._goes_on:
            return {}
        keys = self._keys(indices)
        return {k: self.known[plain(i)] for k, i in enumerate(keys) if plain(i) in self.known}

    def gave(self, worker: int, epoch: int, task: Task) -> None:
        """A worker was given a task of its own."""
        given = self._given[worker]
        given.append((epoch, task))
        if len(given) > self._long[worker]:
            for _ in range(self._since(worker, self._pool.kept(worker))):
                given.popleft()
                self._done[worker] -= 1
            size = len(task.indices) if type(task.indices) is list else 1
            self._long[worker] = len(given) + min(MANY, max(FEW, LONG // max(1, size)))

    def came(self, worker: int) -> None:
        """It answered the oldest that it had not."""
        if self._keeps:
            self._done[worker] += 1
        else:
            self._given[worker].popleft()

    def heal(self, e: WorkerDiedError, epoch: int, asked: Mapping[int, Any]) -> dict[int, StokerError]:
        """Puts others in the place of those that died.

        Args:
            e: who.
            epoch: that is on.
            asked: where workers share tasks, those that nobody has answered.

        Returns:
            By number, tasks that are not tried any more, and why.

        Raises:
            WorkerDiedError: too many died.
        """
        lost: dict[int, StokerError] = {}
        for place in e.places:
            life = self._pool.life(place)
            words = self._account(life, asked)
            tasks = self._shared(life, epoch, asked, lost) if self._spec.shared else self._own(life, epoch, lost)
            self._spend(life, words, e)
            self._pool.replace(place, tasks)
        return lost

    def tell(self) -> None:
        """Says who died. Apart from ``heal``: a warning may be an error to somebody."""
        untold, self._untold = self._untold, []
        for text in untold:
            logger.warning(text)
            warnings.warn(text, StokerWarning, stacklevel=7)

    # -- tasks

    def _own(self, life: Life, now: int, lost: dict[int, StokerError]) -> list[tuple[int, Task]]:
        """What a worker with tasks of its own is to do again."""
        if self._keeps:
            self._again_in_vain(life)
        given, done = self._given[life.id], self._done[life.id]
        out: list[tuple[int, Task]] = []
        if self._keeps:
            for epoch, (number, indices) in list(given)[self._since(life.id, life.kept) : done]:
                bad = indices.bad if type(indices) is RetryTask else {}
                out.append((epoch, Task(number, RetryTask(_plain(indices), bad, replay=True))))
        rest = list(given)[done:]
        if rest and life.hand == (rest[0][0], rest[0][1].number):
            epoch, (number, indices) = rest.pop(0)
            again = self._judged(life, epoch, number, indices)
            if isinstance(again, StokerError):
                if epoch == now:  # else of one that was left early
                    lost[number] = again
                del given[done]
            else:
                given[done] = epoch, Task(number, again._replace(probe=False))
                out.append((epoch, Task(number, again)))
        return out + rest

    def _again_in_vain(self, life: Life) -> None:
        """A sample that could be loaded once, and now, when only its random draws are wanted, kills or hangs: a file
        server that is gone. Its task has been answered; it is done again without the sample, or not at all, and what
        is drawn after it is other than it would have been. So a sample that kills has to be surely to blame."""
        given, done = self._given[life.id], self._done[life.id]
        at = next((j for j, (e, t) in enumerate(given) if j < done and life.hand == (e, t.number)), None)
        if at is None:
            return
        epoch, (number, indices) = given[at]
        bad = dict(indices.bad) if type(indices) is RetryTask else {}
        case = self._in_vain.setdefault((epoch, number), _Case(bad))
        case.deaths += 1
        keys, k = self._keys(indices), (life.at[0] & 0xFFFFFFFF) - 2
        known = 0 <= k < len(keys)
        case.seen[k] += known
        if not life.hung and case.deaths < SURE:
            return
        if known and (life.hung or case.seen[k] > 1):
            bad[k] = Failure(plain(keys[k]), "", "could be loaded once, and not again")
            given[at] = epoch, Task(number, RetryTask(_plain(indices), bad))
        elif life.hung or case.deaths > SURE:
            del given[at]
            self._done[life.id] -= 1
        else:
            return
        self._drawn_otherwise = True

    def _since(self, worker: int, kept: tuple[int, int] | None) -> int:
        """How many of a worker's tasks lie before the random state that was noted."""
        answered = list(self._given[worker])[: self._done[worker] + 1]
        at = next((k for k, (epoch, task) in enumerate(answered) if (epoch, task.number) == kept), None)
        return min(self._done[worker], at or 0)

    def _shared(
        self, life: Life, epoch: int, asked: Mapping[int, Any], lost: dict[int, StokerError]
    ) -> list[tuple[int, Task]]:
        """What is to be done again where any worker may do any task."""
        if life.hand is None:  # between two tasks, or in the instant in which it took one
            if self._pool.finishing:
                return [(epoch, Task(number, indices)) for number, indices in asked.items()]
            for number, indices in asked.items():
                self._pool.submit(None, epoch, Task(number, indices))
            return []
        number = life.hand[1]
        if life.hand[0] != epoch or number not in asked:
            return []
        again = self._judged(life, epoch, number, asked[number])
        if isinstance(again, StokerError):
            lost[number] = again
            return []
        return [(epoch, Task(number, again))]

    def _judged(self, life: Life, epoch: int, number: int, indices: Any) -> RetryTask | StokerError:
        """How a task that was in a dead worker's hand is tried again; or why it is not."""
        keys = self._keys(indices)
        case = self._cases.setdefault((epoch, number), _Case(self._bad(indices)))
        watched = case.deaths > 0 or self._spec.timed
        if life.hung:
            return self._late(life, case, epoch, number, indices)
        case.deaths += 1
        case.pids.append(life.pid)
        case.words = exit_reason.why(life.exitcode, life.nbytes)
        phase, k = life.at[0] >> 32 << 32, (life.at[0] & 0xFFFFFFFF) - 2
        if watched and phase != PROBED and 0 <= k < len(keys):
            case.seen[k] += 1
            if case.seen[k] > 1 and case.deaths >= SURE:
                return self._blamed(case, epoch, number, indices, k)
        elif watched and phase == PROBED:
            case.whole += 1
            if case.whole > 1:
                del self._cases[epoch, number]
                return WorkerDiedError(
                    f"{_pids(case.pids)} exited unexpectedly: task {number} was in hand each time, the last worker "
                    f"{case.words}. Each of its samples can be loaded alone, so no sample is to blame: collate_fn, or "
                    f"the memory that the batch takes. Its samples: {str(keys)[:200]}",
                    [life.id],
                    [number],
                )
        return RetryTask(_plain(indices), case.bad, probe=case.deaths > 1, others=case.late)

    def _late(self, life: Life, case: _Case, epoch: int, number: int, indices: Any) -> RetryTask | StokerError:
        """Of a worker that was killed because a sample took too long: that one is known, and not tried again."""
        self._tokens += 1
        keys, k = self._keys(indices), (life.at[0] & 0xFFFFFFFF) - 2
        limit = self._spec.sample_timeout
        if not 0 <= k < len(keys):
            case.late += 1
            if case.late <= SURE:
                # A batch that is made at once: which of them is it? Or it was another one, drawn in a bad one's place.
                return RetryTask(_plain(indices), case.bad, probe=True, others=case.late)
            which, file, index = f"one of {str(keys)[:200]}, or what was to replace it,", "", None
        else:
            index = keys[k]
            file = file_of(self._spec.dataset, index)
            which = called(index, file)
        if index is None or not self._goes_on:
            del self._cases[epoch, number]
            return SampleTimeoutError(
                f"{which} was not loaded within sample_timeout={limit:g} seconds, so its worker (pid {life.pid}) was "
                f"killed and replaced. It was here:\n{life.hung}"
            )
        case.bad[k] = Failure(plain(index), file, f"SampleTimeout: not loaded within {limit:g} s", "timeout")
        logger.warning(f"{which}: not loaded within {limit:g} s; its worker was here:\n{life.hung}")
        return RetryTask(_plain(indices), dict(case.bad), others=case.late)

    def _blamed(self, case: _Case, epoch: int, number: int, indices: Any, k: int) -> RetryTask | StokerError:
        index = self._keys(indices)[k]
        file = file_of(self._spec.dataset, index)
        if plain(index) not in self.known:
            self._tokens += case.deaths  # what bounds these is the policy for samples
        del self._cases[epoch, number]
        if not self._goes_on:
            return WorkerDiedError(
                f"{_pids(case.pids)} exited unexpectedly: {called(index, file)} kills the worker that loads it: the "
                f'last one {case.words}. on_error="skip" goes on without it, stoker verify finds all such samples',
                [],
                [number],
            )
        failure = Failure(plain(index), file, f"WorkerDied: the worker that loads it {case.words}", "death")
        self.known[plain(index)] = failure
        return RetryTask(_plain(indices), {**case.bad, k: failure})

    def _keys(self, indices: Any) -> list[Any]:
        indices = _plain(indices)
        return list(indices) if self._spec.auto_collation else [indices]

    # -- accounts

    def _account(self, life: Life, asked: Mapping[int, Any]) -> str:
        """Says that a worker died."""
        words = f"worker {life.id} (pid {life.pid}) "
        words += "was killed, it was late" if life.hung else exit_reason.why(life.exitcode, life.nbytes)
        if not life.serving:
            words += ", while it started"
        elif life.hand is not None:
            words += f", with task {life.hand[1]} in hand"
            k = (life.at[0] & 0xFFFFFFFF) - 2
            indices = asked.get(life.hand[1])
            if not self._spec.shared:
                given = list(self._given[life.id])[: self._done[life.id] + 1]
                indices = next((t.indices for e, t in given if (e, t.number) == life.hand), None)
            watched = self._spec.timed or (life.hand in self._cases)
            if watched and indices is not None and 0 <= k < len(self._keys(indices)):
                index = self._keys(indices)[k]
                words += f", at {called(index, file_of(self._spec.dataset, index))}"
        self._died.append(words)
        faults = self._metrics.faults
        kind = "timeouts" if life.hung else "deaths"
        faults[kind] = faults.get(kind, 0) + 1
        faults["died"] = [*faults.get("died", []), words][-LAST:]
        return words

    def _spend(self, life: Life, words: str, e: WorkerDiedError) -> None:
        """Takes a token for a death.

        Raises:
            WorkerDiedError: there is none.
        """
        came, self._earned_at = self._metrics.tasks - self._earned_at, self._metrics.tasks
        self._tokens = min(max(TOKENS, self._tokens), self._tokens + came * EARNED) - 1
        # Where others go on, one that is killed while it starts says nothing of the dataset.
        self._unborn = 0 if life.serving else 1 if came else self._unborn + 1
        if self._tokens >= 0 and self._unborn < STARTS:
            changed, self._drawn_otherwise = self._drawn_otherwise, False
            same = "its next batches have other random numbers" if changed else "no batch changes"
            next_ = "It was about to leave" if life.leaving else "Another one takes its place"
            self._untold.append(f"{words}. {next_}; {same}")
            return
        how = Counter(w.partition(") ")[2].partition(";")[0].partition(",")[0] for w in self._died)
        counts = "; ".join(f"{n} {w}" for w, n in how.most_common(3))
        started = " None of the last had even started: is the dataset to be had in a worker?" * (self._unborn >= STARTS)
        raise WorkerDiedError(
            f"{e}: {len(self._died)} workers died, faster than batches came, so no other is started ({counts})."
            f"{started} The last: {words}",
            e.workers,
            e.tasks,
            e.places,
        )


def _plain(indices: Any) -> Any:
    return indices.indices if type(indices) is RetryTask else indices


def _pids(pids: list[int | None]) -> str:
    return f"DataLoader worker (pid(s) {', '.join(map(str, pids))})"
