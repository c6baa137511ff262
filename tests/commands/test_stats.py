"""``stoker.mean_std`` and ``stoker stats``: against NumPy's float64, and what a dataset may be besides a good one."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, WeightedRandomSampler

import stoker
from stoker.commands import main
from stoker.commands.image_record import BLOCK, ChannelGroup, group_of, merged
from stoker.commands.stats import ImageStats, mean_std
from stoker.core.errors import StokerError, UsageError
from tests.helpers import interrupt

REL = 1e-9


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def close(found: Any, want: Any, rel: float = REL) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(want, np.float64), rtol=rel, atol=rel)


def here(data: Any, **kw: Any) -> ImageStats:
    return mean_std(data, num_workers=0, **kw)


def same_as_numpy(found: ImageStats, images: Any) -> None:
    """``images`` [n, channels, height, width]."""
    x = np.asarray(images).astype(np.float64)
    close(found.mean, x.mean((0, 2, 3)))
    close(found.std, x.std((0, 2, 3)))
    close(found.min, x.min((0, 2, 3)))
    close(found.max, x.max((0, 2, 3)))
    assert found.images == len(x)


# The arithmetic


def of(x: Any) -> ChannelGroup:
    return group_of(np.asarray(x, np.float64).reshape(1, -1), 1)


numbers = st.floats(-1e4, 1e4, allow_subnormal=False)


@given(st.lists(st.lists(numbers, min_size=1, max_size=9), min_size=1, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_merging_in_any_order_is_numpys_float64(parts: list[list[float]], rng: random.Random) -> None:
    every = np.concatenate(parts)
    records = [of(p) for p in parts]
    found = [functools.reduce(merged, records)]
    while len(records) > 1:  # any tree
        rng.shuffle(records)
        records.append(merged(records.pop(), records.pop()))
    for m in (*found, records[0]):
        assert m.n[0] == len(every)
        np.testing.assert_allclose(m.mean[0], every.mean(), rtol=REL, atol=1e-9)
        np.testing.assert_allclose(m.m2[0] / m.n[0], every.var(), rtol=REL, atol=1e-9)
        assert m.m2[0] >= 0


@given(
    hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.float16]),
        st.tuples(st.integers(1, 4), st.integers(1, 30)),
        elements=st.one_of(st.floats(-100, 100, width=16), st.sampled_from([math.nan, math.inf, -math.inf])),
    )
)
@settings(max_examples=50)
def test_nan_and_inf_are_counted_and_left_out(x: Any) -> None:
    g = group_of(x, 1)
    for c, row in enumerate(x.astype(np.float64)):
        good = row[np.isfinite(row)]
        assert (g.nan[c], g.inf[c], g.n[c]) == (np.isnan(row).sum(), np.isinf(row).sum(), len(good))
        if len(good):
            close(g.mean[c], good.mean())
            close(g.m2[c] / len(good), good.var())
            assert (g.low[c], g.high[c]) == (good.min(), good.max())


def test_an_image_larger_than_a_block() -> None:
    x = np.random.default_rng(0).normal(1e6, 1, (2, 3 * BLOCK + 17))
    g = group_of(x, 1)
    close(g.mean, x.mean(1), 1e-12)
    close(np.sqrt(g.m2 / g.n), x.std(1))


class Rows(Dataset[Any]):
    """Images that are rows of an array."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.data[i]


@pytest.mark.slow
def test_many_images() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal([[[0.2]], [[0.5]], [[100.0]]], [[[0.1]], [[1.0]], [[30.0]]], (20_000, 3, 8, 8)).astype(np.float32)
    found = mean_std(Rows(x), num_workers=2)
    same_as_numpy(found, x)
    assert found.samples == 20_000


@pytest.mark.slow
def test_what_a_naive_float32_sum_gets_wrong() -> None:
    """A large mean and a small spread: E[x^2] - E[x]^2 in float32 is noise, where the moments have all digits."""
    x = (1000 + np.random.default_rng(0).normal(0, 0.1, (2000, 1, 16, 16))).astype(np.float32)
    count, total, squares = 0, np.float32(0), np.float32(0)
    for image in x:
        count += image.size
        total += image.sum(dtype=np.float32)
        squares += (image * image).sum(dtype=np.float32)
    mean = total / np.float32(count)
    naive = float(squares / np.float32(count) - mean * mean)
    true = float(x.astype(np.float64).std())
    assert abs(float(mean) - x.astype(np.float64).mean()) > 1e-5
    assert naive < 0 or abs(math.sqrt(naive) / true - 1) > 0.5
    same_as_numpy(mean_std(Rows(x), num_workers=2), x)


