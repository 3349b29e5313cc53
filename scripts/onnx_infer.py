"""Segments a scan with the networks that `cascadeseg export` wrote: NumPy, SimpleITK and ONNX Runtime, nothing of ours.

    cascadeseg export networks
    python scripts/onnx_infer.py networks scan.nii.gz lungs.nii.gz

To be translated: SimpleITK and ONNX Runtime have the same functions for C++, C#, Java and others. It is the method in
its plainest form, for scans that show both lungs as most do. `cascadeseg infer` does more: it parts lungs that stage 1
took for one, settles which side is which, knows couches and bowel by their place, grows boxes that cut a lung, goes
through long scans in slabs, mends HU, fills holes, and says when to look.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import SimpleITK

Image = Any  # SimpleITK has no types
Array = np.ndarray[Any, Any]
STRAY_SHARE = 0.03
"""Of a lung's largest part, what a smaller one must have to be kept."""
NOWHERE = -100.0
"""The logit where a lung was not looked for."""


class Network:
    """One of the ONNX files, and what `cascade.json` says of it."""

    def __init__(self, folder: Path, known: dict[str, Any]) -> None:
        self.known = known
        self.session = onnxruntime.InferenceSession(folder / known["file"], providers=["CPUExecutionProvider"])

    def __call__(self, **images: Image) -> Array:
        """Images on one grid to (channels, X, Y, Z); what the network's strides lack is filled with air."""
        outside = {"hu": self.known["outside_hu"], "opinion": 0.0}
        arrays = {name: array_of(image) for name, image in images.items()}
        shape = next(iter(arrays.values())).shape
        missing = [(0, -n % self.known["multiple_of"]) for n in shape]
        feed = {name: np.pad(array, missing, constant_values=outside[name]) for name, array in arrays.items()}
        (result,) = self.session.run(None, {name: array[None, None] for name, array in feed.items()})
        return result[0][:, : shape[0], : shape[1], : shape[2]]  # type: ignore[no-any-return]


def segmented(folder: Path, scan: Image) -> Image:
    """The lungs of a scan of HU, on its own grid, numbered as `cascade.json` has it."""
    cascade = json.loads((folder / "cascade.json").read_text(encoding="utf-8"))
    if "refiner" not in cascade:
        raise SystemExit(f"{folder}: a locator alone; export a model of both stages")
    locator, refiner = (Network(folder, cascade[name]) for name in ("locator", "refiner"))
    canonical = SimpleITK.DICOMOrient(numbers_of(scan, locator.known["outside_hu"]), "RAS")
    right_and_left = located(canonical, locator)
    best, labels = np.zeros(canonical.GetSize(), np.float32), np.zeros(canonical.GetSize(), np.uint8)
    for side, name in enumerate(("lung_right", "lung_left")):
        mine, other = (array_of(right_and_left[n]) for n in (side, 1 - side))
        found = main_parts((mine + other > 0.5) & (mine >= other))
        if found.sum() * volume_ml(right_and_left[0]) < cascade["boxes"]["smallest_lung_ml"]:
            continue
        box = box_around(found, right_and_left[0], cascade["boxes"]["margin_mm"], refiner.known)
        opinion = opinion_of(mine, other, right_and_left[0], box, refiner.known)
        logits = refined(canonical, opinion, box, refiner, mirrored=name == "lung_left")
        there = array_of(on_grid(logits, canonical, NOWHERE))
        labels[there > best] = cascade["labels"][name]
        best = np.maximum(best, there)
    for value in (cascade["labels"]["lung_right"], cascade["labels"]["lung_left"]):
        labels[(labels == value) & ~main_parts(labels == value)] = 0
    return SimpleITK.Resample(
        image_of(labels, canonical), scan, SimpleITK.Transform(), SimpleITK.sitkNearestNeighbor, 0
    )


def numbers_of(scan: Image, outside_hu: float) -> Image:
    """A scan in float32, air where it has no numbers."""
    hu = array_of(SimpleITK.Cast(scan, SimpleITK.sitkFloat32))
    return image_of(np.nan_to_num(hu, nan=outside_hu, posinf=outside_hu, neginf=outside_hu), scan)


def located(scan: Image, locator: Network) -> tuple[Image, Image]:
    """Stage 1's probabilities of the right and of the left lung; the scan goes on beyond its faces for a little."""
    known = locator.known
    beyond = np.ceil(known["goes_on_mm"] / known["spacing_mm"]) * known["spacing_mm"]
    low, high = -0.5 - beyond / spacing(scan), np.array(scan.GetSize()) - 0.5 + beyond / spacing(scan)
    grid = grid_between(scan, low, high, known["spacing_mm"])
    right, left = locator(hu=on_grid(scan, grid, known["outside_hu"], goes_on=True))
    return image_of(right, grid), image_of(left, grid)


def main_parts(mask: Array) -> Array:
    """A mask without its small parts."""
    parts = SimpleITK.ConnectedComponent(SimpleITK.GetImageFromArray(mask.astype(np.uint8)), True)
    numbers = SimpleITK.GetArrayFromImage(parts)
    sizes = np.bincount(numbers.ravel())
    sizes[0] = 0
    return (sizes >= max(1, STRAY_SHARE * sizes.max()))[numbers]  # type: ignore[no-any-return]


