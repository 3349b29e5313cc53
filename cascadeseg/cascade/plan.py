"""How a scan will keep within memory: decided from its grid alone, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, prod

from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.locate import KEPT_MM, beyond_faces, coarse_grid, slabs_along_z
from cascadeseg.cascade.windowed import restored_mb
from cascadeseg.errors import ScanError
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box
from cascadeseg.network.bounded import Runner, pass_mb

PROGRAM_MB = 390.0
"""The interpreter with torch, nibabel and both networks, and what allocators keep (measured on Linux)."""
GPU_PROGRAM_MB = 450.0
"""A CUDA context with its kernels and both networks, on a small GPU; on an H100 it takes 582 to 781 (measured)."""
CLEANING_BYTES = 7.5
"""For each voxel of the scan in a lung's box: the lung, its components and what finding them takes (7.1 measured)."""
SETTLING_MB = 150.0
"""Sides of lungs of 7.7 litres each settled, beside both copies of stage 1's opinion (138 and 147 measured)."""
UNASKED_MB = 1200.0
"""What a process may take for the sake of speed, both lungs at once, where no limit was given that allows more."""
LONGEST_LUNG_MM = 400.0
LARGEST_LUNG_VOXELS = (176, 256, 352)
"""Stage 2's image of a lung as large as they come."""
LARGEST_GPU_TILE = 12_000_000
"""Voxels that stage 2 sees at a time on a GPU where no limit is given: most lungs as a whole."""


@dataclass(frozen=True)
class Plan:
    """What a scan will need.

    Attributes:
        host_mb: memory of the process at its largest.
        device_mb: memory of the GPU at its largest; 0 without one.
        largest_tile: voxels that stage 2 may see at a time.
        tiles: how many tiles the largest lung would take.
        streamed: whether the finest levels of both networks go through memory a few slices at a time: on a processor
            always, on a GPU where they would not fit otherwise.
        both_mb: what stage 2 may take to work on both lungs at the same time: infinite where that is enough for the
            largest, 0 under a limit where it is not, as boxes may grow.
    """

    host_mb: float
    device_mb: float
    largest_tile: float
    tiles: int
    streamed: bool
    both_mb: float = 0.0

    def __str__(self) -> str:
        gpu = f", {self.device_mb:,.0f} MB of the GPU" if self.device_mb else ""
        how = "each lung as a whole" if self.tiles == 1 else f"a large lung in {self.tiles} tiles"
        if self.both_mb:
            how = "both lungs at once" if self.both_mb == inf else f"{how}, both at once if they are small"
        return f"at most {self.host_mb:,.0f} MB of memory{gpu}; {how}"

    def takes_both(self, refiner: Runner, lungs: Sequence[LungBox]) -> bool:
        """Whether stage 2 may work on these lungs at the same time."""
        view, stride = refiner.stage.view, refiner.stage.unet.stride
        shapes = [lung.extent(view.spacing_mm, stride).shape for lung in lungs]
        return sum(pass_mb(refiner, prod(shape), shape[0] * shape[1]) for shape in shapes) <= self.both_mb


