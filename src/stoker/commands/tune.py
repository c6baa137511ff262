"""``stoker tune``: the command around ``tuning.api.tune``."""

from __future__ import annotations

from pathlib import Path

import click

from ..core import output
from ..core.options import BATCH_SIZE
from ..core.progress import Progress
from ..tuning.knobs import BUDGET_S, KNOBS
from . import arguments


@arguments.command("tune")
@arguments.target
@arguments.json_file
@click.option(
    "--html", "html_path", type=arguments.FILE, metavar="FILE", help="Write the result as an HTML page (stoker[html])."
)
@click.option(
    "--knobs",
    default=",".join(KNOBS),
    metavar="A,B",
    show_default=True,
    help="The settings that may change. batch_size may be included, but a different batch size changes the training.",
)
@arguments.time_limit(default=BUDGET_S)
@click.option(
    "--batch-size",
    type=arguments.COUNT,
    metavar="N",
    help=f"Samples per batch.  [default: the loader's; {BATCH_SIZE} for a dataset]",
)
def command(
    target: str, json_path: Path | None, html_path: Path | None, knobs: str, time_limit: float, batch_size: int | None
) -> int:
    """Find a data loader's best settings by measuring.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. A script is
    imported, not run: code behind `if __name__ == "__main__"` stays out.

    \b
    Examples:
      stoker tune train.py:make_loader
      stoker tune mypackage.data:train_set --batch-size 64
      stoker tune train.py:loader --knobs num_workers,prefetch_factor --time-limit 5 --json tune.json
      stoker tune train.py:make_loader --html tune.html
    """
    from ..diagnosis.report import html
    from ..loader.variant import find
    from ..tuning.api import tune  # imports torch

    if html_path is not None:
        html.check(html_path)
    names = [name.strip() for name in knobs.split(",") if name.strip()]
    loader = find(target)
    with Progress(target, time_limit) as progress:
        result = tune(loader, knobs=names, budget_s=time_limit, batch_size=batch_size, name=target, progress=progress)
    output.give(result.as_dict(), json_path, result.show)
    if html_path is not None:
        html.save_tuned(result, html_path)
    return 0
