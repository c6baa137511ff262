import csv
import os

from PIL import Image
from torch.utils.data import Dataset


def pil_loader(path):
    with open(path, "rb") as f:
        img = Image.open(f)
        return img.convert("RGB")


class CSVImages(Dataset):
    def __init__(self, root, transform, loader=pil_loader):
        self.root, self.transform, self.loader = root, transform, loader
        with open(os.path.join(root, "labels.csv")) as f:
            self.samples = [(os.path.join(root, p), int(t)) for p, t in list(csv.reader(f))[1:]]

    def __getitem__(self, index):
        path, target = self.samples[index]
        sample = self.loader(path)
        return self.transform(sample), target

    def __len__(self):
        return len(self.samples)


def build_dataset(root, transform):
    return CSVImages(root, transform)
