"""``stoker run``: runs a script or a command as it is, listens to its loaders, and reports.

The script runs in a Python of its own, so ``__main__``, argv, tracebacks, pickling and the exit code are its own, with
no stoker frames in between. A ``sitecustomize`` on PYTHONPATH arms the watch in that process and in every Python it
starts (torchrun, accelerate, ``python -m``). What they see comes back over a Unix socket in the abstract namespace
(unix(7)), which is no file and cannot be left behind.
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
from pathlib import Path
from traceback import format_exc
from typing import Any

from ..core import output
from ..core.errors import UsageError
from ..core.monitor import SystemMonitor
from ..diagnosis.report import history, html, schema, tensorboard, text
from ..diagnosis.report.build import report_of
from ..diagnosis.report.live import Ticker
from ..diagnosis.watch.shared_counters import LIVE, Live

HOOK = Path(__file__).parents[1] / "diagnosis" / "watch" / "_hook"
SOURCE = Path(__file__).parents[2]
MAX_LINE = 16 << 20  # bytes of one report of a process; more is no report
PR_SET_PDEATHSIG = 1
FORWARD = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
    if hasattr(signal, name)
)
SI_KERNEL = 0x80  # sigaction(2): sent by the kernel, as Ctrl-C is, and so to the whole foreground group


class Listener:
    """Collects the last word of every watched process.

    Attributes:
        last: by process id, the latest snapshot.
    """

    def __init__(self) -> None:
        self.address = f"stoker-{secrets.token_hex(16)}"
        self.last: dict[int, dict[str, Any]] = {}
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

    def now(self) -> dict[str, dict[str, Any]]:
        """Each loader of the process that was heard last, as it stands at this moment."""
        out: dict[str, dict[str, Any]] = {}
        for pid, snapshot in list(self.last.items())[-1:]:
            for i, metrics in enumerate(snapshot["loaders"]):
                values = zip(LIVE, self._live[pid].row(i), strict=True)
                out[metrics["name"]] = {**metrics, **{k: max(v, metrics[k]) for k, v in values}}
        return out

    def snapshots(self) -> list[dict[str, Any]]:
        """The last snapshot of each process; of one that was killed, brought up to its last batch."""
        for pid, snapshot in self.last.items():
            if not snapshot.get("final"):
                for i, metrics in enumerate(snapshot["loaders"]):
                    for key, value in zip(LIVE, self._live[pid].row(i), strict=True):
                        metrics[key] = type(metrics[key])(max(value, metrics[key]))
        return list(self.last.values())


def command_line(command: list[str], module: bool) -> list[str]:
    """What is executed: a script by this Python, ``-m`` likewise, anything else that is on PATH as it is."""
    if module:
        return [sys.executable, "-m", *command]
    first = command[0]
    path = Path(first)
    if path.suffix == ".py" or (path.is_file() and not os.access(path, os.X_OK)):
        return [sys.executable, *command]
    if os.sep in first and path.is_file():
        return command
    if shutil.which(first):
        return command
    return [sys.executable, *command]  # does not exist: Python says so in its own words


def run(
    command: list[str],
    module: bool,
    apply: bool,
    json_path: Path,
    max_steps: int | None,
    html_path: Path | None = None,
    live: bool = False,
    ceilings: bool = False,
    debug: bool = False,
    scalars_path: Path | None = None,
) -> int:
    """Runs ``command`` and writes the report.

    Args:
        command: script or command with its arguments.
        module: the first word is a module's name, as after ``python -m``.
        apply: put stoker's engine and measured settings behind its loaders.
        json_path: where the JSON report goes; ``-`` is stdout, behind what the command wrote there.
        max_steps: end each process after so many batches.
        html_path: where the report goes as a page.
        live: a line about the loaders while it runs.
        ceilings: measure what the steps and the loader could do alone, and end the script.
        debug: everything in the script's own process.
        scalars_path: folder for TensorBoard's scalars.

    Returns:
        The command's exit code; a command killed by a signal kills this process by the same one.

    Raises:
        UsageError: the report cannot be written; nothing was run.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("stoker run works on Linux only; stoker.DataLoader works everywhere")
    if debug and (apply or ceilings):
        raise UsageError("--debug loads everything in one process: it goes with neither --apply nor --ceilings")
    output.check(json_path)
    if html_path is not None:
        html.check(html_path)
    if scalars_path is not None:
        tensorboard.check(scalars_path)
    listener = Listener()
    line, env = command_line(command, module), _environment(listener.address, apply, max_steps, ceilings, debug)
    began = time.monotonic()
    code, around = _execute(line, env, listener, live, scalars_path)
    wall_s = time.monotonic() - began
    listener.close()
    try:
        report = report_of(_command(command, module), code, listener.snapshots(), around, wall_s, apply)
        if not apply and not (max_steps or ceilings or debug):
            history.save(report)
        _write(report, json_path, html_path)
    except OSError as e:  # the script is over, and whoever waits for its exit code gets it
        sys.stderr.write(f"stoker: the report cannot be written: {e}\n")
    except Exception:
        sys.stderr.write(f"stoker: there is no report, which is stoker's fault and not the script's:\n{format_exc()}")
    sys.stderr.flush()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARD)
        os.kill(os.getpid(), -code)
    return code


