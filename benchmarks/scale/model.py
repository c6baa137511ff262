"""Ranks, their nodes and the network between them as a queue of events: what more of them would do.

A rank follows the rules of ``stoker_ray.pool`` (tasks ahead, packing, what is late is made twice), and each
of these takes one thing at a time::

    driver   the training thread: a call, a batch's indices and delivery, the copy out of the object store
    core     of a node or of this machine: makes one batch
    wire     out of a node, and into the trainer: an answer holds both for as long as its bytes take

With several ranks a step begins when all of them have their batch. Nothing here reads a clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

# As in stoker_ray; a test compares them.
AHEAD = 2  # tasks in flight for each core of a node
TICK_S, LATE, HANGS_S = 0.05, 3.0, 5.0
PACK_BYTES, MOST_PACKED, PACK_S, STORE_SHARE = 8 << 20, 8, 0.05, 3
INLINE = 100 << 10  # bytes of an answer that travels in Ray's message, not through its object store


@dataclass(frozen=True)
class Costs:
    """What things take, in seconds.

    Attributes:
        call_s: the driver, for a call and its answer.
        batch_s: the driver, for a batch: its indices, its place in the order, its delivery.
        copy_s: the driver, for a byte out of the object store.
        object_s: the wire, for an answer that goes through the object store.
        wire_s: the wire, for a byte.
        latency_s: one way.
    """

    call_s: float = 0.0
    batch_s: float = 0.0
    copy_s: float = 0.0
    object_s: float = 0.0
    wire_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True)
class Node:
    """A node, and what happens to it.

    Attributes:
        cores: as many batches at a time.
        slow: times as long as usual, from ``slow_from`` seconds on.
        dies: when.
        notice: seconds after which its calls fail then.
    """

    cores: int
    slow: float = 1.0
    slow_from: float = 0.0
    dies: float = math.inf
    notice: float = 0.03


@dataclass(frozen=True)
class Plan:
    """What is to be simulated.

    Attributes:
        batches: of each rank.
        make_s: of a batch, by one core, on average.
        nbytes: of a batch.
        nodes: of each rank.
        local: worker processes of each rank on its own machine.
        ahead: tasks in flight for each core.
        ranks: how many.
        step_s: what a training step takes. The driver does nothing else meanwhile.
        spread: of the time to make a batch: sigma of a lognormal distribution.
        fault: a node that takes the place of the first rank's first.
        gather: tasks wait until a call is full, or nothing is left to be delivered.
        drop_slow: a node gets no tasks while it takes ``LATE`` times as long as the best one, which says what is late.
        store: bytes of the trainer's object store.
    """

    batches: int
    make_s: float
    nbytes: int = 0
    nodes: tuple[Node, ...] = ()
    local: int = 0
    ahead: int = AHEAD
    ranks: int = 1
    step_s: float = 0.0
    spread: float = 0.0
    fault: Node | None = None
    gather: bool = False
    drop_slow: bool = False
    store: int = 8 << 30


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        times: when each batch of the first rank was delivered.
        waits: by step, from the end of the step before until all ranks have their batch.
        delivered: by rank, the tasks in the order of delivery.
        calls, made: of all ranks: calls sent, and batches made, those made twice included.
        driver_s: seconds of the first rank's driver.
        wire_s: seconds of the wire into the first rank.
    """

    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    delivered: list[list[int]] = field(default_factory=list)
    calls: int = 0
    made: int = 0
    driver_s: float = 0.0
    wire_s: float = 0.0

    def rate(self, skip: int = 0, last: int = 0) -> float:
        """Batches a second of the first rank, ``skip`` at the beginning and ``last`` at the end left out."""
        times = self.times[skip : len(self.times) - last]
        return (len(times) - 1) / (times[-1] - times[0])


class _Cores:
    def __init__(self, n: int) -> None:
        self.free = [0.0] * n

    def end(self, begin: float, seconds: float) -> float:
        """When a task ends that comes at ``begin``."""
        end = max(begin, self.free[0]) + seconds
        heapq.heapreplace(self.free, end)
        return end


class _Remote:
    """A node as a rank sees it."""

    def __init__(self, node: Node, core_tasks: int) -> None:
        self.node, self.core_tasks, self.room = node, core_tasks, node.cores * core_tasks
        self.cores = _Cores(node.cores)
        self.calls: list[_Call] = []
        self.usable, self.doubted = True, False
        self.took = self.out_free = 0.0
        self.open = 0


@dataclass(eq=False)
class _Call:
    remote: _Remote
    tasks: list[int]
    sent: float
    failed: bool = False
    repeated: bool = False


