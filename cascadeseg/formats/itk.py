"""Reading MetaImage (``.mha``, ``.mhd``) and NRRD by SimpleITK, writing them without, and its images in memory.

ITK's world is LPS and its arrays are (Z, Y, X): both end here. SimpleITK is heavy for what is used of it, but it
reads every encoding of both formats (pynrrd was weighed: it reads one of them). It would write a volume by way of two
more of its size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import SimpleITK

from cascadeseg.errors import ScanError
from cascadeseg.formats import metaimage, nrrd, packed
from cascadeseg.formats.memory import DEFLATE_LIMIT, refuse_oversized
from cascadeseg.formats.names import SLICER_SUFFIX, suffix_of
from cascadeseg.formats.placement import ItkGeometry, checked_grid, checked_spacing, volume_shape
from cascadeseg.formats.scan import Before, Scan, hollow, nothing

IMAGE_IO = {
    **dict.fromkeys((".mha", ".mhd"), "MetaImageIO"),
    **dict.fromkeys((".nrrd", ".nhdr", SLICER_SUFFIX), "NrrdImageIO"),
}
DETACHED = (".mhd", ".nhdr")
VOXEL_TYPES = {
    SimpleITK.sitkInt8: "i1",
    SimpleITK.sitkUInt8: "u1",
    SimpleITK.sitkInt16: "i2",
    SimpleITK.sitkUInt16: "u2",
    SimpleITK.sitkInt32: "i4",
    SimpleITK.sitkUInt32: "u4",
    SimpleITK.sitkInt64: "i8",
    SimpleITK.sitkUInt64: "u8",
    SimpleITK.sitkFloat32: "f4",
    SimpleITK.sitkFloat64: "f8",
}


def read_itk(path: Path, suffix: str, volume: int | None = None, before: Before = nothing) -> Scan:
    """A MetaImage or NRRD file as a `Scan` whose ``native`` is its `ItkGeometry`, not yet audited.

    Args:
        path: the file (of two files, the header).
        suffix: one of `IMAGE_IO`.
        volume: which volume of a 4D file, from 0; None for 3D files.
        before: see `read_scan`.

    Raises:
        ScanError: anything that is not one readable 3D volume.
    """
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)  # what matters of them is told by our own checks
    data, odd = (metaimage if _is_metaimage(suffix) else nrrd).checked_header(path)
    if data:
        _check_files(path, data)
    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO(IMAGE_IO[suffix])
    try:
        reader.SetFileName(_file_name(path))
        reader.ReadImageInformation()
        shape, index = volume_shape(reader.GetSize(), volume, path)
        checked_spacing(reader.GetSpacing()[:3], path)
        held = None if suffix in DETACHED else path.stat().st_size * DEFLATE_LIMIT
        _check_kind(reader.GetNumberOfComponents(), path)
        kind, geometry = reader.GetPixelID(), ItkGeometry.of_image(reader)
        dtype = np.dtype(VOXEL_TYPES.get(kind, "f8"))
        refuse_oversized(path, shape, dtype.itemsize, held)
        grid, warnings = checked_grid(shape, geometry.affine, path)
        outline = Scan(hollow(shape, dtype), grid, source=str(path), native=geometry, warnings=(*warnings, *odd))
        before(outline)
        if data and data.packed is not None:
            if kind not in VOXEL_TYPES:
                found = f"compressed data of type {SimpleITK.GetPixelIDValueAsString(kind)}"
                raise ScanError(path, found, "one number per voxel, in HU")
            return replace(outline, voxels=packed.unpacked_volume(path, data, shape, dtype, index))
        if reader.GetDimension() > 3:
            rest = reader.GetSize()[3:]
            reader.SetExtractSize([*shape, *[0] * len(rest)])
            reader.SetExtractIndex([0, 0, 0, *map(int, np.unravel_index(index, rest, order="F"))])
        image = reader.Execute()
    except RuntimeError as problem:
        reason = _reason(problem)
        unreadable = ScanError(path, f"not a readable {suffix[1:]} file ({reason})")
        raise nrrd.refusal(path, reason) or unreadable from problem
    return scan_of_image(image, str(path)).warned(*odd)


def scan_of_image(image: Any, source: str) -> Scan:
    """A 3D SimpleITK image as a `Scan`: a view of its buffer, which the view keeps alive."""
    shape, _ = volume_shape(image.GetSize(), None, source)
    _check_kind(image.GetNumberOfComponentsPerPixel(), source)
    if image.GetPixelID() not in VOXEL_TYPES:  # of a LabelMap ITK would end the process, of complex numbers take a half
        raise ScanError(source, f"voxels of type {image.GetPixelIDTypeAsString()}", "one number per voxel, in HU")
    if (extra := image.GetDimension() - 3) > 0:
        image = SimpleITK.Extract(image, [*shape, *[0] * extra], [0] * (3 + extra))
    geometry = ItkGeometry.of_image(image)
    grid, warnings = checked_grid(shape, geometry.affine, source)
    array = np.asarray(_Held(SimpleITK.GetArrayViewFromImage(image), image))
    return Scan(array.transpose(2, 1, 0), grid, source=source, native=geometry, warnings=warnings)


def write_itk(voxels: npt.NDArray[Any], geometry: ItkGeometry, path: Path) -> None:
    """Writes (X, Y, Z) voxels, compressed, as the path's suffix says, some slices at a time.

    Raises:
        RuntimeError: SimpleITK could not read a file of this name.
    """
    _file_name(path)
    if _is_metaimage(suffix_of(path)):
        metaimage.write_metaimage(voxels, geometry, path)
    else:
        nrrd.write_nrrd(voxels, geometry, _pairs(voxels, path), path)


def holds(path: Path, voxels: npt.NDArray[Any], geometry: ItkGeometry) -> bool:
    """Whether a file, read back, is the volume that `write_itk` was given: its header by SimpleITK, its voxels by us.

    Raises:
        ScanError: its header or its voxels cannot be read.
        RuntimeError: SimpleITK cannot read its header.
    """
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    suffix = suffix_of(path)
    data, _ = (metaimage if _is_metaimage(suffix) else nrrd).checked_header(path)
    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO(IMAGE_IO[suffix])
    reader.SetFileName(_file_name(path))
    reader.ReadImageInformation()
    pairs = _pairs(voxels, path)
    if {key: reader.GetMetaData(key) for key in pairs if reader.HasMetaDataKey(key)} != pairs:
        return False
    same_kind = reader.GetSize() == voxels.shape and VOXEL_TYPES.get(reader.GetPixelID()) == voxels.dtype.str[1:]
    if not same_kind or not np.allclose(ItkGeometry.of_image(reader).affine, geometry.affine, rtol=1e-9, atol=1e-9):
        return False
    return data is not None and data.packed is not None and packed.holds(path, data, voxels)


def _is_metaimage(suffix: str) -> bool:
    return IMAGE_IO[suffix] == "MetaImageIO"


def _pairs(voxels: npt.NDArray[Any], path: Path) -> dict[str, str]:
    """What a file's header says beside its geometry: of a Slicer segmentation, what its labels are."""
    return nrrd.segment_pairs(voxels) if suffix_of(path) == SLICER_SUFFIX else {}


