"""The command ``stoker``. Exit codes: 0 it worked, 1 it failed, 2 wrong usage; ``run`` has the script's own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .._version import __version__
from ..core.errors import UsageError
from . import batch_size, bench_command, cache, compare, tune, verify_command
from .arguments import count
from .stats import command

REPORT = "stoker-report.json"
RUN_EXAMPLE = """examples:
  stoker run train.py --epochs 1           observe the script as it is
  stoker run --apply train.py --epochs 1   the same, sped up: before and after in wall clock
  stoker run --html report.html --json - train.py > report.json
  stoker run torchrun --nproc-per-node 2 train.py
  stoker run -m package.train

Options of stoker come before the script; everything behind it is the script's.
The exit code is the script's own. Observed runs are remembered by folder and command in
$XDG_CACHE_HOME/stoker/runs, for --apply to compare with; it needs none."""
CHECK_EXAMPLE = """example:
  stoker check --json | jq .cores"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="stoker",
        description="Keeps the accelerator fed: says what starves it, and mends it.",
        epilog="example:\n  stoker run train.py",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"stoker {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run a script and report what its loaders did", epilog=RUN_EXAMPLE, formatter_class=raw
    )
    run.add_argument(
        "--apply", action="store_true", help="put stoker's engine, cache and number of workers behind its loaders"
    )
    run.add_argument(
        "--json", type=Path, default=Path(REPORT), metavar="FILE", help=f"the report (default: {REPORT}); - is stdout"
    )
    run.add_argument("--html", type=Path, metavar="FILE", help="the report as one page (needs stoker[html])")
    run.add_argument("--live", action="store_true", help="a line about the loaders while the script runs")
    run.add_argument(
        "--ceilings",
        action="store_true",
        help="what the steps could do alone, and the loader alone; ends the script after a few seconds",
    )
    run.add_argument("--tensorboard", type=Path, metavar="DIR", help="scalars for TensorBoard, once a second")
    run.add_argument(
        "--debug", action="store_true", help="load in the script's own process: for breakpoints and plain tracebacks"
    )
    run.add_argument("--max-steps", type=count, metavar="N", help="end the script after N batches")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument("script", metavar="SCRIPT|COMMAND", help="a Python script, or a command that starts Python")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    tune.add(commands)
    check = commands.add_parser(
        "check", help="what this machine really grants", epilog=CHECK_EXAMPLE, formatter_class=raw
    )
    check.add_argument(
        "--json", type=Path, nargs="?", const=Path("-"), metavar="FILE", help="one JSON object (default: on stdout)"
    )
    batch_size.add(commands)
    bench_command.add(commands)
    compare.add(commands)
    command.add(commands)
    cache.add(commands)
    verify_command.add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line ``argv`` (without the program's name) and returns its exit code."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(words)
    try:
        if options.command == "run":
            from . import run

            return run.run(
                [options.script, *options.args],
                options.module,
                options.apply,
                options.json,
                options.max_steps,
                options.html,
                options.live,
                options.ceilings,
                options.debug,
                options.tensorboard,
            )
        if options.command == "tune":
            return tune.run(options)
        if options.command == "check":
            from . import check

            return check.run(options.json)
        if options.command == "batch-size":
            return batch_size.run(options)
        if options.command == "bench":
            return bench_command.run(options)
        if options.command == "compare":
            return compare.run(options)
        if options.command == "stats":
            return command.run(options)
        if options.command == "cache":
            return cache.run(options)
        if options.command == "verify":
            return verify_command.run(options)
    except UsageError as e:
        sys.stderr.write(f"stoker: {e}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stoker: interrupted\n")
        return 130
    except BrokenPipeError:  # ... | head
        sys.stderr.close()
        return 1
    parser.print_help(sys.stderr)
    return 2