def _write(report: schema.RunReport, json_path: Path, html_path: Path | None) -> None:
    """Writes the report and prints it. A command that failed before its first batch leaves an earlier report alone."""
    empty = bool(report.exit_code) and not report.loaders and not report.bypassing
    if empty and json_path.is_file():
        sys.stderr.write(text.render(report, None, sys.stderr) + f"the report of an earlier run is kept: {json_path}\n")
        return
    printed = str(json_path) == "-"
    if printed:
        print(schema.encode(report), end="", flush=True)
    else:
        schema.save(report, json_path)
    if html_path is not None:
        html.save(report, html_path)
    sys.stderr.write(text.render(report, None if printed else json_path, sys.stderr))


def _environment(address: str, apply: bool, max_steps: int | None, ceilings: bool, debug: bool) -> dict[str, str]:
    env = dict(os.environ)
    path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{HOOK}{os.pathsep}{path}" if path else str(HOOK)
    env.update(STOKER_RUN=address, STOKER_HOME=str(SOURCE))
    for name in ("STOKER_APPLY", "STOKER_CEILINGS", "STOKER_DEBUG", "STOKER_MAX_STEPS"):
        env.pop(name, None)
    if apply:
        env["STOKER_APPLY"] = "1"
    if debug:
        env["STOKER_DEBUG"] = "1"
    if ceilings:
        env["STOKER_CEILINGS"] = "1"
    if max_steps is not None:
        env["STOKER_MAX_STEPS"] = str(max_steps)
    return env


def _in_foreground() -> bool:
    """Whether the terminal's Ctrl-C reaches this process group."""
    try:
        tty = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(tty) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(tty)


def _execute(
    line: list[str], env: dict[str, str], listener: Listener, live: bool, scalars_path: Path | None
) -> tuple[int, dict[str, Any]]:
    """Runs the command; signals sent to this process go on to it, once. Returns its exit code, and what the machine did
    meanwhile."""
    shared_group = _in_foreground()  # else it gets a group of its own, or a signal to ours would reach it twice
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
    ambient = SystemMonitor()
    told: list[Ticker | tensorboard.Scalars] = [Ticker(listener.now)] if live else []
    if scalars_path is not None:
        told.append(tensorboard.Scalars(scalars_path, listener.now))
    code = process.wait()
    for listening in told:
        listening.stop()
    return code, ambient.stop()


def _forward(process: subprocess.Popen[bytes], shared_group: bool) -> None:
    while True:
        info = signal.sigwaitinfo(FORWARD)
        if shared_group and info.si_code == SI_KERNEL:
            continue  # the terminal told it already
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(info.si_signo)


def _command(command: list[str], module: bool) -> list[str]:
    return ["-m", *command] if module else list(command)