class _Held:
    """Lends an array's memory together with its owner: SimpleITK's view alone can outlive the image's buffer.

    The array is marked writable because torch warns of others; nothing writes into a scan.
    """

    def __init__(self, array: npt.NDArray[Any], owner: object) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self.owner = owner


def _file_name(path: Path) -> str:
    """The path as SimpleITK takes it; one that is not UTF-8 would end the process."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError as problem:
        raise RuntimeError("the name of the file or of a folder is not UTF-8, rename it") from problem
    return name


def _check_files(path: Path, data: packed.Data) -> None:
    """Raises ScanError if a file of the data is not there, or holds less than the header promises."""
    for file in data.files:
        if not file.is_file():
            found = f"its data file {file.name} is missing"
            raise ScanError(path, found, "header and data side by side, as they were written")
        held = file.stat().st_size - data.start
        if held < data.stored:
            raise packed.cut_short(path, file, f"{max(held, 0):,} of {data.stored:,} bytes of data")


def _check_kind(components: int, where: object) -> None:
    if components != 1 and suffix_of(str(where)) == SLICER_SUFFIX:
        found = f"{components} layers of segments"
        raise ScanError(where, found, "one layer, in which no segments overlap", "export it from Slicer as a label map")
    if components != 1:
        found = f"{components} numbers per voxel (a colour, complex or vector image)"
        raise ScanError(where, found, "one number per voxel, in HU")


def _reason(problem: RuntimeError) -> str:
    """The telling line of an ITK exception, without the C++ file and object that it came from."""
    lines = [" ".join(line.split()) for line in str(problem).splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR: " in line]
    line = lines[-1] if lines and lines[-1].startswith("[nrrd]") else (errors or lines or ["no reason given"])[-1]
    return line.split("ERROR: ", 1)[-1].split("): ", 1)[-1].rstrip(". ")
