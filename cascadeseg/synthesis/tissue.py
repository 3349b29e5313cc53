"""The finer label map of a phantom: what each voxel is made of."""

from __future__ import annotations

from enum import IntEnum


class Tissue(IntEnum):
    """What a voxel is made of (`Phantom.tissues`)."""

    AIR = 0
    PADDING = 1
    COUCH = 2
    CLOTH = 3
    SKIN = 4
    FAT = 5
    MUSCLE = 6
    BONE = 7
    CARTILAGE = 8
    SPINAL_CANAL = 9
    BRAIN = 10
    BREAST = 11
    MEDIASTINUM = 12
    HEART = 13
    BLOOD = 14
    OESOPHAGUS = 15
    DIAPHRAGM = 16
    ABDOMEN = 17
    LIVER = 18
    SPLEEN = 19
    KIDNEY = 20
    STOMACH = 21
    BOWEL = 22
    GAS = 23
    LUNG = 30
    LUNG_VESSEL = 31
    BRONCHUS = 32
    AIRWAY = 33
    AIRWAY_WALL = 34
    FISSURE = 35
    GROUND_GLASS = 40
    CONSOLIDATION = 41
    NODULE = 42
    EMPHYSEMA = 43
    FIBROSIS = 44
    BULLA = 45
    EFFUSION = 50
    PNEUMOTHORAX = 51
    EMPTY_HEMITHORAX = 52
    PLEURA = 53
    DEVICE = 60
    METAL = 61
