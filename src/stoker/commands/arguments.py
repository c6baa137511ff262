"""Types for argparse: what is wrong is said with the value, and with exit code 2."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def workers(text: str) -> int | str:
    """So many, or "auto"."""
    return text if text == "auto" else whole(text)


def seconds(text: str) -> float:
    """More than 0."""
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def share(text: str) -> float:
    """From 0 to less than 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, as 0.1")
    return value


def days(text: str) -> float:
    """From 0 on."""
    value = _number(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return value


def milliseconds(text: str) -> float:
    """From 0 on; as seconds."""
    value = _number(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of milliseconds")
    return value / 1e3


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
