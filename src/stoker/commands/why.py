"""``stoker why``: what a running job waits for."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..core import output
from ..core.errors import UsageError
from . import arguments


@arguments.command("why")
@click.argument("pid", type=click.IntRange(min=1))
@arguments.json_file
def command(pid: int, json_path: Path | None) -> int:
    """Say why a training job hangs, while it runs.

    PID is the training process, what started it (torchrun, stoker run), or one of its workers. The job is looked at
    twice, a second apart, and goes on as it is. Works for torch's DataLoader and for stoker's. py-spy
    (pip install 'stoker[why]') shows where in Python each process is.

    \b
    Examples:
      stoker why 4242
      stoker why $(pgrep -of train.py)
      stoker why --json - 4242 | jq -r .sentence
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("stoker why works on Linux only")
    from ..diagnosis.hang import causes, job, text

    jobs = job.look(pid)
    cause = causes.judge(jobs)
    output.give(text.as_dict(pid, jobs, cause), json_path, lambda: print(text.render(jobs, cause, sys.stdout)))
    return 0
