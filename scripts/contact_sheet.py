"""Draw synthetic volumes, and scans beside them, as rows of axial, coronal and sagittal slices.

python scripts/contact_sheet.py OUT.png --seeds 1 2 3 [--presets healthy covid] [--spacing 2] [--scan FILE.nii.gz ...]

Pictures of real scans are for looking only: none belongs into the repository.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from cascadeseg.labels import LUNGS, RIGHT_LUNG

WINDOWS = {"lung": (-1350, 150), "soft": (-160, 240)}


def picture(slab: np.ndarray, label: np.ndarray | None, window: str, aspect: float, height: int) -> Image.Image:
    """One slice (columns, rows from below) as an RGB picture of ``height`` pixels."""
    low, high = WINDOWS[window]
    grey = np.clip((slab.astype(np.float32) - low) / (high - low) * 255, 0, 255).astype(np.uint8)
    rgb = np.repeat(grey[:, :, None], 3, axis=2)
    if label is not None:
        for lung in LUNGS:
            mask = label == lung.value
            inner = mask.copy()
            for axis in (0, 1):
                inner &= np.roll(mask, 1, axis) & np.roll(mask, -1, axis)
            rgb[mask & ~inner] = lung.colour
    rgb = rgb.transpose(1, 0, 2)[::-1]
    width = max(8, round(height * slab.shape[0] / (slab.shape[1] * aspect)))
    tile = Image.new("RGB", (min(width, round(1.5 * height)), height))
    shrink = tile.width / width
    fitted = Image.fromarray(np.ascontiguousarray(rgb)).resize((tile.width, max(1, round(height * shrink))))
    tile.paste(fitted, (0, (height - fitted.height) // 2))
    return tile


def row(hu: np.ndarray, labels: np.ndarray | None, spacing: tuple[float, ...], title: str, height: int) -> Image.Image:
    """Axial (three heights), coronal and sagittal slices; RAS+ arrays, shown with the patient's right on the left."""
    hu = hu[::-1]
    labels = labels[::-1] if labels is not None else None
    centre = [n // 2 for n in hu.shape]
    if labels is not None and labels.any():
        hits = np.argwhere(labels[::2, ::2, ::2] > 0) * 2
        low, high = hits.min(0), hits.max(0)
        centre = [int(v) for v in (low + high) // 2]
        heights = [int(low[2] + f * (high[2] - low[2])) for f in (0.8, 0.5, 0.25)]
        right = np.argwhere(labels[::2, ::2, ::2] == RIGHT_LUNG.value) * 2
        side = int(right[:, 0].mean()) if len(right) else centre[0]
    else:
        heights = [int(f * (hu.shape[2] - 1)) for f in (0.75, 0.5, 0.25)]
        side = centre[0]
    dx, dy, dz = spacing
    cut = (lambda s: None) if labels is None else (lambda s: labels[s])
    every = slice(None)
    views: list[tuple[tuple[Any, ...], float, str]] = [((every, every, z), dy / dx, "lung") for z in heights]
    views.append(((every, every, heights[1]), dy / dx, "soft"))
    views.append(((every, centre[1], every), dz / dx, "lung"))
    views.append(((every, centre[1], every), dz / dx, "soft"))
    views.append(((side, every, every), dz / dy, "lung"))
    tiles = [picture(hu[s], cut(s) if w == "lung" else None, w, a, height) for s, a, w in views]
    sheet = Image.new("RGB", (sum(t.width + 4 for t in tiles), height + 14))
    x = 0
    for tile in tiles:
        sheet.paste(tile, (x, 14))
        x += tile.width + 4
    ImageDraw.Draw(sheet).text((2, 1), title, fill=(255, 255, 0))
    return sheet


def synthetic(seed: int, preset: str, spacing: float, height: int) -> Image.Image:
    import torch

    from cascadeseg.synthesis import PRESETS, render, sample_patient

    torch.set_num_threads(1)
    patient = sample_patient(seed, PRESETS[preset])
    phantom = render(patient, patient.field_of_view(spacing))
    labels = phantom.labels.numpy()
    ml = [round(float((labels == v).sum()) * spacing**3 / 1000) for v in (1, 2)]
    title = f"{preset} {seed}: {patient.view.kind}, right {ml[0]} left {ml[1]} ml; {findings(patient)}"
    return row(phantom.hu.numpy(), labels, (spacing,) * 3, title, height)


def findings(patient: Any) -> str:
    """What was drawn for a patient, in words."""
    f = patient.findings
    said = {
        "ground glass": f.ground_glass, "consolidation": f.consolidation, "lobar": max(f.lobar) >= 0,
        "white lung": max(f.white), "atelectasis": max(f.atelectasis), "emphysema": max(f.emphysema),
        "fibrosis": f.fibrosis, "bullae": f.bullae, "nodules": len(f.lesions), "effusion": max(f.effusion),
        "loculated fluid": max(f.pockets), "pneumothorax": max(f.pneumothorax), "missing lung": max(f.missing),
        "raised diaphragm": max(f.raised), "hernia": f.hernia, "gas in the wall": f.wall_air[1],
    }  # fmt: skip
    return ", ".join([name for name, value in said.items() if value]) or "no findings"


def scanned(path: Path, height: int) -> Image.Image:
    import nibabel

    image = nibabel.as_closest_canonical(nibabel.load(path))
    reference = path.with_name(path.name.replace(".nii.gz", "_ref.nii.gz"))
    labels = None
    if reference.exists():
        labels = np.asarray(nibabel.as_closest_canonical(nibabel.load(reference)).dataobj).astype(np.uint8)
    spacing = tuple(float(v) for v in image.header.get_zooms()[:3])
    return row(np.asarray(image.dataobj), labels, spacing, path.name, height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--presets", nargs="+", default=["default"], help="every seed of each")
    parser.add_argument("--spacing", type=float, default=2.0)
    parser.add_argument("--scan", type=Path, nargs="*", default=[])
    parser.add_argument("--panel", type=int, default=230, help="height of a picture in pixels")
    parser.add_argument("--colours", type=int, default=0, help="of a palette, for small files; 0: all")
    args = parser.parse_args()
    rows = [synthetic(seed, preset, args.spacing, args.panel) for preset in args.presets for seed in args.seeds]
    rows += [scanned(path, args.panel) for path in args.scan]
    sheet = Image.new("RGB", (max(r.width for r in rows), sum(r.height for r in rows)))
    y = 0
    for r in rows:
        sheet.paste(r, (0, y))
        y += r.height
    if args.colours:
        sheet = sheet.quantize(args.colours, Image.Quantize.MAXCOVERAGE)
    sheet.save(args.out, optimize=True)


if __name__ == "__main__":
    main()
