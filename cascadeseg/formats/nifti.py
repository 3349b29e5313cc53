"""Reading and writing NIfTI-1 and NIfTI-2: headers by nibabel, voxels straight between file and buffer.

Which affine holds (the package's one rule):

1. The sform, if its code is above 0 and it can be a voxel grid (finite, axes at right angles within
   `placement.MAX_SHEAR_DEGREES`).
2. Else the qform, if its code is above 0 and it can.
3. Else, if there was a form: the file is refused, and the reason names what is wrong with the form.
4. With both codes 0 the header says nothing about orientation: spacing from ``pixdim``, axes to the patient's
   left, front and head about the centre (what nibabel and FSL assume), and a warning to check the sides.

A form that cannot is named in a warning where the other holds. Where both hold and put a corner of the volume more
than `FORMS_AGREE_MM` apart, a warning names both. ``pixdim`` has to be positive in any case: a header that is broken
there is refused. A header in metres or micrometres is read in millimetres; one whose voxels cannot be in its unit, as
where a program filled it in carelessly, is taken to be in millimetres already, and a warning says so.

Voxels keep the stored type in native byte order. ``.nii.gz`` is unpacked by isal (twice as fast as zlib) into one
buffer of the exact size; ``.nii`` is memory-mapped, copy on write. ``.hdr``/``.img`` pairs go through nibabel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from gzip import BadGzipFile
from math import prod
from pathlib import Path
from typing import IO, Any

import nibabel
import numpy as np
import numpy.typing as npt
from isal import igzip, isal_zlib
from nibabel.spatialimages import HeaderDataError

from cascadeseg.errors import CascadesegError, ScanError
from cascadeseg.formats.memory import DEFLATE_LIMIT, refuse_oversized
from cascadeseg.formats.packed import COPY_AGAIN, GZIP, deflated, slabs
from cascadeseg.formats.placement import (
    MAX_SHEAR_DEGREES,
    SPACING_RANGE_MM,
    checked_grid,
    checked_spacing,
    shear_degrees,
    spacing_of,
    volume_shape,
)
from cascadeseg.formats.scan import Before, Scan, hollow, nothing
from cascadeseg.geometry import Affine, Grid
from cascadeseg.labels import LUNGS

FORMS_AGREE_MM = 1.0
GZIP_MAGIC = b"\x1f\x8b"
SINGLE_FILE_MAGIC = {348: b"n+1", 540: b"n+2\0\r\n\x1a\n"}
MM_PER_UNIT = {1: 1000.0, 2: 1.0, 3: 0.001}
UNIT_NAMES = {1: "metres", 3: "micrometres"}
LABEL_INTENT = 1002
NOT_OF_A_MASK = (
    "slice_start", "slice_end", "slice_code", "slice_duration", "toffset", "cal_min", "cal_max",
    "intent_p1", "intent_p2", "intent_p3",
)  # fmt: skip
READ_BYTES = 1 << 20


def read_nifti(path: Path, volume: int | None = None, before: Before = nothing) -> Scan:
    """A NIfTI file as a `Scan` whose ``native`` is the nibabel header, not yet audited.

    Args:
        path: ``.nii`` or ``.nii.gz`` (told apart by content, not name), or the ``.hdr`` or ``.img`` of a pair.
        volume: which volume of a 4D file, from 0; None for 3D files.
        before: see `read_scan`.

    Raises:
        ScanError: anything that is not one readable 3D volume.
    """
    if path.name.lower().endswith((".hdr", ".img")):
        return _read_pair(path, volume, before)
    with _opened(path) as (stream, packed):
        header = _read_header(stream, path)
        shape, skipped = volume_shape(_dims(header), volume, path)
        dtype = _voxel_type(header, path)
        offset = max(int(header["vox_offset"]), int(header["sizeof_hdr"]) + 4)
        offset += skipped * prod(shape) * dtype.itemsize
        size = path.stat().st_size
        held = size * DEFLATE_LIMIT if packed else size - offset
        refuse_oversized(path, shape, dtype.itemsize, held, mapped=not packed)
        outline = _scan(hollow(shape, dtype.newbyteorder("=")), header, path)
        before(outline)
        if packed or not dtype.isnative:
            voxels = _read_voxels(stream, offset, shape, dtype, path)
        else:
            mapped = np.memmap(path, dtype, mode="c", offset=offset, shape=shape, order="F")
            voxels = mapped.view(np.ndarray)
    return replace(outline, voxels=voxels)


def scan_of_image(image: Any, source: str) -> Scan:
    """A nibabel image in memory as a `Scan`: its stored values, never its scaled float64 ones; not audited."""
    shape, index = volume_shape(tuple(map(int, image.shape)), None, source)
    lazy = hasattr(image.dataobj, "get_unscaled")
    raw = np.asarray(image.dataobj.get_unscaled() if lazy else image.dataobj)
    slope, intercept = _scaling(image.dataobj.slope, image.dataobj.inter) if lazy else (1.0, 0.0)
    if raw.dtype.kind not in "iuf" or raw.dtype.itemsize > 8:
        raise ScanError(source, f"voxels of type {raw.dtype}", "one number per voxel, in HU")
    voxels = raw.reshape((*shape, -1), order="F")[..., index]
    affine, native, odd = _image_affine(image, shape, source)
    grid, warnings = checked_grid(shape, affine, source)
    voxels = voxels.astype(raw.dtype.newbyteorder("="), copy=False)
    return Scan(voxels, grid, slope, intercept, source, native, (*odd, *warnings))


def _image_affine(image: Any, shape: tuple[int, ...], source: str) -> tuple[Affine, Any, tuple[str, ...]]:
    """A nibabel image's affine, the header that masks get (None where it is not NIfTI's), and what was odd.

    The header decides as in a file, unless the image's affine has been changed since; then that does, and goes into the
    header as when nibabel saves the image.
    """
    if not isinstance(image.header, nibabel.Nifti1Header):
        return np.asarray(image.affine), None, ()
    header = image.header.copy()
    if image.affine is None or np.allclose(header.get_best_affine(), image.affine):
        affine, odd = form_affine(header, shape, source)
        return affine, header, odd
    header.set_sform(image.affine, code="aligned")
    header.set_qform(image.affine, code="unknown")
    return np.asarray(image.affine), header, ()


def _read_pair(path: Path, volume: int | None, before: Before) -> Scan:
    try:
        image = nibabel.load(path)
        header = image.header
        shape, index = volume_shape(tuple(map(int, image.shape)), volume, path)
        dtype = _voxel_type(header, path)
        refuse_oversized(path, shape, dtype.itemsize, None)
        outline = _pair_outline(image, hollow(shape, dtype.newbyteorder("=")), path)
        before(outline)
        raw = np.asarray(image.dataobj.get_unscaled())
    except CascadesegError:
        raise
    except Exception as problem:  # nibabel raises many kinds for a bad pair, and all of them mean one thing
        raise ScanError(path, f"not a readable NIfTI or Analyze pair ({_one_line(problem)})") from problem
    voxels = raw.reshape((*shape, -1), order="F")[..., index]
    return replace(outline, voxels=voxels.astype(dtype.newbyteorder("="), copy=False))


def _pair_outline(image: Any, voxels: npt.NDArray[Any], path: Path) -> Scan:
    # nibabel takes slope and intercept out of the header that it gives, and leaves them with the voxels.
    slope, intercept = _scaling(image.dataobj.slope, image.dataobj.inter)
    if isinstance(image.header, nibabel.Nifti1Header):
        return replace(_scan(voxels, image.header, path), slope=slope, intercept=intercept)
    # Analyze has no forms; nibabel knows how its axes lie.
    grid, warnings = checked_grid(voxels.shape, np.asarray(image.affine), path)
    return Scan(voxels, grid, slope, intercept, str(path), None, (*warnings, _NO_FORM))


def _scan(voxels: npt.NDArray[Any], header: Any, path: Path) -> Scan:
    affine, odd = form_affine(header, voxels.shape, path)
    grid, repaired = checked_grid(voxels.shape, affine, path)
    slope, intercept = _scaling(float(header["scl_slope"]), float(header["scl_inter"]))
    return Scan(voxels, grid, slope, intercept, str(path), header, (*odd, *repaired))


def _scaling(slope: float | None, intercept: float | None) -> tuple[float, float]:
    """A slope of 0 or NaN means that the values are stored as they are (NIfTI-1 standard, ``scl_slope``)."""
    if slope is None or not np.isfinite(slope) or slope == 0:
        return 1.0, 0.0
    return float(slope), float(intercept) if intercept is not None and np.isfinite(intercept) else 0.0


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """The file's unpacked bytes, and whether they are packed; damage of the packing becomes a ScanError."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    try:
        with igzip.open(path, "rb") if packed else path.open("rb") as stream:
            yield stream, packed
    except EOFError as problem:
        raise ScanError(path, "the file is cut short", "a whole gzip file", COPY_AGAIN) from problem
    except (BadGzipFile, isal_zlib.error) as problem:  # type: ignore[misc]
        found = f"damaged gzip data ({_one_line(problem)})"
        raise ScanError(path, found, "", COPY_AGAIN) from problem


