"""A pool of local worker processes and nodes of a Ray cluster. See ``workers.protocol.Pool``.

1. training thread, ``submit``: puts the task into this pool's queue.
2. ``_dispatch``: sends it to an idle local worker, else to the node that answers soonest; else it waits. If all are
   busy, each gets a second task per core, so that no node idles while an answer is in transit. Small batches that are
   made quickly share a call.
3. node: its workers make the batch; the answer is a Ray object. One of Ray's threads announces it (``_arrived``).
4. training thread, ``receive``: takes results that have arrived, here or from nodes, and dispatches waiting tasks.
5. training thread, ``RemoteResult.take``: makes the only copy, from the object store into a slot of this process.

Late batches are made twice: idle local workers repeat a call that takes much longer than usual, and the first answer
counts. If a node answers with an error, or its worker died, the task is run here: so the error that the training loop
sees is a local one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from stoker.core.errors import one_line
from stoker.core.types import Batch
from stoker.core.warn import warn_user
from stoker.sampling.order import Task
from stoker.transport.thread_slots import HeapWriter
from stoker.workers.exceptions import is_error
from stoker.workers.process_pool import ProcessPool
from stoker.workers.protocol import LocalBatch, Result, WorkerReply, WorkerSpec

from .checks import digests, first_difference
from .cluster import using_ray
from .node import Died, Packed
from .nodes import AHEAD, NodeRequest, Nodes, NodeState, RayNode

TICK_S = 0.05  # between two checks for late calls
LATE = 3.0  # a call that takes this many times the usual duration is repeated by idle local workers
SLOW = 3.0  # a node that takes this many times as long as the fastest gets no tasks,
ASK_AGAIN_S = 5.0  # except for one call at this interval
HANGS_S = 5.0  # after this, or ten times its usual duration if longer, a node gets no new tasks until it answers
PACK_BYTES = 8 << 20  # small batches share a call, up to this many bytes
MOST_PACKED = 8  # and this many batches
PACK_S = 0.05  # seconds of one core's work that a call may carry, if that is more than one batch
STORE_SHARE = 3  # batches in flight may fill one part in this many of the object store
SMALL = 64 << 10  # bytes; smaller answers are decoded at once, because they may be errors


class RemoteResult(Result):
    """A batch made by a node, still in the object store."""

    def __init__(self, epoch: int, packed: Packed, slots: HeapWriter) -> None:
        nbytes = len(packed.leaves) + len(packed.meta)
        super().__init__(-1, epoch, packed.number, False, packed.times, nbytes, packed)
        self._slots = slots

    def take(self) -> Batch:
        return super().take().unpack(self._slots)


class RemotePool:
    """Worker processes here (``local``), and on the other nodes of a cluster, which come and go."""

    def __init__(self, local: ProcessPool, nodes: Nodes, spec: WorkerSpec) -> None:
        self._local, self._nodes, self._spec = local, nodes, spec
        self.processes = local.processes  # on this machine
        self.retire, self.resize, self.alive = local.retire, local.resize, local.alive
        self._owner = os.getpid()
        self._epoch = 0
        self._waiting: deque[Task] = deque()
        self._with_local: dict[int, Task] = {}
        self._ready: deque[Result] = deque()
        # by task number: digests of the nodes' batches, and of the same batches made here
        self._probes: dict[int, list[tuple[RayNode, dict[str, str]]]] = {}
        self._probed_here: dict[int, dict[str, str]] = {}
        self._batch_bytes = 0
        self._next_tick = 0.0
        self._finishing = False
        self._calls: list[NodeRequest] = []  # of this round, with answers not taken yet
        self._round = nodes.next_round()
        local.wake_by(nodes.wake.fd)

    # -- the scheduler's interface

    @property
    def ahead(self) -> int:
        """Tasks that may be in flight in addition to those of local workers."""
        return sum(AHEAD * self._room(n) for n in self._nodes.with_state(NodeState.READY))

    def submit(self, worker: int | None, task: Task) -> None:
        with self._nodes.lock:
            self._waiting.append(task)
            self._dispatch(wait_for_more=True)

    def resume(self, epoch: int, shared_seed: int | None) -> None:
        with self._nodes.lock:
            self._epoch = epoch
            self._round = self._nodes.next_round()
            self._calls.clear()
            self._waiting.clear()
            self._with_local.clear()
            self._ready.clear()
        self._local.resume(epoch, shared_seed)

    def finish(self) -> None:
        with self._nodes.lock:
            self._finishing = True
            self._finish_local()

    def receive(self, timeout: float | None, worker: int | None = None) -> Result | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._tell()
            with self._nodes.lock:
                if self._has_nodes:
                    self._take_answers()
                    self._repeat_late()
                else:  # another iterator has begun, and nodes work for that
                    while self._calls:
                        self._repeat(self._calls.pop())
                if not self._ready:
                    self._dispatch()
                self._finish_local()
                if self._ready:
                    return self._ready.popleft()
            now = time.monotonic()
            left = TICK_S if deadline is None else max(0.0, min(TICK_S, deadline - now))
            result = self._local.receive(left)
            if result is not None:
                return self._made_here(result)
            if deadline is not None and now >= deadline:
                return None

    def close(self) -> None:
        if os.getpid() == self._owner:
            with self._nodes.lock:
                if self._has_nodes:
                    self._nodes.next_round()  # drops batches that nodes are still making
                self._waiting.clear()
        self._local.close()

    @property
    def _has_nodes(self) -> bool:
        """Whether nodes work for this iterator: they work for the loader's latest one."""
        return self._round == self._nodes.round

    # -- dispatching tasks

    def _dispatch(self, wait_for_more: bool = False) -> None:
        """Dispatches waiting tasks. With ``wait_for_more``, sends a node only full calls. Each delivery brings one new
        task, and calls with one task each would cost the training thread a third of a millisecond."""
        if self._has_nodes:
            self._send_probes()
        while self._waiting:
            for per_core in range(1, AHEAD + 1):
                if len(self._with_local) < per_core * max(1, self._local.alive()):
                    self._to_local(self._waiting.popleft())
                    break
                node = self._free_node(per_core)
                if node is not None:
                    fit = max(self._core_tasks(node), per_core * self._room(node) - node.open)
                    fit = min(self._pack(), fit)
                    if wait_for_more and len(self._waiting) < fit:
                        return
                    self._to_node(node, [self._waiting.popleft() for _ in range(min(fit, len(self._waiting)))])
                    break
            else:
                return

    def _pack(self) -> int:
        """Returns the maximum number of tasks in one call."""
        return max(1, min(MOST_PACKED, PACK_BYTES // max(1, self._batch_bytes))) if self._batch_bytes else 1

    def _core_tasks(self, node: RayNode) -> int:
        """Returns the tasks that keep a node's core busy: one, or as many as fit a call and are made in ``PACK_S``."""
        quick = int(PACK_S / node.make_s) if node.make_s else 1
        return max(1, min(self._pack(), quick))

    def _room(self, node: RayNode) -> int:
        """Returns the number of tasks that keep all cores of a node busy."""
        return node.info.cores * self._core_tasks(node)

    def _free_node(self, per_core: int) -> RayNode | None:
        """Returns the node that may take another task and answers soonest; None if there is none."""
        if not self._has_nodes:
            return None
        ready = self._nodes.with_state(NodeState.READY)
        in_flight = sum(node.open for node in self._nodes.nodes.values())
        if in_flight and (in_flight + 1) * self._batch_bytes > self._nodes.store_bytes // STORE_SHARE:
            return None
        slow_s, now = SLOW * self._usual_s(), time.monotonic()
        free = [
            node
            for node in ready
            if node.open < per_core * self._room(node)
            # A slow node would hold up the order; it gets a call now and then to see whether it is still slow.
            and (node.took_s <= slow_s or (not node.calls and now - node.asked > ASK_AGAIN_S))
        ]
        return min(free, key=lambda node: node.took_s * (1 + node.open / self._room(node)), default=None)

    def _usual_s(self) -> float:
        """Returns the seconds that a call takes on the fastest node; 0.0 if unknown."""
        return min((n.took_s for n in self._nodes.with_state(NodeState.READY) if n.took_s), default=0.0)

    def _to_local(self, task: Task) -> None:
        self._with_local[task.number] = task
        self._local.submit(None, task)

    def _to_node(self, node: RayNode, tasks: list[Task], probe: bool = False) -> None:
        call = NodeRequest(node, node.actor, self._round, tasks, time.monotonic(), probe)
        node.calls.append(call)
        self._calls.append(call)
        node.asked = call.sent
        spec = self._spec
        seeds = spec.base_seed, spec.part_epochs + self._epoch
        try:
            with using_ray():
                ref = node.actor.make.remote(self._nodes.key, call.round, seeds, [(t.number, t.indices) for t in tasks])
                ref.future().add_done_callback(functools.partial(self._arrived, call))
        except Exception as e:
            node.calls.remove(call)
            self._calls.remove(call)
            self._waiting.extendleft(reversed([] if probe else tasks))
            self._nodes.give_up(node, one_line(e))

    def _send_probes(self) -> None:
        """Makes nodes that have just started make a batch that is also made here."""
        for node in self._nodes.with_state(NodeState.PROBING):
            if self._waiting and not node.calls:
                task = self._waiting.popleft()
                self._to_local(task)
                self._probes.setdefault(task.number, [])
                self._to_node(node, [task], probe=True)

    def _finish_local(self) -> None:
        """Once no more tasks will come, lets local workers leave when nodes have answered: they may have to help."""
        if self._finishing and not self._waiting and not self._open_calls():
            self._local.finish()

    def _open_calls(self) -> list[NodeRequest]:
        """Returns the calls whose tasks nobody else has, including those of nodes that were given up."""
        return [call for call in self._calls if not call.repeated and not call.probe]

    # -- answers

    def _arrived(self, call: NodeRequest, future: Future[list[Packed | Died]]) -> None:
        """Called by one of Ray's threads. The answer may be read much later, in the next epoch."""
        call.took_s = time.monotonic() - call.sent
        self._nodes.answers.append((call, future))
        self._nodes.wake.set()

    def _take_answers(self) -> None:
        answers_in = self._nodes.answers
        while answers_in:
            call, future = answers_in.popleft()
            node = call.node
            if call in node.calls:
                node.calls.remove(call)
            current = call in self._calls
            if current:
                self._calls.remove(call)
            try:
                answers = future.result()
            except Exception as e:
                if current and not call.probe and not call.repeated:
                    self._waiting.extendleft(reversed(call.tasks))
                self._after_error(call, current, e)
                continue
            if node.took_s > SLOW * self._usual_s():
                node.recent_s.clear()  # this call tested whether the node is still slow
            node.recent_s.append(call.took_s)
            if node.state is NodeState.DOUBTED:
                node.state = NodeState.READY
            if current and call.probe:
                self._compare(node, call.tasks[0], answers[0])
            elif current:
                self._keep(node, call, answers)

    def _after_error(self, call: NodeRequest, current: bool, e: Exception) -> None:
        node = call.node
        cause = getattr(e, "cause", None) or e  # a RayTaskError holds the node's error
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
        if isinstance(cause, RuntimeError) and type(cause) is RuntimeError:  # raised by ``NodeWorkers.make``
            if current:
                self._nodes.give_up(node, str(cause))
        elif call.actor is node.actor:
            self._nodes.restart(node, reason)

    def _keep(self, node: RayNode, call: NodeRequest, answers: Iterable[Packed | Died]) -> None:
        for task, answer in zip(call.tasks, answers, strict=True):
            if not isinstance(answer, Packed):  # its worker died: the cause is determined on this machine
                self._repeat_here(call, task)
                continue
            result: Result = RemoteResult(self._epoch, answer, self._nodes.slots)
            if result.nbytes < SMALL:
                batch = result.take()
                if is_error(batch):
                    self._repeat_here(call, task)
                    continue
                result = LocalBatch(-1, self._epoch, task.number, False, answer.times, result.nbytes, batch)
            self._batch_bytes = max(self._batch_bytes, result.nbytes)
            node.made(answer.times)
            self._ready.append(result)

    def _repeat_here(self, call: NodeRequest, task: Task) -> None:
        if not call.repeated:
            self._to_local(task)

    def _made_here(self, result: Result) -> Result:
        with self._nodes.lock:
            if result.epoch != self._epoch:
                return result
            self._with_local.pop(result.task, None)
            self._batch_bytes = max(self._batch_bytes, result.nbytes)
            if result.task not in self._probes:
                return result
            batch = result.take()
            if not is_error(batch):
                self._probed_here[result.task] = digests(batch)
            self._judge(result.task)
            return LocalBatch(
                result.worker, result.epoch, result.task, result.ended, result.times, result.nbytes, batch
            )

    # -- the first batch of a node is made twice

    def _compare(self, node: RayNode, task: Task, answer: Packed | Died) -> None:
        if not isinstance(answer, Packed):
            self._nodes.give_up(node, f"its first batch killed a worker ({answer.reason})")
            return
        batch = answer.unpack(self._nodes.slots)
        if is_error(batch):
            error = batch.data if type(batch) is WorkerReply else batch
            lines = [line for line in error.exc_msg.strip().splitlines() if line.strip()]
            last = lines[-1].strip() if lines else ""
            if "FileNotFoundError" in error.exc_msg:
                last += "; files do not travel, so its paths have to exist there"
            self._nodes.give_up(node, f"it cannot load what this machine can ({last})")
            return
        self._probes[task.number].append((node, digests(batch)))
        self._judge(task.number)

    def _judge(self, number: int) -> None:
        """Accepts a node if its batch and the one made here are the same, once both have arrived."""
        here = self._probed_here.get(number)
        if here is None:
            return
        for node, there in self._probes[number]:
            place = first_difference(here, there)
            if place:
                self._nodes.give_up(node, f"its first batch has other bits than the same batch made here, at {place}")
            else:
                node.state, node.probed = NodeState.READY, True
        self._probes[number] = []

    # -- late calls

    def _repeat_late(self) -> None:
        while self._nodes.lost:
            self._repeat(self._nodes.lost.popleft())
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        for node in self._nodes.with_state(NodeState.READY, NodeState.DOUBTED):
            late = [c for c in node.calls if now - c.sent > max(HANGS_S, 10 * node.took_s)]
            if late:
                node.state = NodeState.DOUBTED
                for call in late:
                    self._repeat(call)
        if self._waiting or len(self._with_local) >= max(1, self._local.alive()):
            return
        late_s = max(TICK_S, LATE * self._usual_s())
        calls = [c for c in self._open_calls() if now - c.sent > late_s]
        if calls:
            self._repeat(min(calls, key=lambda c: c.tasks[0].number))

    def _repeat(self, call: NodeRequest) -> None:
        """Dispatches a call's tasks again; the first answer counts."""
        if not call.repeated and not call.probe and call.round == self._round:
            call.repeated = True
            self._waiting.extendleft(reversed(call.tasks))

    def _tell(self) -> None:
        """Warns about events on nodes; in this thread, because the user's line is on its stack."""
        messages = self._nodes.messages
        while messages:
            with contextlib.suppress(IndexError):
                warn_user(messages.popleft())
