"""Writes the volumes of data.py as NIfTI files beside the script's working folder."""

import os

import nibabel as nib
import numpy as np


def files(n=16):
    os.makedirs("nifti", exist_ok=True)
    out = []
    for i in range(n):
        volume = np.load(os.path.join(os.environ["DATA"], "volumes", f"{i:02d}.npy"))
        for kind, array in (("image", volume), ("label", (volume % 1000 > 500).astype(np.uint8))):
            nib.save(nib.Nifti1Image(array, np.diag([1.0, 1.0, 1.5, 1.0])), f"nifti/{kind}{i:02d}.nii.gz")
        out.append({"image": f"nifti/image{i:02d}.nii.gz", "label": f"nifti/label{i:02d}.nii.gz"})
    return out
