"""``stoker run``: runs a script or a command unchanged, collects what its loaders did, and reports.

The script runs in its own Python process, so ``__main__``, argv, tracebacks, pickling and the exit code are its own,
without frames of stoker. A ``sitecustomize`` on PYTHONPATH starts the watch in that process and in every Python that it
starts (torchrun, accelerate, ``python -m``). The watches report over a Unix socket in a folder that only this user may
enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import click

from ..core import output
from ..core.elsewhere import elsewhere, kinds
from ..core.errors import UsageError, one_line
from ..core.options import parse_bytes
from ..core.processes import die_with_parent
from ..core.types import JsonObject
from . import arguments
from .config import Configured
from .gate import Gate, condition
from .listener import LOOK_S, Listener
from .script import command_line

if TYPE_CHECKING:
    from ..core.monitor import SystemMonitor
    from ..diagnosis.report.prices import Prices
    from ..diagnosis.report.schema import RunReport

REPORT = "stoker-report.json"
HOOK = Path(__file__).parents[1] / "diagnosis" / "watch" / "_hook"
SOURCE = Path(__file__).parents[2]
# Imported while the script runs, not before or after it, because that takes 120 ms.
REPORTING: tuple[str, ...] = ("rich.console", "rich.table", "platformdirs.unix")
REPORTING += tuple(f"stoker.diagnosis.report.{name}" for name in ("build", "history", "text"))
FORWARD = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
    if hasattr(signal, name)
)
SI_KERNEL = 0x80  # sigaction(2): sent by the kernel, such as Ctrl-C, which reaches the whole foreground group


@dataclass(frozen=True)
class Options:
    """The options of ``stoker run``; see ``--help``."""

    command: tuple[str, ...]
    module: bool
    apply: bool
    keep: str
    on_mismatch: str
    workers_on: str
    json_path: Path
    html_path: Path | None
    details: bool
    debug: bool
    max_steps: int | None
    metrics_port: tuple[str, int] | None
    prices: Prices | None
    gate: Gate


def _checked_keep(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return value if value in ("no", "disk") else str(parse_bytes(value, 0, "--keep"))


# The script's options are not parsed: the first argument that is not an option ends stoker's options.
@click.command("run", cls=Configured, context_settings={"allow_interspersed_args": False})
@click.option("--apply", is_flag=True, help="Use stoker's engine, cache and number of workers in its loaders.")
@click.option(
    "--workers-on",
    default="",
    metavar="ray[:HOST:PORT]",
    help="With --apply: also load batches on the nodes of this Ray cluster (stoker[ray]).",
)
@click.option(
    "--keep",
    default="no",
    metavar="no|disk|SIZE",
    show_default=True,
    callback=_checked_keep,
    help="With --apply: keep the cache on disk for the next run. disk: up to a tenth of the free space; or a size "
    "such as 20GB.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["warn", "stop"]),
    default="warn",
    show_default=True,
    help="With --apply: what to do if a cached sample differs from what the script makes. stop: raise an error.",
)
@click.option(
    "--json",
    "json_path",
    type=arguments.FILE,
    default=Path(REPORT),
    show_default=True,
    metavar="FILE",
    help="Write the report as JSON; - writes it to stdout as the last line.",
)
@click.option(
    "--html", "html_path", type=arguments.FILE, metavar="FILE", help="Write the report as an HTML page (stoker[html])."
)
@click.option("--details", is_flag=True, help="Print every count, time and finding, not only the most important.")
@click.option("--debug", is_flag=True, help="Load in the script's own process, for breakpoints and plain tracebacks.")
@click.option("--max-steps", type=arguments.COUNT, metavar="N", help="End the script after N batches.")
@click.option(
    "--metrics-port",
    type=arguments.address,
    metavar="[HOST:]PORT",
    help="Serve gauges to Prometheus during the run (stoker[metrics]). 0: any free port. 0.0.0.0:PORT: also to other "
    "machines.",
)
@click.option(
    "--gpu-price", type=arguments.price, metavar="PRICE", help="Price per GPU hour, to report what waiting costs."
)
@click.option("--gpus", type=arguments.COUNT, metavar="N", help="Number of GPUs the run uses.  [default: all]")
@click.option(
    "--cpu-price",
    type=arguments.price,
    metavar="PRICE",
    help="Price per CPU core hour, to report whether more cores pay off.",
)
@click.option(
    "--fail-on",
    type=condition,
    multiple=True,
    metavar="input-bound|slower-than=REPORT",
    help="Exit with code 1 if this is true of the run. May be repeated.",
)
@click.option(
    "--fail-above",
    type=arguments.loss,
    metavar="10%",
    help="Share by which a loader's samples/s may be below REPORT's.  [default: 10%]",
)
@click.option("-m", "module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.argument(
    "command", metavar="SCRIPT|COMMAND [ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=arguments.files
)
def command(
    gpu_price: float | None,
    gpus: int | None,
    cpu_price: float | None,
    fail_on: tuple[str, ...],
    fail_above: float | None,
    **options: Any,
) -> int:
    """Run a script and report what its data loaders did; --apply speeds it up.

    SCRIPT is a Python script, or a command that starts Python. Options of stoker come before it; everything after it is
    the script's. The exit code is the script's own. Observed runs are remembered by folder and command in
    $XDG_CACHE_HOME/stoker/runs: --apply compares with them, and works without one too. A table [tool.stoker] in the
    nearest pyproject.toml, from the script's folder upwards, has defaults such as keep = "20GB" or json = "run.json".

    \b
    Examples:
      stoker run train.py --epochs 1           observe the script as it is
      stoker run --apply train.py --epochs 1   the same, sped up: before and after in wall clock
      stoker run --json - train.py | tail -n 1 | jq .verdict
      stoker run --gpu-price 2.10 --gpus 8 train.py
      stoker run --fail-on slower-than=main.json --fail-above 10% train.py
      stoker run torchrun --nproc-per-node 2 train.py
      stoker run --metrics-port 9100 train.py
      stoker run -m package.train
    """
    if gpu_price is None and (gpus is not None or cpu_price is not None):
        raise UsageError("--gpus and --cpu-price need --gpu-price")
    prices = None
    if gpu_price is not None:
        from ..diagnosis.report.prices import Prices

        prices = Prices(gpu_price, gpus or 0, cpu_price)
    return run(Options(**options, prices=prices, gate=Gate(fail_on, fail_above)))


def _check(options: Options) -> None:
    """Raises UsageError, before the script runs, if options exclude each other or a file cannot be written."""
    if not sys.platform.startswith("linux"):
        raise UsageError("stoker run works on Linux only; stoker.DataLoader works everywhere")
    if options.workers_on:
        if not options.apply:
            raise UsageError("--workers-on needs --apply")
        name, address = elsewhere(options.workers_on) or ("", "")
        if name not in kinds() or "//" in address:
            allowed = " or ".join(f"{kind}, or {kind}:HOST:PORT" for kind in kinds())
            raise UsageError(
                f"--workers-on must be {allowed}, a cluster that this machine belongs to, not {options.workers_on}"
            )
    if options.keep != "no" and not options.apply:
        raise UsageError("--keep needs --apply, which fills the cache")
    if options.debug and options.apply:
        raise UsageError("--debug loads everything in one process, so it cannot be combined with --apply")
    output.check(options.json_path)
    if options.html_path is not None:
        from ..diagnosis.report import html  # see REPORTING

        html.check(options.html_path)
    if options.metrics_port is not None:
        from ..integrations import prometheus

        prometheus.check()


def run(options: Options) -> int:
    """Runs the command and writes the report. Returns the command's exit code, or 1 if that is 0 and a condition of
    ``--fail-on`` holds. If a signal killed the command, kills this process with the same signal. Raises UsageError if
    options are wrong, the report could not be written, or the command cannot be started."""
    _check(options)
    line = command_line(options.command, options.module)
    listener = Listener()
    began = time.monotonic()
    try:
        code, machine = _execute(line, options, listener)
        wall_s = time.monotonic() - began
    finally:
        listener.close()
    from ..diagnosis.report import build, history

    gate = Gate() if code else options.gate  # a failed script has already printed why
    failed = ["there is no report for --fail-on to check"] if gate.asked else []
    try:
        sent, cut = listener.snapshots(), options.max_steps is not None
        words = ["-m", *options.command] if options.module else list(options.command)
        report = build.report_of(words, code, sent, machine, wall_s, options.apply, options.prices, cut)
        failed = list(gate.failed(report))
        if not options.apply and not (options.max_steps or options.debug):
            history.save(report)
        _write(report, options)
    except OSError as e:  # the script has ended, so its exit code still counts
        sys.stderr.write(f"stoker: cannot write the report: {e}\n")
    except Exception:
        sys.stderr.write(f"stoker: there is no report because of a bug in stoker, not in the script:\n{format_exc()}")
    sys.stderr.write("".join(f"stoker: {reason}\n" for reason in failed))
    sys.stderr.flush()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL's handler cannot be set
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARD)
        os.kill(os.getpid(), -code)
    return code or int(bool(failed))


def _write(report: RunReport, options: Options) -> None:
    """Writes the report and prints it. If the command failed before its first batch, keeps an earlier report."""
    from ..diagnosis.report import html, text

    path: Path | None = options.json_path
    kept = ""
    if report.exit_code and not report.loaders and not report.bypassing and os.path.isfile(options.json_path):
        kept = f"the report of an earlier run was not overwritten: {path}\n"
        path = None
    elif str(path) == "-":
        # Starts on a new line, because the script's output may not end with one.
        print("\n" + json.dumps(report.as_dict()))
        path = None
    else:
        output.give(report.as_dict(), options.json_path, lambda: None, named=path != Path(REPORT))
    sys.stdout.flush()  # this process may be about to kill itself with a signal
    if options.html_path is not None and not kept:
        html.save(report, options.html_path)
    sys.stderr.write(text.render(report, path, sys.stderr, details=options.details) + kept)


def _environment(folder: str, options: Options) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{HOOK}{os.pathsep}{path}" if path else str(HOOK),
        "STOKER_RUN": folder,
        "STOKER_HOME": str(SOURCE),
        "STOKER_APPLY": "1" if options.apply else "",
        "STOKER_KEEP": options.keep if options.apply else "",
        "STOKER_ON_MISMATCH": options.on_mismatch if options.apply else "",
        "STOKER_WORKERS_ON": options.workers_on,
        "STOKER_DEBUG": "1" if options.debug else "",
        "STOKER_MAX_STEPS": str(options.max_steps or ""),
    }


def _in_foreground() -> bool:
    """Returns whether the terminal's Ctrl-C reaches this process group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:
        return False


