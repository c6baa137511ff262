"""``stoker run``: the script's own argv, output, exit code and traceback; a report of what was seen, whatever happens."""

from __future__ import annotations

import ast
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stoker.commands import main as cli
from stoker.commands import run
from stoker.commands.run import HOOK, SOURCE, command_line
from stoker.core import output
from tests.commands.helpers import forked_stoker, python, report, script, stoker
from tests.diagnosis.helpers import NOT_HERE


@pytest.mark.slow
def test_an_untouched_script_is_observed(tmp_path: Path) -> None:
    path = script(tmp_path, nap=0.002)
    plain = python(path, "--lr", "1")
    p = forked_stoker(tmp_path, path, "--lr", "1")
    assert p.returncode == 0, p.stderr
    assert p.stdout == plain.stdout
    r = report(tmp_path)
    assert r["schema"] == 2
    assert r["command"] == [str(path), "--lr", "1"]
    assert r["exit_code"] == 0
    assert r["applied"] is None
    assert r["partial"] is False
    assert r["machine"]["cores"] >= 1
    (loader,) = r["loaders"]
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "LINE" in text)
    assert loader["name"] == f"train.py:{line}"
    assert (loader["batches"], loader["samples"], loader["epochs"]) == (40, 160, 2)
    assert loader["settings"]["num_workers"] == 1
    assert loader["settings"]["engine"] == "torch"
    assert loader["stages"]["worker"]["tasks"] >= 40
    assert loader["stages"]["fetch"]["self_s"] > 40 * 4 * 0.0016
    assert r["verdict"] == "input-bound"
    assert f"train.py:{line}" in p.stderr
    assert "input-bound" in p.stderr


def test_a_command_that_was_stopped_passes_on_no_signal_that_nobody_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """sigtimedwait(2) was interrupted, and its time over meanwhile: what Python returns then is no signal."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def interrupted(signals: object, timeout: float) -> signal.struct_siginfo:
        assert process.stdin is not None
        process.stdin.close()
        return signal.struct_siginfo((-1089357056, 0, 0, 0, 0, 0, 0))

    monkeypatch.setattr(signal, "sigtimedwait", interrupted)
    assert run._wait(process, shared_group=False) == 1


@pytest.mark.slow
def test_a_loop_that_does_not_wait_is_healthy(tmp_path: Path) -> None:
    p = forked_stoker(tmp_path, script(tmp_path, step=0.2))
    assert p.returncode == 0
    r = report(tmp_path)
    assert r["verdict"] == "healthy", r["loaders"]
    assert r["findings"] == []
    assert "healthy" in p.stderr


STAGED = """
import random, time, torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        time.sleep(0.003)
        x = torch.full((32, 32), float(i))
        return x + random.random(), i


torch.manual_seed(0)
loader = DataLoader(Files(), batch_size=8, shuffle=True, num_workers=2)
for epoch in range(5):
    print([(i.tolist(), (x[:, 0, 0] - i).tolist()) for x, i in loader])
