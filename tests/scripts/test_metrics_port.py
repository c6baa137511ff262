"""``stoker run --metrics-port``: what Prometheus gets while a script runs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from .harness import SOURCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stoker run works on Linux only"),
    pytest.mark.scripts,
    pytest.mark.timeout(120),
]
SCRIPT = """
    import sys, time
    from torch.utils.data import DataLoader

    class Nap(list):
        def __getitem__(self, i):
            time.sleep(0.002)
            return i

    print("begins", flush=True)
    for epoch in range(10**6):
        for x in DataLoader(Nap(range(40)), batch_size=4, num_workers=1):
            pass
        if epoch == 0:
            print("an epoch", flush=True)
        if "STOP" in open("stop").read():
            break
"""


def start(tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "stop").write_text("")
    line = [sys.executable, "-m", "stoker", "run", *args, "train.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(line, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def samples(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))}


def ended(p: subprocess.Popen[str], tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "stop").write_text("STOP")
    out, err = p.communicate(timeout=100)
    assert p.returncode == 0, err
    return out, err


def test_a_free_port_and_what_is_there(tmp_path: Path) -> None:
    p = start(tmp_path, "--metrics-port", "0")
    try:
        assert p.stdout is not None
        assert p.stderr is not None
        url = p.stderr.readline()
        found = re.fullmatch(r"stoker: metrics at http://127\.0\.0\.1:(\d+)/metrics\n", url)
        assert found, url
        assert [p.stdout.readline(), p.stdout.readline()] == ["begins\n", "an epoch\n"]
        seen = samples(int(found[1]))
        while not any("wait_pct" in key for key in seen):  # the script's first report is a second old at most
            seen = samples(int(found[1]))
        line = next(i for i, text in enumerate(SCRIPT.splitlines(), 1) if "in DataLoader(" in text)
        labels = f'{{loader="train.py:{line}",rank="0"}}'
        assert 50 < seen[f"stoker_data_wait_pct{labels}"] <= 100
        assert seen[f"stoker_data_workers{labels}"] == 1
        assert seen[f"stoker_data_failed_samples{labels}"] == 0
        assert seen[f"stoker_data_samples_per_s{labels}"] > 0
        assert seen["stoker_data_verdict"] in (-1, 1)
    finally:
        _, err = ended(p, tmp_path)
    assert "stoker: input-bound" in err


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        out, err = ended(start(tmp_path, "--metrics-port", str(port)), tmp_path)
    assert err.startswith(f"stoker: cannot serve metrics at 127.0.0.1:{port}: Address already in use\n")
    assert out == "begins\nan epoch\n"
    assert "stoker: input-bound" in err
