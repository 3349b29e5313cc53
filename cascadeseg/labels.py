"""What a label value means: the only place a label's number, name, colour or SNOMED CT code is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    """One structure of the label map.

    Attributes:
        value: the number in the uint8 label map.
        name: the machine's name (keys of reports, `dataset.json`).
        title: the reader's name (tables, previews).
        side: ``"right"`` or ``"left"``, always the patient's.
        colour: RGB, 0-255.
        snomed: SNOMED CT concept identifier.
    """

    value: int
    name: str
    title: str
    side: str
    colour: tuple[int, int, int]
    snomed: str


BACKGROUND = 0
RIGHT_LUNG = Label(1, "lung_right", "right lung", "right", (64, 160, 255), "3341006")
LEFT_LUNG = Label(2, "lung_left", "left lung", "left", (255, 150, 60), "44029006")
LUNGS = (RIGHT_LUNG, LEFT_LUNG)
IGNORE = 255
"""Voxels of a *reference* that count for neither side (never written by `infer`)."""
