"""``StokerCallback``: a callback for Hugging Face's Trainer that adds the ``data/*`` numbers to its logs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from .loggers import coded
from .monitor import DataMonitor

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise UsageError("stoker.integrations.transformers needs Transformers: pip install transformers") from None

TAKE_TEXT = {"TensorBoardCallback", "WandbCallback", "PrinterCallback", "ProgressCallback", "DefaultFlowCallback"}


class StokerCallback(TrainerCallback):  # type: ignore[misc]
    """Adds how long the training loop waits for data (docs/loggers.md) to each log of the Trainer.

    The numbers reach every logger in ``report_to``, under the names that the Trainer gives them
    (``train/data/wait_pct`` in TensorBoard and W&B). The verdict is text, or its number if a logger takes no text.

    Example:
        >>> from transformers import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(model, args, train_dataset=dataset, callbacks=[StokerCallback()])  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._monitor: DataMonitor | None = None
        self._ready: dict[str, float | str] = {}  # for the next log
        self._takes_text = False

    def on_train_begin(self, args: object, state: object, control: object, **others: object) -> None:
        self._close()  # not ``on_train_end``, which a user's subclass may have replaced
        self._monitor = DataMonitor()
        self._ready = {}
        callbacks = _callbacks(sys._getframe(1))
        names = [type(callback).__name__ for callback in callbacks]
        self._takes_text = bool(names) and TAKE_TEXT.issuperset({*names} - {type(self).__name__})
        if self not in callbacks:
            self._monitor.say(
                "the Trainer's callbacks were not found, so callbacks that run before this one do not get data/*"
            )
            return
        # The Trainer's own callbacks come first. This one must run after the one that decides whether a step is logged.
        # It must run before those that report, because each reads what earlier ones left in the log.
        callbacks.remove(self)
        callbacks.insert(names.index("DefaultFlowCallback") + 1 if "DefaultFlowCallback" in names else 0, self)

    def on_step_end(self, args: object, state: object, control: TrainerControl, **others: object) -> None:
        if control.should_log and self._monitor is not None:  # ``should_log`` is the same in all ranks
            self._ready = self._monitor.read()

    def on_epoch_end(self, args: object, state: object, control: TrainerControl, **others: object) -> None:
        self.on_step_end(args, state, control)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: dict[str, float | str] | None = None,
        **others: object,
    ) -> None:
        if logs is None or "loss" not in logs or not self._ready:
            return
        values = self._ready if self._takes_text else coded(self._ready)
        self._ready = {}
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)

    def on_train_end(self, *_: object, **others: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _callbacks(caller: FrameType | None) -> list[object]:
    """Returns the Trainer's list of callbacks from the calling frame's handler: callbacks get no reference to it."""
    found = getattr(caller.f_locals.get("self") if caller is not None else None, "callbacks", None)
    return found if isinstance(found, list) else []
