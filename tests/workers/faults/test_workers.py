"""Workers that die: the same batches to the bit whoever is killed and when, who is to blame, and no crash loop spins."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

import stoker
from stoker.core import resources
from stoker.core.errors import StokerWarning, UsageError, WorkerDiedError
from stoker.core.metrics import LoaderMetrics
from stoker.loader import pool_iterator
from stoker.loader.loader_state import state_of
from stoker.sampling.order import Task
from stoker.transport import codec
from stoker.transport import slots as ring
from stoker.workers import process_main, restart
from stoker.workers.faults import exit_reason
from tests.helpers import children_left, pretend_device

SEED = int(os.environ.get("STOKER_SEED", "0"))
LIMIT_S = 90  # for what takes a second or two
MODES: dict[str, dict[str, Any]] = {
    "two": {"num_workers": 2},
    "three": {"num_workers": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "auto": {"num_workers": "auto"},
    "auto, persistent": {"num_workers": "auto", "persistent_workers": True},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(LIMIT_S),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Drawn(Dataset):
    """Index and draws from all three generators; some samples kill their worker after the first draw.

    Args:
        n: samples.
        kills: by index, a signal's number, or an exit code below 0; and how often: a file counts.
        floats: more numbers, so that batches lie in slots.
    """

    def __init__(self, n: int = 200, kills: dict[int, tuple[int, int]] | None = None, floats: int = 0) -> None:
        self.n, self.kills, self.floats = n, kills or {}, floats
        self.files = [f"{i}.jpg" for i in range(n)]
        self.folder = os.getcwd()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        first = float(torch.rand(()))
        if i in self.kills:
            self.kill(i, *self.kills[i])
        row = [float(i), first, random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.cat([torch.tensor(row, dtype=torch.float64), torch.full((self.floats,), i, dtype=torch.float64)])

    def kill(self, i: int, how: int, times: int) -> None:
        for k in range(times):
            try:
                os.close(os.open(f"{self.folder}/killed-{i}-{k}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if how < 0:
                os._exit(-how - 1)
            os.kill(os.getpid(), how)
            signal.pause()


class Batched(Drawn):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


ALWAYS = 1 << 20


def loader_of(dataset: Any, mode: dict[str, Any], **kw: Any) -> Any:
    loader = stoker.DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **mode, **kw})
    if mode.get("num_workers") == "auto":
        loader.resize(2)
    return loader


def bits(loader: Any, epochs: int = 2, seed: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.cat([batch.clone() for batch in loader]) for _ in range(epochs)]


def deaths(loader: Any) -> int:
    return int(state_of(loader).metrics.faults.get("deaths", 0))


def kill(it: Any, r: random.Random, how: int) -> None:
    """Kills any one worker that runs."""
    running = [p for p in it._workers if p.is_alive()]
    if running:
        os.kill(r.choice(running).pid, how)


# -- the same batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("two", signal.SIGKILL),
        pytest.param("auto", -1, marks=pytest.mark.slow),
        pytest.param("persistent", signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("auto, persistent", -4, marks=pytest.mark.slow),
    ],
)
def test_samples_that_kill_once_change_no_bit(mode: str, how: int) -> None:
    """At the first task of a worker, in the middle, at the last of all; and after one draw of the task's many."""
    calm = bits(loader_of(Drawn(), MODES[mode]))
    loader = loader_of(Drawn(kills={3: (how, 1), 77: (how, 1), 150: (how, 2), 199: (how, 1)}), MODES[mode])
    shaken = bits(loader)
    assert deaths(loader) == 5
    assert all(torch.equal(a, b) for a, b in zip(calm, shaken, strict=True))


