"""Sends the numbers of a step to a logger, which it recognises by the methods that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from ..core.errors import UsageError
from .numbers import CODES, VERDICT

Values = Mapping[str, float | str]
Sender = Callable[[Values, int | None], None]


class _Writer(Protocol):
    """TensorBoard's ``SummaryWriter``."""

    def add_scalar(self, tag: str, value: float, global_step: int | None) -> object: ...
    def add_text(self, tag: str, text: str, global_step: int | None) -> object: ...


class _Run(Protocol):
    """A W&B run, or the module ``wandb`` while a run is active."""

    def log(self, data: dict[str, float | str], *, step: int | None = None, commit: bool | None = None) -> object: ...


class _MLflow(Protocol):
    """The module ``mlflow``."""

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> object: ...
    def set_tag(self, key: str, value: str) -> object: ...


class _Experiment(_Writer, Protocol):
    """What a Lightning logger writes to: a ``SummaryWriter`` or an MLflow client."""

    def set_tag(self, run_id: str, key: str, value: str) -> object: ...


class _LightningLogger(Protocol):
    run_id: str

    @property
    def experiment(self) -> _Experiment: ...
    def log_metrics(self, metrics: dict[str, float | str], step: int | None) -> object: ...


def sender(to: object) -> Sender:
    """Returns a function that sends to this logger.

    Raises:
        UsageError: it has none of the methods that are known here.
    """
    if hasattr(to, "add_scalar"):
        return lambda values, step: _to_writer(cast(_Writer, to), values, step)
    if hasattr(to, "log_metrics") and hasattr(to, "log_hyperparams"):
        return lambda values, step: _to_lightning(cast(_LightningLogger, to), values, step)
    if hasattr(to, "log_metrics") and hasattr(to, "set_tag"):
        return lambda values, step: _to_mlflow(cast(_MLflow, to), values, step)
    if hasattr(to, "log") and hasattr(to, "log_artifact"):
        return lambda values, step: _to_wandb(cast(_Run, to), values, step)
    raise UsageError(
        f"{type(to).__name__} is not a supported logger. Pass a TensorBoard SummaryWriter, a W&B run, the mlflow "
        "module or a Lightning logger, or log the result of read() yourself"
    )


def coded(values: Values) -> dict[str, float]:
    """Replaces the verdict by its number."""
    return {key: CODES[value] if isinstance(value, str) else value for key, value in values.items()}


def _apart(values: Values) -> tuple[dict[str, float], str]:
    return {key: value for key, value in values.items() if not isinstance(value, str)}, str(values.get(VERDICT, ""))


def _to_writer(writer: _Writer, values: Values, step: int | None) -> None:
    numbers, verdict = _apart(values)
    for key, value in numbers.items():
        writer.add_scalar(key, value, step)
    writer.add_text(VERDICT, verdict, step)


def _to_wandb(run: _Run, values: Values, step: int | None) -> None:
    # Without a step, the values go out with the script's next log: a separate call would advance W&B's step.
    if step is None:
        run.log(dict(values), commit=False)
    else:
        run.log(dict(values), step=step)


def _to_mlflow(mlflow: _MLflow, values: Values, step: int | None) -> None:
    numbers, verdict = _apart(values)
    mlflow.log_metrics(numbers, step)
    mlflow.set_tag(VERDICT, verdict)


def _to_lightning(logger: _LightningLogger, values: Values, step: int | None) -> None:
    kinds = {cls.__name__ for cls in type(logger).__mro__}
    if "WandbLogger" in kinds:
        logger.log_metrics(dict(values), step)
        return
    numbers, verdict = _apart(values)
    if "TensorBoardLogger" in kinds:
        logger.log_metrics({**numbers}, step)
        logger.experiment.add_text(VERDICT, verdict, step)
    elif "MLFlowLogger" in kinds:
        logger.log_metrics({**numbers}, step)
        logger.experiment.set_tag(logger.run_id, VERDICT, verdict)
    else:
        logger.log_metrics({**coded(values)}, step)
