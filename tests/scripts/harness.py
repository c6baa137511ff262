"""Runs a script as it is, observed and with ``--apply``, and compares what it wrote (see seen.py)."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import stoker

LIMIT_S = 400  # several at a time on two cores, frameworks that take long to import among them
PATIENCE_S = 10.0  # the helpers of multiprocessing end when they see that their process has
HERE = Path(__file__).parent
SOURCE = Path(stoker.__file__).parent.parent  # however the tests came to it, the scripts come to the same
MARK = "STOKER_TESTS_RUN"  # in the environment of all that a run starts, whatever session it is in
LEAVES = 0.85  # of the versions that a sample has without stoker
# What torch's own workers leave when they end while they send a batch, without stoker too: the folder of the sockets
# that multiprocessing sends descriptors over, and the file that tempfile tries a folder with.
OF_TORCH = re.compile(r"pymp-.*|[a-z0-9_]{8}")
WAYS = {"plain": [], "observed": ["run"], "applied": ["run", "--apply"]}


@dataclass
class Outcome:
    """What a run of a script did.

    Attributes:
        code: its exit code.
        out: the lines it wrote.
        err: what it, and stoker, said.
        left: processes that it left behind.
        files: what it left in its folder of temporary files, the first words of their names, without OF_TORCH.
    """

    code: int
    out: list[str]
    err: str
    left: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[str]:
        """Its lines that begin with this sign; "" are those that hold whatever is done to the script.

        A ``{`` is a framework's, which prints how long it took.
        """
        return [x for x in self.out if (x.startswith(kind) if kind else x[:1] not in tuple("=~{"))]

    @property
    def versions(self) -> list[float]:
        return [float(x) for x in re.findall(r"^~ versions ([\d.]+)", "\n".join(self.out), re.M)]


def differences(ours: Outcome, plain: Outcome) -> str:
    return "\n".join(difflib.unified_diff(plain.of(""), ours.of(""), "plain", "with stoker", lineterm="", n=1))


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with this mark in their environment."""
    out = []
    for p in psutil.process_iter():
        try:
            if p.environ().get(MARK) == mark:
                out.append(p)
        except psutil.Error:
            continue
    return out


def run(way: str, command: list[str], folder: Path, env: dict[str, str]) -> Outcome:
    """One run, in a folder and with a home of its own, so that nothing of an earlier one is known."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    # The path of a socket may have 107 characters (unix(7)). torch's workers send tensors over sockets in TMPDIR, and
    # where its path is long a batch is lost and the script waits for ever.
    temporary = Path(tempfile.mkdtemp(prefix="st"))
    mark = uuid.uuid4().hex
    known = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "XDG_CACHE_HOME", "HF_HOME")}
    known |= {"HOME": str(folder / "home"), "TMPDIR": str(temporary), MARK: mark, **env}
    line = [sys.executable, *(["-m", "stoker", *WAYS[way]] if WAYS[way] else []), *command]
    p = subprocess.Popen(
        line, cwd=folder, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = p.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        stacks = [f"{q.pid} {q.name()} {q.status()}" for q in marked(mark)]
        os.killpg(p.pid, signal.SIGKILL)
        out, err = p.communicate()
        err += f"\nafter {LIMIT_S} s there were: {stacks}"
    _, alive = psutil.wait_procs(marked(mark), timeout=PATIENCE_S)
    left = [f"{q.pid} {' '.join(q.cmdline())}" for q in alive if q.is_running()]
    for q in alive:
        q.kill()
    files = sorted({re.split("[-_]", x.name)[0] for x in temporary.iterdir() if not OF_TORCH.fullmatch(x.name)})
    shutil.rmtree(temporary)
    return Outcome(p.returncode, out.splitlines(), err, left, files)


def three_ways(
    script: str | list[str],
    tmp_path: Path,
    data: Path,
    *,
    seeded: bool = True,
    path: Path | None = None,
    ways: Sequence[str] = tuple(WAYS),
) -> dict[str, Outcome]:
    """Runs a script in all ways at once and asserts that nobody can tell which is which.

    Args:
        script: its name below this folder, or the command line after ``python`` or ``stoker run``.
        tmp_path: for what it writes.
        data: a folder of data.make, which the script finds as DATA.
        seeded: a second run of it alone would draw the same.
        path: where a package that is run with ``-m`` lies.
        ways: in which it runs, "plain" among them.

    Returns:
        What came of each.
    """
    command = [str(HERE / script)] if isinstance(script, str) else script
    where = [SOURCE, HERE / "lib", *([path] if path else [])]
    paths = {
        "DATA": str(data),
        "OMP_NUM_THREADS": "1",  # several at a time: the threads of OpenMP would spin while they wait for each other
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_TMPDIR": tempfile.gettempdir(),  # the path of a socket may have 107 characters
        "PYTHONPATH": os.pathsep.join(map(str, where)),
    }
    with ThreadPoolExecutor(len(ways)) as pool:
        futures = {way: pool.submit(run, way, command, tmp_path / way, paths) for way in ways}
        done = {way: x.result() for way, x in futures.items()}
    plain = done["plain"]
    assert plain.code == 0, plain.err
    assert plain.of(""), "the script says nothing"
    for way, ours in done.items():
        if way == "plain":
            continue
        assert ours.code == 0, f"{way}: {ours.code}\n{ours.err}"
        assert ours.of("") == plain.of(""), f"{way}:\n{differences(ours, plain)}\n{ours.err}"
        assert len(ours.versions) == len(plain.versions)
        for mine, theirs in zip(ours.versions, plain.versions, strict=True):
            assert mine >= LEAVES * theirs, f"{way}: {mine} versions of a sample, {theirs} without stoker\n{ours.err}"
        assert "Traceback" not in ours.err, f"{way}:\n{ours.err}"
        assert ours.left == plain.left == [], f"{way} leaves {ours.left}"
        more = set(ours.files) - set(plain.files)
        assert not more, f"{way} leaves files: {sorted(more)}"
    if seeded and "observed" in done:
        assert done["observed"].of("=") == plain.of("="), "observing changed what the script draws"
    return done