def box_around(mask: Array, coarse: Image, margin_mm: float, known: dict[str, Any]) -> Image:
    """The grid of one lung's crop (an image without content), the lung in its middle."""
    where = np.argwhere(mask)
    margin = margin_mm / spacing(coarse)
    low, high = where.min(axis=0) - 0.5 - margin, where.max(axis=0) + 0.5 + margin
    sizes = np.ceil((high - low) * spacing(coarse) / known["spacing_mm"])
    sizes += -sizes % known["multiple_of"]
    half = sizes * known["spacing_mm"] / spacing(coarse) / 2
    return grid_between(coarse, (low + high) / 2 - half, (low + high) / 2 + half, known["spacing_mm"])


def opinion_of(mine: Array, other: Array, coarse: Image, box: Image, known: dict[str, Any]) -> Image | None:
    """What stage 2 is told of stage 1's opinion: vague in place, as sharp in value as `contrast` makes it."""
    if "opinion" not in known:
        return None
    told = known["opinion"]
    mine, other = (np.clip((p - 0.5) * told["contrast"] + 0.5, 0, 1) for p in (mine, other))
    opinion = image_of(mine - other, coarse)
    if told["spacing_mm"]:
        vague = grid_between(box, np.full(3, -0.5), np.array(box.GetSize()) - 0.5, told["spacing_mm"])
        opinion = on_grid(opinion, vague, 0.0)
    return on_grid(opinion, box, 0.0)


def refined(scan: Image, opinion: Image | None, box: Image, refiner: Network, *, mirrored: bool) -> Image:
    """Stage 2's logits in a lung's box. It knows right lungs alone: a left one is shown to it in a mirror."""
    axes = [mirrored, False, False]
    images = {"hu": on_grid(scan, box, refiner.known["outside_hu"], goes_on=True)}
    images |= {} if opinion is None else {"opinion": opinion}
    seen = {name: SimpleITK.Flip(image, axes) for name, image in images.items()}
    (logits,) = refiner(**seen)
    return image_of(logits[::-1] if mirrored else logits, box)


# ------------------------------------------------------------------------------------------------------ grids


def array_of(image: Image) -> Array:
    """(X, Y, Z) of an image; SimpleITK's own arrays are (Z, Y, X)."""
    return SimpleITK.GetArrayFromImage(image).transpose(2, 1, 0)  # type: ignore[no-any-return]


def image_of(array: Array, grid: Image) -> Image:
    """An image of (X, Y, Z) on the grid of another."""
    image = SimpleITK.GetImageFromArray(np.ascontiguousarray(array.transpose(2, 1, 0)))
    image.CopyInformation(grid)
    return image


def spacing(image: Image) -> Array:
    return np.array(image.GetSpacing())


def volume_ml(image: Image) -> float:
    """Of a voxel."""
    return float(spacing(image).prod() / 1000)


def grid_between(image: Image, low: Array, high: Array, spacing_mm: float) -> Image:
    """A grid, without content, between two corners in the voxels of an image, in that image's directions."""
    size = np.ceil((high - low) * spacing(image) / spacing_mm - 1e-3).astype(int)
    grid = SimpleITK.Image([int(n) for n in size], SimpleITK.sitkUInt8)
    grid.SetSpacing([spacing_mm] * 3)
    grid.SetDirection(image.GetDirection())
    first = low + 0.5 * spacing_mm / spacing(image)
    grid.SetOrigin(image.TransformContinuousIndexToPhysicalPoint(first.tolist()))
    return grid


def on_grid(image: Image, grid: Image, outside: float, *, goes_on: bool = False) -> Image:
    """An image on another grid of the same directions: averaged where that is coarser, then linearly between voxels.

    Args:
        image: float32.
        grid: the other grid.
        outside: what there is beyond the image.
        goes_on: its outermost voxels go on there instead.
    """
    steps = np.maximum(spacing(grid) / spacing(image), 1)
    if (steps > 1).any():
        image = SimpleITK.DiscreteGaussian(image, ((steps**2 - 1) / 12).tolist(), 64, 0.01, False)
    resample = SimpleITK.ResampleImageFilter()
    resample.SetReferenceImage(grid)
    resample.SetInterpolator(SimpleITK.sitkLinear)
    resample.SetDefaultPixelValue(outside)
    resample.SetUseNearestNeighborExtrapolator(goes_on)
    resample.SetOutputPixelType(SimpleITK.sitkFloat32)
    return resample.Execute(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", type=Path, help="the folder that `cascadeseg export` wrote")
    parser.add_argument("scan", help="a file that SimpleITK reads")
    parser.add_argument("mask", help="the file to write")
    options = parser.parse_args()
    mask = segmented(options.networks, SimpleITK.ReadImage(options.scan))
    SimpleITK.WriteImage(mask, options.mask, useCompression=True)
    labels = json.loads((options.networks / "cascade.json").read_text(encoding="utf-8"))["labels"]
    voxels = SimpleITK.GetArrayViewFromImage(mask)
    volumes = {name: (voxels == value).sum() * volume_ml(mask) for name, value in labels.items() if value}
    print(", ".join(f"{name} {volume:.0f} ml" for name, volume in volumes.items()))


if __name__ == "__main__":
    main()