def _read_header(stream: IO[bytes], path: Path) -> Any:
    """The header as it is in the file: nibabel's repairs are not wanted, our own checks follow."""
    start = stream.read(4)
    if not start:
        raise ScanError(path, "the file is empty", "a NIfTI file")
    kinds = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    sizes = {int.from_bytes(start, "little"): "<", int.from_bytes(start, "big"): ">"}
    size = next((size for size in kinds if size in sizes), None)
    if size is None:
        raise ScanError(path, f"not a NIfTI file (it starts with {start!r})", "a NIfTI header")
    block = start + stream.read(size - 4)
    if len(block) < size:
        raise ScanError(path, "the file is cut short inside its header", "", COPY_AGAIN)
    header = kinds[size](block, endianness=sizes[size], check=False)
    if bytes(header["magic"])[:3] != SINGLE_FILE_MAGIC[size][:3]:
        found = "a header without its voxels" if bytes(header["magic"])[:2] == b"ni" else "not a NIfTI file"
        raise ScanError(path, found, "a NIfTI header with the voxels behind it")
    if not 1 <= int(header["dim"][0]) <= 7 or not np.isfinite(header["vox_offset"]):
        raise ScanError(path, f"a damaged NIfTI header (dim {[int(n) for n in header['dim']]})")
    return header


