"""``stoker run``: runs a script or a command as it is, listens to its loaders, and reports.

The script runs in its own Python process, so ``__main__``, argv, tracebacks, pickling and the exit code are its own,
without stoker's frames in between. A ``sitecustomize`` on PYTHONPATH starts the watch in that process and in every
Python it starts (torchrun, accelerate, ``python -m``). The watches report over a Unix socket in the abstract namespace
(unix(7)), which is not a file and so cannot be left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import format_exc
from typing import Any

import click

from ..core import output
from ..core.errors import UsageError
from ..core.monitor import SystemMonitor
from ..core.types import JsonObject
from ..diagnosis.report import history, html, text
from ..diagnosis.report.build import report_of
from ..diagnosis.report.schema import RunReport
from ..diagnosis.watch.shared_counters import LIVE, Live
from . import arguments

REPORT = "stoker-report.json"
HOOK = Path(__file__).parents[1] / "diagnosis" / "watch" / "_hook"
SOURCE = Path(__file__).parents[2]
MAX_LINE = 16 << 20  # bytes of one report of a process; a longer line is not a report
PR_SET_PDEATHSIG = 1
PRINTING = ("rich.console", "rich.table", "platformdirs.unix")  # imported beside the script, not after it: 50 ms
FORWARD = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
    if hasattr(signal, name)
)
SI_KERNEL = 0x80  # sigaction(2): sent by the kernel, as Ctrl-C is, and so to the whole foreground group


@dataclass(frozen=True)
class Options:
    """The options of ``stoker run``, as ``--help`` explains them."""

    command: tuple[str, ...]
    module: bool
    apply: bool
    json_path: Path
    html_path: Path | None
    debug: bool
    max_steps: int | None

    @property
    def words(self) -> list[str]:
        """The command as the report has it."""
        return ["-m", *self.command] if self.module else list(self.command)


# Options of the script are not parsed: the first argument that is not an option ends stoker's.
@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--apply", is_flag=True, help="Use stoker's engine, cache and number of workers in its loaders.")
@click.option(
    "--json",
    "json_path",
    type=arguments.FILE,
    default=Path(REPORT),
    show_default=True,
    metavar="FILE",
    help="The report; - is stdout.",
)
@click.option("--html", "html_path", type=arguments.FILE, metavar="FILE", help="The report as a page (stoker[html]).")
@click.option("--debug", is_flag=True, help="Load in the script's own process: for breakpoints and plain tracebacks.")
@click.option("--max-steps", type=arguments.COUNT, metavar="N", help="End the script after N batches.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("command", metavar="SCRIPT|COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(**options: Any) -> int:
    """Run a script and report what its data loaders did; --apply speeds it up.

    SCRIPT is a Python script, or a command that starts Python. Options of stoker come before it; everything after it is
    the script's. The exit code is the script's own. Observed runs are remembered by folder and command in
    $XDG_CACHE_HOME/stoker/runs: --apply compares with them, and works without one too.

    \b
    Examples:
      stoker run train.py --epochs 1           observe the script as it is
      stoker run --apply train.py --epochs 1   the same, sped up: before and after in wall clock
      stoker run --html report.html --json - train.py > report.json
      stoker run torchrun --nproc-per-node 2 train.py
      stoker run -m package.train
    """
    return run(Options(**options))


class Listener:
    """Collects the latest snapshot of every watched process: ``last``, by process id."""

    def __init__(self) -> None:
        self.address = f"stoker-{secrets.token_hex(16)}"
        self.last: dict[int, JsonObject] = {}
        self._live: dict[int, Live] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + self.address)
        self._server.listen(64)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        threading.Thread(target=self._accept, name="stoker_listen", daemon=True).start()

    def close(self) -> None:
        """No new connections; what was sent on the old ones is read to its end."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for t in self._threads:
            t.join(timeout=2.0)  # a process that outlives the command does not keep the report waiting

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            # An abstract socket has no permissions of its own: only this user's processes are heard.
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("iII", credentials)[1] != os.getuid():
                connection.close()
                continue
            t = threading.Thread(target=self._read, args=(connection,), daemon=True)
            self._threads.append(t)
            t.start()

    def _read(self, connection: socket.socket) -> None:
        with connection:
            try:
                _, fds, _, _ = socket.recv_fds(connection, 1, 1)
                live = Live(fds[0])
                os.close(fds[0])
            except (OSError, IndexError, ValueError):
                return
            with connection.makefile("rb") as lines:
                for line in iter(lambda: lines.readline(MAX_LINE), b""):
                    try:
                        snapshot = json.loads(line)
                        self.last[int(snapshot["pid"])] = snapshot
                        self._live[int(snapshot["pid"])] = live
                    except (ValueError, KeyError, TypeError):
                        continue  # half a line of a process that was killed

    def snapshots(self) -> list[JsonObject]:
        """The last snapshot of each process; of one that was killed, brought up to its last batch."""
        for pid, snapshot in self.last.items():
            if not snapshot.get("final"):
                for i, metrics in enumerate(snapshot["loaders"]):
                    for key, value in zip(LIVE, self._live[pid].row(i), strict=True):
                        metrics[key] = type(metrics[key])(max(value, metrics[key]))
        return list(self.last.values())


