import functools
import random

import numpy as np
import torch
from PIL import Image


def resize(img, size):
    return img.resize((size * 4 // 3, size), Image.BOX)


def random_crop(img, size):
    x, y = random.randint(0, img.width - size), random.randint(0, img.height - size)
    return img.crop((x, y, x + size, y + size))


def to_tensor(img):
    return torch.from_numpy(np.array(img)).permute(2, 0, 1).float().div(255)


def build_transform(crop):
    steps = [functools.partial(resize, size=crop * 5 // 4), functools.partial(random_crop, size=crop), to_tensor]

    def transform(img):
        return functools.reduce(lambda x, f: f(x), steps, img)

    return transform
