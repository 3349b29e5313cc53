"""Left and right lung masks from any chest CT, by a coarse-to-fine cascade.

from cascadeseg import Segmenter, read_scan, write_labels

segmenter = Segmenter()                        # loads the model once, serves any number of scans
scan = read_scan("scan.nii.gz")
result = segmenter.segment(scan)
write_labels(result.labels, "scan_lungs.nii.gz", scan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cascadeseg._version import __version__

if TYPE_CHECKING:
    from cascadeseg.cascade.pipeline import Segmentation, Segmenter
    from cascadeseg.errors import CascadesegError
    from cascadeseg.formats import read_scan, write_labels

__all__ = ["CascadesegError", "Segmentation", "Segmenter", "__version__", "read_scan", "write_labels"]

_HOMES = {
    "CascadesegError": "cascadeseg.errors",
    "Segmentation": "cascadeseg.cascade.pipeline",
    "Segmenter": "cascadeseg.cascade.pipeline",
    "read_scan": "cascadeseg.formats",
    "write_labels": "cascadeseg.formats",
}


def __getattr__(name: str) -> object:
    """Imports on first use (PEP 562), so that the command line answers before torch is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
