"""How a scan will keep within memory: decided from its grid alone, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
LARGEST_LUNG, LARGEST_LAYER = prod(LARGEST_LUNG_VOXELS), prod(LARGEST_LUNG_VOXELS[:2])
"""Voxels of that image, and of one of its slices."""
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
    host = _host_work(scan, locator, refiner)
    if refiner.device.type != "cuda":
        return _within(scan, host, "--max-memory", max_memory_gb)
    host_mb = host.kept_mb + host.between_mb
    _refuse(scan, "--max-memory", max_memory_gb, host_mb)
    mostly_context = 4 * LARGEST_LAYER * refiner.stage.unet.context > LARGEST_GPU_TILE  # a whole lung is less work then
    tile = LARGEST_LUNG if mostly_context else LARGEST_GPU_TILE
    gpu = replace(host, kept_mb=GPU_PROGRAM_MB, between_mb=0.0, largest_tile=tile, streamed=False)
    if _exceeds(gpu.most_mb(tile), max_vram_gb):
        gpu = replace(gpu, largest_tile=host.largest_tile, streamed=True)
    planned = _within(scan, gpu, "--max-vram", max_vram_gb)
    return replace(planned, host_mb=host_mb, device_mb=planned.host_mb)


@dataclass(frozen=True)
class _Work:
    """What the steps take of the memory that the networks work in: a GPU's, or else that of the process.

    Attributes:
        locator: stage 1's engine.
        refiner: stage 2's engine.
        slab: voxels that stage 1 sees at a time, and those of a slice of them.
        kept_mb: what is taken all along.
        between_mb: what settling the sides or cleaning takes beside that, whichever is more.
        largest_tile: voxels that stage 2 sees at a time where there is room.
        streamed: as in `Plan`.
    """

    locator: Runner
    refiner: Runner
    slab: tuple[int, int]
    kept_mb: float
    between_mb: float
    largest_tile: float
    streamed: bool

    def most_mb(self, tile: float, both_mb: float = 0.0) -> float:
        """Memory at its largest, with tiles of so many voxels; ``both_mb`` as in `Plan`."""
        if both_mb == inf:
            return self.kept_mb + self.side_by_side_mb()
        return self.kept_mb + max(self._stage1_mb(), self._stage2_mb(tile), self.between_mb, both_mb)

    def side_by_side_mb(self) -> float:
        """The most that a step takes beside what is kept, two of the largest lungs at once in stage 2."""
        return max(self._stage1_mb(), 2 * self._refiner_mb(LARGEST_LUNG), self.between_mb)

    def _stage1_mb(self) -> float:
        """The network on a slab, and the slab's image."""
        return pass_mb(self.locator, *self.slab, self.streamed) + 4 * self.slab[0] / 1e6

    def _stage2_mb(self, tile: float) -> float:
        """The other lung's logits, this one's where they are put together, and the network on one tile."""
        return (2 * LARGEST_LUNG + (2 * LARGEST_LUNG if tile < LARGEST_LUNG else 0)) / 1e6 + self._refiner_mb(tile)

    def _refiner_mb(self, tile: float) -> float:
        return pass_mb(self.refiner, tile, LARGEST_LAYER, self.streamed)


def _host_work(scan: Scan, locator: Runner, refiner: Runner) -> _Work:
    """What the process has to hold where the networks work in its own memory."""
    opinion_mb = _opinion_mb(scan, locator)
    return _Work(
        locator,
        refiner,
        slab=_slab(scan, locator),
        kept_mb=PROGRAM_MB + scan.voxels.nbytes / 1e6 + restored_mb(scan) + opinion_mb,
        between_mb=max(opinion_mb + SETTLING_MB, _mask_mb(scan) + _cleaning_mb(scan)),
        largest_tile=float(LARGEST_LUNG),
        streamed=refiner.device.type == "cpu",
    )


