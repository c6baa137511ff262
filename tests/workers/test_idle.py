"""How a worker waits: awake where the last wait was short, asleep otherwise."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

import pytest

from stoker.workers import idle as module
from stoker.workers.idle import AWAKE_NS, Idle


@pytest.fixture
def fd(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The read end of a pipe with something in it: who sleeps until it can be read wakes at once, and says so."""
    monkeypatch.setattr(module, "_cores", lambda: 2)
    r, w = os.pipe()
    os.write(w, b"x")
    yield r
    os.close(r)
    os.close(w)


def waited_awake(idle: Idle) -> int:
    """Nanoseconds until it slept."""
    began = time.perf_counter_ns()
    while not idle.wait(2):
        assert time.perf_counter_ns() - began < 60e9
    return time.perf_counter_ns() - began


def test_a_worker_stays_awake_after_a_short_wait_and_sleeps_after_a_long_one(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: now)
    idle = Idle(fd, -1)
    assert idle.wait(2) == [(fd, select.POLLIN)]  # of the first wait nothing is known
    now += AWAKE_NS // 2
    assert idle.over()
    assert not idle.over()  # there was no other
    assert idle.wait(2) == []  # that one was short
    now += AWAKE_NS - 1
    assert idle.wait(2) == []
    now += 1
    assert idle.wait(2)
    assert idle.over()
    assert idle.wait(2)  # and that one was long


def test_it_is_awake_for_as_long_as_it_says(fd: int) -> None:
    idle = Idle(fd)
    for _ in range(100):
        idle.wait(2)
        idle.over()
        spent = waited_awake(idle)
        if spent >= AWAKE_NS:  # else the waits before this one took too long, on a machine that is busy
            break
    assert spent >= AWAKE_NS
    idle.over()
    assert idle.wait(2)


def test_more_workers_than_cores_sleep(fd: int) -> None:
    idle = Idle(fd)
    for _ in range(10):
        assert idle.wait(3)
        assert idle.over()
