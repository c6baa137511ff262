"""Sends the numbers of a step to a logger, which it recognises by the methods that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, cast

from ..core.errors import UsageError
from .numbers import CODES, VERDICT

Values = Mapping[str, float | str]
Sender = Callable[[Values, int | None], None]


class _Logger(Protocol):
    """What is used of a TensorBoard ``SummaryWriter``, a W&B run (or the module ``wandb`` while a run is active), the
    module ``mlflow``, or a Lightning logger."""

    add_scalar: Callable[..., object]
    add_text: Callable[..., object]
    log: Callable[..., object]
    log_metrics: Callable[..., object]
    set_tag: Callable[..., object]
    run_id: str

    @property
    def experiment(self) -> _Logger: ...  # what a Lightning logger writes to


def sender(to: object) -> Sender:
    """Returns a function that sends to this logger. Raises UsageError if it has none of the methods known here."""
    logger = cast(_Logger, to)
    if hasattr(to, "add_scalar"):
        return partial(_to_writer, logger)
    if hasattr(to, "log_metrics") and hasattr(to, "log_hyperparams"):
        return partial(_to_lightning, logger)
    if hasattr(to, "log_metrics") and hasattr(to, "set_tag"):
        return partial(_to_mlflow, logger)
    if hasattr(to, "log") and hasattr(to, "log_artifact"):
        return partial(_to_wandb, logger)
    raise UsageError(
        f"{type(to).__name__} is not a supported logger. Pass a TensorBoard SummaryWriter, a W&B run, the mlflow "
        "module or a Lightning logger, or log the result of read() yourself"
    )


def coded(values: Values) -> dict[str, float]:
    """Replaces the verdict by its number."""
    return {key: CODES[value] if isinstance(value, str) else value for key, value in values.items()}


def _apart(values: Values) -> tuple[dict[str, float], str]:
    return {key: value for key, value in values.items() if not isinstance(value, str)}, str(values.get(VERDICT, ""))


def _to_writer(writer: _Logger, values: Values, step: int | None) -> None:
    numbers, verdict = _apart(values)
    for key, value in numbers.items():
        writer.add_scalar(key, value, step)
    writer.add_text(VERDICT, verdict, step)


def _to_wandb(run: _Logger, values: Values, step: int | None) -> None:
    # Without a step, the values go out with the script's next log: a separate call would advance W&B's step.
    if step is None:
        run.log(dict(values), commit=False)
    else:
        run.log(dict(values), step=step)


def _to_mlflow(mlflow: _Logger, values: Values, step: int | None) -> None:
    numbers, verdict = _apart(values)
    mlflow.log_metrics(numbers, step)
    mlflow.set_tag(VERDICT, verdict)


def _to_lightning(logger: _Logger, values: Values, step: int | None) -> None:
    kinds = {cls.__name__ for cls in type(logger).__mro__}
    numbers, verdict = _apart(values)
    if "TensorBoardLogger" in kinds:
        logger.log_metrics(numbers, step)
        logger.experiment.add_text(VERDICT, verdict, step)
    elif "MLFlowLogger" in kinds:
        logger.log_metrics(numbers, step)
        logger.experiment.set_tag(logger.run_id, VERDICT, verdict)
    else:
        logger.log_metrics(dict(values) if "WandbLogger" in kinds else coded(values), step)
