"""Reading and writing scans and masks. Importing this loads none of nibabel, SimpleITK and pydicom."""

from cascadeseg.formats.find import find_scans
from cascadeseg.formats.names import (
    LABEL_SUFFIXES,
    MASK_SUFFIXES,
    SCAN_SUFFIXES,
    SEGMENTATION_SUFFIX,
    is_not_dicom,
    stem_of,
    suffix_of,
)
from cascadeseg.formats.read import has_its_own_affine, read_labels, read_outline, read_scan, scan_of
from cascadeseg.formats.scan import Scan
from cascadeseg.formats.write import (
    check_source,
    check_writable,
    holds_labels,
    not_of_dicom,
    write_labels,
    write_scan,
)

__all__ = [
    "LABEL_SUFFIXES",
    "MASK_SUFFIXES",
    "SCAN_SUFFIXES",
    "SEGMENTATION_SUFFIX",
    "Scan",
    "check_source",
    "check_writable",
    "find_scans",
    "has_its_own_affine",
    "holds_labels",
    "is_not_dicom",
    "not_of_dicom",
    "read_labels",
    "read_outline",
    "read_scan",
    "scan_of",
    "stem_of",
    "suffix_of",
    "write_labels",
    "write_scan",
]
