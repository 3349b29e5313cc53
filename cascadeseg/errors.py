"""The only error types of the package.

Every one of them is the reader's to mend (a file, a config, a model, a place to write), and says so in one
line: *where: what was found; what was expected; what to do*. The command line prints that line and exits with 2.
"""

from __future__ import annotations

from typing import Any


class CascadesegError(Exception):
    """A problem that the user can mend.

    Attributes:
        where: the file, folder, config key or option that the problem is in.
        found: what is there.
        expected: what should be there instead, or an empty string where that goes without saying.
        remedy: what the user can do, or an empty string.
    """

    def __init__(self, where: object, found: str, expected: str = "", remedy: str = "") -> None:
        self.where = str(where)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        parts = [found, f"expected {expected}" if expected else "", remedy]
        super().__init__(f"{where}: " + "; ".join(part for part in parts if part))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.found, self.expected, self.remedy)  # how it goes to another process


class ScanError(CascadesegError):
    """A scan, mask or folder of them that cannot be read as a 3D CT volume."""


class OutputError(CascadesegError):
    """A result that cannot be written where it was asked for."""


class ConfigError(CascadesegError):
    """A config file, an override or an option that means nothing or contradicts another."""


class ModelError(CascadesegError):
    """A model file that is missing, damaged, or not a cascadeseg model."""


class DeviceError(CascadesegError):
    """A device that was asked for and is not there."""