"""


@pytest.mark.slow
def test_apply_gives_a_script_its_own_batches_sooner(tmp_path: Path) -> None:
    """The whole way of ``--apply``: the trial, a cache that workers fill, and epochs of workers that stay."""
    path = script(tmp_path, STAGED)
    plain = python(path)
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    (settings,) = report(tmp_path)["applied"]["settings"].values()
    assert settings["cache"]["filled"] == 96
    assert settings["to"]["num_workers"] == settings["from"]["num_workers"]
    assert p.stdout == plain.stdout


@pytest.mark.slow
def test_apply_and_compare(tmp_path: Path) -> None:
    # It reads the clock, so that it cannot be staged and workers are what pays.
    path = script(tmp_path, nap="0.01 + 1e-9 * (time.time() > 0)", workers=0, extra="print(y.tolist())")
    plain = forked_stoker(tmp_path, path)
    assert plain.returncode == 0
    first = report(tmp_path)
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    assert p.stdout == plain.stdout  # the same samples in the same order
    r = report(tmp_path)
    (name,) = (e["name"] for e in r["loaders"])
    assert [e["samples_per_s"] for e in r["applied"]["before"]["loaders"]] == [first["loaders"][0]["samples_per_s"]]
    assert r["applied"]["settings"][name]["from"]["num_workers"] == 0
    settings = r["applied"]["settings"][name]
    assert settings["to"]["num_workers"] > 1, settings["reason"]  # it sleeps: more workers than cores pay
    assert r["applied"]["speedup"][name] == pytest.approx(
        r["loaders"][0]["samples_per_s"] / first["loaders"][0]["samples_per_s"]
    )
    assert r["applied"]["compared"]["script"] == {"before": first["wall_s"], "after": r["wall_s"]}
    assert r["loaders"][0]["settings"]["engine"] == "stoker"
    assert r["loaders"][0]["samples"] == 160
    assert p.stderr.split("stoker: ", 1)[1].startswith(r["headline"].split()[0])
    assert "wall clock" not in p.stderr  # see --details
    assert "stoker.DataLoader" in p.stderr


OBJECTS = """
import stoker
from torch.utils.data import DataLoader, Dataset

