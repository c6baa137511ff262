"""Equality to the bit."""

from __future__ import annotations

from typing import Any

from stoker.core.compare import equal_bits


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_objects_inside_objects_are_each_compared() -> None:
    """Attributes are compared as dicts that live for a moment: the next one may have the same id."""
    for n in range(50):
        a = Holder(reader=Holder(x=[1]), transform=Holder(steps=[Holder(k=i) for i in range(n)]), last=Holder(y=1))
        b = Holder(reader=Holder(x=[1]), transform=Holder(steps=[Holder(k=i) for i in range(n)]), last=Holder(y=2))
        assert not equal_bits(a, b)
        b.last.y = 1
        assert equal_bits(a, b)


def test_objects_that_hold_themselves() -> None:
    a, b = Holder(x=1), Holder(x=1)
    a.me, b.me = a, b
    assert equal_bits(a, b)
