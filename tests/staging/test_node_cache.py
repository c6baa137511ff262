"""Ranks of one node: they divide cores and memory, and share one trial and one cache."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.core import resources
from stoker.core.errors import UsageError
from stoker.loader.auto import limits
from stoker.staging import node_cache
from stoker.staging.isolate import Trial
from stoker.staging.store.encode import take
from stoker.staging.store.memory import MemoryTables
from stoker.staging.store.store import Store, size_of
from stoker.staging.store.tables import BLOCK

RANK = """
import json, os, signal, sys
import numpy as np
import torch
from stoker.staging import node_cache
from stoker.staging.node_cache import start_trial
from stoker.staging.split import Split
from stoker.staging.dataset import Staged
from stoker.staging.trial import find_plan

SCALE = float(os.environ.get("SCALE", "1"))


class Data(torch.utils.data.Dataset):
    def __init__(self, seed):
        self.base, self.rank = np.random.default_rng(seed).random(20000), int(os.environ["RANK"])
        self.kinds = {"a", "b", "c"}
        self.rng = np.random.default_rng()

    def __len__(self):
        return 64

    def sort(self, i):
        return np.sort(self.base * (i + 1) * SCALE)[-64:] MORE

    def __getitem__(self, i):
        x = self.sort(i)
        return torch.from_numpy(x), torch.rand(1)


class Waits(Data):
    def __getitem__(self, i):
        if "FIFO" in os.environ:
            open(os.environ["FIFO"]).close()
        return super().__getitem__(i)


class Pairs(Data):
    def __getitem__(self, i):
        j = (i + 1 + int(torch.rand(()))) % 64
        return torch.from_numpy(self.sort(i)), torch.from_numpy(self.sort(j))


class Odd(Data):
    def __getitem__(self, i):
        return torch.from_numpy(self.sort(i)), complex(i, 1)


def find_calls(dataset, limit_s, *_):
    while not (found := find_plan(dataset, limit_s)).memo:
        pass  # on a busy machine the calls may have seemed not to be worth it
    return found


def say(**what):
    print(json.dumps(what), flush=True)


def serve(staged, first, last):
    right = True
    for i in range(first, last):
        right &= bool((staged[i][0].numpy() == data.sort(i)).all())
    return {"right": right, **staged.account._asdict()}


if __name__ == "__main__":
    if "CALLS" in os.environ:
        node_cache.find_plan = find_calls
    chosen = [cls for name, cls in (("CALLS", Pairs), ("ODD", Odd), ("WAITS", Waits)) if name in os.environ] or [Data]
    data = chosen[0](int(os.environ.get("SEED", "0")))
    trial = start_trial(data, 30.0)
    say(kind=type(trial).__name__)
    trial.wait(60)
    found = trial.result()
    staged = Staged(data, _split=Split(data, found), _memories=trial.memories)
    medium = staged._store.medium
    say(file=os.fstat(medium.fd).st_ino, sample_s=found.sample_s, shared=bool(trial.memories), **staged.account._asdict())
    for line in sys.stdin:
        if line == "fork\\n":
            child = os.fork()
            if not child:
                signal.pause()
            say(child=child)
            continue
        first, last = map(int, line.split())
        say(**serve(staged, first, last))
