"""A pool of local worker processes and of nodes of a Ray cluster. See ``workers.protocol.Pool``.

1. training thread, ``submit``: the task waits in a queue of this pool.
2. ``_dispatch``: it goes to a local worker that is idle, else to the node that answers soonest, else it waits. Nodes
   that are all busy get a second task for each core, so that none is idle while an answer travels. Small batches that
   are made quickly travel several a call.
3. node: its workers make the batch; the answer is a Ray object. A thread of Ray's says that it is there (``_arrived``).
4. training thread, ``receive``: takes what has arrived, here or from nodes, and gives out what waits.
5. training thread, ``RemoteResult.take``: the one copy, from the object store into a slot of this process.

What is late is made twice: a call that takes much longer than usual is repeated by local workers that are idle, and the
first answer counts. A node that answers with an error, or whose worker died, has its task made here: the error that the
training loop sees is a local one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from stoker.core.errors import one_line
from stoker.core.warn import warn_user
from stoker.sampling.order import Task
from stoker.workers.process_pool import ProcessPool
from stoker.workers.protocol import LocalBatch, Result, WorkerReply, WorkerSpec

from .checks import digest
from .cluster import using_ray
from .node import Packed
from .nodes import AHEAD, NodeRequest, Nodes, NodeState, RayNode
from .results import RemoteResult, is_error, unpack

TICK_S = 0.05  # between two looks at what is late
LATE = 3.0  # times as long as usual: a call that is repeated by whoever is idle
SLOW = 3.0  # times as long as the node that answers soonest: a node that gets no tasks,
ASK_AGAIN_S = 5.0  # but for one so often
HANGS_S = 5.0  # and then, or after ten times as long as usual, a node gets no new tasks until it answers
PACK_BYTES = 8 << 20  # small batches travel several a call, up to this many bytes
MOST_PACKED = 8  # of them
PACK_S = 0.05  # seconds of a core's work that a call may carry, if that is more than one batch for each idle core
STORE_SHARE = 3  # part of the object store that batches in flight may fill
SMALL = 64 << 10  # bytes: an answer that may be an error is looked into


class RemotePool:
    """Worker processes here and on the nodes of a cluster.

    Args:
        local: those here.
        nodes: the others; they come and go.
        spec: what all do.

    Attributes:
        processes: of this machine.
    """

    def __init__(self, local: ProcessPool, nodes: Nodes, spec: WorkerSpec) -> None:
        self._local, self._nodes, self._spec = local, nodes, spec
        self.processes = local.processes
        self._owner = os.getpid()
        self._epoch = 0
        self._waiting: deque[Task] = deque()
        self._with_local: dict[int, Task] = {}
        self._ready: deque[Result] = deque()
        self._probes: dict[int, list[tuple[RayNode, str]]] = {}  # by number of the task: digests of nodes
        self._probed_here: dict[int, str] = {}  # the digest of the same batch, made here
        self._batch_bytes = 0
        self._next_tick = 0.0
        self._finishing = False
        self._calls: list[NodeRequest] = []  # of this round, whose answers have not been taken
        self._round = nodes.next_round()
        local.wake_by(nodes.wake.fd)

    # -- what the scheduler asks for

    @property
    def ahead(self) -> int:
        """Tasks that may be in flight beside those of local workers."""
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

    def retire(self, worker: int) -> None:
        self._local.retire(worker)

    def resize(self, n: int) -> None:
        self._local.resize(n)

    def alive(self) -> int:
        return self._local.alive()

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
                else:
                    self._leave_nodes()
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
                    self._nodes.next_round()  # what nodes still make is dropped
                self._waiting.clear()
        self._local.close()

    @property
    def _has_nodes(self) -> bool:
        """Nodes work for the iterator of the loader that was begun last."""
        return self._round == self._nodes.round

    def _leave_nodes(self) -> None:
        """Another iterator has begun: what nodes were to make for this one is made here."""
        while self._calls:
            self._repeat(self._calls.pop())

    # -- giving out tasks

    def _dispatch(self, wait_for_more: bool = False) -> None:
        """Gives out what waits. ``wait_for_more``: a node gets no call that could have taken more small batches: a task
        comes with each delivery, and calls of one each would cost the training thread a third of a millisecond."""
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
        """Tasks of one call."""
        return max(1, min(MOST_PACKED, PACK_BYTES // max(1, self._batch_bytes))) if self._batch_bytes else 1

    def _core_tasks(self, node: RayNode) -> int:
        """Tasks that keep a core of a node busy: one, or as many as fit a call and are made in ``PACK_S``."""
        quick = int(PACK_S / node.make_s) if node.make_s else 1
        return max(1, min(self._pack(), quick))

    def _room(self, node: RayNode) -> int:
        """Tasks that keep all cores of a node busy."""
        return node.info.cores * self._core_tasks(node)

    def _free_node(self, per_core: int) -> RayNode | None:
        """The node that may have one more task and answers soonest."""
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
            # A slow node would hold up the order; now and then it is asked whether it still is slow.
            and (node.took_s <= slow_s or (not node.calls and now - node.asked > ASK_AGAIN_S))
        ]
        return min(free, key=lambda node: node.took_s * (1 + node.open / self._room(node)), default=None)

    def _usual_s(self) -> float:
        """What a call takes on the node that answers soonest."""
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
        """Nodes that have just started make a batch that is also made here."""
        for node in self._nodes.with_state(NodeState.PROBING):
            if self._waiting and not node.calls:
                task = self._waiting.popleft()
                self._to_local(task)
                self._probes.setdefault(task.number, [])
                self._to_node(node, [task], probe=True)

    def _finish_local(self) -> None:
        """No more tasks will come. Local workers leave when nodes have answered, for they may have to help out."""
        if self._finishing and not self._waiting and not self._open_calls():
            self._local.finish()

    def _open_calls(self) -> list[NodeRequest]:
        """Calls whose tasks nobody else has, of nodes that have been given up, too."""
        return [call for call in self._calls if not call.repeated and not call.probe]

    # -- answers

    def _arrived(self, call: NodeRequest, future: object) -> None:
        """Called by a thread of Ray's."""
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
                node.recent_s.clear()  # it was asked whether it still is slow
            node.recent_s.append(time.monotonic() - call.sent)
            if node.state is NodeState.DOUBTED:
                node.state = NodeState.READY
            if current and call.probe:
                self._compare(node, call.tasks[0], answers[0])
            elif current:
                self._keep(node, call, answers)

    def _after_error(self, call: NodeRequest, current: bool, e: Exception) -> None:
        node = call.node
        cause = getattr(e, "cause", None) or e  # a RayTaskError has that of the node
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
        if isinstance(cause, RuntimeError) and type(cause) is RuntimeError:  # of ``NodeWorkers.make``
            if current:
                self._nodes.give_up(node, str(cause))
        elif call.actor is node.actor:
            self._nodes.restart(node, reason)

    def _keep(self, node: RayNode, call: NodeRequest, answers: Iterable[Any]) -> None:
        for task, answer in zip(call.tasks, answers, strict=True):
            if not isinstance(answer, Packed):  # its worker died: who is to blame is found here
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
                self._probed_here[result.task] = digest(batch)
            self._judge(result.task)
            return LocalBatch(
                result.worker, result.epoch, result.task, result.ended, result.times, result.nbytes, batch
            )

    # -- the first batch of a node is made twice

    def _compare(self, node: RayNode, task: Task, answer: Any) -> None:
        if not isinstance(answer, Packed):
            self._nodes.give_up(node, f"its first batch killed a worker ({answer.reason})")
            return
        batch = unpack(answer, self._nodes.slots)
        if is_error(batch):
            error = batch.data if type(batch) is WorkerReply else batch
            lines = [line for line in error.exc_msg.strip().splitlines() if line.strip()]
            last = lines[-1].strip() if lines else ""
            if "FileNotFoundError" in error.exc_msg:
                last += "; files do not travel, so its paths have to exist there"
            self._nodes.give_up(node, f"it cannot load what this machine can ({last})")
            return
        self._probes[task.number].append((node, digest(batch)))
        self._judge(task.number)

    def _judge(self, number: int) -> None:
        """Both batches are there: the node is used if they are the same."""
        here = self._probed_here.get(number)
        if here is None:
            return
        for node, there in self._probes[number]:
            if here == there:
                node.state, node.probed = NodeState.READY, True
            else:
                self._nodes.give_up(node, "its first batch has other bits than the same batch made here")
        self._probes[number] = []

    # -- what is late

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
        """Its tasks are given out again; the answer that comes first counts."""
        if not call.repeated and not call.probe and call.round == self._round:
            call.repeated = True
            self._waiting.extendleft(reversed(call.tasks))

    def _tell(self) -> None:
        """Warns of what happened to nodes; in this thread, for the user's line is on its stack."""
        messages = self._nodes.messages
        while messages:
            with contextlib.suppress(IndexError):
                warn_user(messages.popleft())
