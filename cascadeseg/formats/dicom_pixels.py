"""The stored values of CT slices: read where they lie in the file, or decoded.

pydicom decodes, or GDCM (in SimpleITK) what pydicom has no decoder for, as lossless JPEG and JPEG of 12 bits.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pydicom
from pydicom.pixels import pixel_array
from pydicom.uid import MultiFrameGrayscaleWordSecondaryCaptureImageStorage, RLELossless, generate_uid

from cascadeseg.errors import ScanError
from cascadeseg.formats.dicom_files import Slice, Source, encoding_of
from cascadeseg.formats.packed import COPY_AGAIN

_TAGS = [
    "SamplesPerPixel", "PhotometricInterpretation", "NumberOfFrames", "Rows", "Columns", "BitsAllocated", "BitsStored",
    "HighBit", "PixelRepresentation", "ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelData",
]  # fmt: skip


def values_reader() -> Callable[[Slice], npt.NDArray[Any]]:
    """What gives the (rows, columns) stored values of a slice, of type ``slice_.stored``.

    It may be called from several threads. A file of many frames is decoded whole, or read whole from a zip, where every
    frame by itself would unpack all before it, and kept until the next one. What it gives out raises ScanError for
    pixels that are damaged, or compressed in a way that nothing here can undo.
    """
    held: dict[str, npt.NDArray[Any]] = {}
    lock = Lock()

    def values(slice_: Slice) -> npt.NDArray[Any]:
        raw, alone = slice_.pixels_at is not None, slice_.frames == 1
        try:
            if alone or (raw and not slice_.source.archive):
                frame = _words(slice_, slice_.frame, 1)[0] if raw else _decoded(slice_)[0]
            else:
                with lock:
                    if slice_.source.name not in held:
                        held.clear()
                        held[slice_.source.name] = _words(slice_, 0, slice_.frames) if raw else _decoded(slice_)
                    frame = held[slice_.source.name][slice_.frame]
        except (zipfile.BadZipFile, zlib.error, EOFError) as problem:
            found = f"damaged in its zip ({' '.join(str(problem).split())[:120]})"
            raise ScanError(slice_.source.name, found, "", "copy the zip again") from problem
        return _without_other_bits(frame, slice_) if raw else frame

    return values


def _words(slice_: Slice, first: int, count: int) -> npt.NDArray[Any]:
    """(count, rows, columns) words of a file from a frame on, as they lie there."""
    each = slice_.shape[0] * slice_.shape[1] * slice_.stored.itemsize
    with slice_.source.open() as stream:
        stream.seek((slice_.pixels_at or 0) + (first - slice_.frame) * each)
        held = stream.read(count * each)
    if len(held) < count * each:
        raise ScanError(slice_.source.name, "the file is cut short", "", COPY_AGAIN)
    return np.frombuffer(held, slice_.stored.newbyteorder("<")).reshape(count, *slice_.shape)


def _without_other_bits(words: npt.NDArray[Any], slice_: Slice) -> npt.NDArray[Any]:
    """The values in the words of a file; padding beside the stored bits becomes the lowest value that they can hold."""
    up, down = slice_.shifts
    if down == 0:
        return words
    values: npt.NDArray[Any] = (words << up) >> down
    if slice_.padding is not None:
        word = np.array([slice_.padding]).astype(words.dtype)
        if (word << up >> down << down - up) != word:
            values[words == word] = np.iinfo(words.dtype).min >> down
    return values


def _decoded(slice_: Slice) -> npt.NDArray[Any]:
    """(frames, rows, columns) stored values of a slice's file."""
    data, encoding = _pixel_data(slice_.source)
    try:
        try:
            if encoding == RLELossless or not encoding.is_encapsulated:
                words = np.asarray(pixel_array(data, raw=True, correct_unused_bits=False))
                values = _without_other_bits(words.astype(slice_.stored, copy=False), slice_)
            else:
                values = np.asarray(pixel_array(data, raw=True))
        except Exception as problem:  # each decoder has errors of its own, and all of them mean one thing
            values = _decoded_by_gdcm(data, problem)
        return values.reshape(slice_.frames, *slice_.shape).astype(slice_.stored, copy=False)
    except Exception as problem:
        found = f"pixels that cannot be decoded ({encoding.name}: {' '.join(str(problem).split())[:120]})"
        raise ScanError(slice_.source.name, found, "", "decompress the files, e.g. with dcmdjpeg") from problem


def _pixel_data(source: Source) -> tuple[Any, Any]:
    """What of a file tells its pixels, and its transfer syntax."""
    with source.open() as stream:
        data = pydicom.dcmread(stream, force=True, specific_tags=_TAGS)
    data.file_meta.TransferSyntaxUID = encoding = encoding_of(data)
    return data, encoding


def _decoded_by_gdcm(data: Any, problem: Exception) -> npt.NDArray[Any]:
    """The stored values by GDCM; raises ``problem``, which says more than its errors do, if it cannot either.

    The file it is given is no CT, for of a CT it would rescale all frames as the first.
    """
    import SimpleITK

    data.SOPClassUID, data.SOPInstanceUID = MultiFrameGrayscaleWordSecondaryCaptureImageStorage, generate_uid()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slice.dcm"
        data.save_as(file)
        try:
            return np.asarray(SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(file), imageIO="GDCMImageIO")))
        except RuntimeError:
            raise problem from None
