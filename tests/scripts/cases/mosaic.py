"""Mosaics of four pictures, an endless loader made once, and the mosaic closed for the last epochs."""

import os
import random

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class _RepeatSampler:
    """Sampler that repeats forever."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    """Workers that are used again; the iterator is made in the constructor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def __del__(self):
        try:
            if not hasattr(self.iterator, "_workers"):
                return
            for w in self.iterator._workers:
                if w.is_alive():
                    w.terminate()
            self.iterator._shutdown_workers()
        except Exception:
            pass

    def reset(self):
        self.iterator = self._get_iterator()


class YOLODataset(Dataset):
    def __init__(self, img_path, imgsz=64, augment=True):
        self.im_files = sorted(os.path.join(img_path, f) for f in os.listdir(img_path))
        self.imgsz, self.mosaic = imgsz, augment

    def __len__(self):
        return len(self.im_files)

    def close_mosaic(self):
        self.mosaic = False

    def load_image(self, i):
        im = Image.open(self.im_files[i]).convert("RGB")
        return np.array(im.resize((self.imgsz, self.imgsz))), (im.height, im.width)

    def load_mosaic(self, index):
        s = self.imgsz
        yc, xc = (int(random.uniform(s // 2, 2 * s - s // 2)) for _ in range(2))
        indices = [index, *random.choices(range(len(self)), k=3)]
        img4 = np.full((2 * s, 2 * s, 3), 114, dtype=np.uint8)
        corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
        for j, (row, column) in zip(indices, corners, strict=True):
            img, _ = self.load_image(j)
            img4[row * s : (row + 1) * s, column * s : (column + 1) * s] = img
        x0, y0 = xc - s // 2, yc - s // 2
        return img4[y0 : y0 + s, x0 : x0 + s], indices

    def __getitem__(self, index):
        if self.mosaic:
            img, indices = self.load_mosaic(index)
        else:
            (img, _), indices = self.load_image(index), [index] * 4
        return {"img": torch.from_numpy(img.transpose(2, 0, 1).copy()), "idx": index, "with": torch.tensor(indices)}


def main():
    random.seed(23)
    torch.manual_seed(23)
    dataset = YOLODataset(os.path.join(os.environ["DATA"], "photos"))
    loader = InfiniteDataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
    seen = Seen()
    for epoch in range(5):
        if epoch == 3:
            dataset.close_mosaic()
            loader.reset()
        for batch in loader:
            whole = whose(batch["img"]) if epoch >= 3 else batch["idx"]
            seen.add(batch["idx"], whole, drawn=batch["img"] if epoch < 3 else None)
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