def _leave_once(worker: int) -> None:
    """Ends each worker's first process with exit code 0, as torch's handler of SIGTERM does."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"started-{worker}", os.O_CREAT | os.O_EXCL))
        os._exit(0)


def test_a_worker_that_exits_with_0_though_tasks_are_left_is_replaced() -> None:
    """So few tasks that all are in the queue when the workers start: who finds its end may leave, nobody else."""
    loader = loader_of(Drawn(8), MODES["auto"], worker_init_fn=_leave_once)
    with pytest.warns(StokerWarning, match="exit code 0"):
        shaken = bits(loader, epochs=1)
    assert deaths(loader) in (1, 2)  # the other may not have been missed yet
    calm = bits(loader_of(Drawn(8), MODES["auto"]), epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(calm, shaken, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "dataset", "keep_ns"),
    [("persistent", Drawn, 0), ("two", Batched, 0), ("persistent", Batched, 1 << 61), ("two", Drawn, 1 << 61)],
    ids=lambda x: {0: "before each task", 1 << 61: "before the first task only"}.get(x, "") if type(x) is int else None,
)
def test_random_state_goes_on_from_wherever_it_was_noted(
    mode: str, dataset: Any, keep_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_main, "CHECKPOINT_NS", keep_ns)
    calm = bits(loader_of(dataset(), MODES[mode]))
    loader = loader_of(dataset(kills=dict.fromkeys((5, 60, 120, 180), (signal.SIGKILL, 1))), MODES[mode])
    assert all(torch.equal(a, b) for a, b in zip(calm, bits(loader), strict=True))
    assert deaths(loader) == 4


class Worn(Drawn):
    """Each sample counts its loads; at some of them it kills: of sample 3 when its draws are wanted again."""

    def __init__(self, deadly: dict[int, set[int]]) -> None:
        super().__init__(80)
        self.deadly = deadly

    def __getitem__(self, i: int) -> torch.Tensor:
        if i in self.deadly:
            for load in itertools.count():
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(f"{self.folder}/load-{i}-{load}", os.O_CREAT | os.O_EXCL))
                    break
            if load in self.deadly[i]:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@pytest.mark.slow
def test_deaths_while_draws_are_made_again_are_nobodys_fault_at_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Somebody's kill -9 may meet one task twice. Its sample is left out only when it is surely to blame, as elsewhere,
    for the draws that come after it are others then; and that is said."""
    monkeypatch.setattr(process_main, "CHECKPOINT_NS", 1 << 61)  # all is made again from the first task on
    settings = {"shuffle": False, "persistent_workers": True}
    calm = bits(loader_of(Drawn(80), MODES["two"], **settings))
    loader = loader_of(Worn({3: {1, 2}, 25: {0}}), MODES["two"], **settings)
    assert all(torch.equal(a, b) for a, b in zip(calm, bits(loader), strict=True))
    assert deaths(loader) == 3
    assert not [w for w in recwarn if "random numbers" in str(w.message)]
    for p in Path.cwd().glob("load-*"):
        p.unlink()
    loader = loader_of(Worn({3: {1, 2, 3, 4, 5}, 25: {0}}), MODES["two"], **settings)
    torch.manual_seed(7)
    assert torch.cat([batch.clone() for batch in loader])[:, 0].tolist() == list(range(80))
    assert deaths(loader) == 4
    assert len([w for w in recwarn if "later random numbers may differ" in str(w.message)]) == 1