"""


class Rank:
    """A process that stands for a rank. It serves the ranges of samples that it is told."""

    def __init__(self, folder: Path, rank: int, more: str = "", **env: str) -> None:
        path = folder / f"rank{len(more)}.py"
        path.write_text(RANK.replace("MORE", more))
        here = {"LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "OMP_NUM_THREADS": "1", "STOKER_RUN": str(folder / "run")}
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **here, **env},
        )
        self.kind = self.hear()["kind"]

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def tell(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def serve(self, first: int, last: int) -> dict[str, Any]:
        self.tell(first, last)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []
    (tmp_path / "run").mkdir(0o700)

    def begin(*args: Any, **env: str) -> Rank:
        ranks.append(Rank(tmp_path, *args, **env))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.kill()


@pytest.mark.slow
def test_two_ranks_fill_and_read_one_cache(start: Callable[..., Rank], tmp_path: Path) -> None:
    ranks = [start(0), start(1)]
    assert [r.kind for r in ranks] == ["_Owner", "_Member"]
    (socket_path,) = (tmp_path / "run").iterdir()  # which only this user may enter
    assert socket_path.is_socket()
    first, second = (r.hear() for r in ranks)
    assert first["file"] == second["file"]
    assert first["sample_s"] == second["sample_s"]  # one trial
    assert first["shared"]
    assert second["shared"]
    assert first["budget"] == second["budget"]
    ranks[0].serve(0, 32)
    filled = ranks[1].serve(32, 64)
    assert filled["filled"] == filled["prepared"] == 64
    assert filled["ranks"] == 2
    for rank in ranks:
        again = rank.serve(0, 64)
        assert again["right"]
        assert again["prepared"] == 64  # nothing was made twice


@pytest.mark.slow
def test_calls_that_one_rank_made_are_answered_to_the_other(start: Callable[..., Rank]) -> None:
    ranks = [start(0, CALLS="1"), start(1, CALLS="1")]
    first, second = (r.hear() for r in ranks)
    assert first["file"] == second["file"]
    assert second["shared"]
    made = ranks[0].serve(0, 64)
    again = ranks[1].serve(0, 64)
    assert made["right"]
    assert again["right"]
    assert made["prepared"] == again["prepared"] == 128


@pytest.mark.slow
def test_ranks_whose_samples_need_a_pickle_share_the_trial_and_no_memory(start: Callable[..., Rank]) -> None:
    ranks = [start(0, ODD="1"), start(1, ODD="1")]
    assert [r.kind for r in ranks] == ["_Owner", "_Member"]
    first, second = (r.hear() for r in ranks)
    assert first["sample_s"] == second["sample_s"]
    assert first["file"] != second["file"]
    assert not first["shared"]
    assert not second["shared"]
    for rank in ranks:
        assert rank.serve(0, 64)["filled"] == 64
        assert rank.serve(0, 64)["right"]


@pytest.mark.slow
def test_ranks_with_different_datasets_keep_to_themselves(start: Callable[..., Rank]) -> None:
    ranks = [start(0, SEED="1"), start(1, SEED="2")]
    assert [r.kind for r in ranks] == ["_Owner", "_Owner"]
    first, second = (r.hear() for r in ranks)
    assert first["file"] != second["file"]
    for rank in ranks:
        assert rank.serve(0, 64)["right"]
        assert rank.serve(0, 64)["right"]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "env"), [("", {"SCALE": "3"}), (" + self.rank", {})])
def test_what_the_deterministic_part_reads_is_compared(start: Callable[..., Rank], more: str, env: Any) -> None:
    """A global variable that is another in each rank, or the rank itself."""
    ranks = [start(0, more), start(1, more, **env)]
    first, second = (r.hear() for r in ranks)
    assert first["file"] != second["file"]
    for rank in ranks:
        assert rank.serve(0, 64)["right"]
        assert rank.serve(0, 64)["right"]


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_fills_hurts_nobody(start: Callable[..., Rank]) -> None:
    owner, member = start(0), start(1)
    file = owner.hear()["file"]
    assert member.hear()["file"] == file
    owner.serve(0, 8)
    owner.tell("fork")
    child = owner.hear()["child"]
    try:
        owner.tell(8, 64)
        member.tell(56, 60)
        owner.kill()
        assert member.hear()["right"]
        for _ in range(2):
            served = member.serve(0, 64)
            assert served["right"]
        assert served["filled"] == 64
        late = start(0)  # as an agent starts it anew; the dead one's child does not hold the name
        assert late.kind == "_Owner"
        assert late.hear()["file"] != file
        assert late.serve(0, 64)["right"]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_its_trial_leaves_it_to_another(start: Callable[..., Rank], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    owner, member = start(0, FIFO=str(fifo), WAITS="1"), start(1, WAITS="1")
    assert [owner.kind, member.kind] == ["_Owner", "_Member"]
    owner.kill()
    assert not member.hear()["shared"]
    assert member.serve(0, 64)["right"]


def test_the_others_budget_is_theirs_until_they_come() -> None:
    samples, each = 64, BLOCK
    budget = 32 * each
    memory = MemoryTables(size_of(samples, budget))
    store = Store(memory, samples, budget)
    store.divide(2)
    store.join()

    def fill() -> int:
        store.admit({i: take(torch.full((each,), i, dtype=torch.uint8)) for i in range(samples)})
        return store.account.filled

    assert 0 < fill() <= 16
    Store(MemoryTables.of(os.dup(memory.fd), pickles=False), samples, budget).join()
    assert 16 < fill() <= 32
    assert store.account.ranks == 2


def test_a_process_of_no_run_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "STOKER_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "socket", None)
    trial = node_cache.start_trial(list(range(64)), 5.0)
    trial.wait(60)
    assert type(trial) is Trial


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "node7"}, 4),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2),  # Lightning
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "node7"}, 1),  # how many are here nobody says
        ({"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "node7"}, 1),  # a container for each
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}, 4),
        ({"LOCAL_WORLD_SIZE": "two"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], ranks: int) -> None:
    for name in [n for n in os.environ if n.startswith(("LOCAL_", "WORLD_", "MASTER_", "SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resources, "cores_granted", lambda: 6)
    assert resources.ranks() == ranks
    assert limits.cores_here() == max(1, 6 // ranks)
    assert resources.memory_of_rank() == resources.memory_granted() // ranks


DIGEST = """
import functools, random, sys, threading
import numpy as np
import torch
from stoker.staging.node_cache import _content