def _dims(header: Any) -> tuple[int, ...]:
    count = int(header["dim"][0])
    return tuple(int(n) for n in header["dim"][1 : 1 + count])


def _voxel_type(header: Any, path: Path) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(header.get_data_dtype())
    except (HeaderDataError, KeyError) as problem:
        raise ScanError(path, f"unknown voxel type code {int(header['datatype'])}") from problem
    if dtype.names is not None:
        raise ScanError(path, "a colour image (RGB voxels)", "one number per voxel, in HU")
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ScanError(path, f"voxels of type {dtype.name}", "whole or floating-point numbers")
    return dtype


def _read_voxels(
    stream: IO[bytes], offset: int, shape: tuple[int, int, int], dtype: np.dtype[Any], path: Path
) -> npt.NDArray[Any]:
    """(X, Y, Z) in native byte order, read into one buffer of the exact size, the file's checksum tested."""
    stream.seek(offset)
    try:
        voxels: npt.NDArray[Any] = np.empty(shape, dtype, order="F")
    except MemoryError as problem:
        raise ScanError(path, f"no memory for {shape} voxels of {dtype.name}") from problem
    wanted = voxels.reshape(-1, order="F").view(np.uint8)
    done = 0
    # A piece at a time: a gzip file reads into a buffer by way of bytes of the same length.
    while count := stream.readinto(wanted[done : done + READ_BYTES]):  # type: ignore[attr-defined]
        done += count
    if done < len(wanted):
        found = f"the file is cut short ({done:,} of {len(wanted):,} bytes of voxels)"
        raise ScanError(path, found, "", COPY_AGAIN)
    while stream.read(READ_BYTES):  # not wanted, but a gzip file has its checksum at its end
        pass
    return voxels if dtype.isnative else voxels.byteswap(inplace=True).view(dtype.newbyteorder("="))


