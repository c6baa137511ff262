"""Samples of which few are unlike the others: what a copy does not restore, and what they do, must stay as it is.

A trial with a few samples sees none of them, and no branch of the code tells them apart.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data._utils import collate

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning
from stoker.core.nested import is_data
from stoker.loader.dataloader import DataLoader as StokerLoader
from stoker.staging import change_watch
from stoker.tuning.given_workers import own_sampler
from tests.exact.cases import slow

N = 96
MISSING = object()


@pytest.fixture(autouse=True)
def _nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_watch, "COMPARED", 0)


def is_rare(i: int) -> bool:
    return i % 48 == 37


class Samples(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def passes(data: Any, between: Callable[[int], object] = lambda epoch: None) -> Iterator[list[Any]]:
    """Three epochs of single samples, with a cache if possible."""
    with contextlib.suppress(stoker.StokerError):
        data = stoker.Staged(data, cache_budget="20MB")
    for epoch in range(3):
        random.seed(epoch)
        np.random.seed(epoch)
        torch.manual_seed(epoch)
        between(epoch)
        yield [data[i] for i in range(N)]


def assert_as_without_cache(make: Callable[[], Any], between: Callable[[int], object] = lambda epoch: None) -> None:
    plain = make()
    expected = []
    for epoch in range(3):
        random.seed(epoch)
        np.random.seed(epoch)
        torch.manual_seed(epoch)
        between(epoch)
        expected.append([plain[i] for i in range(N)])
    for epoch, made in enumerate(passes(make(), between)):
        assert equal_bits(made, expected[epoch]), f"epoch {epoch}"


def test_an_object_that_stands_for_nothing_is_the_same_object() -> None:
    labels = {i: i for i in range(N) if not is_rare(i)}
    data = Samples(lambda i: (slow(i), labels.get(i, MISSING)))
    for made in passes(data):
        assert [y is MISSING for _, y in made] == [is_rare(i) for i in range(N)]


class Broken(Exception):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


def test_an_exception_as_a_sample() -> None:
    """It can be pickled, and not unpickled."""
    data = Samples(lambda i: Broken(f"{i}.png", "truncated") if is_rare(i) else slow(i))
    for made in passes(data):
        assert [isinstance(x, Broken) for x in made] == [is_rare(i) for i in range(N)]


def test_a_dict_of_the_dataset_is_changed_by_the_loop() -> None:
    flagged = {i: {"hits": 0} for i in range(N) if is_rare(i)}
    data = Samples(lambda i: (slow(i), flagged.get(i)))
    for made in passes(data):
        for _, found in made:
            if found is not None:
                found["hits"] += 1
    assert {x["hits"] for x in flagged.values()} == {3}


def test_the_order_of_a_set() -> None:
    def make(i: int) -> Any:
        visible = set(range(60))
        visible.difference_update(k for k in range(60) if (k * 7 + i) % 5)
        return slow(i), visible

    expected = [list(make(i)[1]) for i in range(N)]
    for made in passes(Samples(make)):
        assert [list(x) for _, x in made] == expected


def test_two_names_of_one_tensor() -> None:
    def make(i: int) -> Any:
        x = torch.from_numpy(slow(i))
        clean = x * 0.5
        return {"x": x, "y": x if is_rare(i) else clean}

    for made in passes(Samples(make)):
        for i, sample in enumerate(made):
            sample["x"].add_(1.0)
            assert (sample["x"] is sample["y"]) == is_rare(i)


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = []
    for i in range(N):
        pixels = np.random.default_rng(i).integers(0, 255, (24, 24, 4 if is_rare(i) else 3), dtype=np.uint8)
        paths.append(str(tmp_path / f"{i}.{'tiff' if is_rare(i) else 'png'}"))
        Image.fromarray(pixels).save(paths[-1])
    return paths


def test_the_format_of_a_picture_decides(pictures: list[str]) -> None:
    class Pictures(Samples):
        def __getitem__(self, i: int) -> Any:
            image = Image.open(pictures[i])
            image.load()
            total = float(slow(i).sum())
            if random.random() < 0.5:
                turned = Image.Transpose.FLIP_LEFT_RIGHT if image.format == "PNG" else Image.Transpose.ROTATE_90
                image = image.transpose(turned)  # type: ignore[assignment]
            return np.array(image), total

    assert_as_without_cache(lambda: Pictures(slow))


def test_the_alpha_of_a_palette(pictures: list[str]) -> None:
    class Few(Samples):
        def __getitem__(self, i: int) -> Any:
            image = Image.open(pictures[i]).quantize(32, method=Image.Quantize.FASTOCTREE)
            total = float(slow(i).sum())
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return np.array(image.convert("RGBA")), total

    assert_as_without_cache(lambda: Few(slow))


class Pipeline:
    def __init__(self, *steps: Callable[..., Any]) -> None:
        self.steps = list(steps)

    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
            if x.std() == 0:  # a blank page has nothing to augment
                break
        return x


class Checked(Pipeline):
    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            try:
                x = step(x)
            except ValueError:
                return np.zeros((4, 4))
        return x


def blank_or(i: int) -> Any:
    return np.full((16, 16), 3.0) if is_rare(i) and slow(i) is not None else slow(i)


class Flagged(Pipeline):
    def __call__(self, x: Any) -> Any:
        done = False
        for step in self.steps:
            if done:
                continue
            x = step(x)
            done = x.std() == 0
        return x


class Clipped(Pipeline):
    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return np.clip(x, -9, 9)


class NoneEnds(Pipeline):
    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
            if x is None:
                return None
        return x


def loud_or(i: int) -> Any:
    return slow(i) * (100 if is_rare(i) else 1)


def none_or(i: int) -> Any:
    return None if is_rare(i) and slow(i) is not None else slow(i)


def refused_or(i: int) -> Any:
    if is_rare(i):
        raise ValueError
    return slow(i)


def noisy(x: Any) -> Any:
    return x + np.random.randn(*x.shape)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(blank_or, np.sqrt, noisy),
        Checked(refused_or, np.sqrt, noisy),
        Flagged(blank_or, np.sqrt, noisy),
        Clipped(loud_or, noisy),
        NoneEnds(none_or, noisy),
    ],
)
def test_a_container_that_leaves_its_loop(pipeline: Pipeline) -> None:
    assert_as_without_cache(lambda: Samples(pipeline))


class Suppresses:
    def __init__(self, i: int) -> None:
        self.i = i

    def __enter__(self) -> Suppresses:
        return self

    def close(self) -> None:
        self.i = -1

    def __exit__(self, kind: object, error: object, tb: object) -> bool:
        self.close()
        return kind is ValueError


@pytest.mark.parametrize("is_stack", [False, True])
def test_a_context_that_suppresses_errors_of_the_random_part(is_stack: bool) -> None:
    class Crops(Samples):
        def __getitem__(self, i: int) -> Any:
            if is_stack:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(contextlib.suppress(ValueError))
                    image = slow(i, 12 if is_rare(i) else 32)
                    top = random.randrange(image.shape[0] - 16)
                    return image[top : top + 16].copy(), top
                return np.zeros(3), -1
            x, top = np.zeros(3), -1
            with Suppresses(i) as clip:
                image = slow(i, 12 if is_rare(clip.i) else 32)
                top = random.randrange(image.shape[0] - 16)
                x = image[top : top + 16].copy()
            return x, top

    assert_as_without_cache(lambda: Crops(slow))


def test_a_method_of_a_generator_draws() -> None:
    class Coin(Samples):
        def __init__(self) -> None:
            self.coin = random.Random(5).random

        def __getitem__(self, i: int) -> Any:
            x = slow(i)
            return x[:, ::-1].copy() if self.coin() < 0.02 else x

    assert_as_without_cache(Coin)


def test_states_of_generators_are_read() -> None:
    scale = np.array([is_rare(i) for i in range(N)], float)

    def make(i: int) -> Any:
        x = slow(i)
        rng = np.random.RandomState((np.random.get_state()[1][0] + i) % 2**31)
        other = np.random.default_rng([torch.initial_seed() % 2**32, i])
        return x + scale[i] * (rng.rand() + other.normal())

    assert_as_without_cache(lambda: Samples(make))


def test_what_is_drawn_at_first_use_moves_the_generator_once() -> None:
    class Bank(Samples):
        bank: Any = None

        def __getitem__(self, i: int) -> Any:
            x = slow(i)
            if is_rare(i):
                if self.bank is None:
                    self.bank = np.random.randn(4)
                x = x + self.bank[i % 4]
            return x

    after = []
    for kind in (Bank, lambda make: stoker.Staged(Bank(make), cache_budget="20MB")):
        np.random.seed(1)
        list(DataLoader(kind(slow), batch_size=8))
        after.append(np.random.rand())
    assert after[0] == after[1]


def test_a_sample_that_fails_has_effects_once() -> None:
    class Fails(Samples):
        def __init__(self) -> None:
            self.failed = 0

        def __getitem__(self, i: int) -> Any:
            x = slow(i)
            if is_rare(i):
                self.__dict__["failed"] = self.failed + 1
                raise Broken(str(i), "truncated")
            return x

    data = Fails()
    staged: Any = data
    with contextlib.suppress(stoker.StokerError):
        staged = stoker.Staged(data, cache_budget="20MB")
    for _ in range(3):
        for i in range(N):
            with contextlib.suppress(Broken):
                staged[i]
    assert data.failed == 3 * sum(map(is_rare, range(N)))


def after(data: Any, **settings: Any) -> tuple[list[Any], float]:
    """Two epochs, and a number drawn after each."""
    np.random.seed(3)
    made = []
    for _ in range(2):
        made += [batch.clone() for batch in DataLoader(data, **{"batch_size": 8, **settings})]
        made.append(torch.tensor(np.random.rand()))
    return made, np.random.rand()


class Drawing(Samples):
    """More than one sample in eight draws, and the trial sees none of them."""

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        return x + np.random.randn() if i % 3 == 1 and 8 < i < 80 and i != N // 2 else x


class Together(Samples):
    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [slow(i) + np.random.randn() if is_rare(i) else slow(i) for i in indices]


@pytest.mark.parametrize("kind", [Drawing, Together])
def test_what_draws_after_all_draws_once(kind: type[Samples]) -> None:
    staged: Any = kind(slow)
    with contextlib.suppress(stoker.StokerError):
        staged = stoker.Staged(staged, cache_budget="20MB")
    assert equal_bits(after(staged), after(kind(slow)))


def test_what_another_dataset_stored_says_nothing_of_this_one() -> None:
    other = stoker.Staged(Samples(lambda i: {"x": slow(i)}), cache_budget="20MB")
    assert len([other[i] for i in range(N)]) == N
    test_a_dict_of_the_dataset_is_changed_by_the_loop()


def view_of(i: int, view: int) -> Any:
    return slow(i)[:, view : view + 8]


def test_functions_that_only_their_defaults_tell_apart() -> None:
    class Views(Samples):
        def __init__(self) -> None:
            self.views = [lambda i, v=v: view_of(i, v) * (v + 1) for v in range(4)]

        def __getitem__(self, i: int) -> Any:
            return self.views[random.choice([0] * 9 + [1, 2, 3])](i).copy()

    assert_as_without_cache(Views)


def test_the_neighbour_before_the_first() -> None:
    for made in passes(Samples(lambda i: (slow(abs(i)), i))):
        assert [int(i) for _, i in made] == list(range(N))
    staged = stoker.Staged(Samples(lambda i: (slow(abs(i)), i)), cache_budget="20MB")
    assert [staged[i][1] for i in (N - 1, -1, N - 1, -1)] == [N - 1, -1, N - 1, -1]


def test_zones_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = [1_700_000_000 + i * 7919 for i in range(N)]

    def between(epoch: int) -> None:
        monkeypatch.setenv("TZ", "CST5CDT" if epoch == 2 else "CST6CDT")
        time.tzset()

    try:
        assert_as_without_cache(lambda: Samples(lambda i: (slow(i), time.localtime(stamps[i]).tm_hour)), between)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("kind", ["lru_cache", "linecache"])
def test_a_cache_of_the_scripts_is_cleared(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"

    @functools.cache
    def labels(path: str) -> list[str]:
        return Path(path).read_text().splitlines()

    def label(i: int) -> int:
        return int(labels(str(path))[i] if kind == "lru_cache" else linecache.getline(str(path), i + 1))

    def between(epoch: int) -> None:
        path.write_text("\n".join(str(i + (50 if epoch and is_rare(i) else 0)) for i in range(N)))
        if epoch != 1:
            labels.cache_clear()
            linecache.checkcache(str(path))

    assert_as_without_cache(lambda: Samples(lambda i: (slow(i), label(i))), between)


LOG = logging.getLogger("rare")
NOTES = {i: f"sample {i} is truncated\n" for i in range(N) if is_rare(i)}


@pytest.mark.parametrize("how", ["print", "log", "root"])
def test_what_few_samples_print_is_printed_each_time(
    how: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def make(i: int) -> Any:
        x = slow(i)
        if how == "print":
            print(NOTES.get(i, ""), end="")
        elif how == "log":
            LOG.log(logging.ERROR if is_rare(i) else logging.DEBUG, "sample %d", i)
        else:
            logging.info("sample %d", i)
        return x

    caplog.set_level(logging.WARNING)

    def between(epoch: int) -> None:
        if how == "root" and epoch == 2:
            caplog.set_level(logging.INFO)

    count = []
    for _ in passes(Samples(make), between):
        text = capsys.readouterr().out
        count.append(text.count("\n") if how == "print" else sum("sample" in x for x in caplog.messages))
        caplog.clear()
    assert count == ([0, 0, N] if how == "root" else [2, 2, 2])


def test_a_function_of_the_users_in_torchs_collate(monkeypatch: pytest.MonkeyPatch) -> None:
    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.nan_to_num(torch.stack(batch, 0), nan=-1.0)

    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, stack)
    data = Samples(lambda i: torch.full((4,), float("nan") if is_rare(i) else float(i)).exp())
    for asked in (data, stoker.Staged(data, cache_budget="20MB")):
        for workers in (0, 1):
            loader = StokerLoader(asked, batch_size=8, num_workers=workers)
            assert not any(bool(x.isnan().any()) for _ in range(3) for x in loader)


def test_what_a_worker_can_send() -> None:
    found = types.SimpleNamespace(a=1)
    assert is_data({"a": [torch.zeros(2), (1, "b", None)], "b": np.float32(1)})
    assert is_data([found, Suppresses(1)])  # batch classes
    for x in (MISSING, {1}, [Broken("", "")], np.array([MISSING], object), types.SimpleNamespace(a=MISSING)):
        assert not is_data(x)


def test_samplers_that_draw_while_the_loop_may() -> None:
    data, g = Samples(slow), torch.Generator()
    late = [RandomSampler(data, replacement=True, generator=g), RandomSampler(data, num_samples=2 * N, generator=g)]
    early = [RandomSampler(data, generator=g), RandomSampler(data, replacement=True)]
    assert [bool(own_sampler(DataLoader(data, sampler=s))) for s in late + early] == [True, True, False, False]


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((500,), i / N).exp().log().exp()


@pytest.mark.parametrize("has_random_part", [False, True])
def test_a_cached_part_that_varies_is_a_difference(has_random_part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tokenizer in Rust whose dropout changes one text in ten. That the script's own samples vary, too, is an
    excuse for the random part only."""
    staged = stoker.Staged(Plain(), cache="ram")
    stored, entropy = staged[0].clone(), random.Random(5)
    vary = lambda i: stored + entropy.random()  # noqa: E731
    filler = staged._filler
    monkeypatch.setattr(Plain, "__getitem__", lambda self, i: vary(i))
    monkeypatch.setattr(filler, "_prepare", vary)
    with pytest.warns(StokerWarning, match="sample 0 differs"):
        assert not filler.compare_whole(0, lambda: stored, (lambda x: x) if has_random_part else None)
