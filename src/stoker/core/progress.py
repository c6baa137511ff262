"""Progress of a command that takes a while, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from . import terminal
from .terminal import human_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

QUIET_S = 2.0  # a command that finishes sooner prints no progress
REDRAWS_PER_S = 4


class Progress:
    """Shows one line, redrawn, on a terminal; elsewhere a single line of text after two seconds. A thread draws the
    line, so the clock keeps running during a slow batch. Leaving the ``with`` erases it. ``name``: what the command
    works on. ``doing``: verb for the line of text."""

    def __init__(self, name: str, time_limit_s: float | None = None, doing: str = "measuring") -> None:
        self._name = name
        self._time_limit_s = time_limit_s
        self._doing = doing
        self._text = ""
        self._began = time.monotonic()
        self._live: Live | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        console = terminal.console(sys.stderr)
        if sys.stderr.isatty() and not console.is_dumb_terminal:
            from rich.live import Live

            # Workers are forked meanwhile: they would inherit the console's lock through a redirected stdout.
            self._live = Live(
                get_renderable=self._line,
                console=console,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            self._timer = threading.Timer(QUIET_S, self._print_once)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __call__(self, text: str) -> None:
        """Sets the text; cheap enough to be called for each batch."""
        self._text = text

    def samples(self, done: int, total: int, failed: int = 0) -> None:
        """Shows the progress of a loop over samples; see ``samples_done``."""
        self(samples_done(done, total, time.monotonic() - self._began, failed))

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _line(self) -> Text:
        from rich.text import Text

        limit = "" if self._time_limit_s is None else f" of {self._time_limit_s:g}"
        took = time.monotonic() - self._began
        return Text(f"stoker: {took:4.1f}{limit} s  {self._text}", no_wrap=True, overflow="ellipsis")

    def _print_once(self) -> None:
        limit = "" if self._time_limit_s is None else f", up to {self._time_limit_s:g} s"
        sys.stderr.write(f"stoker: {self._doing} {self._name}{limit}: {self._text}\n")
        sys.stderr.flush()


def samples_done(done: int, total: int | None, seconds: float, failed: int = 0) -> str:
    """Describes the progress of a loop over samples, and the time left."""
    text = f"{done:,} of {total:,} samples ({done / total:.0%})" if total else f"{done:,} samples"
    if failed:
        text += f", {failed:,} failed"
    if total and 0 < done < total:
        text += f", about {human_seconds(seconds / done * (total - done))} left"
    return text