def _within(scan: Scan, work: _Work, option: str, limit_gb: float | None) -> Plan:
    """The plan of work in the process's own memory, with the largest of stage 2's tiles within an option's limit.

    Raises:
        ScanError: not even the smallest fit.
    """
    context, stride = 2 * work.refiner.stage.unet.context, work.refiner.stage.unet.stride
    smallest = min(LARGEST_LAYER * (context + stride), LARGEST_LUNG)
    tile = work.largest_tile
    _refuse(scan, option, limit_gb, work.most_mb(smallest))
    while _exceeds(work.most_mb(tile), limit_gb) and tile > smallest:
        tile = max(smallest, tile - LARGEST_LAYER * stride)
    tiles = 1 if tile >= LARGEST_LUNG else ceil(LARGEST_LUNG_VOXELS[2] / (tile / LARGEST_LAYER - context))
    both_mb = _both_mb(work, tile, limit_gb)
    return Plan(work.most_mb(tile, both_mb), 0.0, tile, tiles, work.streamed, both_mb)


def _both_mb(work: _Work, tile: float, limit_gb: float | None) -> float:
    """What stage 2 may take for both lungs at the same time, as in `Plan`: nothing where one goes in tiles."""
    if not work.refiner.shareable or tile < LARGEST_LUNG:
        return 0.0
    room_mb = (UNASKED_MB if limit_gb is None else limit_gb * 1000) - work.kept_mb
    if work.side_by_side_mb() <= room_mb:
        return inf
    return max(0.0, room_mb) if limit_gb is None else 0.0


def _mask_mb(scan: Scan) -> float:
    """Memory of the mask: its slices without lung take none, if slices lie one behind the other in memory."""
    canonical = scan.grid.canonical()
    axial = scan.grid.canonical_axes()[0][2] == 2
    share = min(1.0, LONGEST_LUNG_MM / (canonical.shape[2] * canonical.spacing_mm[2])) if axial else 1.0
    return share * prod(scan.grid.shape) / 1e6


def _cleaning_mb(scan: Scan) -> float:
    """Memory of one lung's components on the scan's grid, beside both lungs' logits."""
    lung_mm3 = LARGEST_LUNG  # of voxels of 1 mm
    voxels = min(lung_mm3 / (1000 * scan.grid.voxel_volume_ml), prod(scan.grid.shape))
    return (CLEANING_BYTES * voxels + 2 * 2 * LARGEST_LUNG) / 1e6


def _opinion_mb(scan: Scan, locator: Runner) -> float:
    """Memory of stage 1's opinion near the lungs, which is the host's."""
    view = locator.stage.view
    nx, ny, nz = coarse_grid(scan.canonical(), view).shape
    return 4 * nx * ny * min(nz, int((LONGEST_LUNG_MM + 2 * KEPT_MM) / view.spacing_mm)) / 1e6


def _slab(scan: Scan, locator: Runner) -> tuple[int, int]:
    """Voxels of the largest slab that stage 1 sees, and of one of its slices."""
    shape = coarse_grid(scan.canonical(), locator.stage.view).shape
    nx, ny, _ = beyond_faces(Box.whole(shape), shape, locator.stage.view).shape
    depth = max(slab.seen.stop - slab.seen.start for slab in slabs_along_z(shape[2], locator.stage))
    return nx * ny * depth, nx * ny


def _exceeds(needed_mb: float, limit_gb: float | None) -> bool:
    return limit_gb is not None and needed_mb > limit_gb * 1000


def _refuse(scan: Scan, option: str, limit_gb: float | None, needed_mb: float) -> None:
    if _exceeds(needed_mb, limit_gb):
        found = f"needs up to {ceil(needed_mb / 100) / 10:.1f} GB of memory"  # rounded up: so much is enough
        expected = f"no more than {option} leaves it ({limit_gb:g} GB)"  # of several jobs each has its share
        raise ScanError(scan.source, found, expected, "raise the limit, run fewer --jobs, or crop the scan")
