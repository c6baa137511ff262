"""``stoker stats``: the command around ``mean_std``."""

from __future__ import annotations

from pathlib import Path

import click

from ...core import output
from ...core.errors import StokerError
from ...core.progress import Progress
from .. import arguments


@click.command("stats")
@arguments.target
@click.option(
    "--key",
    metavar="NAME",
    help="The image in a sample: a dict's key, a tuple's index or a field, with dots to go inside.  "
    "[default: the first image]",
)
@click.option(
    "--samples", type=arguments.COUNT, metavar="N", help="Read N random ones; the first N of a stream.  [default: all]"
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="For --samples and augmentation.",
)
@click.option("--layout", type=click.Choice(["CHW", "HWC"]), help="Where channels are, if the guess is wrong.")
@arguments.num_workers
@arguments.json_file
def command(
    target: str,
    key: str | None,
    samples: int | None,
    seed: int,
    layout: str | None,
    num_workers: int | str,
    json_path: Path | None,
) -> int:
    """Mean and std of an image dataset, and its broken samples.

    TARGET is a DataLoader, a Dataset, or a function that returns one: path.py:name or package.module:name. Measure the
    images as Normalize gets them: without Normalize itself. Unreadable samples are listed.

    \b
    Examples:
      stoker stats train.py:train_set
      stoker stats mypackage.data:make_loader --samples 5000 --num-workers 8
      stoker stats train.py:train_set --key image --json stats.json
    """
    from ...loader.variant import find
    from .reading import mean_std  # which loads torch

    try:
        with Progress(target) as progress:
            found = mean_std(
                find(target),
                key=key,
                samples=samples,
                seed=seed,
                layout=layout,
                num_workers=num_workers,
                name=target,
                progress=progress,
            )
    except StokerError as e:
        return arguments.fail(e)
    output.give(found.as_dict(), json_path, lambda: print(found))
    return 0