_NO_FORM = (
    "the header does not say how the axes lie (no qform, no sform): left, front, head was assumed; "
    "check the sides of the mask"
)


def form_affine(header: Any, shape: tuple[int, ...], path: object) -> tuple[Affine, tuple[str, ...]]:
    """The affine (voxel index to RAS+ mm) that a header means by the module's rule, and what was odd."""
    pixdim = np.asarray(header["pixdim"][1:4], dtype=np.float64)
    unit, careless = _mm_per_unit(header, pixdim)
    checked_spacing(pixdim * unit, path)
    forms = _forms(header)
    if not forms:
        return _in_mm(np.asarray(header.get_base_affine()), unit), (*careless, _NO_FORM)
    faults = {name: fault for name, affine in forms.items() if (fault := _fault(affine))}
    usable = {name: affine for name, affine in forms.items() if name not in faults}
    if not usable:
        name, affine = next(iter(forms.items()))
        if np.isnan(affine).all():
            raise ScanError(f"{path}, {name}", faults[name], "a rotation, a spacing and an origin", "repair the header")
        checked_grid(shape, _in_mm(affine, unit), f"{path}, {name}")
    name, affine = next(iter(usable.items()))
    warnings = [*careless]
    warnings += [f"the {bad} cannot be a voxel grid ({fault}); the {name} was used" for bad, fault in faults.items()]
    apart = _corners_apart_mm(affine, usable.get("qform", affine), shape) * unit
    if apart > FORMS_AGREE_MM:
        said = " and ".join(f"{n} ({_described(a)})" for n, a in usable.items())
        warnings.append(f"{said} disagree by {apart:.3g} mm; the sform was used")
    elif name == "sform" and np.abs(spacing_of(affine) / pixdim - 1).max() > 0.01:
        said = " x ".join(f"{s:.4g}" for s in pixdim)
        warnings.append(f"pixdim ({said}) and sform ({_described(affine)}) disagree; the sform was used")
    return _in_mm(affine, unit), tuple(warnings)


def _forms(header: Any) -> dict[str, Affine]:
    """The forms that the header claims to have, the preferred first; a qform without a meaning is all NaN."""
    if header["pixdim"][0] == 0:  # stands for 1 (NIfTI-1 standard, method 2), which nibabel's header insists on
        header = header.copy()
        header["pixdim"][0] = 1
    forms: dict[str, Affine] = {}
    if int(header["sform_code"]) > 0:
        forms["sform"] = np.asarray(header.get_sform(), dtype=np.float64)
    if int(header["qform_code"]) > 0:
        try:
            forms["qform"] = np.asarray(header.get_qform(), dtype=np.float64)
        except (HeaderDataError, ValueError):
            forms["qform"] = np.full((4, 4), np.nan)
    return forms


def _mm_per_unit(header: Any, pixdim: npt.NDArray[np.float64]) -> tuple[float, tuple[str, ...]]:
    """Millimetres per unit of the header; of a unit that makes the spacing absurd 1, and a warning."""
    code = int(header["xyzt_units"]) & 7
    unit = MM_PER_UNIT.get(code, 1.0)
    low, high = SPACING_RANGE_MM
    if unit == 1.0 or all(low <= s * unit <= high for s in pixdim):
        return unit, ()
    said = " x ".join(f"{s:.4g}" for s in pixdim)
    name = UNIT_NAMES[code]
    return 1.0, (f"voxels of {said} {name}, as the header has it, cannot be: they were read as mm; check the spacing",)


def _in_mm(affine: Affine, unit: float) -> Affine:
    scaled: Affine = np.array(affine, dtype=np.float64)
    scaled[:3] *= unit
    return scaled


