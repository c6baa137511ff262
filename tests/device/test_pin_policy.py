"""What is pinned, and whether: batches of every make, and the decision as a table of cases."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import stoker
from stoker.core import nested as walk
from stoker.core.errors import UsageError
from stoker.device import pin_policy
from stoker.device.pin_policy import decide

Point = collections.namedtuple("Point", "x y")
MB = 1 << 20


class SimpleCustomBatch:
    """torch's own example of a batch type that pins itself (docs, "Memory Pinning")."""

    def __init__(self, data: Any) -> None:
        columns = list(zip(*data, strict=True))
        self.inp = torch.stack(columns[0], 0)
        self.tgt = torch.stack(columns[1], 0)

    def pin_memory(self) -> SimpleCustomBatch:
        self.inp = walk.pin_tensor(self.inp)
        self.tgt = walk.pin_tensor(self.tgt)
        return self


class Replaced:
    def pin_memory(self) -> str:
        return "another"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    name: str


class Frame(Mapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, k: str) -> Any:
        return self.items_[k]

    def __iter__(self) -> Any:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Extra(dict[str, Any]):
    note = ""


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors that were pinned, by their number; a pinned one is its negative."""
    seen: list[int] = []

    def pin_tensor(t: torch.Tensor, device: str | None = None) -> torch.Tensor:
        seen.append(int(t.reshape(-1)[0]))
        return -t

    monkeypatch.setattr(walk, "pin_tensor", pin_tensor)
    return seen


def t(n: int) -> torch.Tensor:
    return torch.tensor([n])


def test_tensors_in_any_nesting(pinned: list[int]) -> None:
    extra = Extra(a=t(1))
    extra.note = "kept"
    data = (
        t(2),
        [t(3), "word", 4, b"bytes"],
        {"k": t(5)},
        Point(t(6), None),
        Frozen(t(7), "n"),
        extra,
        Frame({"z": t(8)}),
    )
    out = walk.pin(data)
    assert sorted(pinned) == [1, 2, 3, 5, 6, 7, 8]
    assert type(out) is tuple
    assert out[1][1:] == ["word", 4, b"bytes"]
    assert type(out[3]) is Point
    assert int(out[3].x) == -6
    assert type(out[4]) is Frozen
    assert (int(out[4].image), out[4].name) == (-7, "n")
    assert int(data[4].image) == 7  # what the user has is left alone
    assert (type(out[5]), out[5].note) == (Extra, "kept")
    assert type(out[6]) is Frame
    assert walk.pin(range(3)) == [0, 1, 2]  # torch does that, too


def test_what_pins_itself_is_asked_and_its_answer_taken(pinned: list[int]) -> None:
    batch = SimpleCustomBatch([(t(1), t(2)), (t(3), t(4))])
    out = walk.pin({"b": batch, "r": Replaced()})
    assert out["b"] is batch
    assert int(batch.inp[0]) == -1
    assert out["r"] == "another"
    assert walk.pin(SimpleCustomBatch) is SimpleCustomBatch


def test_what_lies_on_a_device_is_left_alone() -> None:
    x = torch.empty(3, device="meta")
    assert walk.pin([x])[0] is x


CASES: list[tuple[str | None, str, bool, str]] = [
    (None, "", False, "no accelerator"),
    ("mps", "", False, "shares its memory"),
    ("cuda", "error 1", False, "error 1"),
    ("cuda", "", True, "on its own"),
]


@pytest.mark.parametrize(("kind", "refused", "on", "why"), CASES)
def test_the_decision(kind: str | None, refused: str, on: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_policy, "kind", lambda: kind)
    monkeypatch.setattr(pin_policy, "unified", lambda kind: kind == "mps")
    choice = decide(refused)
    assert choice.on is on, choice
    assert why in choice.why


def test_auto_without_a_device_is_off_and_says_so() -> None:
    if pin_policy.kind() is not None:
        pytest.skip("there is one")
    loader = stoker.DataLoader(range(8), batch_size=2, num_workers=1, pin_memory="auto")  # type: ignore[arg-type]
    assert loader.pin_memory is False
    assert loader.decisions == ["pin_memory=False: there is no accelerator"]
    assert len(list(loader)) == 4


def test_another_word_is_an_error() -> None:
    with pytest.raises(UsageError, match="pin_memory must be True, False or \"auto\", not 'always'"):
        stoker.DataLoader(range(3), pin_memory="always")  # type: ignore[arg-type]
