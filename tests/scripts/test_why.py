"""``stoker why`` with py-spy: lines, samples and the threads of libraries, in jobs that nothing of stoker's is in."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from pathlib import Path

import pytest

from stoker.diagnosis.hang import causes, stacks
from stoker.diagnosis.hang.job import look
from stoker.diagnosis.hang.text import render
from tests.diagnosis.hang.helpers import judged, running, script, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
    pytest.mark.skipif(stacks.py_spy() is None, reason="needs py-spy"),
    pytest.mark.scripts,
]


def test_the_line_and_the_sample(tmp_path: Path) -> None:
    path = script(tmp_path, "LOCK.acquire()", before="LOCK.acquire()")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.strip() == "LOCK.acquire()")
    with running(path) as p:
        (job,), cause = judged(p.pid, "forked_lock")
        assert f"at train.py:{line} " in cause.sentence
        (worker,) = [w for w in job.workers if w.pid in cause.pids]
        assert worker.sample == "9"
        assert worker.stacks.source == "py-spy"
        assert job.loop is not None
        assert any(str(frame).endswith("<module>") for frame in job.loop.frames)


def test_fsspecs_event_loop_after_a_fork(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    before = "import asyncio; from fsspec.asyn import get_loop, sync; LOOP = get_loop()"
    with running(script(tmp_path, "sync(LOOP, asyncio.sleep, 0)", before=before)) as p:
        _, cause = judged(p.pid, "forked_fsspec")
        assert cause.hangs


def test_a_loop_that_waits_for_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "rank.py"
    path.write_text(
        "import os, torch.distributed as d\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='2')\n"
        "store = d.TCPStore('127.0.0.1', 0, 2, True, wait_for_workers=False)\n"
        "print('there', flush=True)\n"
        "d.init_process_group('gloo', store=store, rank=0, world_size=2)\n"
    )
    with running(path) as p:
        _, cause = judged(p.pid, "collective")
        assert cause.hangs is not False


RANKS = """
import os, time, torch, torch.distributed as d
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        if i == 9 and os.environ["RANK"] == "1":
            print("there", flush=True)
            time.sleep(1e6)
        return torch.ones(3)

d.init_process_group("gloo")
for batch in DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
    d.all_reduce(batch)
"""


def test_the_rank_that_holds_up_the_others(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RANKS)
    with running("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, path) as p:
        jobs = until(
            lambda: look(p.pid), lambda jobs: {causes.cause_of(job).name for job in jobs} == {"sleep", "collective"}
        )
        assert causes.judge(jobs).name == "sleep"
        (other,) = [found for job in jobs if (found := causes.cause_of(job)).name == "collective"]
        assert re.match(r"Loop \d+ waits in torch\.distributed \(all_reduce\) at train\.py:", other.sentence)


def test_a_worker_that_is_a_thread(tmp_path: Path) -> None:
    path = script(tmp_path, "time.sleep(1e6)", "stoker.DataLoader")
    path.write_text(path.read_text().replace('multiprocessing_context="fork"', 'worker_method="thread"'))
    with running(path) as p:
        _, cause = judged(p.pid, "sleep")
        assert cause.sentence.startswith(f"Worker thread of {p.pid} sleeps")
        assert "for sample 9 at train.py" in cause.sentence


def test_the_transcript_of_the_docs(tmp_path: Path) -> None:
    """The script of docs/why.md gives its transcript, but for numbers of processes and seconds."""
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"^ {4}stoker why \d+\n\n((?: {4}.*\n|\n)+?)(?=\S)", page, re.MULTILINE)
    path = tmp_path / "train.py"
    path.write_text("print('there', flush=True)\n" + code)
    with running(path) as p:
        jobs, cause = judged(p.pid, "forked_lock")
        text = render(jobs, cause, io.StringIO())
    assert _plain(text, 1) == _plain(textwrap.dedent(shown).strip(), 0)


def _plain(text: str, lines_before: int) -> str:
    """Without line breaks, numbers of processes, and the seconds, which are shown from the first one on."""
    text = re.sub(r"; has not run for [\d,]+ s", "", " ".join(text.split()))
    text = re.sub(r"(train\.py:)(\d+)", lambda m: f"{m[1]}{int(m[2]) - lines_before}", text)
    return re.sub(r"(?i)(loop|worker) \d+", r"\1", text)
