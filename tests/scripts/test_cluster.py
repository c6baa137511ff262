"""Nodes of a real Ray cluster, all on this machine: the same batches, whatever is killed, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import stoker
from stoker.core.errors import StokerWarning
from stoker.loader.loader_state import state_of
from stoker_ray.checks import digests
from stoker_ray.cluster import MIN_STORE, shared_memory
from stoker_ray.nodes import NodeState

from .drawn_loaders import Configuration, Drawn

ray = pytest.importorskip("ray")

from .ray_nodes import (  # noqa: E402
    NODES,
    STORE,
    Epochs,
    Fills,
    Limited,
    actors,
    processes,
    raylet,
    send,
    until,
    until_ready,
    workers,
)

pytestmark = [
    pytest.mark.scripts,
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::stoker.core.errors.StokerWarning"),
]
SOURCE = Path(stoker.__file__).parent.parent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from ray.cluster_utils import Cluster

    if shared_memory() < MIN_STORE:
        pytest.skip("Ray has no object store in memory here: /dev/shm is small")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("RAY_AUTH_MODE", "disabled")
        m.setenv("PYTHONPATH", str(SOURCE))
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 500 << 20})
        for _ in range(NODES):
            found.add_node(num_cpus=2, object_store_memory=STORE)
        m.setenv("RAY_ADDRESS", found.address)
        yield found
        ray.shutdown()
        found.shutdown()


# These two come first: later tests have actors of this process, which start at any time.

SCRIPT = """
import os, sys, time
import torch
from helper.module import Numbers
from torch.utils.data import DataLoader

class Doubled(Numbers):
    def __getitem__(self, i):
        time.sleep(0.004)
        return super().__getitem__(i) * 2

def main():
    loader = DataLoader(Doubled(300), batch_size=4, num_workers=1)
    for epoch in range(int(sys.argv[1])):
        print("epoch", epoch, sum(float(x.sum()) for x in loader), flush=True)

main()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "__init__.py").write_text("")
    (tmp_path / "helper" / "module.py").write_text(
        "import torch\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __init__(self, n): self.n = n\n"
        "    def __len__(self): return self.n\n"
        "    def __getitem__(self, i): return torch.full((100,), float(i))\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PYTHONPATH": str(SOURCE)}


def test_a_script_with_modules_of_its_own_keeps_its_output(cluster, script, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    env = environment(home)
    plain = subprocess.run([sys.executable, script, "8"], env=env, capture_output=True, text=True, timeout=120)
    command = [sys.executable, "-m", "stoker", "run", "--apply", "--workers-on", "ray", "--json", tmp_path / "r.json"]
    applied = subprocess.run([*command, script, "8"], env=env, capture_output=True, text=True, timeout=200)
    assert plain.returncode == applied.returncode == 0, applied.stderr
    assert applied.stdout == plain.stdout
    assert not (home / ".ray").exists()


def test_nothing_is_left_when_the_trainer_is_killed(cluster, script, tmp_path):
    before = {p.pid for p in actors(cluster)}
    command = [sys.executable, "-m", "stoker", "run", "--apply", "--workers-on", "ray", script, "1000"]
    p = subprocess.Popen(command, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: bool({a.pid for a in actors(cluster)} - before and workers(cluster)))
        theirs = [a for a in actors(cluster) if a.pid not in before]
        started = [child for actor in theirs for child in actor.children(recursive=True)] + theirs
    finally:
        for process in [*psutil.Process(p.pid).children(recursive=True), p]:
            process.kill()
        p.wait()
    _, alive = psutil.wait_procs(started, timeout=60)  # a second or two, but other processes compute
    assert not alive, [(x.pid, x.cmdline()) for x in alive]


@pytest.fixture(scope="module")
def nodes(cluster):
    found, made = Limited("", 64 << 20), []
    found.most = NODES
    loader = stoker.DataLoader(Drawn(200, 4), 2, num_workers=1, worker_method="ray")
    state_of(loader).nodes = found
    until_ready(loader)
    yield found, made
    found.close()
    assert not made or sum(made) > 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("CLUSTER_SEEDS", "4"))))
