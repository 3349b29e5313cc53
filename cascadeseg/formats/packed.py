"""Voxels in files beside or behind a text header, as MetaImage and NRRD have them; compressed ones are unpacked here.

Of damaged compressed data ITK gives back whatever came out (MetaImage) or passes over their checksum (NRRD).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from cascadeseg.errors import ScanError

PACKED_BYTES = 1 << 12
"""Unpacked at a time, to 4 MB at the most: deflate packs no tighter than by a factor of 1,032."""
ZLIB_OR_GZIP = 47  # zlib's wbits: the largest window, in either wrapping, as ITK takes it
COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Data:
    """Where the voxels lie: in one file, or in several that hold equal shares.

    Attributes:
        files: in the order of the voxels.
        start: where the voxels begin in each file.
        stored: the bytes that each file has to hold from there; 0 if the header does not say.
        packed: of compressed data the voxels that come out of each file; None of others.
        big_endian: the order of a voxel's bytes.
    """

    files: list[Path]
    start: int
    stored: int
    packed: int | None
    big_endian: bool


def unpacked_volume(
    path: Path, data: Data, shape: tuple[int, int, int], dtype: np.dtype[Any], volume: int
) -> npt.NDArray[Any]:
    """A volume of compressed data, unpacked a piece at a time; those of other volumes are looked at as well.

    Args:
        path: the header's file, for messages.
        data: where they lie.
        shape: (X, Y, Z) of a volume.
        dtype: of its voxels, in native byte order.
        volume: which one, from 0.

    Returns:
        (X, Y, Z) voxels.

    Raises:
        ScanError: the data are damaged, or not as many as the header promises.
    """
    voxels: npt.NDArray[Any] = np.empty(shape, dtype, order="F")
    wanted = voxels.reshape(-1, order="F").view(np.uint8)
    promised = (data.packed or 0) * dtype.itemsize
    for number, file in enumerate(data.files):
        try:
            count, whole = _unpack(file, data, wanted, promised, number * promised - volume * len(wanted))
        except isal_zlib.error as problem:  # type: ignore[misc]
            found = f"damaged compressed data{_of(file, path)} ({problem})"
            raise ScanError(path, found, "", COPY_AGAIN) from problem
        if not whole and count <= promised:
            raise cut_short(path, file, f"its compressed data end after {count:,} of {promised:,} bytes of voxels")
        if count != promised:
            found = f"compressed data{_of(file, path)} of {'' if whole else 'over '}{count:,} bytes"
            raise ScanError(path, found, f"{promised:,}, as the header says", "the file is damaged")
    return voxels.byteswap(inplace=True) if data.big_endian == (sys.byteorder == "little") else voxels


def _unpack(file: Path, data: Data, wanted: npt.NDArray[np.uint8], promised: int, place: int) -> tuple[int, bool]:
    """Unpacks one file's bytes into those wanted, the first at ``place``, which may be before them or behind.

    Returns:
        How many there were (no more than a piece above those promised), and whether that was their end.
    """
    unpacker = isal_zlib.decompressobj(ZLIB_OR_GZIP)
    left = data.stored or file.stat().st_size - data.start
    count = 0
    with file.open("rb") as stream:
        stream.seek(data.start)
        while not unpacker.eof and count <= promised and (packed := stream.read(min(left, PACKED_BYTES))):
            left -= len(packed)
            piece = np.frombuffer(unpacker.decompress(packed), np.uint8)
            at = place + count
            low, high = (min(max(n, 0), len(wanted)) for n in (at, at + len(piece)))
            wanted[low:high] = piece[low - at : high - at]
            count += len(piece)
    return count, unpacker.eof


def cut_short(path: Path, file: Path, counts: str) -> ScanError:
    """The refusal of a data file that ends too early; ``path`` is the header's."""
    return ScanError(path, f"{'the file' if file == path else file.name} is cut short ({counts})", "", COPY_AGAIN)


def _of(file: Path, path: Path) -> str:
    return "" if file == path else f" in {file.name}"