def command_line(command: Sequence[str], module: bool) -> list[str]:
    """The command line to execute: this Python runs a script or a module; other commands are looked up on PATH."""
    if module:
        return [sys.executable, "-m", *command]
    path = Path(command[0])
    is_script = path.suffix == ".py" or (path.is_file() and not os.access(path, os.X_OK))
    if shutil.which(command[0]) and not is_script:
        return list(command)
    return [sys.executable, *command]  # of what does not exist Python prints its own error


def run(options: Options) -> int:
    """Runs the command and writes the report.

    Returns:
        The command's exit code; a command killed by a signal kills this process by the same one.

    Raises:
        UsageError: the report cannot be written; nothing was run.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("stoker run works on Linux only; stoker.DataLoader works everywhere")
    if options.debug and options.apply:
        raise UsageError("--debug loads everything in one process: it does not go with --apply")
    output.check(options.json_path)
    if options.html_path is not None:
        html.check(options.html_path)
    listener = Listener()
    began = time.monotonic()
    code, machine = _execute(options, listener)
    wall_s = time.monotonic() - began
    listener.close()
    try:
        report = report_of(options.words, code, listener.snapshots(), machine, wall_s, options.apply)
        if not options.apply and not (options.max_steps or options.debug):
            history.save(report)
        _write(report, options.json_path, options.html_path)
    except OSError as e:  # the script is over: its exit code counts
        sys.stderr.write(f"stoker: the report cannot be written: {e}\n")
    except Exception:
        sys.stderr.write(f"stoker: there is no report because of a bug in stoker, not in the script:\n{format_exc()}")
    sys.stderr.flush()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARD)
        os.kill(os.getpid(), -code)
    return code


def _write(report: RunReport, json_path: Path, html_path: Path | None) -> None:
    """Writes the report and prints it. A command that failed before its first batch leaves an earlier report alone."""
    empty = bool(report.exit_code) and not report.loaders and not report.bypassing
    if empty and json_path.is_file():
        sys.stderr.write(text.render(report, None, sys.stderr) + f"the report of an earlier run is kept: {json_path}\n")
        return
    output.give(report.as_dict(), json_path, lambda: None)
    sys.stdout.flush()  # a signal may end this process
    if html_path is not None:
        html.save(report, html_path)
    sys.stderr.write(text.render(report, None if str(json_path) == "-" else json_path, sys.stderr))


def _environment(address: str, options: Options) -> dict[str, str]:
    env = dict(os.environ)
    path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{HOOK}{os.pathsep}{path}" if path else str(HOOK)
    env.update(
        STOKER_RUN=address,
        STOKER_HOME=str(SOURCE),
        STOKER_APPLY="1" if options.apply else "",
        STOKER_DEBUG="1" if options.debug else "",
        STOKER_MAX_STEPS=str(options.max_steps or ""),
    )
    return env


def _in_foreground() -> bool:
    """Whether the terminal's Ctrl-C reaches this process group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:
        return False


def _execute(options: Options, listener: Listener) -> tuple[int, JsonObject]:
    """Runs the command, and passes on to it, once, each signal that this process gets. Returns its exit code, and
    what ``SystemMonitor`` saw meanwhile."""
    line = command_line(options.command, options.module)
    env = _environment(listener.address, options)
    shared_group = _in_foreground()  # else it gets its own process group, or it would get our signals twice
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARD)

    def child() -> None:  # between fork and exec; no thread has been started yet
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARD)
        if not shared_group:
            os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        process = subprocess.Popen(line, env=env, preexec_fn=child)
    except OSError as e:
        raise UsageError(f"cannot run {line[0]}: {e.strerror}") from e
    listener.start()
    threading.Thread(target=_forward, args=(process, shared_group), name="stoker_signals", daemon=True).start()
    for name in PRINTING:
        import_module(name)
    monitor = SystemMonitor()
    return process.wait(), monitor.stop()


def _forward(process: subprocess.Popen[bytes], shared_group: bool) -> None:
    while True:
        info = signal.sigwaitinfo(FORWARD)
        if shared_group and info.si_code == SI_KERNEL:
            continue  # the terminal has sent it already
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(info.si_signo)