@pytest.mark.slow
def test_the_count_of_workers_changes_no_bit() -> None:
    x = np.random.default_rng(1).normal(3, 1, (700, 3, 5, 4))
    found = [mean_std(Rows(x), num_workers=n) for n in (0, 1, 2, "auto")]
    assert len({(f.mean, f.std, f.min, f.max) for f in found}) == 1


# What a sample may be


class Named(NamedTuple):
    pixels: Any
    label: int


RGB = np.random.default_rng(2).integers(0, 256, (20, 12, 10, 3), np.uint8)
FIRST = RGB.transpose(0, 3, 1, 2)
WIDE = np.random.default_rng(3).integers(-3000, 30000, (20, 13, 32, 30), np.int16)
FORMS: dict[str, tuple[Any, Any, str]] = {
    "CHW tensors": ([torch.from_numpy(x.copy()) for x in FIRST], FIRST, "CHW"),
    "HWC arrays": (list(RGB), FIRST, "HWC"),
    "HWC tensors": ([torch.from_numpy(x) for x in RGB], FIRST, "HWC"),
    "PIL": ([Image.fromarray(x) for x in RGB], FIRST, "HWC"),
    "tuples with a label": ([(7, Image.fromarray(x), "a") for x in RGB], FIRST, "HWC"),
    "nested dicts": ([{"y": torch.tensor([1.0]), "in": {"x": x}} for x in RGB], FIRST, "HWC"),
    "named tuples": ([Named(x, 1) for x in RGB], FIRST, "HWC"),
    "gray PIL": ([Image.fromarray(x[..., 0]) for x in RGB], FIRST[:, :1], "HW"),
    "gray HW1": ([x[..., :1] for x in RGB], FIRST[:, :1], "HWC"),
    "1-bit PIL": ([Image.fromarray(x[..., 0] > 99) for x in RGB], (FIRST[:, :1] > 99) * np.uint8(255), "HW"),
    "RGBA": ([Image.fromarray(x).convert("RGBA") for x in RGB], np.pad(FIRST, ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=255), "HWC"),
    "int16, 13 bands": (list(WIDE), WIDE, "CHW"),
    "int16, 13 bands last": ([x.transpose(1, 2, 0) for x in WIDE], WIDE, "HWC"),
    "uint16": (list(RGB.astype(np.uint16) * 257), FIRST.astype(np.uint16) * 257, "HWC"),
    "float16": ([torch.from_numpy(x / 255).half() for x in FIRST], (FIRST / 255).astype(np.float16), "CHW"),
    "bfloat16": ([torch.from_numpy(x.copy()).bfloat16() for x in FIRST], torch.from_numpy(FIRST.copy()).bfloat16().double().numpy(), "CHW"),
    "float64 with a gradient": ([torch.from_numpy(x / 255).requires_grad_() for x in FIRST], FIRST / 255, "CHW"),
    "batches": ([torch.from_numpy(FIRST[i : i + 5].copy()) for i in range(0, 20, 5)], FIRST, "CHW"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_samples(form: str) -> None:
    data, want, where = FORMS[form]
    found = here(data)
    same_as_numpy(found, want)
    assert [t.partition(" ")[0] for t in found.types] == [where]
    assert found.failed == 0
    assert found.scale == (255 if want.dtype == np.uint8 else 1)


def test_sizes_differ_and_every_pixel_counts_once() -> None:
    data = [np.full((h, 7, 3), h, np.float32) for h in (5, 9, 31)]
    found = here(data)
    every = np.concatenate([x.reshape(-1, 3) for x in data]).astype(np.float64)
    close(found.mean, every.mean(0))
    close(found.std, every.std(0))
    assert found.shapes == {"5x7x3": 1, "9x7x3": 1, "31x7x3": 1}


@pytest.mark.parametrize(("key", "channel"), [("b", 1), ("t", 2), ("o", 3), ("a.b", 4), ("mask", 5), (None, 0)])
def test_the_key_says_which_part_is_the_image(key: str | None, channel: int) -> None:
    def plane(value: float) -> Any:
        return torch.full((1, 6, 6), value)

    sample = {
        "first": plane(0.0), "b": plane(1.0), "t": (plane(2.0),), "o": Named(plane(3.0), 1), "a.b": plane(4.0),
        "mask": torch.ones(6, 6, dtype=torch.bool),
    }  # fmt: skip
    want = {5: 1.0}.get(channel, float(channel))
    assert here([sample, sample], key=key).mean == (want,)


def test_the_key_of_a_tuple_and_of_an_object() -> None:
    assert here([Named(torch.full((1, 6, 6), 3.0), 1)] * 2, key="pixels").mean == (3.0,)
    assert here([(torch.zeros(1, 6, 6), torch.ones(1, 6, 6))] * 2, key="1").mean == (1.0,)


def test_layout_is_a_rule_and_an_option() -> None:
    def types(*data: Any) -> list[str]:
        return [t.partition(" ")[0] for t in here(list(data)).types]

    assert types(torch.rand(3, 9, 3)) == ["CHW"]  # nothing decides: tensors are channels first
    assert types(np.zeros((3, 9, 3))) == ["HWC"]  # arrays are as images are read
    odd = [torch.rand(3, 50, 4) for _ in range(3)]
    assert len(here(odd).mean) == 3
    found = here(odd, layout="HWC")
    assert len(found.mean) == 4
    assert "types: HWC float32 (3)" in str(found)


def test_the_line_scales_uint8_and_says_so() -> None:
    found = here(list(RGB))
    close([float(v) for v in found.normalize[16:].split("]")[0].split(", ")], FIRST.mean((0, 2, 3)) / 255, 1e-5)
    assert "values / 255" in str(found)
    assert found.as_dict()["normalize"] == found.normalize
    same = here([torch.from_numpy(x / 255) for x in FIRST])
    assert same.normalize == found.normalize
    assert "values / 255" not in str(same)


def test_what_else_there_is_to_say() -> None:
    x = np.random.default_rng(0).normal(0, 1, (9, 3, 8, 8))
    bad = x.copy()
    bad[0, 1, :2, 0], bad[3, 2, 0, 0] = np.nan, -np.inf
    found = here(list(bad))
    assert (found.nan, found.inf) == ((0, 2, 0), (0, 0, 1))
    everything = here([np.full((1, 5, 5), np.nan)])
    assert math.isnan(everything.mean[0])
    assert json.loads(json.dumps(everything.as_dict(), allow_nan=False))["mean"] == [None]


def test_images_of_other_channel_counts_and_units_are_left_out_and_noted() -> None:
    found = here([*RGB, RGB[0, ..., 0], (RGB[0] / 255).astype(np.float32)])
    same_as_numpy(found, FIRST)
    assert found.scale == 255
    assert found.shapes == {"12x10x3": 21, "12x10": 1}
    assert any(n.startswith("2 images with other channel counts or types skipped") for n in found.notes)


def test_text_and_json() -> None:
    class Odd(Rows):
        def __getitem__(self, i: int) -> Any:
            if i == 2:
                raise ValueError("<b>")
            return super().__getitem__(i)

    found = here(Odd(RGB), name="<it>")
    assert "1 sample could not be read and is left out; the first is sample 2: ValueError: <b>" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["failed"] == 1
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(AttributeError):
        found.mean = ()  # type: ignore[misc]


# Samples that cannot be read


class Folder(Dataset[Any]):
    """Like torchvision's: ``samples`` has (path, label)."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(p), 0) for p in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        if self.samples[i][0].endswith("nopath.png"):
            raise ZeroDivisionError("no idea which")
        return Image.open(self.samples[i][0]), self.samples[i][1]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_samples_are_left_out_and_the_count_goes_on(tmp_path: Path, workers: int) -> None:
    for i, x in enumerate(RGB):
        Image.fromarray(x).save(tmp_path / f"{i:02}.png")
    (tmp_path / "20-text.png").write_text("no image")
    (tmp_path / "21-nopath.png").write_text("")
    whole = (tmp_path / "00.png").read_bytes()
    (tmp_path / "22-cut.png").write_bytes(whole[: len(whole) // 2])
    found = mean_std(Subset(Folder(tmp_path), range(3, 23)), num_workers=workers)
    same_as_numpy(found, FIRST[3:])
    assert (found.samples, found.failed) == (20, 3)
    assert "the first is sample 17 (" in found.notes[0]
    assert "20-text.png): UnidentifiedImageError" in found.notes[0]


class Kills(Rows):
    def __getitem__(self, i: int) -> Any:
        if i == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def test_a_sample_that_kills_its_worker_is_left_out() -> None:
    found = mean_std(Kills(np.zeros((200, 1, 4, 4))), num_workers=2)
    assert "sample 70" in found.notes[0]
    assert "SIGKILL" in found.notes[0]
    assert (found.samples, found.images, found.failed) == (200, 199, 1)


def cannot_start(worker: int) -> None:
    raise ValueError("no disk\nhere")


def test_a_worker_that_cannot_start() -> None:
    with pytest.raises(StokerError, match="reading the samples failed: here"):
        mean_std(DataLoader(Rows(RGB), num_workers=1, worker_init_fn=cannot_start))


# Loaders, subsets


def test_loaders_of_both_kinds_and_what_counts_of_them() -> None:
    seen = torch.from_numpy(FIRST.copy())
    kw: dict[str, Any] = {"batch_size": 7, "num_workers": 2, "collate_fn": lambda samples: None}
    same_as_numpy(here(DataLoader(Rows(seen), shuffle=True, drop_last=True, **kw)), FIRST)
    same_as_numpy(stoker.mean_std(stoker.DataLoader(Rows(seen), **kw)), FIRST)
    same_as_numpy(here(lambda: Rows(seen)), FIRST)
    same_as_numpy(here(DataLoader(Rows(seen), sampler=SubsetRandomSampler([3, 1, 8]))), FIRST[[1, 3, 8]])
    weighted = here(DataLoader(Rows(seen), sampler=WeightedRandomSampler(torch.ones(20), 50)))
    same_as_numpy(weighted, FIRST)
    assert any("WeightedRandomSampler is ignored" in n for n in weighted.notes)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def test_a_random_subset() -> None:
    found = here(list(RGB), samples=7)
    assert (found.samples, found.mean) == (7, here(list(RGB), samples=7).mean)
    assert found.mean != here(list(RGB), samples=6).mean


class Noisy(Rows):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) + torch.rand(1)


def test_random_augmentation_is_measured_as_it_comes() -> None:
    x = torch.zeros(300, 1, 4, 4)
    state = torch.get_rng_state()
    found = [mean_std(Noisy(x), num_workers=n) for n in (1, 2)]
    assert found[0].mean == found[1].mean  # augmentation belongs to the task, not to the worker
    here(Noisy(x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("data", "kw", "words"),
    [
        ([], {}, "is empty"),
        (Stream(), {}, "is an iterable dataset"),
        (5, {}, "not a Dataset or a DataLoader"),
        ([("a", 1), ("b", 2)], {}, "no image in its samples; sample 0: no image, but str, int"),
        ([torch.zeros(5)] * 3, {}, r"Tensor \(5,\)"),
        ([{"x": RGB[0]}], {"key": "y"}, "there is no 'y' in a sample: it is a dict"),
        ([(RGB[0], 1)], {"key": "1"}, "no image, but int"),
        (list(RGB), {"layout": "WHC"}, "layout must be .*, not 'WHC'"),
    ],
)
def test_wrong_usage(data: Any, kw: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mean_std(data, **{"num_workers": 0, **kw})


# The command

SCRIPT = """
    import os, threading, numpy as np, torch
    from torch.utils.data import Dataset

    class Data(Dataset):
        def __init__(self, n): self.n = n
        def __len__(self): return self.n
        def __getitem__(self, i):
            if i == 3:
                raise OSError(5, "bad disk", "/data/3.jpg")
            return np.full((8, 8, 3), i, np.uint8), i

    class Broken(Data):
        def __getitem__(self, i): raise KeyError(i)

    class Stuck(Data):
        def __getitem__(self, i):
            os.write(1, b"reading\\n")
            threading.Event().wait()

    data, none, broken, stuck, labels, five = Data(40), Data(0), Broken(9), Stuck(40), [1, 2], 5
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"stats_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(tmp_path / f"{name}.py")
    sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_command(target: str) -> None:
    line = [sys.executable, "-m", "stoker", "stats", f"{target}:data", "--json", "-"]
    p = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    found = json.loads(p.stdout)
    want = np.delete(np.arange(40.0), 3)
    close(found["mean"], [want.mean()] * 3)
    close(found["std"], [want.std()] * 3)
    assert "/data/3.jpg" in found["notes"][0]
    assert (found["schema"], found["samples"], found["failed"]) == (2, 40, 1)


def test_exit_codes_and_json(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> int:
        return main.main(["stats", *args])

    out = tmp_path / "out.json"
    assert run(f"{target}:data", "--json", str(out), "--num-workers", "2", "--samples", "10") == 0
    said = capsys.readouterr()
    assert json.loads(out.read_text())["samples"] == 10
    assert "Normalize(mean=[" in said.out
    assert run(f"{target}:broken", "--num-workers", "0") == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        f"stoker: none of the 9 samples of {target}:broken could be read; sample 0: KeyError: 0\n",
    )
    wrong = {
        (f"{target}:nothing",): "has no 'nothing'",
        (f"{target}:five",): "not a Dataset or a DataLoader",
        (f"{target}:none",): "is empty",
        (f"{target}:labels", "--num-workers", "0"): "no image in its samples",
        (f"{target}:data", "--key", "7", "--num-workers", "0"): "there is no '7'",
        (f"{target}:data", "--json", str(tmp_path / "no" / "file")): "cannot write the report",
        ("nowhere.py:data",): "file nowhere.py does not exist",
    }
    for args, words in wrong.items():
        assert run(*args) == 2
        said = capsys.readouterr()
        assert words in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
    for args in (("--samples", "0"), ("--num-workers", "few"), ("--layout", "WCH")):
        assert run(f"{target}:data", *args) == 2


@pytest.mark.slow
def test_an_interrupt_leaves_nobody(target: str) -> None:
    interrupt("stats", f"{target}:stuck", "--num-workers", "2")
