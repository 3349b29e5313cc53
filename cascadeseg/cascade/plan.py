"""How a scan will keep within memory: decided from its grid alone, before any work."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, prod

from cascadeseg.cascade.locate import coarse_grid, slabs_along_z
from cascadeseg.errors import ScanError
from cascadeseg.formats.scan import Scan
from cascadeseg.network.bounded import Runner, bytes_per_voxel

PROGRAM_MB = 330.0
"""The interpreter with torch, nibabel and both networks (measured on Linux)."""
GPU_PROGRAM_MB = 450.0
"""A CUDA context with its kernels and both networks."""
SLABS_MB = 60.0
"""Slabs of the scan on their way to a stage, and of logits on their way back."""
LARGEST_LUNG_VOXELS = (184, 264, 360)
"""Stage 2's image of a lung as large as they come."""
LARGEST_TILE = 12_000_000
"""Voxels that stage 2 sees at a time where no limit is given: most lungs as a whole."""


@dataclass(frozen=True)
class Plan:
    """What a scan will need.

    Attributes:
        host_mb: memory of the process at its largest.
        device_mb: memory of the GPU at its largest; 0 without one.
        largest_tile: voxels that stage 2 may see at a time.
        tiles: how many tiles the largest lung would take.
    """

    host_mb: float
    device_mb: float
    largest_tile: float
    tiles: int

    def __str__(self) -> str:
        gpu = f", {self.device_mb:,.0f} MB of the GPU" if self.device_mb else ""
        how = "each lung as a whole" if self.tiles == 1 else f"a large lung in {self.tiles} tiles"
        return f"at most {self.host_mb:,.0f} MB of memory{gpu}; {how}"


def plan(
    scan: Scan,
    locator: Runner,
    refiner: Runner,
    max_memory_gb: float | None = None,
    max_vram_gb: float | None = None,
) -> Plan:
    """What a scan needs, and how large stage 2's tiles may be under the limits.

    Args:
        scan: of it only the grid and the voxels' type are used.
        locator: stage 1's engine.
        refiner: stage 2's engine.
        max_memory_gb: of the whole process, the scan and its mask included; None for no limit.
        max_vram_gb: of the GPU; None for no limit.

    Raises:
        ScanError: not even the smallest tiles fit.
    """
    on_gpu = refiner.device.type == "cuda"
    host_mb = PROGRAM_MB + (scan.voxels.nbytes + prod(scan.grid.shape)) / 1e6
    if on_gpu:
        _refuse(scan, "--max-memory", max_memory_gb, host_mb)
    cost_mb = bytes_per_voxel(refiner.stage, refiner.precision) / 1e6
    layer = LARGEST_LUNG_VOXELS[0] * LARGEST_LUNG_VOXELS[1]
    context, stride = 2 * refiner.stage.unet.context, refiner.stage.unet.stride

    limit_gb = max_vram_gb if on_gpu else max_memory_gb
    coarse_mb, stage1_mb = _stage1_mb(scan, locator)
    fixed_mb = (GPU_PROGRAM_MB if on_gpu else host_mb) + coarse_mb + SLABS_MB
    least_mb = fixed_mb + max(stage1_mb, layer * (context + stride) * cost_mb)
    _refuse(scan, "--max-vram" if on_gpu else "--max-memory", limit_gb, least_mb)

    affordable = inf if limit_gb is None else (limit_gb * 1000 - fixed_mb) / cost_mb
    largest_tile = min(LARGEST_TILE, affordable)
    tile = min(prod(LARGEST_LUNG_VOXELS), largest_tile)
    kept = LARGEST_LUNG_VOXELS[2] if tile == prod(LARGEST_LUNG_VOXELS) else tile / layer - context
    network_mb = fixed_mb + max(stage1_mb, tile * cost_mb)
    return Plan(
        host_mb=host_mb if on_gpu else network_mb,
        device_mb=network_mb if on_gpu else 0.0,
        largest_tile=largest_tile,
        tiles=ceil(LARGEST_LUNG_VOXELS[2] / kept),
    )


def _stage1_mb(scan: Scan, locator: Runner) -> tuple[float, float]:
    """Memory of stage 1's opinion, and of its network on one slab."""
    nx, ny, nz = coarse_grid(scan.canonical(), locator.stage.view).shape
    slabs = slabs_along_z(nz, locator.stage)
    voxels = nx * ny * max(slab.seen.stop - slab.seen.start for slab in slabs)
    return 8 * nx * ny * nz / 1e6, voxels * bytes_per_voxel(locator.stage, locator.precision) / 1e6


def _refuse(scan: Scan, option: str, limit_gb: float | None, needed_mb: float) -> None:
    if limit_gb is not None and limit_gb * 1000 < needed_mb:
        found = f"needs {needed_mb / 1000:.1f} GB of memory at least"
        raise ScanError(scan.source, found, f"{option} {limit_gb:g} or less", "raise the limit, or crop the scan")
