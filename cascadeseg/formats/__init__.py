"""Reading and writing scans and masks. Importing this loads none of nibabel, SimpleITK and pydicom."""

from cascadeseg.formats.find import find_scans
from cascadeseg.formats.names import MASK_SUFFIXES, SCAN_SUFFIXES, stem_of, suffix_of
from cascadeseg.formats.read import read_labels, read_scan, scan_of
from cascadeseg.formats.scan import Scan
from cascadeseg.formats.write import check_writable, write_labels, write_scan

__all__ = [
    "MASK_SUFFIXES",
    "SCAN_SUFFIXES",
    "Scan",
    "check_writable",
    "find_scans",
    "read_labels",
    "read_scan",
    "scan_of",
    "stem_of",
    "suffix_of",
    "write_labels",
    "write_scan",
]