@pytest.mark.slow
def test_random_state_is_noted_seldom_and_what_nobody_needs_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_main, "CHECKPOINT_NS", 0)
    calm = bits(loader_of(Drawn(400), MODES["two"]))
    loader = loader_of(Drawn(400, kills=dict.fromkeys((100, 200, 300), (signal.SIGKILL, 1))), MODES["two"])
    torch.manual_seed(7)
    shaken = []
    for _ in range(2):
        rows = []
        for batch in (it := iter(loader)):
            rows.append(batch.clone())
            assert all(len(a.answered) + len(a.waiting) <= 24 for a in it._scheduler._restarts.own._assigned)
        shaken.append(torch.cat(rows))
    assert all(torch.equal(a, b) for a, b in zip(calm, shaken, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "floats", "how"),
    [
        ("three", 3_000, signal.SIGKILL),  # in slots
        ("auto", 0, signal.SIGSEGV),
        ("persistent", 3_000, signal.SIGSEGV),
        ("auto, persistent", 0, signal.SIGKILL),
    ],
)
def test_any_worker_killed_at_any_moment_changes_no_bit(
    mode: str, floats: int, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer kills while tasks are in flight, holds some of what it gets, and in the end compares all of it."""
    monkeypatch.setattr(
        restart, "MAX_DEATHS_ON_START", 1 << 30
    )  # on a busy machine it may meet five in a row while they start
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    kw = {"batch_size": 2}
    calm = bits(loader_of(Drawn(300, floats=floats), MODES[mode], **kw), epochs=2)
    loader = loader_of(Drawn(300, floats=floats), MODES[mode], **kw)
    torch.manual_seed(7)
    for want in calm:
        at = {r.randrange(8, 150) for _ in range(4)}
        held = []
        for k, batch in enumerate(it := iter(loader)):
            held.append(batch if k % 3 else batch.clone())
            if k in at:
                kill(it, r, how)
        assert torch.equal(torch.cat(held), want)
        del held, batch
        gc.collect()
    assert deaths(loader) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["three", "auto, persistent"])
def test_many_kills_over_many_batches(mode: str) -> None:
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    calm = bits(loader_of(Drawn(2000, floats=500), MODES[mode]), epochs=2)
    loader = loader_of(Drawn(2000, floats=500), MODES[mode])
    torch.manual_seed(7)
    for want in calm:
        at = {r.randrange(500) for _ in range(20)}
        rows = []
        for k, batch in enumerate(it := iter(loader)):
            rows.append(batch)
            if k in at:
                kill(it, r, r.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        assert torch.equal(torch.cat(rows), want)
    assert deaths(loader) > 10


SCRIPT = """
import os, signal, sys, torch, stoker
class Deadly(torch.utils.data.Dataset):
    def __len__(self): return 200
    def __getitem__(self, i):
        if i == {at} and not os.path.exists("once"):
            {once}
            os.kill(os.getpid(), signal.SIGKILL)
        return i
{setup}
try:
    for batch in {loader}(Deadly(), batch_size=4, num_workers=2, **{kw}):
        last = batch
    print("whole", batch.tolist())
except RuntimeError as e:
    print(e)
"""


def told(loader: str, at: int, once: str = "pass", kw: str = "{}", setup: str = "") -> str:
    """In a process of its own: torch's handler of SIGCHLD raises wherever the main thread happens to be."""
    code = SCRIPT.format(at=at, once=once, loader=loader, kw=kw, setup=setup)
    line = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout or done.stderr  # where it raises a second time, nothing is printed


DEAD = r"DataLoader worker \(pid(\(s\))? \d+.*\) (is killed by signal|exited unexpectedly)"


@pytest.mark.slow
def test_task_seeds_without_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system without pipes in packet mode each worker has tasks of its own, and nothing has to be run again."""
    monkeypatch.setattr(pool_iterator, "supported", lambda: False)
    calm = bits(loader_of(Drawn(), MODES["auto"]))
    loader = loader_of(Drawn(kills=dict.fromkeys((3, 77, 150, 199), (signal.SIGKILL, 1))), MODES["auto"])
    assert all(torch.equal(a, b) for a, b in zip(calm, bits(loader), strict=True))
    assert deaths(loader) == 4


@pytest.mark.slow
def test_torch_ends_the_run() -> None:
    """What all this is for."""
    once = "open('once', 'w').close()"
    assert "whole" not in told("torch.utils.data.DataLoader", 77, once)
    Path("once").unlink()
    assert told("stoker.DataLoader", 77, once) == "whole [196, 197, 198, 199]\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode", [{"num_workers": 2, "in_order": False}, {"num_workers": 2, "batch_size": None}], ids=str
)
def test_no_sample_is_lost_or_doubled_in_other_modes(mode: dict[str, Any]) -> None:
    kills = dict.fromkeys((0, 60, 199), (signal.SIGKILL, 1))
    found = [b.view(-1, 5)[:, 0] for b in loader_of(Drawn(kills=kills), mode)]
    assert torch.cat(found).sort().values.tolist() == list(map(float, range(200)))


@pytest.mark.slow
def test_workers_die_while_others_come_and_go() -> None:
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    calm = bits(loader_of(Drawn(600), MODES["auto"], batch_size=2), epochs=1)
    loader = loader_of(Drawn(600), MODES["auto"], batch_size=2)
    torch.manual_seed(7)
    rows = []
    for k, batch in enumerate(it := iter(loader)):
        rows.append(batch.clone())
        if k % 20 == 10:
            loader.resize(r.randint(1, 4))
        if k % 40 in (10, 11):
            kill(it, r, signal.SIGKILL)
    assert torch.equal(torch.cat(rows), calm[0])


class Leaver(Drawn):
    """The second worker dies with its first task in hand, once it has been told to leave. The first waits for that, or
    there would be no task for the second."""

    def __getitem__(self, i: int) -> torch.Tensor:
        row = super().__getitem__(i)
        info = torch.utils.data.get_worker_info()
        if info is None or not os.path.exists(f"held-{info.id}"):
            return row
        with open(f"held-{info.id}", "w"), open(f"told-{info.id}") as told:  # each waits for the other end
            how = told.read()
        os.remove(f"held-{info.id}")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(0)
        return row


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_worker_dies_that_was_told_to_leave(how: str) -> None:
    calm = bits(loader_of(Leaver(), MODES["auto"]), epochs=1)
    for name in ("held-0", "held-1", "told-0", "told-1"):
        os.mkfifo(name)
    loader = loader_of(Leaver(), MODES["auto"])
    torch.manual_seed(7)
    it = iter(loader)
    for held in ("held-0", "held-1"):
        open(held).close()
    loader.resize(1)
    Path("told-1").write_text(how)
    Path("told-0").write_text("go on")
    assert torch.equal(torch.cat([batch.clone() for batch in it]), calm[0])
    assert deaths(loader) == 1
    assert not children_left()


@pytest.mark.slow
def test_the_interpreter_that_workers_are_forked_from_is_killed() -> None:
    mode = {"num_workers": 2, "multiprocessing_context": "spawn"}
    calm = bits(loader_of(Drawn(3000), mode), epochs=1)
    loader = loader_of(Drawn(3000), mode)
    torch.manual_seed(7)
    rows = []
    for k, batch in enumerate(it := iter(loader)):
        rows.append(batch.clone())
        if k in (3, 500):
            os.kill(it._scheduler._pool._table.launcher.fork_server.process.pid, signal.SIGKILL)
    assert torch.equal(torch.cat(rows), calm[0])
    assert deaths(loader) >= 2  # they do not hear of it at once, and go on meanwhile


@pytest.mark.slow
def test_a_script_that_starts_its_loader_when_it_is_imported() -> None:
    """Under spawn the script is imported by what workers are forked from, which then starts a loader, and so on."""
    Path("unguarded.py").write_text(
        "import stoker\nlist(stoker.DataLoader(range(8), num_workers=2, multiprocessing_context='spawn'))\n"
    )
    line = [sys.executable, "unguarded.py"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "WorkerDiedError" in done.stderr.splitlines()[-1]
    assert 'must be under if __name__ == "__main__"' in done.stderr.splitlines()[-1]
    assert "exit code 1" in done.stderr.splitlines()[-1]


REAPER = """
import threading, time
def reap():
    while True:
        try: os.waitpid(-1, 0)
        except ChildProcessError: time.sleep(0.001)
threading.Thread(target=reap, daemon=True).start()"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup", ["signal.signal(signal.SIGCHLD, signal.SIG_IGN)", REAPER], ids=["ignored", "waited for"]
)
def test_a_worker_dies_and_somebody_else_reaps_it(setup: str) -> None:
    """``multiprocessing`` then believes for ever that it runs."""
    said = told("stoker.DataLoader", at=100, once="open('once', 'w').close()", setup=setup)
    assert said == "whole [196, 197, 198, 199]\n"


