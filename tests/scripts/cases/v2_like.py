"""Transforms as torchvision v2 writes them: nn.Modules with make_params, a container with forward, hooks, no_grad."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Transform(nn.Module):
    def make_params(self, flat):
        return {}

    def transform(self, x, params):
        raise NotImplementedError

    def forward(self, *inputs):
        flat = list(inputs) if len(inputs) > 1 else list(inputs[0]) if isinstance(inputs[0], tuple) else [inputs[0]]
        params = self.make_params(flat)
        out = [self.transform(x, params) if isinstance(x, (torch.Tensor, Image.Image)) else x for x in flat]
        return tuple(out) if len(out) > 1 else out[0]


class Resize(Transform):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def transform(self, x, params):
        return x.resize((self.size, self.size))


class ToImage(Transform):
    def transform(self, x, params):
        return torch.from_numpy(np.array(x)).permute(2, 0, 1)


class RandomFlip(Transform):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def make_params(self, flat):
        return {"flip": bool(torch.rand(1) < self.p)}

    def transform(self, x, params):
        return x.flip(-1) if params["flip"] else x


class Normalize(Transform):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))

    def transform(self, x, params):
        return x.float() / 255 - self.mean


class Compose(nn.Module):
    def __init__(self, transforms):
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, *inputs):
        needs_unpacking = len(inputs) > 1
        for t in self.transforms:
            outputs = t(*inputs)
            inputs = outputs if needs_unpacking else (outputs,)
        return outputs


class Gpu(nn.Module):
    """A Sequential, and a hook that counts."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.AvgPool2d(1), nn.Identity(), nn.Dropout2d(0.0))
        self.calls = 0
        self.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    @torch.no_grad()
    def forward(self, x):
        return self.body(x)


class Photos(Dataset):
    def __init__(self, root, transforms, after=None):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root))
        self.transforms, self.after = transforms, after

    def __len__(self):
        return len(self.files)

    @torch.no_grad()
    def __getitem__(self, i):
        image, target = Image.open(self.files[i]), torch.tensor(i)
        image, target = self.transforms(image, i)
        return (image if self.after is None else self.after(image)), target


if __name__ == "__main__":
    torch.manual_seed(3)
    root = os.path.join(os.environ["DATA"], "photos")
    seen = Seen()
    tf = Compose([Resize(64), ToImage(), RandomFlip(), Normalize()])
    for data in (
        Photos(root, tf),
        Photos(root, tf, Gpu()),
        Photos(root, Compose([Resize(64), ToImage(), Normalize()]), nn.Identity()),
    ):
        loader = DataLoader(data, 16, shuffle=True, num_workers=1)
        for _ in range(3):
            for x, i in loader:
                seen.add(whose(x), i, x + x.flip(-1), drawn=x)
            seen.epoch()
        seen.end()
