"""File names of scans and masks: which suffixes are read and written, and a scan's name without its suffix."""

from __future__ import annotations

from pathlib import Path

NIFTI_SUFFIXES = (".nii.gz", ".nii")
SLICER_SUFFIX = ".seg.nrrd"
"""Of a 3D Slicer segmentation, which is a NRRD whose header says what its labels are; always a mask."""

ITK_SUFFIXES = (SLICER_SUFFIX, ".mha", ".mhd", ".nrrd", ".nhdr")
"""MetaImage and NRRD, each in one file, or with a header and the voxels in files of their own."""

VOLUME_SUFFIXES = (*NIFTI_SUFFIXES, ".mha", ".mhd", ".nrrd")
"""What `write_scan` can write."""

MASK_SUFFIXES = (*VOLUME_SUFFIXES, SLICER_SUFFIX)
"""What `write_labels` can write of any scan."""

SEGMENTATION_SUFFIX = ".dcm"
"""Of a DICOM segmentation, which `write_labels` makes of a DICOM series only."""

LABEL_SUFFIXES = (*MASK_SUFFIXES, SEGMENTATION_SUFFIX)
"""What `write_labels` can write; `read_labels` reads it, too (a DICOM segmentation may have any other name)."""

DICOM_SUFFIXES = (".dcm", ".ima")
SERIES_SUFFIXES = (*DICOM_SUFFIXES, ".zip")

SCAN_SUFFIXES = (*NIFTI_SUFFIXES, *ITK_SUFFIXES, ".hdr", *SERIES_SUFFIXES)
"""What `read_scan` reads by name (a DICOM file may have any other name; a series may be a folder)."""

VOXELS_SUFFIX = ".img"
"""Of the other file of a ``.hdr``, which is read as well; not looked for, as the two are one scan."""

MASK_ENDINGS = (".seg", "_lungs", "_ref", "_mask", "_seg", "_label", "_labels")
"""How the name of a mask beside its scan ends, before the suffix: `find_scans` passes over these."""


def suffix_of(path: str | Path) -> str:
    """The suffix in lower case, ``.nii.gz`` and ``.seg.nrrd`` in one piece; what follows the last dot if unknown."""
    name = Path(path).name.lower()
    known = (suffix for suffix in SCAN_SUFFIXES if name.endswith(suffix))
    return next(known, Path(name).suffix)


def stem_of(path: str | Path) -> str:
    """The file's (or folder's) name without its scan suffix: ``scan.v2.nii.gz`` gives ``scan.v2``."""
    name = Path(path).name
    suffix = suffix_of(name)
    return name[: -len(suffix)] if suffix in (*SCAN_SUFFIXES, VOXELS_SUFFIX) else name


def is_not_dicom(path: str | Path) -> bool:
    """Whether a scan, by its name, is a file of another format."""
    other = set(SCAN_SUFFIXES) - set(SERIES_SUFFIXES)
    return suffix_of(path) in other and not Path(path).is_dir()


def may_be_cut(path: str | Path) -> bool:
    """Whether a mask may be smaller than its scan: 3D Slicer saves a segmentation cut to what its segments fill."""
    return suffix_of(path) == SLICER_SUFFIX


def is_mask_name(path: str | Path) -> bool:
    """Whether a file is, by its name, a mask that lies beside its scan: ``a_lungs``, ``lungs`` or ``a.seg``."""
    return suffix_of(path) == SLICER_SUFFIX or f"_{stem_of(path).lower()}".endswith(MASK_ENDINGS)