@pytest.mark.slow
def test_an_epoch_that_is_left_early_and_a_worker_that_dies_in_between() -> None:
    """Tasks of the epoch that was left move the workers' random state, dead or alive."""
    results = []
    for kills in ({}, dict.fromkeys((2, 9, 13, 40, 41, 42), (signal.SIGKILL, 1))):
        loader = loader_of(Drawn(kills=kills), MODES["persistent"], shuffle=False)
        torch.manual_seed(7)
        rows = []
        for left in (3, 1, 12, 50):
            rows += [batch.clone() for batch, _ in zip(loader, range(left), strict=False)]
        results.append(torch.cat(rows))
    assert torch.equal(*results)


@pytest.mark.slow
def test_behind_a_thread_that_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the pinning thread hears of the death, and the consumer replaces the worker."""
    from stoker.loader import pin_thread

    pretend_device(monkeypatch)
    monkeypatch.setattr(pin_thread, "pin", lambda data, device=None: data.clone())
    for mode in ("auto", "persistent"):
        calm = bits(loader_of(Drawn(floats=3000), MODES[mode]))
        loader = loader_of(
            Drawn(kills=dict.fromkeys((3, 60, 61, 150), (signal.SIGKILL, 1)), floats=3000), MODES[mode], pin_memory=True
        )
        assert all(torch.equal(a, b) for a, b in zip(calm, bits(loader), strict=True))
        assert deaths(loader) == 4
        for p in Path.cwd().glob("killed-*"):
            p.unlink()


def test_in_a_thread_of_the_users() -> None:
    found: list[Any] = []

    def consume() -> None:
        found.append(bits(loader_of(Drawn(kills={77: (signal.SIGKILL, 1)}), MODES["two"]), epochs=1)[0])

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(LIMIT_S)
    assert len(found[0]) == 200


@pytest.mark.slow
def test_nothing_is_left_behind_by_many_deaths() -> None:
    r = random.Random(SEED)
    loader = loader_of(Drawn(600, floats=5000), MODES["persistent"], batch_size=2)
    it = iter(loader)
    for _ in range(40):
        next(it)
    before, slots = len(os.listdir("/proc/self/fd")), sum(x.arena.slots for x in it._scheduler._pool._table.readers)
    for k in range(200):
        next(it)
        if k % 25 == 0:
            kill(it, r, signal.SIGKILL)
    assert deaths(loader) >= 4
    assert len(os.listdir("/proc/self/fd")) <= before
    assert (
        sum(x.arena.slots for x in it._scheduler._pool._table.readers) <= slots + 4
    )  # what the dead were filling is used again
    assert len(it._workers) == 2
    workers = list(it._workers)
    it._shutdown_workers()
    assert not any(p.is_alive() for p in workers)
    assert not {p.pid for p in multiprocessing.active_children()} & {p.pid for p in workers}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_slots_that_the_dead_were_filling_are_used_again(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch kills once, when its slot is taken and not yet sent."""
    write = codec.Encoded.write

    def writes_and_dies(self: Any, address: int) -> None:
        write(self, address)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"filled-{int(self._tensors[0][0, 0])}", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(codec.Encoded, "write", writes_and_dies)
    loader = loader_of(Drawn(16, floats=50_000), MODES[mode], shuffle=False, batch_size=2)
    it = iter(loader)
    assert [int(batch[0, 0]) for batch in it] == list(range(0, 16, 2))
    assert deaths(loader) == 8
    assert sum(x.arena.slots for x in state_of(loader).arenas) <= 8  # 2 workers, 2 tasks each, 1 held, 1 in hand


