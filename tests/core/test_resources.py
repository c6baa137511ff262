"""What the machine grants: cgroup trees of every kind, and ``stoker check``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.commands import check
from stoker.commands import main as cli
from stoker.core import gpus, resources
from stoker.diagnosis.report.build import report_of


def tree(tmp_path: Path, lines: str, files: dict[str, str]) -> dict[str, Path]:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(lines)
    root.mkdir()
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return {"root": root, "proc": proc}


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "200000 100000"}, 1.0),
        ("0::/not/there\n", {"cpu.max": "300000 100000"}, 3.0),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        (
            "4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("1:cpu:/\n0::/\n", {"unified/cpu.max": "100000 100000", "cpu/cpu.cfs_quota_us": "-1"}, 1.0),
        ("0::/\n", {"cpu.max": "rubbish"}, None),
        ("0::/\n", {"cpu.max": ""}, None),
        ("", {}, None),
        ("no cgroup line at all", {}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, lines: str, files: dict[str, str], quota: float | None) -> None:
    assert resources.cpu_quota(**tree(tmp_path, lines, files)) == quota


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1073741824\n"}, 1 << 30),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096000"}, 4096000),
        ("0::/a\n", {"a/memory.max": "8192000", "a/memory.high": "4096000"}, 4096000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (
            "4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": "2048000", "memory/memory.limit_in_bytes": "1024000"},
            1024000,
        ),
        ("4:memory:/host/path\n", {"memory/memory.limit_in_bytes": "512000"}, 512000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "many"}, None),
        ("4:memory:/\n", {}, None),
    ],
)
def test_memory_limit(tmp_path: Path, lines: str, files: dict[str, str], limit: int | None) -> None:
    assert resources.memory_limit(**tree(tmp_path, lines, files)) == limit


def test_stalls_for_memory_are_those_of_the_own_cgroup(tmp_path: Path) -> None:
    def psi(total: int) -> str:
        return f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"

    here = tree(tmp_path, "0::/a\n", {"a/memory.pressure": psi(2000), "memory.pressure": psi(3000)})
    assert resources.memory_stalled(**here) == 2000
    here = tree(tmp_path / "v1", "4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "1"})
    assert resources.memory_stalled(**here) is None
    (here["proc"] / "pressure").mkdir()
    (here["proc"] / "pressure/memory").write_text(psi(4000))
    assert resources.memory_stalled(**here) == 4000


def test_memory_in_use_is_without_the_cache(tmp_path: Path) -> None:
    files = {"memory.current": "5000", "memory.stat": "anon 1000\ninactive_file 3000\n"}
    assert resources.memory_used(**tree(tmp_path, "0::/\n", files)) == 2000


def test_reading_this_machine() -> None:
    m = resources.read()
    assert 1 <= m.cores <= m.cores_affinity <= m.cores_host
    assert 0 < m.memory_available <= m.memory <= m.memory_host
    assert json.dumps(m.as_dict())


def python(code: str) -> str:
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return p.stdout.strip()


def test_affinity_bounds_the_cores() -> None:
    code = "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]); from stoker.core import resources as machine; print(machine.read().cores)"
    assert python(code) == "1"


def test_limits_of_the_process() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (500, 500)); from stoker.core import resources as machine; m = machine.read();"
        "print(m.open_files, any('ulimit -n' in w for w in m.warnings))"
    )
    assert python(code) == "500 True"


def test_what_looks_wrong_is_said_with_a_remedy() -> None:
    m = resources.read()
    wrong = resources._wrong(
        resources.Machine(
            **{
                **vars(m),
                "cpu_quota": 1.5,
                "cores_affinity": 8,
                "shm": 64 << 20,
                "memory": 100 << 30,
                "memory_available": 1 << 30,
                "swap_used": m.memory_host,
                "pressure": {"io": 55.0},
                "open_files": 256,
                "warnings": [],
            }
        )
    )
    for words in ("CPU quota", "--shm-size", "are free", "swapped out", "stalled on io", "ulimit -n"):
        assert any(words in w for w in wrong), words


def stoker(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stoker", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def test_check_prints_json() -> None:
    p = stoker("check", "--json")
    assert p.returncode == 0
    out = json.loads(p.stdout)
    assert out["cores"] == resources.cores_granted()
    assert set(out) == {*resources.read().as_dict(), "versions", "pin_memory", "copies"}
    assert set(out["versions"]) == set(check.versions())


@pytest.mark.slow
def test_check_writes_json_where_it_is_asked_to(tmp_path: Path) -> None:
    p = stoker("check", "--json", "-")
    assert json.loads(p.stdout)["cores"] == resources.cores_granted()
    p = stoker("check", "--json", str(tmp_path / "grant.json"))
    assert "cores" in json.loads((tmp_path / "grant.json").read_text())
    assert "cores" in p.stdout  # and the text is shown
    p = stoker("check", "--json", str(tmp_path / "none" / "grant.json"))
    assert p.returncode == 2
    assert "does not exist" in p.stderr


class Pynvml:
    """A host with four GPUs, of which the last two are busy with what others do."""

    UUIDS = ("GPU-aa", "GPU-ab", "GPU-c", "GPU-d")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetName(self, h: int) -> str:
        return f"name {h}"

    def nvmlDeviceGetUUID(self, h: int) -> str:
        return self.UUIDS[h]

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        return SimpleNamespace(total=1, free=1)

    def nvmlDeviceGetUtilizationRates(self, h: int) -> Any:
        return SimpleNamespace(gpu=10 * h)


@pytest.mark.parametrize(
    ("visible", "mine"),
    [
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("GPU-c,GPU-aa", [2, 0]),
        ("GPU-a", []),  # of two
        ("1,9,2", [1]),  # CUDA stops at the first that is none
        ("-1", []),
        ("", []),
        ("MIG-0aa", [0, 1, 2, 3]),
    ],
)
def test_gpus_of_others_are_none_of_ours(monkeypatch: pytest.MonkeyPatch, visible: str | None, mine: list[int]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in gpus.gpus()] == mine
    assert gpus.Nvml().busy() == [10.0 * i for i in mine]


def test_gpus_that_a_script_hides_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = {"pid": 1, "loaders": [], "final": True, "cuda_visible": "2"}
    report = report_of(["x.py"], 0, [seen], {"gpu_busy": [0.0, 0.1, 0.2, 0.9]}, 1.0)
    assert [gpu["index"] for gpu in report.machine["gpus"]] == [2]
    assert report.around.gpu_busy == [0.2]


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_check_fits_the_terminal(columns: str) -> None:
    p = stoker("check", COLUMNS=columns)
    assert p.returncode == 0
    assert "\033[" not in p.stdout
    assert max(len(line) for line in p.stdout.splitlines()) <= int(columns)
    assert "cores" in p.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "args",
    [
        [],
        ["no-such"],
        ["run"],
        ["run", "--max-steps", "0", "x.py"],
        ["run", "--max-steps", "-1", "x.py"],
        ["check", "extra"],
    ],
)
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    p = stoker(*args)
    assert p.returncode == 2
    assert p.stdout == ""
    if args:
        assert p.stderr.startswith("stoker: ")
        assert p.stderr.count("\n") == 1
    else:
        assert "All commands: stoker --help" in p.stderr


def test_help_has_an_example_and_version_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("run", "check", "bench", "tune", "batch-size", "compare", "stats", "cache", "verify")
    for args in (["--help"], *([name, "--help"] for name in names)):
        assert cli.main(args) == 0
        said = capsys.readouterr().out
        assert "Example" in said, args
        assert args != ["--help"] or all(name in said for name in names)
    assert [cli.main([option]) for option in ("--version", "-V")] == [0, 0]
    assert capsys.readouterr().out.startswith("stoker 0.")
