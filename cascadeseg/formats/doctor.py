"""placeholder, filled in below."""

from cascadeseg.formats.scan import Scan


def audit(scan: Scan) -> Scan:
    return scan