@pytest.mark.slow
@pytest.mark.parametrize("at", [77, 199])
def test_a_death_before_anybody_knew_the_task(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the instant between taking a task from the board and saying so: all that are not answered are asked for again."""
    calm = bits(loader_of(Drawn(), MODES["auto"]))
    monkeypatch.setattr(ring.Arena, "current_task", property(lambda arena: None, lambda arena, task: None))
    loader = loader_of(Drawn(kills={at: (signal.SIGKILL, 1)}), MODES["auto"])
    assert all(torch.equal(a, b) for a, b in zip(calm, bits(loader), strict=True))
    assert deaths(loader) == 1


# -- who is to blame


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "dataset"), [("two", Drawn), ("auto", Batched), ("spawn", Drawn)])
def test_the_sample_that_kills_is_named_and_the_others_come(mode: str, dataset: Any) -> None:
    it = iter(loader_of(dataset(kills={50: (signal.SIGSEGV, ALWAYS)}), MODES[mode], shuffle=False))
    rows = [next(it)[:, 0].tolist() for _ in range(12)]
    with pytest.raises(WorkerDiedError) as e:
        next(it)
    assert str(e.value).startswith("DataLoader worker (pid(s) ")  # torch's words, for those who look for them
    assert "exited unexpectedly: sample 50 (50.jpg) kills the worker that loads it" in str(e.value)
    assert "was killed by SIGSEGV (a crash in native code)" in str(e.value)
    rows += [batch[:, 0].tolist() for batch in it]
    assert list(itertools.chain(*rows)) == [float(i) for i in range(200) if not 48 <= i < 52]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dataset"), [("persistent", Drawn), ("auto", Batched)])
def test_the_policy_for_samples_decides(mode: str, dataset: Any, tmp_path: Path) -> None:
    bad = {50: (signal.SIGSEGV, ALWAYS), 51: (-3, ALWAYS), 120: (signal.SIGKILL, ALWAYS)}
    loader = loader_of(dataset(kills=bad), MODES[mode], shuffle=False, on_error="skip")
    rows = bits(loader)
    for found in rows:
        assert found[:, 0].tolist() == [float(i) for i in range(200) if i not in bad]
    first = deaths(loader)
    assert first <= 4 * len(bad)
    assert len(bits(loader)) == 2
    assert deaths(loader) == first  # they are known, and nobody tries them again
    lines = (tmp_path / "stoker-quarantine.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert '"kind": "death"' in lines[0]
    loader = loader_of(dataset(kills=bad), MODES[mode], shuffle=False, on_error="replace")
    found = torch.cat(list(loader))[:, 0].tolist()
    assert len(found) == 200
    assert not set(found) & {50.0, 51.0, 120.0}


@pytest.mark.slow
def test_what_stands_in_for_a_killer_does_not_depend_on_the_count() -> None:
    bad = {50: (signal.SIGSEGV, ALWAYS), 120: (signal.SIGKILL, ALWAYS)}
    found = []
    for n in (1, 3):
        loader = loader_of(Drawn(kills=bad), MODES["auto"], on_error="replace")
        loader.resize(n)
        found.append(bits(loader))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.slow
def test_a_staged_dataset_and_a_single_sample_are_named(tmp_path: Path) -> None:
    def prepare(i: int) -> torch.Tensor:
        if i == 21:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.tensor([float(i)])

    staged = stoker.Staged(list(range(60)), prepare=prepare, cache="ram")
    loader = stoker.DataLoader(Subset(staged, list(range(60))), batch_size=4, num_workers=2, on_error="skip")
    for _ in range(2):
        assert torch.cat(list(loader)).flatten().tolist() == [float(i) for i in range(60) if i != 21]
    it = iter(stoker.DataLoader(Drawn(9, {4: (signal.SIGSEGV, ALWAYS)}), batch_size=None, num_workers=2))
    assert [int(next(it)[0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(WorkerDiedError, match="sample 4 "):
        next(it)
    assert [int(x[0]) for x in it] == [5, 6, 7, 8]


def _kills_at_20(samples: list[torch.Tensor]) -> torch.Tensor:
    if int(samples[0][0]) == 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return torch.stack(samples)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_a_batch_that_kills_is_no_samples_fault(mode: str) -> None:
    it = iter(loader_of(Drawn(), MODES[mode], shuffle=False, collate_fn=_kills_at_20, on_error="skip"))
    for _ in range(5):
        next(it)
    with pytest.raises(WorkerDiedError, match=r"Each sample can be loaded alone.*\[20, 21, 22, 23\]"):
        next(it)
    assert next(it)[:, 0].tolist() == [24, 25, 26, 27]


# -- crash loops


def _start_and_die(worker: int) -> None:
    with open("started", "a") as file:
        file.write(".")
    os._exit(7)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["two", "auto, persistent", "spawn"])
def test_workers_that_cannot_start_end_with_an_error(mode: str, tmp_path: Path) -> None:
    it = iter(loader_of(Drawn(), MODES[mode], worker_init_fn=_start_and_die))
    with pytest.raises(
        WorkerDiedError, match=r"None of them finished starting: can the dataset be loaded in a worker process"
    ):
        next(it)
    assert len((tmp_path / "started").read_text()) < 12


class Counted(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.loaded = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 1 << 20  # more than one worker loads while another starts eight times

    def __getitem__(self, i: int) -> int:
        self.loaded += 1
        return i


def _second_one_dies(worker: int) -> None:
    """While it starts, eight times, and not before the first one has made ten batches more."""
    if worker:
        with open("started", "a+") as file:
            file.write(".")
            file.seek(0)
            if len(file.read()) > 8:
                return
        loaded = torch.utils.data.get_worker_info().dataset.loaded
        enough = int(loaded) + 40
        while int(loaded) < enough:
            pass
        os._exit(7)


@pytest.mark.slow
def test_one_that_cannot_start_while_another_works_ends_no_run(tmp_path: Path) -> None:
    loader = loader_of(Counted(), MODES["auto"], batch_size=4, worker_init_fn=_second_one_dies)
    batches = []
    for batch in (it := iter(loader)):
        batches.append(batch)
        if deaths(loader) == 8:
            break
    del it
    assert deaths(loader) == 8
    assert len(torch.cat(batches).unique()) == 4 * len(batches)


@pytest.mark.slow
def test_samples_that_all_kill_end_with_an_error_that_says_all() -> None:
    bad = dict.fromkeys(range(200), (signal.SIGKILL, ALWAYS))
    loader = loader_of(Drawn(kills=bad), MODES["auto"], on_error="skip", max_errors=4)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as e:
        list(loader)
    assert time.monotonic() - began < LIMIT_S / 2
    assert deaths(loader) < 60
    assert "killed by SIGKILL" in str(e.value)


class Restless(Drawn):
    """Kills whoever loads anything, at another sample each time: nobody is to blame."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if os.getpid() % 3 != i % 3:
            return super().__getitem__(i)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_a_loop_of_crashes_does_not_spin(mode: str) -> None:
    loader = loader_of(Restless(), MODES[mode])
    with pytest.raises(WorkerDiedError):
        list(loader)
    assert deaths(loader) < 40


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_deaths_that_nobody_can_explain_end_with_an_error(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.Arena, "current_task", property(lambda arena: None, lambda arena, task: None))
    loader = loader_of(Drawn(kills={0: (signal.SIGKILL, ALWAYS)}), MODES[mode], shuffle=False, on_error="skip")
    with pytest.raises(
        WorkerDiedError, match=r"workers died faster than batches were delivered.*was killed by SIGKILL.*The last one: "
    ):
        list(loader)
    assert deaths(loader) < 40


@pytest.mark.slow
def test_batches_earn_what_deaths_cost() -> None:
    """One that dies now and then, for as long as the run takes, is replaced each time."""
    kills = dict.fromkeys(range(0, 1600, 100), (signal.SIGKILL, 1))  # more than are borne in a row
    loader = loader_of(Drawn(1600, kills), MODES["two"], shuffle=False)
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(1600))
    assert deaths(loader) == 16


