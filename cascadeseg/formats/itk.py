"""Reading and writing MetaImage (``.mha``, ``.mhd``) and NRRD by SimpleITK, and its images in memory.

ITK's world is LPS and its arrays are (Z, Y, X): both end here. SimpleITK is heavy for what is used of it, but it
reads every encoding of both formats (pynrrd was weighed: it reads one of them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import SimpleITK

from cascadeseg.errors import ScanError
from cascadeseg.formats import metaimage, nrrd, packed
from cascadeseg.formats.memory import DEFLATE_LIMIT, refuse_oversized
from cascadeseg.formats.names import SLICER_SUFFIX, suffix_of
from cascadeseg.formats.placement import LPS_TO_RAS, checked_grid, checked_spacing, volume_shape
from cascadeseg.formats.scan import Before, Scan, hollow, nothing
from cascadeseg.geometry import Affine, Grid

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
COMPRESSION_LEVEL = 2  # a mask is as small as with 9, in a quarter of the time


@dataclass(frozen=True)
class ItkGeometry:
    """Where an ITK image lies, in its own words (LPS+ mm), so that it can be written back to the last bit."""

    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    direction: tuple[float, ...]

    @property
    def affine(self) -> Affine:
        """(4, 4) voxel index to RAS+ mm."""
        affine = np.eye(4)
        affine[:3, :3] = np.reshape(self.direction, (3, 3)) * np.asarray(self.spacing)
        affine[:3, 3] = self.origin
        return np.asarray(LPS_TO_RAS @ affine)

    @staticmethod
    def of_grid(grid: Grid) -> ItkGeometry:
        affine = LPS_TO_RAS @ grid.affine
        direction = (affine[:3, :3] / np.asarray(grid.spacing_mm)).ravel()
        return ItkGeometry(grid.spacing_mm, tuple(map(float, affine[:3, 3])), tuple(map(float, direction)))

    @staticmethod
    def of_image(image: Any) -> ItkGeometry:
        """Of a 3D image or image reader."""
        return ItkGeometry(image.GetSpacing()[:3], image.GetOrigin()[:3], _direction3(image))


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
    data, odd = (metaimage if IMAGE_IO[suffix] == "MetaImageIO" else nrrd).checked_header(path)
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


def image_of(voxels: npt.NDArray[Any], geometry: ItkGeometry) -> Any:
    """The SimpleITK image of (X, Y, Z) voxels."""
    image = SimpleITK.GetImageFromArray(voxels.transpose(2, 1, 0))
    image.SetSpacing(geometry.spacing)
    image.SetOrigin(geometry.origin)
    image.SetDirection(geometry.direction)
    return image


def write_itk(voxels: npt.NDArray[Any], geometry: ItkGeometry, path: Path) -> None:
    """Writes (X, Y, Z) voxels, compressed, as the path's suffix says; what goes wrong is a RuntimeError."""
    image = image_of(voxels, geometry)
    for key, value in _pairs(voxels, path).items():
        image.SetMetaData(key, value)
    written = path.with_suffix(path.suffix.lower())  # ITK knows no others
    SimpleITK.WriteImage(image, _file_name(written), useCompression=True, compressionLevel=COMPRESSION_LEVEL)
    written.replace(path)


def holds(path: Path, voxels: npt.NDArray[Any], geometry: ItkGeometry) -> bool:
    """Whether a file, read back, is the volume that `write_itk` was given."""
    image = SimpleITK.ReadImage(str(path), imageIO=IMAGE_IO[suffix_of(path)])
    pairs = _pairs(voxels, path)
    if {key: image.GetMetaData(key) for key in pairs if image.HasMetaDataKey(key)} != pairs:
        return False
    same_place = np.allclose(ItkGeometry.of_image(image).affine, geometry.affine, rtol=1e-9, atol=1e-9)
    array = SimpleITK.GetArrayViewFromImage(image).transpose(2, 1, 0)
    return same_place and array.dtype == voxels.dtype and np.array_equal(array, voxels)


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


def _direction3(image: Any) -> tuple[float, ...]:
    n = image.GetDimension()
    matrix = np.reshape(image.GetDirection(), (n, n))[:3, :3]
    return tuple(map(float, matrix.ravel()))


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