def _execute(line: list[str], options: Options, listener: Listener) -> tuple[int, JsonObject]:
    """Runs the command and forwards signals to it. Returns its exit code, and what ``SystemMonitor`` saw."""
    env = _environment(listener.folder, options)
    shared_group = _in_foreground()  # if not, the command gets its own process group, so that signals do not come twice
    signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARD, signal.SIGCHLD])

    def child() -> None:  # runs between fork and exec, which is safe because no thread has been started yet
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*FORWARD, signal.SIGCHLD])
        if not shared_group:
            os.setpgid(0, 0)
        die_with_parent()

    try:
        process = subprocess.Popen(line, env=env, preexec_fn=child)
    except OSError as e:
        raise UsageError(f"cannot run {line[0]}: {e.strerror}") from e
    with contextlib.ExitStack() as beside:
        monitor = _beside(listener, options, beside)
        code = _wait(process, shared_group)
        return code, {} if monitor is None else monitor.stop()


def _beside(listener: Listener, options: Options, stack: contextlib.ExitStack) -> SystemMonitor | None:
    """Starts what runs beside the script. The script is already running, so failures are only reported on stderr."""
    try:
        listener.start()
        from ..core import resources  # see REPORTING
        from ..core.monitor import SystemMonitor
        from ..integrations import prometheus

        for name in REPORTING:
            import_module(name)
        stack.enter_context(prometheus.serving(options.metrics_port, listener.snapshots))
        return None if resources.threads_are_scarce() else SystemMonitor()
    except (OSError, RuntimeError) as e:  # out of threads (ulimit -u) or file descriptors (ulimit -n), or no /proc
        sys.stderr.write(f"stoker: the report will be incomplete: {one_line(e)}\n")
        return None


def _wait(process: subprocess.Popen[bytes], shared_group: bool) -> int:
    """Waits for the command and forwards signals to it. Returns its exit code."""
    while process.poll() is None:
        info = signal.sigtimedwait([*FORWARD, signal.SIGCHLD], LOOK_S)
        if info is None or info.si_signo not in FORWARD:  # a timeout, or SIGCHLD: the loop checks whether it ended
            continue
        if shared_group and info.si_code == SI_KERNEL:
            continue  # the terminal has already sent it to the command
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(info.si_signo)
    return int(process.returncode)
