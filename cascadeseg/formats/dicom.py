from cascadeseg.formats.scan import Scan
from pathlib import Path


def read_dicom(path: Path, series: str | None) -> Scan:
    raise NotImplementedError