# -- words, settings


def test_the_cause_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([3, 3, 5])
    monkeypatch.setattr(resources, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(resources, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(exit_reason, "_kills", None)
    exit_reason.begin()
    assert exit_reason.why(-9, 0).startswith("was killed by SIGKILL (memory.events shows no out-of-memory kill: ")
    assert exit_reason.why(-9, 5 << 20) == (
        "was killed by SIGKILL: out of memory (oom_kill in memory.events rose from 3 to 5); last measured memory: 5.0 MiB of a limit "
        "of 1.0 GiB"
    )
    assert exit_reason.why(-11, 0) == "was killed by SIGSEGV (a crash in native code)"
    assert exit_reason.why(3, 0).startswith("ended with exit code 3")
    assert exit_reason.why(-64, 0).startswith("was killed by")
    assert exit_reason.why(None, 0) == "ended with an unknown exit code"


def test_out_of_memory_kills_are_counted_by_either_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "cg/job").mkdir(parents=True)
    assert resources.oom_kills(tmp_path / "cg", tmp_path / "proc") is None
    (tmp_path / "cg/job/memory.events").write_text("low 0\nhigh 2\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert resources.oom_kills(tmp_path / "cg", tmp_path / "proc") == 3
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n")
    (tmp_path / "cg/memory/job").mkdir(parents=True)
    (tmp_path / "cg/memory/job/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert resources.oom_kills(tmp_path / "cg", tmp_path / "proc") == 6


def test_a_death_is_a_warning_and_in_the_report() -> None:
    with stoker.watch() as w, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        list(loader_of(Drawn(kills={77: (signal.SIGKILL, 1)}), MODES["two"]))
    mine = [str(x.message) for x in said if issubclass(x.category, StokerWarning)]
    assert len(mine) == 1
    assert "was killed by SIGKILL" in mine[0]
    assert "during task" in mine[0]
    assert w.report is not None
    faults = w.report["loaders"][0]["faults"]
    assert faults["deaths"] == 1
    assert faults["died"][0] in mine[0]
    assert "1 workers died and were replaced" in str(w)


@pytest.mark.slow
@pytest.mark.parametrize("at", [77, 199])
def test_raise_is_torchs_way(at: int) -> None:
    found = told("stoker.DataLoader", at, kw="{'on_worker_death': 'raise'}")
    assert re.search(DEAD, found)
    assert "sample" not in found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["two", "auto"])
def test_warnings_may_be_errors_to_somebody(mode: str) -> None:
    """Then one ends ``next``, and nothing is lost for whoever asks again."""
    kills = {77: (signal.SIGKILL, 1), 120: (signal.SIGKILL, ALWAYS)}
    found, told = [], 0
    with warnings.catch_warnings():
        it = iter(loader_of(Drawn(kills=kills), MODES[mode], shuffle=False))
        warnings.simplefilter("error", StokerWarning)
        while True:
            try:
                found += next(it)[:, 0].tolist()
            except StopIteration:
                break
            except (StokerWarning, WorkerDiedError):
                told += 1
    assert found == [float(i) for i in range(200) if not 120 <= i < 124]
    assert told >= 3  # of two that die at once, one is said


@pytest.mark.slow
def test_code_that_asked_for_nothing_gets_torchs_error() -> None:
    assert re.search(DEAD, told("torch.utils.data.DataLoader", 77, setup="stoker.install()"))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_streams_have_torchs_way_and_say_so_when_asked_for_another() -> None:
    stream = "class S(torch.utils.data.IterableDataset):\n def __iter__(self): os.kill(os.getpid(), 9)"
    assert re.search(DEAD, told("(lambda d, batch_size, **kw: stoker.DataLoader(S(), **kw))", 0, setup=stream))
    with pytest.raises(UsageError, match="needs a map-style dataset, because an iterator's position"):
        stoker.DataLoader(Stream(), num_workers=1, on_worker_death="restart")


def test_settings_that_are_none_say_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"on_worker_death must be .*, not 'again'"):
        stoker.DataLoader(Drawn(), on_worker_death="again")
    with pytest.raises(UsageError, match="a crash in a thread ends the whole process"):
        stoker.DataLoader(Drawn(), num_workers=1, worker_method="thread", on_worker_death="restart")


@pytest.mark.parametrize("size", [1000, 1])
def test_tasks_that_nobody_needs_are_forgotten(size: int) -> None:
    """What was answered before the random state that a worker noted is not held."""
    worker = SimpleNamespace(rng_checkpoint=None)
    pool: Any = SimpleNamespace(workers=[worker])
    spec: Any = SimpleNamespace(num_workers=1, saves_rng=True, shared=False, on_error=None)
    restarts: Any = restart.Restarts(pool, spec, {}, LoaderMetrics("loader"))
    held = 0
    for number in range(200):
        restarts.own.given(0, Task(0, number, list(range(size))))
        held = max(held, len(restarts.own._assigned[0].answered) + len(restarts.own._assigned[0].waiting))
        worker.rng_checkpoint = (0, number)  # in which it begins
        restarts.own.answered(0)
    assert held <= 10
