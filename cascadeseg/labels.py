"""What a label value means: the only place a label's number, name, colour or SNOMED CT code is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A concept of SNOMED CT: its identifier, and what it means in words."""

    value: str
    meaning: str


@dataclass(frozen=True)
class Label:
    """One structure of the label map.

    Attributes:
        value: the number in the uint8 label map.
        name: the machine's name (keys of reports, `dataset.json`).
        title: the reader's name (tables, previews).
        side: ``"right"`` or ``"left"``, always the patient's.
        colour: RGB, 0-255.
        snomed: SNOMED CT concept identifier of the structure with its side.
        laterality: the side as a concept of its own, as DICOM has it.
    """

    value: int
    name: str
    title: str
    side: str
    colour: tuple[int, int, int]
    snomed: str
    laterality: Code


BACKGROUND = 0
RIGHT_LUNG = Label(1, "lung_right", "right lung", "right", (64, 160, 255), "3341006", Code("24028007", "Right"))
LEFT_LUNG = Label(2, "lung_left", "left lung", "left", (255, 150, 60), "44029006", Code("7771000", "Left"))
LUNGS = (RIGHT_LUNG, LEFT_LUNG)
VALUES = {"background": BACKGROUND} | {label.name: label.value for label in LUNGS}
"""By name, as descriptions of models and of data sets have them."""
ANATOMICAL_STRUCTURE = Code("123037004", "Anatomical Structure")
LUNG = Code("39607008", "Lung")
LUNG_CHANNELS = slice(1, 3)
"""Where the lungs are among a locator's outputs; the background is before them, behind them what is `BESIDE` them."""
BESIDE = range(3, 9)
"""Voxels of a *reference* that are no lung, by what they are: the groups of `LabelNames.beside` (never written)."""
IGNORE = 255
"""Voxels of a *reference* that count for neither side (never written by `infer`)."""
