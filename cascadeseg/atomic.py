"""Files that are either whole or not there.

A result is written into a hidden folder of its own beside its place and, once it is complete, renamed into place.
Whatever goes wrong before that, an interruption included, leaves what was there before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cascadeseg.errors import OutputError

STAGING_PREFIX = ".cascadeseg-"


def replace_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Writes a file by ``write(temporary_path)``, which has the same name in another folder, then renames it.

    Raises:
        OutputError: it could not be written; nothing is left behind.
    """
    with staged(Path(path)) as part:
        write(part)


def replace_text(path: str | Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all; what a file's name has that is no UTF-8 is escaped.

    Raises:
        OutputError: it could not be written.
    """
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8", errors="backslashreplace"))


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A place to write ``path`` in: what lies in its folder when the block ends well is renamed into place.

    The name is the final one, because an ``.mhd`` names its data file, and a folder holds both. The data file is
    renamed first, so that a header never points at nothing.

    Raises:
        OutputError: the place cannot be written in, or writing failed with an OSError.
    """
    try:
        _refuse(path)
        folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=path.parent))
    except OSError as problem:
        found = f"cannot be written ({problem.strerror})"
        raise OutputError(path, found, "", "choose another folder") from problem
    try:
        yield folder / path.name
        for file in sorted(folder.iterdir(), key=lambda file: file.name == path.name):
            _flush_to_disk(file)
            file.replace(path.parent / file.name)
    except OSError as problem:
        raise OutputError(path, f"cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse(path: Path) -> None:
    if path.is_dir():
        raise OutputError(path, "a folder", "the name of a file")
    if not path.parent.is_dir():
        found = "is not a folder" if path.parent.exists() else "does not exist"
        raise OutputError(path, f"the folder {path.parent} {found}", "a folder to write in", "make it first")
    if path.exists() and not os.access(path, os.W_OK):
        raise OutputError(path, "a file that may not be overwritten", "", "choose another name")


def _flush_to_disk(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