class Objects(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return [{"id": j, "box": (i, j, 0.5), "name": f"object {j}"} for j in range(400)]

def one_epoch(loader):
    return sum(len(sample) for batch in loader for sample in batch)

if __name__ == "__main__":
    loader = DataLoader(stoker.Staged(Objects()), batch_size=8, num_workers=2, collate_fn=lambda samples: samples)
    for epoch in range(6):
        print(one_epoch(loader))
"""


@pytest.mark.slow
def test_what_is_served_from_the_cache_is_not_put_down_to_the_training_loop(tmp_path: Path) -> None:
    """A worker's stack goes on with the frames of the loop that forked it."""
    p = forked_stoker(tmp_path, script(tmp_path, OBJECTS))
    assert p.returncode == 0, p.stderr
    (loader,) = report(tmp_path)["loaders"]
    assert "one_epoch" not in {x["name"] for x in loader["where"]}
    assert "cache" in {x["kind"] for x in loader["where"]}, p.stderr


@pytest.mark.slow
def test_apply_does_not_break_what_cannot_be_loaded_in_a_worker(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, torch
        from torch.utils.data import DataLoader, Dataset
        here = os.getpid()
        class Data(Dataset):
            def __len__(self): return 40
            def __getitem__(self, i):
                assert os.getpid() == here, "only in the main process"
                return i
        print(sum(len(b) for b in DataLoader(Data(), batch_size=4)))
        """,
    )
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    assert p.stdout == "40\n"
    (change,) = report(tmp_path)["applied"]["settings"].values()
    assert change["from"] == change["to"] == {"num_workers": 0}
    assert "kept 0" in change["reason"]


ENDLESS = """
import itertools, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Data(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        x = slow(i)
        return x + torch.rand(3), i

def slow(i):
    time.sleep(0.005)
    return torch.full((3,), float(i))

class Again:
    def __iter__(self):
        while True:
            yield from ([i, i + 1] for i in range(0, 40, 2))

class Stream(IterableDataset):
    def __init__(self, dataset): self.dataset = dataset
    def __iter__(self):
        for i in itertools.cycle(range(get_worker_info().id, 40, 2)):
            yield self.dataset[i]

torch.manual_seed(1)
for batch in itertools.islice(LOADER, 120):
    print(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(Stream(Data()), batch_size=2, num_workers=2)",
        "DataLoader(Data(), batch_sampler=Again(), num_workers=2)",
    ],
    ids=["stream", "sampler"],
)
def test_one_iterator_without_an_end_is_served_from_the_cache(tmp_path: Path, loader: str) -> None:
    path = script(tmp_path, ENDLESS.replace("LOADER", loader))
    plain = python(path)
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    assert p.stdout == plain.stdout
    (change,) = report(tmp_path)["applied"]["settings"].values()
    assert change["to"] == {"num_workers": 2, "staged": True}, p.stderr
    assert change["cache"]["filled"] == 40


@pytest.mark.slow
def test_loaders_of_one_line_are_applied_to_by_their_own_settings(tmp_path: Path) -> None:
    """And may be made anew from their attributes, as frameworks do that skip batches."""
    path = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self): return 40
            def __getitem__(self, i): return torch.rand(3)

        if __name__ == "__main__":
            for n in (0, 2, 0):
                loader = DataLoader(Data(), batch_size=4, num_workers=n, persistent_workers=n > 0)
                own = len(list(loader))
                names = ("num_workers", "prefetch_factor", "persistent_workers", "timeout")
                copy = DataLoader(loader.dataset, batch_size=4, **{k: getattr(loader, k) for k in names})
                print(own, len(list(copy)), copy.num_workers > 0)
        """,
    )
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    assert p.stdout == "10 10 False\n10 10 True\n10 10 False\n"


@pytest.mark.slow
def test_the_exit_code_and_traceback_are_the_scripts(tmp_path: Path) -> None:
    path = script(tmp_path, extra="if epoch: raise KeyError('mine')")
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    p = stoker(tmp_path, path)
    assert p.returncode == plain.returncode == 1
    assert p.stdout == plain.stdout
    assert p.stderr.startswith(plain.stderr)
    assert "stoker" not in plain.stderr
    r = report(tmp_path)
    assert r["exit_code"] == 1
    assert r["loaders"][0]["batches"] == 21


def test_a_script_that_ends_without_a_loader(tmp_path: Path) -> None:
    p = forked_stoker(tmp_path, script(tmp_path, "import sys; sys.exit(7)"))
    assert p.returncode == 7
    assert p.stdout == ""
    assert report(tmp_path)["loaders"] == []
    assert "(the command's exit code was 7): the command failed before it iterated" in " ".join(p.stderr.split())


@pytest.mark.slow
def test_a_command_that_fails_at_once_leaves_the_report_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(2)")
    assert stoker(tmp_path, "ends.py").returncode == 2
    assert report(tmp_path)["exit_code"] == 2
    (tmp_path / "wrong.py").write_text("this is no python")
    plain = subprocess.run([sys.executable, "wrong.py"], capture_output=True, text=True, cwd=tmp_path)
    p = stoker(tmp_path, "wrong.py")
    assert p.returncode == plain.returncode == 1
    assert p.stderr.startswith(plain.stderr)
    assert report(tmp_path)["exit_code"] == 2
    assert "the report of an earlier run was not overwritten" in p.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_a_script_ended_by_a_signal(tmp_path: Path, sig: signal.Signals) -> None:
    path = script(tmp_path, extra=f"if epoch: time.sleep(1.2); os.kill(os.getpid(), {int(sig)}); time.sleep(30)")
    silent = subprocess.DEVNULL  # torch's workers hold a pipe until they look for their parent, after 5 s
    p = stoker(tmp_path, path, stdout=silent, stderr=silent)
    assert p.returncode == -sig
    r = report(tmp_path)
    assert r["exit_code"] in (-sig, 130)
    assert r["loaders"][0]["batches"] >= 20
    assert r["partial"] is (sig != signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(("sig", "group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_to_stoker_reaches_the_script_once(tmp_path: Path, sig: signal.Signals, group: bool) -> None:
    path = script(
        tmp_path,
        """
        import signal, sys, threading
        got = []
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, lambda s, f: got.append(s))
        print("ready", flush=True)
        while not got:
            threading.Event().wait(0.05)
        threading.Event().wait(0.5)
        print(got, flush=True)
        sys.exit(9)
        """,
    )
    p = subprocess.Popen(
        [sys.executable, "-m", "stoker", "run", str(path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert p.stdout is not None
    assert p.stdout.readline() == "ready\n"
    (os.killpg if group else os.kill)(p.pid, sig)
    out, _ = p.communicate(timeout=60)
    assert p.returncode == 9
    assert out == f"[{sig!r}]\n".replace(repr(sig), str(int(sig)))
    assert report(tmp_path)["exit_code"] == 9


@pytest.mark.slow
def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, extra="epoch or print('going', flush=True) or time.sleep(30)")
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "stoker", "run", str(path)])
    out = b""
    while b"going" not in out:
        out += os.read(fd, 1000)
    children = psutil.Process(pid).children(recursive=True)
    os.write(fd, b"\x03")
    while True:
        try:
            data = os.read(fd, 1000)
        except OSError:
            break
        if not data:
            break
        out += data
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGINT
    assert out.count(b"KeyboardInterrupt") == 1, out
    assert report(tmp_path)["loaders"][0]["batches"] == 1
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.slow
def test_killing_stoker_kills_the_script(tmp_path: Path) -> None:
    path = script(tmp_path, extra="epoch or print('going', flush=True) or time.sleep(30)")
    p = subprocess.Popen(
        [sys.executable, "-m", "stoker", "run", str(path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert p.stdout is not None
    assert p.stdout.readline() == "going\n"
    children = psutil.Process(p.pid).children(recursive=True)
    assert len(children) >= 2
    p.kill()
    p.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.slow
def test_max_steps_of_a_script_with_one_core(tmp_path: Path) -> None:
    path = script(tmp_path)
    path.write_text(f"import os\nos.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n{path.read_text()}")
    p = forked_stoker(tmp_path, "--max-steps", "7", path)
    assert p.returncode == 0
    assert p.stdout == ""
    assert report(tmp_path)["loaders"][0]["batches"] == 7
    assert report(tmp_path)["machine"]["cores"] == 1


def test_a_report_that_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "ro").mkdir(mode=0o500)
    targets = [tmp_path / "no" / "folder.json", tmp_path]
    if os.geteuid():  # root may write everywhere
        targets.append(tmp_path / "ro" / "r.json")
    for target in targets:
        assert cli.main(["run", "--json", str(target), str(path)]) == 2
        assert "cannot write the report" in capsys.readouterr().err
        assert not (tmp_path / "ran").exists()


def test_the_line_that_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch(mode=0o755)
    flags = ["-O", "-X", "dev"]  # as in python -O -X dev -m stoker run train.py
    monkeypatch.setattr("subprocess._args_from_interpreter_flags", lambda: flags)
    assert command_line(["pkg.train", "a"], True) == [sys.executable, *flags, "-m", "pkg.train", "a"]
    assert command_line(["train.py", "a"], False) == [sys.executable, *flags, "train.py", "a"]
    assert command_line([sys.executable, "-m", "pkg.train"], False) == [sys.executable, "-m", "pkg.train"]
    assert command_line(["env", "python", "train.py"], False) == ["env", "python", "train.py"]


@pytest.mark.slow
def test_a_command_that_starts_python_itself(tmp_path: Path) -> None:
    path = script(tmp_path, nap=0.001)
    p = forked_stoker(tmp_path, "env", sys.executable, path, "a")
    assert p.returncode == 0, p.stderr
    assert "['a']" in p.stdout
    assert report(tmp_path)["loaders"][0]["batches"] == 40


@pytest.mark.parametrize("error", [KeyError("cpu_ns"), OSError(28, "No space left on device")], ids=["bug", "disk"])
def test_a_report_that_cannot_be_made_leaves_the_exit_code(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(output, "give", fail)
    p = forked_stoker(tmp_path, script(tmp_path, "raise SystemExit(7)"))
    assert p.returncode == 7
    assert ("a bug in stoker" in p.stderr) == isinstance(error, KeyError)
    assert "cpu_ns" in p.stderr or "No space left" in p.stderr


@pytest.mark.slow
def test_processes_that_nobody_looked_into(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import multiprocessing
        import stoker
        def f():
            for x in stoker.DataLoader(range(400), num_workers=2): pass
        if __name__ == "__main__":
            each = [multiprocessing.get_context("spawn").Process(target=f) for _ in range(2)]
            for p in each: p.start()
            for p in each: p.join()
        """,
    )
    p = forked_stoker(tmp_path, path)
    assert p.returncode == 0, p.stderr
    (loader,) = report(tmp_path)["loaders"]
    assert loader["batches"] == 800
    assert loader["kernel"]["seconds"] == 0