class Transform:
    def __init__(self, size):
        self.size, self.random, self.rng = size, random.Random(), np.random.default_rng()
        self.lock, self.endings = threading.Lock(), {".jpg", ".png", ".gif"}

class Data:
    def __init__(self, rank, size):
        self.rank, self.transform = rank, Transform(size)
        self.numbers, self.table = torch.arange(12).reshape(3, 4).t(), np.arange(9.0)
        self.objects = np.array(["a", {"b": 1}], dtype=object)
        self.scale = lambda x: x * size
        self.part = functools.partial(max, 3)
        self.me = self

for size in (160, 128):
    print(*_content(Data(int(sys.argv[1]), size)))
"""


@pytest.mark.slow
def test_the_digest_is_the_same_in_each_process_and_differs_with_the_content(tmp_path: Path) -> None:
    path = tmp_path / "digests.py"
    path.write_text(DIGEST)

    def of(rank: str) -> list[str]:
        env = {**os.environ, "PYTHONHASHSEED": rank}
        p = subprocess.run([sys.executable, str(path), rank], capture_output=True, text=True, check=True, env=env)
        return p.stdout.split()

    large, left_out, small, _ = of("1")
    assert large != small
    assert left_out == "{'rank'}"
    assert of("2") == [large, left_out, small, left_out]


def test_what_has_no_content_has_no_digest() -> None:
    with socket.socket() as connection, pytest.raises(UsageError):
        node_cache._content(connection)


TRAIN = """
import os
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Data(Dataset):
    def __init__(self):
        self.base = np.random.default_rng(0).random(20000)
    def __len__(self):
        return 96
    def __getitem__(self, i):
        x = np.sort(self.base * (i + 1))[-64:]
        return torch.from_numpy(x), torch.rand(1), i

if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = Data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
    draws = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, r, i in loader:
            draws += r.flatten().tolist()
            for row, k in zip(x, i.tolist()):
                assert (row.numpy() == np.sort(data.base * (k + 1))[-64:]).all()
        dist.barrier()
    assert len(set(draws)) == 3 * 48
    from stoker.tuning import apply
    (known,) = apply._datasets
    account = known.staged.account
    every = [None, None]
    file = os.fstat(known.staged._store.medium.fd).st_ino
    dist.all_gather_object(every, (account.prepared, account.filled, account.ranks, file, known.found.sample_s))
    assert every[0] == every[1], every
    if dist.get_rank() == 0:
        print(*every[0][:3])
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_from_the_second_epoch_on_every_rank_of_torchrun_reads_what_any_rank_made(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    report = tmp_path / "report.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    command = [sys.executable, "-m", "stoker", "run", "--apply", "--json", str(report), *torchrun]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    p = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=180)
    assert p.returncode == 0, p.stderr
    assert p.stdout.split() == ["96", "96", "2"]  # each sample was made once
    (settings,) = json.loads(report.read_text())["applied"]["settings"].values()
    assert settings["cache"]["shared"] == 2
    assert settings["cache"]["filled"] == 96
    assert settings["to"]["num_workers"] == max(1, resources.cores_granted() // 2)