def test_drawn_configurations_are_the_same_to_the_bit(nodes, seed):
    found, made = nodes
    found.most = 1 + seed // 10 % NODES
    drawn = Configuration(seed)

    def begun(loader: stoker.DataLoader) -> None:
        if loader.worker_method == "ray":
            until(lambda: bool(found.with_state(NodeState.READY)), lambda: found.nodes)

    def with_nodes(method: str) -> stoker.DataLoader:
        loader = drawn.loader(method)
        state_of(loader).nodes = found if method == "ray" else None
        return loader

    expected = drawn.run("process", with_nodes, begun, interrupted=False)
    before = found.made()
    assert drawn.run("ray", with_nodes, begun, interrupted=True) == expected
    made.append(found.made() - before)


def test_kills_change_nothing(cluster):
    """Twenty in 1,000 batches: workers, and each fifth time an actor."""
    others = {p.pid for p in actors(cluster)}  # of loaders of other tests

    def of_others(p: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return not others.isdisjoint([p.pid, *(q.pid for q in p.parents())])
        return True

    def victims(loader, find) -> list[psutil.Process]:
        nodes = state_of(loader).nodes

        def there() -> list[psutil.Process]:
            found = [p for n in nodes.with_state(NodeState.READY) for p in find(cluster, n)]
            return [p for p in found if not of_others(p)]

        until(lambda: bool(there()), lambda: nodes.nodes)
        return there() or victims(loader, find)

    dataset, rng = Drawn(2000, 2), random.Random(1)
    out, killed = {}, 0
    for method in ("process", "ray"):
        torch.manual_seed(5)
        loader = stoker.DataLoader(dataset, 2, shuffle=True, num_workers=1, worker_method=method, task_seeds=True)
        if method == "ray":
            until_ready(loader)
            torch.manual_seed(5)
        out[method] = []
        for k, batch in enumerate(loader):
            out[method].append(str(digests(batch)))
            if method == "ray" and k == 48 * (killed + 1):
                send([rng.choice(victims(loader, actors if killed % 5 == 4 else workers))], signal.SIGKILL)
                killed += 1
    assert killed == 20
    assert out["ray"] == out["process"]


class Prepared(torch.utils.data.Dataset):
    """Workers note which process has prepared what."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 80

    def load(self, i: int) -> torch.Tensor:
        time.sleep(0.003)
        with open(self.log, "a") as log:
            log.write(f"{os.getppid()} {i}\n")
        return torch.arange(900).sin() * i

    def __getitem__(self, i: int) -> torch.Tensor:
        return shifted(self.load(i))

    def loads_on_nodes(self) -> int:
        parents = [line.split()[0] for line in self.log.read_text().splitlines()]
        return len(parents) - parents.count(str(os.getpid()))


def shifted(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.003)
    return x + torch.rand(1)


def test_nodes_keep_what_they_have_prepared(cluster, tmp_path):
    staged, plain = Prepared(tmp_path / "staged"), Prepared(tmp_path / "plain")
    cached = stoker.Staged(range(len(staged)), staged.load, shifted)
    one = stoker.DataLoader(cached, 2, shuffle=True, num_workers=1, worker_method="ray", task_seeds=True)
    other = stoker.DataLoader(plain, 2, shuffle=True, num_workers=1, task_seeds=True)
    until_ready(one)

    def epochs(batches: int) -> tuple[int, int]:
        """Until nodes have made so many more. Returns what they made, and samples that they prepared for it."""
        deadline = time.monotonic() + 120
        nodes = state_of(one).nodes.nodes.values()
        made, loads = sum(node.batches for node in nodes), staged.loads_on_nodes()
        while sum(node.batches for node in nodes) < made + batches:
            state = torch.get_rng_state()
            got = [x.sum().item() for x in one]
            torch.set_rng_state(state)
            assert got == [x.sum().item() for x in other]
            assert time.monotonic() < deadline
        return sum(node.batches for node in nodes) - made, staged.loads_on_nodes() - loads

    epochs(200)
    batches, loads = epochs(60)
    assert loads < batches * 2 / 2  # now and then a worker makes a sample again and compares


@pytest.fixture(scope="module")
def epochs(nodes):
    found, _ = nodes
    found.most = NODES
    return Epochs(found)


@pytest.mark.parametrize("stopped", [raylet, processes])
def test_a_node_that_hangs_and_goes_on_later_changes_nothing(cluster, epochs, stopped):
    """It hangs while it makes batches, and goes on in the middle of the next epoch."""
    hangs: list[psutil.Process] = []

    def happens(k: int) -> None:
        if 20 < k < 150 and not hangs and (node := epochs.busy()) is not None:
            hangs.extend(stopped(cluster, node))
            send(hangs, signal.SIGSTOP)
        if k == 300:
            send(hangs, signal.SIGCONT)

    try:
        assert epochs.run("ray", happens) == epochs.expected
    finally:
        send(hangs, signal.SIGCONT)
    assert hangs


def test_a_node_that_is_killed_changes_nothing(cluster, epochs):
    killed: list[psutil.Process] = []

    def happens(k: int) -> None:
        if 20 < k < 150 and not killed and (node := epochs.busy()) is not None:
            killed.extend(raylet(cluster, node))
            send(killed, signal.SIGKILL)

    assert epochs.run("ray", happens) == epochs.expected
    assert killed
    dead = next(n for n in cluster.list_all_nodes() if n.all_processes["raylet"][0].process.pid == killed[0].pid)
    cluster.remove_node(dead)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)


def test_a_full_object_store_changes_nothing(cluster, epochs):
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    full = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    where = NodeAffinitySchedulingStrategy(full.node_id, soft=False)
    filler = ray.remote(Fills).options(num_cpus=0, scheduling_strategy=where).remote()
    known, epochs.nodes.most = epochs.nodes.nodes, len(cluster.list_all_nodes())

    def happens(k: int) -> None:
        if k == 1:
            usable = NodeState.PROBING, NodeState.READY
            until(lambda: full.node_id in known and known[full.node_id].state in usable, lambda: known)

    try:
        assert ray.get(filler.fill.remote(STORE), timeout=60) > STORE >> 24
        assert epochs.run("ray", happens) == epochs.expected
    finally:
        epochs.nodes.most = NODES
        cluster.remove_node(full)


RAY_SCRIPT = """
import sys, time
import ray, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 200
    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.rand(100) + i

def epoch():
    torch.manual_seed(1)
    return sum(float(x.double().sum()) for x in loader)

loader = DataLoader(Numbers(), batch_size=4, num_workers=1)
when = sys.argv[1]
if when == "before":
    ray.init(address="auto", namespace="mine", log_to_driver=False)
first = epoch()
if when == "after":
    while not ray.is_initialized():  # stoker's session, which a script need not know of
        epoch()
    ray.init(address="auto", namespace="mine", log_to_driver=False)
assert ray.get_runtime_context().namespace == "mine"
mine = ray.put("mine")
assert all(epoch() == first for _ in range(5))
del loader
assert ray.is_initialized() and ray.get(mine) == "mine"
ray.shutdown()
print("over")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_session_of_a_script_that_uses_ray_is_joined_and_stays(cluster, tmp_path, when):
    (tmp_path / "train.py").write_text(RAY_SCRIPT)
    command = [sys.executable, "-m", "stoker", "run", "--apply", "--workers-on", "ray", tmp_path / "train.py", when]
    p = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=200)
    assert p.returncode == 0, p.stderr
    assert p.stdout.endswith("over\n"), p.stdout  # Ray itself may have printed of nodes that other tests ended


