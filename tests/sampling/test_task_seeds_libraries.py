"""Task seeds with the generators of MONAI's and albumentations' transforms, where these are installed."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.errors import StokerWarning

N, BATCH = 16, 4
OTHERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 4},
    {"num_workers": "auto"},
    {"num_workers": 1, "worker_method": "thread"},
    {"num_workers": 3, "worker_method": "thread"},
]


class Images(Dataset):
    """An image of noise for each index, the same each time, and a transform of it."""

    def __init__(self, transform: Callable[[np.ndarray[Any, Any]], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        image = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        return torch.as_tensor(np.ascontiguousarray(self.transform(image)))


class ByName:
    """Albumentations as people call it."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return self.transform(image=image)["image"]


class ByKey:
    """MONAI's dictionary transforms."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return self.transform({"image": image.transpose(2, 0, 1).astype(np.float32)})["image"]


def monai() -> Any:
    t = pytest.importorskip("monai.transforms")
    return ByKey(
        t.Compose(
            [
                t.RandFlipd("image", prob=0.5, spatial_axis=0),
                t.RandRotated("image", prob=0.5, range_x=0.4, keep_size=True),
                t.RandGaussianNoised("image", prob=0.5),
                t.OneOf([t.RandScaleIntensityd("image", 0.5, prob=1.0), t.RandShiftIntensityd("image", 9, prob=1.0)]),
            ]
        )
    )


def albumentations(seed: int | None = 137) -> Any:
    a = pytest.importorskip("albumentations")
    inner = a.OneOf([a.VerticalFlip(p=1.0), a.GaussNoise(p=1.0)], p=0.7)
    return ByName(a.Compose([a.HorizontalFlip(p=0.5), a.RandomCrop(24, 24), inner], seed=seed))


def digest(batch: torch.Tensor) -> str:
    """What a failed comparison can print in a line."""
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:16]


def epochs(transform: Any, **kw: Any) -> list[list[str]]:
    torch.manual_seed(7)
    loader = stoker.DataLoader(Images(transform), batch_size=BATCH, shuffle=True, task_seeds=True, **kw)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        return [[digest(batch) for batch in loader] for _ in range(2)]


@pytest.mark.parametrize(
    "make", [monai, albumentations, lambda: albumentations(None)], ids=["monai", "seed", "no seed"]
)
def test_the_same_bits_from_any_number_of_workers(make: Callable[[], Any]) -> None:
    expected = epochs(make(), num_workers=0)
    assert len({batch for epoch in expected for batch in epoch}) == 2 * N // BATCH
    for other in OTHERS:
        assert epochs(make(), **other) == expected, other


def test_monais_worker_init_fn_and_loader() -> None:
    transform = monai()
    data = pytest.importorskip("monai.data")
    expected = epochs(transform, num_workers=0)
    init_fn = data.utils.worker_init_fn
    for workers in (1, 2):
        assert epochs(monai(), num_workers=workers, worker_init_fn=init_fn) == expected
    assert epochs(monai(), num_workers=2, worker_method="thread", worker_init_fn=init_fn) == expected


def test_without_task_seeds_the_bits_are_torchs() -> None:
    for make in (monai, albumentations):
        for workers in (0, 2):
            found = []
            for kind in (stoker.DataLoader, torch.utils.data.DataLoader):
                transform = make()
                if make is monai:
                    transform.transform.set_random_state(seed=3)
                torch.manual_seed(7)
                loader = kind(Images(transform), batch_size=BATCH, num_workers=workers)
                found.append([[digest(batch) for batch in loader] for _ in range(2)])
            assert found[0] == found[1]