def _corners_apart_mm(one: Affine, other: Affine, shape: tuple[int, ...]) -> float:
    corners = np.array(np.meshgrid(*[(0, n - 1) for n in shape], [1])).reshape(4, -1)
    return float(np.linalg.norm(((one - other) @ corners)[:3], axis=0).max())


def _described(affine: Affine) -> str:
    axes = "".join(nibabel.aff2axcodes(affine))
    spacing = " x ".join(f"{s:.4g}" for s in spacing_of(affine))
    return f"{axes}, {spacing} mm, origin {', '.join(f'{v:.4g}' for v in affine[:3, 3])}"


def _fault(affine: Affine) -> str:
    """Why a form cannot be a voxel grid, or an empty string."""
    shear = shear_degrees(affine)
    if np.isnan(affine).all():
        return "a quaternion or qfac without a meaning"
    if not np.isfinite(shear):
        return "a column of zeros or not of numbers"
    if not np.isfinite(affine).all():
        return "an origin that is not a number"
    return f"sheared by {shear:.2f} degrees" if shear > MAX_SHEAR_DEGREES else ""


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


# ---------------------------------------------------------------------------------------------------- writing


def header_for(grid: Grid, dtype: np.dtype[Any], native: object = None, *, is_labels: bool = False) -> Any:
    """The header of a volume on ``grid``: the input's own, where that was NIfTI, with another voxel type.

    The forms, their codes, ``pixdim`` and the units are then the input's, bit for bit. Of labels it says which
    is which, as far as NIfTI lets it.
    """
    if isinstance(native, nibabel.Nifti1Header):
        header = native.copy()
        header["dim"][4:] = 1
        header["dim"][:4] = (3, *grid.shape)
        for field in NOT_OF_A_MASK:
            header[field] = 0
        header["intent_name"] = header["aux_file"] = b""
    else:
        kind = nibabel.Nifti1Header if max(grid.shape) < 2**15 else nibabel.Nifti2Header
        header = kind(endianness="little")
        header["dim"][:] = (3, *grid.shape, 1, 1, 1, 1)
        header.set_qform(grid.affine, code=1)
        header.set_sform(grid.affine, code=1)
        header.set_xyzt_units("mm")
    header.set_data_dtype(dtype.newbyteorder("="))
    header["magic"] = SINGLE_FILE_MAGIC[int(header["sizeof_hdr"])]
    header["vox_offset"] = int(header["sizeof_hdr"]) + 4
    header["scl_slope"], header["scl_inter"] = 1, 0
    header["intent_code"] = LABEL_INTENT if is_labels else 0
    names = ", ".join(f"{label.value} {label.title}" for label in LUNGS)
    header["descrip"] = names.encode() if is_labels else b""
    return header


def write_nifti(voxels: npt.NDArray[Any], header: Any, path: Path) -> None:
    """Writes (X, Y, Z) voxels behind a header; packed if the name ends in ``.gz``."""
    with path.open("xb") as file:
        if not path.name.lower().endswith(".gz"):
            file.writelines(_file_bytes(voxels, header))
            return
        file.writelines(deflated(_file_bytes(voxels, header), GZIP))


def holds(path: Path, voxels: npt.NDArray[Any], header: Any) -> bool:
    """Whether a file, read back, is byte for byte what `write_nifti` was given."""
    with _opened(path) as (stream, _):
        for piece in _file_bytes(voxels, header):
            found = np.frombuffer(stream.read(len(piece)), np.uint8)
            if not np.array_equal(found, np.frombuffer(piece, np.uint8)):
                return False
        return not stream.read(1)


def _file_bytes(voxels: npt.NDArray[Any], header: Any) -> Iterator[Any]:
    """The unpacked file in pieces: header, no extensions, voxels in Fortran order a slab at a time."""
    yield header.binaryblock + bytes(4)
    yield from slabs(voxels, voxels.dtype.newbyteorder(header.endianness))
