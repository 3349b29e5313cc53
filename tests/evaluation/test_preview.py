"""The preview picture: sides, aspect ratio, letters and odd masks, whatever the scan's axis order."""

from __future__ import annotations

from io import BytesIO
from itertools import permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from cascadeseg.evaluation.preview import MARGIN_PX, PANEL_PX, TITLE_PX, Plane, planes, preview_png
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG

SHAPE, SPACING = (30, 24, 12), (2.0, 2.0, 5.0)
ORIENTATIONS = [(order, flips) for order in permutations(range(3)) for flips in product((False, True), repeat=3)]


def canonical_pair() -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    """RAS+ arrays: soft tissue with air at the right front head corner; the right lung high, the left low."""
    voxels = np.full(SHAPE, 40, np.int16)
    voxels[20:, 16:, 8:] = -1000
    labels = np.zeros(SHAPE, np.uint8)
    labels[18:26, 6:18, 4:10] = RIGHT_LUNG.value
    labels[4:12, 6:18, 2:8] = LEFT_LUNG.value
    return voxels, labels


def turned(order: tuple[int, ...], flips: tuple[bool, ...]) -> tuple[Scan, npt.NDArray[np.uint8]]:
    """The same volume stored with another axis order, its affine saying so."""
    voxels, labels = canonical_pair()
    affine = np.diag([*SPACING, 1.0])
    step = [slice(None, None, -1) if flip else slice(None) for flip in flips]
    for axis, flip in enumerate(flips):
        if flip:
            affine[axis, 3] = affine[axis, axis] * (SHAPE[axis] - 1)
            affine[axis, axis] *= -1
    affine[:3, :3] = affine[:3, list(order)]
    stored = voxels[tuple(step)].transpose(order).copy()
    grid = Grid(stored.shape, affine)  # type: ignore[arg-type]
    return Scan(stored, grid), labels[tuple(step)].transpose(order).copy()


def opened(png: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


def coloured(picture: npt.NDArray[np.uint8], colour: tuple[int, int, int]) -> npt.NDArray[Any]:
    """(N, 2): rows and columns of the pixels in this colour."""
    return np.argwhere((picture == colour).all(axis=2))


def test_every_orientation_gives_the_same_picture() -> None:
    voxels, labels = canonical_pair()
    expected = preview_png(Scan(voxels, Grid.axis_aligned(SHAPE, SPACING)), labels, "a")
    for order, flips in ORIENTATIONS:
        scan, stored = turned(order, flips)
        assert preview_png(scan, stored, "a") == expected, (order, flips)


def test_planes_show_the_patients_right_on_the_left_and_the_head_up() -> None:
    corner = np.zeros((3, 4, 5), np.uint8)
    corner[-1, -1, -1] = 1  # right, front, head
    grid = Grid.axis_aligned(corner.shape, (1, 1, 1))
    for plane, shape in [(Plane(2, 4), (4, 3)), (Plane(1, 3), (5, 3)), (Plane(0, 2), (5, 4))]:
        picture = plane.picture(corner[plane.box(grid).slices])
        assert picture.shape == shape
        assert np.argwhere(picture).tolist() == [[0, 0]], "top left in every plane"
    assert Plane(2, 0).letters == ("R", "L", "A", "P")
    assert Plane(1, 0).letters == ("R", "L", "H", "F")
    assert Plane(0, 0).letters == ("A", "P", "H", "F")


def test_the_right_lung_is_drawn_left_of_the_left_lung() -> None:
    scan, labels = turned((2, 0, 1), (True, False, True))
    picture = opened(preview_png(scan, labels, ""))
    upper = picture[: picture.shape[0] // 2, :PANEL_PX]  # the first axial panel
    right, left = coloured(picture, RIGHT_LUNG.colour), coloured(picture, LEFT_LUNG.colour)
    assert len(right) > 100
    assert len(left) > 100
    first = coloured(upper, RIGHT_LUNG.colour)
    assert first[:, 1].max() < PANEL_PX / 2
    assert not len(coloured(upper[:, : PANEL_PX // 2], LEFT_LUNG.colour))


def test_panels_have_square_millimetres() -> None:
    shape, spacing = (60, 48, 24), (2.0, 2.0, 5.0)
    squares = [
        ((a - (n - 1) / 2) * s / 40) ** 2 for a, n, s in zip(np.ogrid[:60, :48, :24], shape, spacing, strict=True)
    ]
    ball = (sum(squares) <= 1).astype(np.uint8)
    picture = opened(preview_png(Scan(np.zeros(shape, np.int16), Grid.axis_aligned(shape, spacing)), ball, ""))
    # 120 mm fill a panel's width, 96 mm across are less, in every panel.
    assert picture.shape[0] == TITLE_PX + round(PANEL_PX * 96 / 120) + PANEL_PX + 2 * MARGIN_PX
    coronal = coloured(picture[-PANEL_PX:, : PANEL_PX + MARGIN_PX], RIGHT_LUNG.colour)
    height, width = np.ptp(coronal, axis=0) + 1
    assert width == pytest.approx(PANEL_PX * 80 / 120, abs=8)
    assert height == pytest.approx(width, abs=12)


def test_planes_pass_through_the_lungs() -> None:
    _, labels = canonical_pair()
    assert planes(labels) == (
        *(Plane(2, z) for z in (8, 6, 4)),
        Plane(1, 12),
        Plane(0, 22),
        Plane(0, 8),
    )


def test_odd_masks_have_a_picture_too() -> None:
    voxels, labels = canonical_pair()
    scan = Scan(voxels, Grid.axis_aligned(SHAPE, SPACING))
    empty = opened(preview_png(scan, np.zeros_like(labels), "no lung — été"))
    assert not len(coloured(empty, RIGHT_LUNG.colour))
    one = np.where(labels == RIGHT_LUNG.value, labels, 0).astype(np.uint8)
    assert not len(coloured(opened(preview_png(scan, one, "")), LEFT_LUNG.colour))
    single = Scan(np.zeros((1, 1, 1), np.int16), Grid.axis_aligned((1, 1, 1), (1, 1, 1)))
    assert opened(preview_png(single, np.ones((1, 1, 1), np.uint8), "")).size


def test_titles_keep_to_the_letters_of_the_font() -> None:
    voxels, labels = canonical_pair()
    scan = Scan(voxels, Grid.axis_aligned(SHAPE, SPACING))
    assert preview_png(scan, labels, "s\u00e3o jo\u00e3o \u80ba") == preview_png(scan, labels, "sao joao ?")
    assert preview_png(scan, labels, "sao") != preview_png(scan, labels, "joao")


def test_only_the_shown_slices_are_turned_into_hu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Box | None] = []
    original = Scan.hu

    def spying(self: Scan, box: Box | None = None) -> npt.NDArray[np.float32]:
        seen.append(box)
        return original(self, box)

    monkeypatch.setattr(Scan, "hu", spying)
    voxels, labels = canonical_pair()
    preview_png(Scan(voxels, Grid.axis_aligned(SHAPE, SPACING)), labels, "")
    assert len(seen) == 6
    assert all(box is not None and 1 in box.shape for box in seen)