def plan(
    scan: Scan,
    locator: Runner,
    refiner: Runner,
    max_memory_gb: float | None = None,
    max_vram_gb: float | None = None,
) -> Plan:
    """What a scan needs, and how large stage 2's tiles may be under the limits.

    Args:
        scan: of it only the grid, the voxels' type and whether a window cut values off are used.
        locator: stage 1's engine.
        refiner: stage 2's engine.
        max_memory_gb: of the whole process, the scan and its mask included; None for no limit.
        max_vram_gb: of the GPU; None for no limit.

    Raises:
        ScanError: not even the smallest tiles fit.
    """
    on_gpu = refiner.device.type == "cuda"
    coarse_mb, slab_voxels, slab_layer = _stage1(scan, locator)
    host_mb = PROGRAM_MB + refiner.library_mb + scan.voxels.nbytes / 1e6 + restored_mb(scan) + coarse_mb
    between_mb = max(coarse_mb + SETTLING_MB, _mask_mb(scan) + _cleaning_mb(scan))
    if on_gpu:
        host_mb += between_mb
        _refuse(scan, "--max-memory", max_memory_gb, host_mb)
    layer = LARGEST_LUNG_VOXELS[0] * LARGEST_LUNG_VOXELS[1]
    context, stride = 2 * refiner.stage.unet.context, refiner.stage.unet.stride

    limit_gb = max_vram_gb if on_gpu else max_memory_gb
    fixed_mb = GPU_PROGRAM_MB if on_gpu else host_mb
    smallest, largest = layer * (context + stride), float(prod(LARGEST_LUNG_VOXELS))
    streamed = refiner.device.type == "cpu"

    def stage1_mb() -> float:
        return pass_mb(locator, slab_voxels, slab_layer, streamed) + 4 * slab_voxels / 1e6

    def needed_mb(tile: float) -> float:
        """With stage 2's tiles of so many voxels."""
        stage2_mb = _stage2_mb(refiner, tile, layer, streamed)
        return fixed_mb + max(stage1_mb(), stage2_mb, 0 if on_gpu else between_mb)

    if on_gpu:
        streamed = limit_gb is not None and needed_mb(LARGEST_GPU_TILE) > limit_gb * 1000
        largest = largest if streamed else LARGEST_GPU_TILE
    _refuse(scan, "--max-vram" if on_gpu else "--max-memory", limit_gb, needed_mb(smallest))
    tile = largest
    while limit_gb is not None and needed_mb(tile) > limit_gb * 1000 and tile > smallest:
        tile = max(smallest, tile - layer * stride)
    whole = tile >= prod(LARGEST_LUNG_VOXELS)
    most_mb, both_mb = needed_mb(tile), 0.0
    if refiner.shareable and whole:
        room_mb = (UNASKED_MB if limit_gb is None else limit_gb * 1000) - fixed_mb
        largest_mb = max(stage1_mb(), 2 * pass_mb(refiner, tile, layer, streamed), between_mb)
        if largest_mb <= room_mb:
            most_mb, both_mb = fixed_mb + largest_mb, inf
        elif limit_gb is None:
            both_mb = max(0.0, room_mb)
            most_mb = max(most_mb, fixed_mb + both_mb)
    return Plan(
        host_mb=host_mb if on_gpu else most_mb,
        device_mb=most_mb if on_gpu else 0.0,
        largest_tile=tile,
        tiles=1 if whole else ceil(LARGEST_LUNG_VOXELS[2] / (tile / layer - context)),
        streamed=streamed,
        both_mb=both_mb,
    )


def _mask_mb(scan: Scan) -> float:
    """Memory of the mask: its slices without lung take none, if slices lie one behind the other in memory."""
    canonical = scan.grid.canonical()
    axial = scan.grid.canonical_axes()[0][2] == 2
    share = min(1.0, LONGEST_LUNG_MM / (canonical.shape[2] * canonical.spacing_mm[2])) if axial else 1.0
    return share * prod(scan.grid.shape) / 1e6


def _cleaning_mb(scan: Scan) -> float:
    """Memory of one lung's components on the scan's grid, beside both lungs' logits."""
    lung_mm3 = lung = prod(LARGEST_LUNG_VOXELS)
    voxels = min(lung_mm3 / (1000 * scan.grid.voxel_volume_ml), prod(scan.grid.shape))
    return (CLEANING_BYTES * voxels + 2 * 2 * lung) / 1e6


def _stage1(scan: Scan, locator: Runner) -> tuple[float, float, float]:
    """Memory of stage 1's opinion, which is the host's; voxels of a slab that it sees, and of a slice."""
    shape = nx, ny, nz = coarse_grid(scan.canonical(), locator.stage.view).shape
    seen_x, seen_y, _ = beyond_faces(Box.whole(shape), shape, locator.stage.view).shape
    slabs = slabs_along_z(nz, locator.stage)
    depth = max(slab.seen.stop - slab.seen.start for slab in slabs)
    kept = min(nz, int((LONGEST_LUNG_MM + 2 * KEPT_MM) / locator.stage.view.spacing_mm))
    return 4 * nx * ny * kept / 1e6, seen_x * seen_y * depth, seen_x * seen_y


def _stage2_mb(refiner: Runner, tile: float, layer: float, streamed: bool) -> float:
    """Memory of the other lung's logits, of this one's where they are put together, and of the network on one tile."""
    lung = prod(LARGEST_LUNG_VOXELS)
    return (2 * lung + (2 * lung if tile < lung else 0)) / 1e6 + pass_mb(refiner, tile, layer, streamed)


def _refuse(scan: Scan, option: str, limit_gb: float | None, needed_mb: float) -> None:
    if limit_gb is not None and limit_gb * 1000 < needed_mb:
        found = f"needs up to {ceil(needed_mb / 100) / 10:.1f} GB of memory"  # rounded up: so much is enough
        expected = f"no more than {option} leaves it ({limit_gb:g} GB)"  # of several jobs each has its share
        raise ScanError(scan.source, found, expected, "raise the limit, run fewer --jobs, or crop the scan")