NOTES = """
import json, os, sys, time
import ray, stoker, torch
from torch.utils.data import Dataset

class Notes(Dataset):
    def __init__(self, folder): self.folder = folder
    def __len__(self): return 200
    def __getitem__(self, i):
        time.sleep(0.004)
        if "RAY_RAYLET_PID" in os.environ:  # on a node
            with open(os.path.join(self.folder, f"{os.getpid()}.new"), "w") as file:
                json.dump(dict(os.environ), file)
            os.replace(file.name, file.name[:-4] + ".json")
        return torch.full((4,), float(i))

os.environ["SET_LATER"] = "hunter3"
ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": {"DATA_ROOT": "/data"}})
loader = stoker.DataLoader(Notes(sys.argv[1]), batch_size=4, num_workers=1, worker_method="ray", task_seeds=True)
until = time.monotonic() + 240  # a busy machine may take minutes to start a node's process
while not any(name.endswith(".json") for name in os.listdir(sys.argv[1])) and time.monotonic() < until:
    assert sum(float(x[:, 0].sum()) for x in loader) == 199 * 100
ray.shutdown()
"""


def test_of_the_environment_nodes_get_what_is_named(cluster, tmp_path):
    """The rest may be credentials. Ray's own ``runtime_env`` names more."""
    (tmp_path / "train.py").write_text(NOTES)
    notes = tmp_path / "notes"
    notes.mkdir()
    secrets = {"AWS_SECRET_ACCESS_KEY": "hunter2", "WANDB_API_KEY": "hunter2", "HF_TOKEN": "hunter2"}
    env = environment(tmp_path) | secrets | {"NUMBA_CACHE_DIR": "/numba", "DATA_ROOT": "/elsewhere"}
    p = subprocess.run(
        [sys.executable, tmp_path / "train.py", notes], env=env, text=True, capture_output=True, timeout=300
    )
    assert p.returncode == 0, p.stderr
    found = [json.loads(path.read_text()) for path in notes.glob("*.json")]
    assert found
    for variables in found:
        assert not {*secrets, "SET_LATER"} & set(variables)
        assert (variables["NUMBA_CACHE_DIR"], variables["DATA_ROOT"]) == ("/numba", "/data")


