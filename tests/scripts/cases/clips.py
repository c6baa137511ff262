"""Short films: eight frames in a row from a random one on, as one tensor."""

import os

import numpy as np
import torch
from PIL import Image
from seen import Seen, whose
from torch.utils.data import DataLoader, Dataset


class ClipDataset(Dataset):
    def __init__(self, root, clip_len=8, size=48):
        self.videos = sorted(os.path.join(root, d) for d in os.listdir(root))
        self.clip_len, self.size = clip_len, size
        self.rng = np.random

    def __len__(self):
        return len(self.videos) * 2

    def __getitem__(self, index):
        video = self.videos[index // 2]
        frames = sorted(os.listdir(video))
        first = self.rng.randint(0, len(frames) - self.clip_len + 1)
        buffer = np.empty((self.clip_len, self.size, self.size, 3), np.float32)
        for k, name in enumerate(frames[first : first + self.clip_len]):
            frame = Image.open(os.path.join(video, name)).convert("RGB")
            buffer[k] = np.asarray(frame.resize((self.size, self.size)))
        buffer += self.rng.normal(0, 2, (self.clip_len, 1, 1, 1)).astype(np.float32)
        return torch.from_numpy(buffer.transpose(3, 0, 1, 2) / 255), index


def init(worker_id):
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)


if __name__ == "__main__":
    torch.manual_seed(6)
    data = ClipDataset(os.path.join(os.environ["DATA"], "clips"))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2, worker_init_fn=init, prefetch_factor=1)
    seen = Seen()
    for _ in range(3):
        for clip, index in loader:
            seen.add(index, whose(clip.mean(2)), drawn=clip)
        seen.epoch()
    seen.end()
