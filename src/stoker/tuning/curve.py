"""Samples per second against the number of workers: as bars of text, and as a drawing."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ..core.terminal import counted, rate
from .guesses import Guess

WIDTH, HEIGHT = 640, 300  # of the drawing
LEFT, RIGHT, TOP, BOTTOM = 80, 16, 44, 44  # its margins
MEASURED, KNEE, GUESS = "#2563eb", "#15803d", "#d97706"
APART = 22  # labels of the axis are at least so far from each other
LINES = 4  # across the drawing, at most, with a round number of samples/s each
LETTERS, LETTERS_AT = "ABCDEFGH", 14  # that stand for the guesses, above the label of the knee

Place: TypeAlias = Callable[[float], float]  # of a number along an axis


class Point(NamedTuple):
    """One number of workers, in samples per second: the median of its windows, the slowest, the fastest."""

    workers: int
    rate: float
    low: float
    high: float
    windows: int


def bars(points: Sequence[Point], knee: int, width: int) -> list[str]:
    """One line of text for each point, below a heading. ``knee``: its number of workers."""
    top = max(p.high for p in points) or 1.0
    room = max(10, min(60, width - 36))
    out = [f"{'workers':>7}  samples/s"]
    for p in points:
        bar = "█" * round(p.rate / top * room)
        mark = " <- the knee" if p.workers == knee else ""
        out.append(f"{p.workers:>7}  {rate(p.rate):>9} {bar}{mark}")
    return out


def svg(points: Sequence[Point], knee: int, guesses: Sequence[Guess]) -> str:
    """Draws medians with the range of their windows, the knee, the guesses. Workers have a logarithmic axis."""
    drawn = [g for g in guesses if g.rate is not None]
    most = max(p.workers for p in points)
    top = max(p.high for p in points) or 1.0

    def x(workers: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.04 + 0.92 * math.log2(1 + workers) / max(1.0, math.log2(1 + most)))

    def y(samples: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * samples / top

    out = [*_axes([p.workers for p in points], top, x, y), *_guess_marks(drawn, x)]
    path = " ".join(f"{x(p.workers):.1f},{y(p.rate):.1f}" for p in points if p.workers)
    out.append(f'<polyline points="{path}" fill="none" stroke="{MEASURED}" stroke-width="1.5"/>')
    for p in points:
        at, is_knee = x(p.workers), p.workers == knee
        colour = KNEE if is_knee else MEASURED
        out += [
            f"<g><title>{counted(p.workers, 'worker')}: {rate(p.rate)} samples/s [{rate(p.low)}..{rate(p.high)}], "
            f"windows: {p.windows}</title>",
            f'<path d="M{at:.1f} {y(p.low):.1f}V{y(p.high):.1f}" stroke="{colour}" stroke-width="3" opacity="0.5"/>',
            f'<circle cx="{at:.1f}" cy="{y(p.rate):.1f}" r="{6 if is_knee else 3.5}" fill="{colour}"/></g>',
        ]
        if is_knee:
            out.append(_label(min(at, WIDTH - RIGHT - 28), y(p.high) - 8, "the knee", KNEE))
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" style="width:100%;max-width:{WIDTH}px;height:auto" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="currentColor">'
        f"<title>samples/s against workers</title>{''.join(out)}</svg>"
    )
    return picture + _legend(drawn)


def _axes(workers: list[int], top: float, x: Place, y: Place) -> list[str]:
    """Lines across with their samples/s, and the numbers of workers that have room below."""
    out = [_label(LEFT - 8, LETTERS_AT, "samples/s", anchor="end"), _label(WIDTH / 2, HEIGHT - 8, "workers")]
    step = _round_step(top / LINES)
    for k in range(math.floor(top / step) + 1):
        at, opacity = y(k * step), 0.2 if k else 0.6
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity="{opacity}"/>')
        out.append(_label(LEFT - 8, at + 4, rate(k * step), anchor="end"))
    last = -math.inf
    for n in workers:
        if x(n) - last >= APART:
            out.append(_label(x(n), HEIGHT - BOTTOM + 16, str(n)))
            last = x(n)
    return out


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5, times a power of ten, that is no smaller than ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _guess_marks(drawn: Sequence[Guess], x: Place) -> list[str]:
    """A broken line for each number of workers that was guessed, with the letters of its rules on top."""
    letters: dict[int, str] = {}
    for letter, g in zip(LETTERS, drawn, strict=False):
        letters[g.workers] = letters.get(g.workers, "") + letter
    out = []
    for n, which in letters.items():
        line = f"M{x(n):.1f} {LETTERS_AT + 4}V{HEIGHT - BOTTOM}"
        out.append(f'<path d="{line}" stroke="{GUESS}" stroke-dasharray="4 3" opacity="0.8"/>')
        out.append(_label(x(n), LETTERS_AT, which, GUESS))
    return out


def _label(x: float, y: float, words: str, colour: str = "", anchor: str = "middle") -> str:
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{html.escape(words)}</text>'


def _legend(drawn: Sequence[Guess]) -> str:
    """What the letters of the guesses mean."""
    out = [f'<span style="color:{KNEE}">&#9679;</span> the knee']
    for letter, g in zip(LETTERS, drawn, strict=False):
        words = f"{g.name}: {counted(g.workers, 'worker')}, {rate(g.rate)} samples/s"
        out.append(f'<b style="color:{GUESS}">{letter}</b> {html.escape(words)}')
    return f'<div style="font-size:0.85em">{"<br>".join(out)}</div>'
