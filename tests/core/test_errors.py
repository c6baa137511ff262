"""How exceptions are said."""

from stoker.core.errors import one_line


def test_an_exception_in_one_line() -> None:
    assert one_line(ValueError("no such\n file")) == "ValueError: no such file"
    assert one_line(AssertionError()) == "AssertionError"