LIGHTNING = """
import os, sys, time
import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(0.003)
        return torch.rand(4) + i / 64

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, n):
        loss = self.net(batch).square().mean()
        # one write: both ranks have one pipe, and print writes its arguments one by one under PYTHONUNBUFFERED
        os.write(1, f"loss {self.global_rank} {self.current_epoch} {n} {float(loss)}\\n".encode())
        return loss
    def on_train_epoch_end(self):
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

torch.set_num_threads(1)
L.seed_everything(3)
L.Trainer(max_epochs=4, accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False).fit(
    Model(), DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True))
"""


def test_lightning_under_torchrun_has_the_losses_of_one_machine(cluster, tmp_path):
    pytest.importorskip("lightning")
    script, begin = tmp_path / "train.py", tmp_path / "begin"
    script.write_text(LIGHTNING)
    command = [sys.executable, "-m", "stoker", "run", "--apply", "--workers-on", "ray", "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", "2", script, begin]
    before, started = {p.pid for p in actors(cluster)}, {}
    for name, address in {"nodes": cluster.address, "alone": "127.0.0.1:1"}.items():
        env = environment(tmp_path) | {"RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started[name] = subprocess.Popen(command, env=env, cwd=tmp_path, text=True, **pipes)
    try:
        until(lambda: len({p.pid for p in actors(cluster)} - before) >= 2 or started["nodes"].poll() is not None)
    finally:
        begin.touch()  # the epochs after the first
    said = {name: p.communicate(timeout=200) for name, p in started.items()}
    losses = {name: sorted(x for x in out.splitlines() if x.startswith("loss")) for name, (out, _) in said.items()}
    assert losses["nodes"] == losses["alone"], said
    assert len(losses["nodes"]) == 2 * 4 * 8, said


def test_no_cluster(monkeypatch):
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    loader = stoker.DataLoader(Drawn(90, 1), 2, num_workers=1, worker_method="ray")
    with pytest.warns(StokerWarning, match="No workers on other nodes: no Ray cluster at '127.0.0.1:1'"):  # noqa: PT031
        list(loader)
        state_of(loader).nodes._thread.join(90)
        list(loader)
