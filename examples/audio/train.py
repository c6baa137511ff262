"""Classifies sounds: wav files become log spectrograms, of which random bands are masked."""

import argparse
import random
import wave
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE = 16_000


def read_wav(path):
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return torch.from_numpy(samples.astype(np.float32) / 32768)


class LogSpectrogram:
    def __init__(self, n_fft=512, hop=128, bands=64):
        self.n_fft, self.hop = n_fft, hop
        self.window = torch.hann_window(n_fft)
        edges = torch.linspace(0, 1, bands + 2) ** 2 * (n_fft // 2)
        bins = torch.arange(n_fft // 2 + 1)[None]
        self.bank = (1 - (bins - edges[1:-1, None]).abs() / (edges[2:] - edges[:-2])[:, None].clamp(min=1)).clamp(min=0)

    def __call__(self, sound):
        power = torch.stft(sound, self.n_fft, self.hop, window=self.window, return_complex=True).abs() ** 2
        return (self.bank @ power + 1e-6).log()


class Sounds(Dataset):
    def __init__(self, root):
        self.paths = sorted(root.glob("*.wav"))
        self.spectrogram = LogSpectrogram()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        features = self.spectrogram(read_wav(path))
        band, at = random.randint(0, 8), random.randint(0, 55)
        features[at : at + band] = 0
        return features, int(path.stem.split("-")[1])


def make_sounds(root, count):
    """Two seconds of a rising, falling or steady tone in noise."""
    root.mkdir(parents=True)
    t = np.arange(2 * RATE) / RATE
    for i in range(count):
        rng = np.random.default_rng(i)
        tone = np.sin(2 * np.pi * t * (rng.uniform(400, 900) + (i % 3 - 1) * 80 * t))
        sound = (0.2 * tone + rng.normal(0, 0.1, len(t))) * 20000
        with wave.open(str(root / f"{i:04d}-{i % 3}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(sound.astype(np.int16).tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--count", type=int, default=1200, help="sounds")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if not args.data.exists():
        make_sounds(args.data, args.count)
    random.seed(0)
    torch.manual_seed(0)
    loader = DataLoader(Sounds(args.data), batch_size=32, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Conv1d(64, 32, 9, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(args.epochs):
        right = 0
        for sounds, labels in loader:
            scores = net(sounds)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == labels).sum().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, right {right} of {len(loader.dataset)}", flush=True)


if __name__ == "__main__":
    main()
