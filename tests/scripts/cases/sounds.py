"""Sounds: a random second's half of each file, its spectrogram, and noise."""

import os
import wave
from pathlib import Path

import numpy as np
import torch
from seen import Seen
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLE_RATE = 8000


def load(path):
    with wave.open(str(path)) as f:
        raw = f.readframes(f.getnframes())
    return torch.from_numpy(np.frombuffer(raw, dtype="<i2").astype(np.float32)) / 32768


class Spectrogram(nn.Module):
    def __init__(self, n_fft=256):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, x):
        return torch.stft(x, self.n_fft, window=self.window, return_complex=True).abs().add(1e-6).log()


class SpeechCommands(Dataset):
    def __init__(self, root):
        self.walker = sorted(str(p) for p in Path(root, "sounds").glob("*.wav"))
        self.spectrogram = Spectrogram()

    def __len__(self):
        return len(self.walker)

    def __getitem__(self, n):
        waveform = load(self.walker[n])
        start = torch.randint(0, len(waveform) - SAMPLE_RATE // 2, ()).item()
        piece = waveform[start : start + SAMPLE_RATE // 2]
        loudness = round(float(piece.median()) * 32768 - 200) // 100  # noise moves the median by little
        return self.spectrogram(piece).unsqueeze(0), n, loudness


def main():
    torch.manual_seed(4)
    loader = DataLoader(SpeechCommands(os.environ["DATA"]), batch_size=8, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Conv2d(1, 4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 64))
    opt = torch.optim.Adam(model.parameters())
    seen = Seen()
    for _ in range(4):
        for spec, n, loudness in loader:
            seen.add(n, (loudness + 1) // 4, drawn=spec)
            loss = nn.functional.cross_entropy(model(spec), n)
            opt.zero_grad()
            loss.backward()
            opt.step()
        seen.epoch()
    seen.end()


if __name__ == "__main__":
    main()
