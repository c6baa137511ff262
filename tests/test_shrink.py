"""Pictures that are decoded large and shrunk: decoding them small is offered, measured, and never done unasked."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

import stoker
from stoker.staging import shrink


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    out = []
    for k in range(3):
        coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8))
        coarse.resize((512, 384), Image.Resampling.BICUBIC).save(folder / f"{k}.jpg", quality=90)
        out.append(folder / f"{k}.jpg")
    return out


class Photos(Dataset[Any]):
    """As torchvision's folders: a loader, and a transform."""

    def __init__(self, paths: list[Path], size: tuple[int, int], how: str = "path") -> None:
        self.paths, self.how = paths, how
        self.transform = [lambda p: p.resize(size), np.asarray]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        x: Any = self._open(self.paths[i])
        for t in self.transform:
            x = t(x)
        return x

    def _open(self, path: Path) -> Any:
        if self.how == "path":
            return Image.open(path).convert("RGB")
        if self.how == "file":
            with open(path, "rb") as file:
                return Image.open(file).convert("RGB")
        if self.how == "bytes":
            return Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        picture = Image.open(path)
        picture.draft("RGB", (64, 48))
        return picture.convert("RGB")


@pytest.mark.parametrize("how", ["path", "file", "bytes"])
def test_a_big_shrink_is_offered_with_its_difference(photos: list[Path], how: str) -> None:
    found = stoker.split(Photos(photos, (64, 48), how))
    assert "512x384 are decoded whole and shrunk to 64x48" in found.offer
    assert "PSNR" in found.offer
    assert "times as fast" in found.offer
    assert "Pictures of 512x384" in str(found)
    assert "stoker.image.read" in found._repr_html_()


def test_nothing_is_offered_where_nothing_is_to_be_had(photos: list[Path]) -> None:
    assert not stoker.split(Photos(photos, (384, 288))).offer  # libjpeg has no step so small
    assert not stoker.split(Photos(photos, (64, 48), "draft")).offer  # done already


def test_the_offer_changes_no_pixel_and_leaves_pillow_as_it_was(photos: list[Path]) -> None:
    from PIL.JpegImagePlugin import JpegImageFile

    before = JpegImageFile.load, Image.Image.resize
    data = Photos(photos, (64, 48))
    want = [data[i] for i in range(3)]
    staged = stoker.Staged(data, cache="ram", cache_budget="8MB")
    assert all(np.array_equal(staged[i], want[i]) for i in range(3))
    with shrink.watched() as found:
        data[0]
    assert [x.wanted for x in found] == [(64, 48)]
    assert before == (JpegImageFile.load, Image.Image.resize)


def test_without_pillow_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "PIL.JpegImagePlugin", raising=False)
    assert shrink.offer(lambda i: 1 / 0, [0]) == ""
