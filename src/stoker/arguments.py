"""Types for argparse: what is wrong is said with the value, and with exit code 2."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


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


def workers(text: str) -> int | str:
    """A whole number of 0 or more, or "auto"."""
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return text if text == "auto" else int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