class _Rank:
    def __init__(self, sim: Simulation, nodes: tuple[Node, ...], seconds: list[float]) -> None:
        plan = sim.plan
        self.sim, self.plan, self.costs, self.seconds = sim, plan, sim.costs, seconds
        self.pack = max(1, min(MOST_PACKED, PACK_BYTES // max(1, plan.nbytes)))
        self.nodes = [_Remote(node, max(1, min(self.pack, int(PACK_S / plan.make_s)))) for node in nodes]
        self.local, self.with_local = _Cores(plan.local), set[int]()
        self.waiting: deque[int] = deque()
        self.ready: dict[int, bool] = {}  # by task: it came from a node
        self.inbox: deque[_Call] = deque()
        self.due = self.drawn = self.spent = 0
        self.asked = self.clock = self.busy = self.next_tick = 0.0
        self.in_free = self.wire = 0.0
        self.blocked = 0  # counts the times that it was, while it is; else negative
        self.times: list[float] = []
        self.delivered: list[int] = []

    # -- the driver

    def ask(self, now: float) -> None:
        """The training loop wants a batch."""
        self.asked = self.clock = now
        self._fill()
        self._look(now)

    def _look(self, now: float) -> None:
        self.clock = max(self.clock, now)
        self.blocked = -abs(self.blocked)
        self._take_answers()
        self._repeat_late()
        if not (self.plan.gather and self.due in self.ready):
            self._dispatch()
        if self.due in self.ready:
            self._deliver()
            return
        if not self.with_local and not any(remote.calls for remote in self.nodes):
            raise RuntimeError("no worker is left")
        self.blocked = turn = abs(self.blocked) + 1
        self.sim.at(self.clock + TICK_S, lambda t: self._look(t) if self.blocked == turn else None)

    def _wake(self, now: float) -> None:
        if self.blocked > 0:
            self.blocked = -self.blocked
            self.sim.at(max(now, self.clock), self._look)

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def _deliver(self) -> None:
        remote = self.ready.pop(self.due)
        self.delivered.append(self.due)
        self.due += 1
        self.spent -= 1
        self._fill()
        self._spend(self.costs.batch_s + (self.plan.nbytes * self.costs.copy_s if remote else 0.0))
        self.times.append(self.clock)
        self.sim.has_batch(self)

    def _fill(self) -> None:
        """Spends credits while there are any."""
        window = self.plan.ahead * (self.plan.local + sum(r.room for r in self.nodes if r.usable))
        room = max(1, self.plan.store // STORE_SHARE // max(1, self.plan.nbytes))
        while self.spent < min(window, room) and self.drawn < self.plan.batches:
            self.spent += 1
            self.waiting.append(self.drawn)
            self.drawn += 1
            if not self.plan.gather or len(self.waiting) >= self.pack:
                self._dispatch()

    def _dispatch(self) -> None:
        while self.waiting:
            for per_core in range(1, self.plan.ahead + 1):
                if len(self.with_local) < per_core * self.plan.local:
                    self._to_local(self.waiting.popleft())
                    break
                free = [r for r in self.nodes if r.usable and not r.doubted and r.open < per_core * r.room]
                if free:
                    remote = min(free, key=lambda r: r.took * (1 + r.open / r.room))
                    n = min(self.pack, len(self.waiting), max(remote.core_tasks, per_core * remote.room - remote.open))
                    self._to_node(remote, [self.waiting.popleft() for _ in range(n)])
                    break
            else:
                return

    def _to_local(self, task: int) -> None:
        self.with_local.add(task)
        self.sim.outcome.made += 1

        def made(now: float) -> None:
            self.with_local.discard(task)
            self._keep([task], False)
            self._wake(now)

        self.sim.at(self.local.end(self.clock, self.seconds[task]), made)

    def _to_node(self, remote: _Remote, tasks: list[int]) -> None:
        self._spend(self.costs.call_s)
        call = _Call(remote, tasks, self.clock)
        remote.calls.append(call)
        remote.open += len(tasks)
        self.sim.outcome.calls += 1
        self.sim.outcome.made += len(tasks)
        node, arrives = remote.node, self.clock + self.costs.latency_s
        times = node.slow if arrives >= node.slow_from else 1.0
        made = max(remote.cores.end(arrives, self.seconds[task] * times) for task in tasks)
        if made > node.dies:
            call.failed = True
            self.sim.at(max(node.dies, arrives) + node.notice, lambda now: self._arrived(call, now))
        else:
            self.sim.at(made, lambda now: self._answer(call, now))

    # -- nodes

    def _answer(self, call: _Call, now: float) -> None:
        """All tasks of a call are made; the answer goes on its way."""
        remote, costs = call.remote, self.costs
        nbytes = self.plan.nbytes * len(call.tasks)
        seconds = nbytes * costs.wire_s + (costs.object_s if nbytes > INLINE else 0.0)
        begin = max(now, remote.out_free, self.in_free)
        arrives = begin + seconds + costs.latency_s
        if arrives > remote.node.dies:
            call.failed = True
            arrives = max(now, remote.node.dies + remote.node.notice)
        else:
            remote.out_free = self.in_free = begin + seconds
            self.wire += seconds
        self.sim.at(arrives, lambda t: self._arrived(call, t))

    def _arrived(self, call: _Call, now: float) -> None:
        self.inbox.append(call)
        self._wake(now)

    def _take_answers(self) -> None:
        while self.inbox:
            call = self.inbox.popleft()
            remote = call.remote
            remote.calls.remove(call)
            remote.open -= len(call.tasks)
            if call.failed:
                remote.usable = False
                self._repeat(call)
                continue
            took = self.clock - call.sent
            remote.took = 0.8 * remote.took + 0.2 * took if remote.took else took
            remote.doubted = self.plan.drop_slow and remote.took > LATE * self._usual(remote)
            self._keep(call.tasks, True)

    def _keep(self, tasks: list[int], remote: bool) -> None:
        for task in tasks:
            if task >= self.due:  # else it was made twice, and the other answer was delivered
                self.ready.setdefault(task, remote)

    def _usual(self, remote: _Remote) -> float:
        """What a call to this node should take."""
        if not self.plan.drop_slow:
            return remote.took
        return min((r.took for r in self.nodes if r.usable and r.took), default=remote.took)

    def _repeat_late(self) -> None:
        if self.clock < self.next_tick:
            return
        self.next_tick = self.clock + TICK_S
        calls = [call for remote in self.nodes for call in remote.calls]
        for call in calls:
            if self.clock - call.sent > max(HANGS_S, 10 * self._usual(call.remote)):
                call.remote.doubted = True
                self._repeat(call)
        if self.waiting or len(self.with_local) >= self.plan.local:
            return
        late = [c for c in calls if not c.repeated and self.clock - c.sent > max(TICK_S, LATE * self._usual(c.remote))]
        if late:
            self._repeat(min(late, key=lambda c: c.tasks[0]))

    def _repeat(self, call: _Call) -> None:
        if not call.repeated:
            call.repeated = True
            self.waiting.extendleft(reversed(call.tasks))


class Simulation:
    """One run of a plan.

    Args:
        plan, costs: what, and what it takes.
        seed: of the times to make batches.

    Example:
        >>> plan = Plan(batches=100, make_s=0.25, nodes=(Node(cores=1),))
        >>> Simulation(plan, Costs()).run().rate()
        4.0
    """

    def __init__(self, plan: Plan, costs: Costs, seed: int = 0) -> None:
        self.plan, self.costs = plan, costs
        self.outcome, self._count = Outcome(), 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._here: list[float] = []  # when each rank got the batch of this step
        self._asked = 0.0
        rng, self._ranks = np.random.default_rng(seed), list[_Rank]()
        drawn = rng.lognormal(-(plan.spread**2) / 2, plan.spread, (plan.ranks, plan.batches)) * plan.make_s
        for rank, seconds in enumerate(drawn.tolist()):
            nodes = plan.nodes if rank or plan.fault is None else (plan.fault, *plan.nodes[1:])
            self._ranks.append(_Rank(self, nodes, seconds))

    def at(self, when: float, act: Callable[[float], None]) -> None:
        """Calls ``act`` at that time; at the same time in the order of these calls."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def has_batch(self, rank: _Rank) -> None:
        """A rank has the batch of this step. The step begins when all have."""
        self._here.append(rank.clock)
        if len(self._here) < self.plan.ranks:
            return
        begins = max(self._here)
        self._here = []
        self.outcome.waits.append(begins - self._asked)
        if rank.due < self.plan.batches:
            self._asked = begins + self.plan.step_s
            for each in self._ranks:
                self.at(self._asked, each.ask)

    def run(self) -> Outcome:
        """All batches of all ranks.

        Raises:
            RuntimeError: no worker is left.
        """
        for rank in self._ranks:
            self.at(0.0, rank.ask)
        while self._events and len(self.outcome.waits) < self.plan.batches:
            when, _, act = heapq.heappop(self._events)
            act(when)
        first = self._ranks[0]
        self.outcome.times, self.outcome.driver_s, self.outcome.wire_s = first.times, first.busy, first.wire
        self.outcome.delivered = [rank.delivered for rank in self._ranks]
        return self.outcome
