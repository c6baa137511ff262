"""detectron2's loaders: a DatasetMapper in a MapDataset, read by an endless stream and grouped by aspect ratio."""

import copy
import itertools
import operator
import os
import pickle
import random

import numpy as np
import torch
import torch.utils.data as torchdata
from PIL import Image
from seen import Seen, whose
from torch import nn

BATCH, EPOCHS = 8, 3


def read_image(file_name):
    with open(file_name, "rb") as f:
        return np.asarray(Image.open(f).convert("RGB"))


class RandomFlip:
    def get_transform(self, image):
        flips = np.random.uniform() < 0.5
        return lambda x: np.ascontiguousarray(x[:, ::-1]) if flips else x


class RandomCrop:
    def get_transform(self, image):
        y, x = np.random.randint(20), np.random.randint(20)
        return lambda array: array[y : y + 100, x : x + 140]


class DatasetMapper:
    def __init__(self, augmentations):
        self.augmentations = augmentations

    def __call__(self, dataset_dict):
        dataset_dict = copy.deepcopy(dataset_dict)
        image = read_image(dataset_dict["file_name"])
        for aug in self.augmentations:
            image = aug.get_transform(image)(image)
        dataset_dict["image"] = torch.as_tensor(np.ascontiguousarray(image.transpose(2, 0, 1)))
        annotations = [x for x in dataset_dict.pop("annotations") if x.get("iscrowd", 0) == 0]
        dataset_dict["classes"] = torch.tensor([x["category_id"] for x in annotations])
        return dataset_dict


class DatasetFromList(torchdata.Dataset):
    def __init__(self, lst):
        lst = [np.frombuffer(pickle.dumps(x, protocol=-1), dtype=np.uint8) for x in lst]
        self._addr, self._lst = np.cumsum([len(x) for x in lst]), np.concatenate(lst)

    def __len__(self):
        return len(self._addr)

    def __getitem__(self, idx):
        start = 0 if idx == 0 else self._addr[idx - 1]
        return pickle.loads(memoryview(self._lst[start : self._addr[idx]]))


class MapDataset(torchdata.Dataset):
    def __init__(self, dataset, map_func):
        self._dataset, self._map_func = dataset, map_func
        self._rng = random.Random(42)
        self._fallback_candidates = set(range(len(dataset)))

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, idx):
        cur_idx = int(idx)
        while True:
            data = self._map_func(self._dataset[cur_idx])
            if data is not None:
                self._fallback_candidates.add(cur_idx)
                return data
            self._fallback_candidates.discard(cur_idx)
            cur_idx = self._rng.sample(sorted(self._fallback_candidates), k=1)[0]


class TrainingSampler(torchdata.Sampler):
    def __init__(self, size, seed=0):
        self._size, self._seed = size, seed

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


class ToIterableDataset(torchdata.IterableDataset):
    def __init__(self, dataset, sampler):
        self.dataset, self.sampler = dataset, sampler

    def __iter__(self):
        worker = torchdata.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for idx in itertools.islice(iter(self.sampler), first, None, step):
            yield self.dataset[idx]


class AspectRatioGroupedDataset(torchdata.IterableDataset):
    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size, self._buckets = dataset, batch_size, [[], []]

    def __iter__(self):
        for d in self.dataset:
            bucket = self._buckets[0 if d["width"] > d["height"] else 1]
            bucket.append(d)
            if len(bucket) == self.batch_size:
                data = bucket[:]
                del bucket[:]
                yield data


def worker_init_reset_seed(worker_id):
    seed = torch.initial_seed() % 2**31
    np.random.seed(seed)
    random.seed(seed)


def main():
    torch.manual_seed(19)
    folder = os.path.join(os.environ["DATA"], "photos")
    dicts = [
        {"file_name": os.path.join(folder, name), "image_id": i, "width": 160, "height": 120,
         "annotations": [{"bbox": [1.0, 2.0, 30.0, 40.0], "category_id": i % 10}]}
        for i, name in enumerate(sorted(os.listdir(folder)))
    ]  # fmt: skip
    dataset = MapDataset(DatasetFromList(dicts), DatasetMapper([RandomCrop(), RandomFlip()]))
    stream = ToIterableDataset(dataset, TrainingSampler(len(dataset)))
    loader = torchdata.DataLoader(stream, num_workers=2, collate_fn=operator.itemgetter(0),
                                  worker_init_fn=worker_init_reset_seed)  # fmt: skip
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    opt, seen, steps = torch.optim.SGD(net.parameters(), 0.01), Seen(), len(dicts) // BATCH
    for step, batch in enumerate(AspectRatioGroupedDataset(loader, BATCH), 1):
        images = torch.stack([d["image"] for d in batch])
        seen.add(whose(images), [d["image_id"] for d in batch], drawn=images)
        opt.zero_grad()
        nn.functional.cross_entropy(net(images.float() / 255), torch.cat([d["classes"] for d in batch])).backward()
        opt.step()
        if step % steps == 0:
            seen.epoch()
        if step == steps * EPOCHS:
            break
    seen.end()


if __name__ == "__main__":
    main()