@pytest.mark.slow
def test_the_rank_that_starves_the_others_is_named(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, time, torch, torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset, DistributedSampler
        dist.init_process_group("gloo")
        class Data(Dataset):
            def __len__(self): return 200
            def __getitem__(self, i):
                time.sleep(0.02 if os.environ["RANK"] == "1" else 0.0)
                return torch.zeros(2)
        for x in DataLoader(Data(), batch_size=4, num_workers=1, sampler=DistributedSampler(Data())):
            dist.all_reduce(x.sum())
        dist.destroy_process_group()
        """,
    )
    p = forked_stoker(
        tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", path
    )
    assert p.returncode == 0, p.stderr
    (loader,) = report(tmp_path)["loaders"]
    assert loader["batches"] == 2 * 25
    assert loader["settings"]["processes"] == 2
    found = report(tmp_path)["ranks"]
    assert [r["rank"] for r in found["each"]] == [0, 1]
    assert found["starving"] == 1
    assert "rank 1 starves the others" in p.stderr


@pytest.mark.slow
def test_memory_of_a_container_that_only_the_script_is_in(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        from planted import Rows, small_container
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            with small_container(1 << 30):
                kept = bytearray(256 << 20)
                for batch in DataLoader(Rows(8), batch_size=4):
                    pass
        """,
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "diagnosis" / "cases")}
    p = forked_stoker(tmp_path, path, env=env)
    if p.returncode == NOT_HERE:
        pytest.skip("no memory cgroup can be made")
    assert p.returncode == 0, p.stderr
    r = report(tmp_path)
    assert r["machine"]["memory"] == 1 << 30
    assert 0 < r["around"]["memory_available_min"] < 800 << 20


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.mine = 5")
    path = script(tmp_path, "import sys; print(mine, [p for p in sys.path if 'stoker' in p and p.endswith('_hook')])")
    p = forked_stoker(tmp_path, path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert p.stdout == "5 []\n", p.stderr


def test_a_link_under_the_default_name_of_the_report_is_replaced(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("kept")
    (tmp_path / "stoker-report.json").symlink_to(target)
    p = forked_stoker(tmp_path, script(tmp_path, "print('ran')"))
    assert p.stdout == "ran\n", p.stderr
    assert target.read_text() == "kept"
    assert not (tmp_path / "stoker-report.json").is_symlink()


OLD = [f"python{version}" for version in ("2.7", "3.6", "3.7", "3.8", "3.9")]


@pytest.mark.slow
def test_pythons_that_stoker_does_not_know_are_left_in_peace(tmp_path: Path) -> None:
    """None that is older than 3.10 can read the watch. What stands in front of their own sitecustomize, all can."""
    path = HOOK / "sitecustomize.py"
    newer = ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal
    assert not any(isinstance(node, newer) for node in ast.walk(ast.parse(path.read_text())))
    env = {"PYTHONPATH": str(path.parent), "STOKER_RUN": "nobody", "STOKER_HOME": str(SOURCE)}
    for name in filter(shutil.which, OLD):
        line = [name, "-B", "-c", "import sys; sys.stdout.write('ran')"]
        if subprocess.run(line, capture_output=True).returncode:
            continue  # a shim without an interpreter behind it
        p = subprocess.run(line, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
        assert (p.returncode, p.stdout, p.stderr) == (0, "ran", "")
