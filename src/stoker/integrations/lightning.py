"""``StokerMonitor``: a Lightning callback that sends the ``data/*`` numbers to the Trainer's loggers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..core.errors import UsageError, one_line
from .loggers import sender
from .monitor import DataMonitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        # Both packages define ``Callback``, and each package's Trainer accepts only its own.
        if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise UsageError("stoker.integrations.lightning needs Lightning: pip install lightning") from None


class StokerMonitor(Callback):  # type: ignore[misc]
    """Logs how long the training loop waits for data (docs/loggers.md), also at the end of each epoch.

    Args:
        every_n_steps: optimizer steps between two logs. None uses the Trainer's ``log_every_n_steps``.

    Example:
        >>> from lightning.pytorch import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(callbacks=[StokerMonitor()])  # doctest: +SKIP
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UsageError(f"every_n_steps must be at least 1, not {every_n_steps}")
        self._every = every_n_steps
        self._monitor: DataMonitor | None = None  # created in the training process, because the callback may be pickled
        self._logged = 0  # the last step that was logged
        self._broken: set[int] = set()  # indices of loggers that failed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._monitor is None:
            self._monitor = DataMonitor()
            if not trainer.loggers and trainer.is_global_zero:
                self._monitor.say("the Trainer has no logger, so data/* is logged nowhere")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged = trainer.global_step  # above 0 after resuming from a checkpoint

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        every = self._every or trainer.log_every_n_steps
        if every and trainer.global_step // every > self._logged // every:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._logged:
            self._log(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _log(self, trainer: Trainer) -> None:
        """Logs the numbers. Must be called in all ranks at the same step."""
        self._logged = trainer.global_step
        if self._monitor is None:
            return
        values = self._monitor.read()
        for i, logger in enumerate(trainer.loggers if values else ()):
            if i in self._broken:
                continue
            try:
                sender(logger)(values, trainer.global_step)
            except Exception as e:
                self._broken.add(i)
                self._monitor.say(f"{type(logger).__name__} no longer receives data/*: {one_line(e)}")
