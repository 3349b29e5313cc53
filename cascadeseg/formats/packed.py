"""Voxels in files beside or behind a header: packed and unpacked here, a piece at a time.

Of damaged compressed data ITK gives back whatever came out (MetaImage) or passes over their checksum (NRRD).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from cascadeseg.errors import ScanError

PACKED_BYTES = 1 << 12
"""Unpacked at a time, to 4 MB at the most: deflate packs no tighter than by a factor of 1,032."""
ZLIB, GZIP, ZLIB_OR_GZIP = 15, 31, 47  # zlib's wbits: the largest window, in this wrapping; in either, as ITK takes it
LEVEL = 1  # of isal: 0.6 MB and 0.02 s for a 512x512x320 mask
SLAB_BYTES = 1 << 24
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


def slabs(voxels: npt.NDArray[Any], dtype: np.dtype[Any]) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of (X, Y, Z) voxels as files have them, in Fortran order and of a type, some slices at a time."""
    count = max(1, SLAB_BYTES // max(1, voxels[..., 0].nbytes))
    for start in range(0, voxels.shape[2], count):
        slab = np.ascontiguousarray(voxels[..., start : start + count].T, dtype=dtype)
        yield slab.reshape(-1).view(np.uint8)


def deflated(pieces: Iterable[Any], wrapping: int) -> Iterator[bytes]:
    """Pieces of bytes packed, in one of zlib's wrappings, a piece at a time."""
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, wrapping)
    yield from map(packer.compress, pieces)
    yield packer.flush()


def holds(path: Path, data: Data, voxels: npt.NDArray[Any]) -> bool:
    """Whether compressed data are (X, Y, Z) voxels and no more, compared a piece at a time.

    Args:
        path: the header's file, for messages.
        data: where they lie.
        voxels: of the type that the header says, in native byte order.

    Raises:
        ScanError: the data are damaged, or not as many as the header promises.
    """
    wanted = slabs(voxels, voxels.dtype.newbyteorder(">" if data.big_endian else "<"))
    rest = np.empty(0, np.uint8)
    for piece in _pieces(path, data, voxels.dtype.itemsize):
        while len(piece):
            if not len(rest) and not len(rest := next(wanted, rest)):
                return False
            count = min(len(piece), len(rest))
            if not np.array_equal(piece[:count], rest[:count]):
                return False
            piece, rest = piece[count:], rest[count:]
    return not len(rest) and next(wanted, None) is None


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
    place = -volume * len(wanted)
    for piece in _pieces(path, data, dtype.itemsize):
        low, high = (min(max(n, 0), len(wanted)) for n in (place, place + len(piece)))
        wanted[low:high] = piece[low - place : high - place]
        place += len(piece)
    return voxels.byteswap(inplace=True) if data.big_endian == (sys.byteorder == "little") else voxels


def _pieces(path: Path, data: Data, itemsize: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of all volumes of compressed data, one piece after the other.

    Raises:
        ScanError: as `unpacked_volume` does; no more than a piece is unpacked of what is too much.
    """
    promised = (data.packed or 0) * itemsize
    for file in data.files:
        unpacker = isal_zlib.decompressobj(ZLIB_OR_GZIP)
        left = data.stored or file.stat().st_size - data.start
        count = 0
        with file.open("rb") as stream:
            stream.seek(data.start)
            while not unpacker.eof and count <= promised and (read := stream.read(min(left, PACKED_BYTES))):
                left -= len(read)
                try:
                    piece = np.frombuffer(unpacker.decompress(read), np.uint8)
                except isal_zlib.error as problem:  # type: ignore[misc]
                    found = f"damaged compressed data{_of(file, path)} ({problem})"
                    raise ScanError(path, found, "", COPY_AGAIN) from problem
                count += len(piece)
                yield piece
        if not unpacker.eof and count <= promised:
            raise cut_short(path, file, f"its compressed data end after {count:,} of {promised:,} bytes of voxels")
        if count != promised:
            found = f"compressed data{_of(file, path)} of {'' if unpacker.eof else 'over '}{count:,} bytes"
            raise ScanError(path, found, f"{promised:,}, as the header says", "the file is damaged")


def cut_short(path: Path, file: Path, counts: str) -> ScanError:
    """The refusal of a data file that ends too early; ``path`` is the header's."""
    return ScanError(path, f"{'the file' if file == path else file.name} is cut short ({counts})", "", COPY_AGAIN)


def _of(file: Path, path: Path) -> str:
    return "" if file == path else f" in {file.name}"
