"""One picture of a scan and its mask, to see at a glance whether the mask is right.

Upper row: three axial levels through the lungs, from head to foot. Lower row: the coronal and both sagittal
planes through the lungs' middles. As radiology shows them: the patient's right on the viewer's left, front up
in axial planes, head up in the others, the face to the left in sagittal planes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid, bounding_box, canonical_view
from cascadeseg.labels import LUNGS

WINDOW_HU = (-1350.0, 150.0)
"""Lung window: centre -600, width 1500."""
PANEL_PX = 384
"""Panels are at most this large; the longer side of a plane fills it."""
MARGIN_PX = 8
TITLE_PX = 34
AXIAL_LEVELS = (0.75, 0.5, 0.25)
"""Of the lungs' height, from head to foot."""
COLUMNS = 3


@dataclass(frozen=True)
class Plane:
    """A slice through a volume in canonical (RAS+) axis order.

    Attributes:
        normal: the axis it is perpendicular to: 0 sagittal, 1 coronal, 2 axial.
        index: which slice.
    """

    normal: int
    index: int

    @property
    def across(self) -> int:
        """The axis that runs across the picture."""
        return 1 if self.normal == 0 else 0

    @property
    def up(self) -> int:
        """The axis that runs up the picture."""
        return 1 if self.normal == 2 else 2

    @property
    def letters(self) -> tuple[str, str, str, str]:
        """The patient's sides at the left, right, top and bottom of the picture."""
        left, right = ("A", "P") if self.across == 1 else ("R", "L")
        top, bottom = ("A", "P") if self.up == 1 else ("H", "F")
        return left, right, top, bottom

    def box(self, grid: Grid) -> Box:
        """The slice's voxels on a canonical grid."""
        start, stop = [0, 0, 0], list(grid.shape)
        start[self.normal], stop[self.normal] = self.index, self.index + 1
        return Box.of(start, stop)

    def picture(self, volume: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(rows, columns) as one looks at it, of an array that holds this slice alone (`box`)."""
        rows_up = np.moveaxis(volume, (self.up, self.across, self.normal), (0, 1, 2))[..., 0]
        # Both axes run against the picture: RAS+ grows to the patient's right, front and head, which are the
        # picture's left, left (sagittal) or top, and top.
        return rows_up[::-1, ::-1]


def planes(labels: npt.NDArray[Any]) -> tuple[Plane, ...]:
    """What to show of a canonical label map: the lungs' middles, or the volume's where there are none."""
    box = bounding_box(np.asarray(labels > 0)) or Box.whole(labels.shape)
    axial = [_level(box, 2, share) for share in AXIAL_LEVELS]
    sagittal = []
    for lung, share in zip(LUNGS, (0.75, 0.25), strict=True):
        own = bounding_box(labels[box.slices] == lung.value)
        shift = box.start[0]
        sagittal.append(shift + _level(own, 0, 0.5) if own else _level(box, 0, share))
    return (
        *(Plane(2, z) for z in axial),
        Plane(1, _level(box, 1, 0.5)),
        *(Plane(0, x) for x in sagittal),
    )


def preview_png(scan: Scan, labels: npt.NDArray[np.uint8], title: str) -> bytes:
    """The PNG file's bytes.

    Args:
        scan: any orientation; only the slices that are shown are turned into HU.
        labels: (X, Y, Z) on ``scan.grid``.
        title: the line above the picture; the font at hand has no letters but ASCII's, and others lose their accents.
    """
    shown = scan.canonical()
    mask = canonical_view(labels, scan.grid)
    panels = [_panel(plane, shown, mask) for plane in planes(mask)]
    cell = PANEL_PX + MARGIN_PX
    rows = -(-len(panels) // COLUMNS)
    heights = [max(panel.height for panel in panels[row * COLUMNS : (row + 1) * COLUMNS]) for row in range(rows)]
    size = (COLUMNS * cell + MARGIN_PX, TITLE_PX + sum(heights) + rows * MARGIN_PX)
    sheet = Image.new("RGB", size, (16, 16, 16))
    _write(ImageDraw.Draw(sheet), (MARGIN_PX, TITLE_PX // 2), _in_ascii(title), "lm", size=17)
    top = TITLE_PX
    for row, height in enumerate(heights):
        for column, panel in enumerate(panels[row * COLUMNS : (row + 1) * COLUMNS]):
            left = MARGIN_PX + column * cell + (PANEL_PX - panel.width) // 2
            sheet.paste(panel, (left, top + (height - panel.height) // 2))
        top += height + MARGIN_PX
    file = BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _in_ascii(text: str) -> str:
    """A text without accents, and with ``?`` for what is no letter of ASCII."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(part for part in parts if not unicodedata.combining(part)).encode("ascii", "replace").decode("ascii")


def _level(box: Box, axis: int, share: float) -> int:
    """The slice of a box at a share of its extent."""
    start, stop = box.start[axis], box.stop[axis]
    return min(start + int((stop - start) * share), stop - 1)


def _panel(plane: Plane, scan: Scan, labels: npt.NDArray[Any]) -> Image.Image:
    """One plane with contours and letters, at most `PANEL_PX` wide and high, right in mm."""
    box = plane.box(scan.grid)
    size = _size_px(plane, scan.grid)
    grey = Image.fromarray(_windowed(plane.picture(scan.hu(box)))).resize(size, Image.Resampling.BILINEAR)
    picture = np.asarray(grey.convert("RGB")).copy()
    slice_labels = plane.picture(labels[box.slices])
    for lung in LUNGS:
        picture[_contour(slice_labels == lung.value, size)] = lung.colour
    panel = Image.fromarray(picture)
    _write_letters(panel, plane.letters)
    return panel


def _windowed(hu: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    low, high = WINDOW_HU
    return np.ascontiguousarray((np.clip((hu - low) / (high - low), 0, 1) * 255).astype(np.uint8))


def _size_px(plane: Plane, grid: Grid) -> tuple[int, int]:
    """(width, height) with square millimetres."""
    width, height = (grid.shape[axis] * grid.spacing_mm[axis] for axis in (plane.across, plane.up))
    scale = PANEL_PX / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _contour(mask: npt.NDArray[np.bool_], size: Sequence[int]) -> npt.NDArray[np.bool_]:
    """(height, width): the mask's rim, one or two pixels thick, inside the mask."""
    # Interpolated and cut at one half, so that thick slices give no stairs.
    image = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
    large = np.asarray(image.resize((size[0], size[1]), Image.Resampling.BILINEAR)) > 127
    ringed = np.pad(large, 1)
    inner = ringed[:-2, 1:-1] & ringed[2:, 1:-1] & ringed[1:-1, :-2] & ringed[1:-1, 2:] & ringed[1:-1, 1:-1]
    rim: npt.NDArray[np.bool_] = large & ~inner
    return rim


def _write_letters(panel: Image.Image, letters: tuple[str, str, str, str]) -> None:
    draw = ImageDraw.Draw(panel)
    width, height = panel.size
    left, right, top, bottom = letters
    _write(draw, (4, height // 2), left, "lm")
    _write(draw, (width - 4, height // 2), right, "rm")
    _write(draw, (width // 2, 4), top, "mt")
    _write(draw, (width // 2, height - 4), bottom, "mb")


def _write(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, anchor: str, size: int = 14) -> None:
    font = ImageFont.load_default(size)
    draw.text(at, text, fill=(255, 255, 160), font=font, anchor=anchor, stroke_width=1, stroke_fill=(0, 0, 0))
