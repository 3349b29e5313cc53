"""The cascade, end to end: a scan in, the mask of both lungs on the scan's own grid out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cascadeseg.cascade.clean import clean
from cascadeseg.cascade.confidence import (
    RENAMED,
    Calibration,
    Signs,
    compared,
    judged,
    missing_reason,
    signs_of,
)
from cascadeseg.cascade.crop import crop_lungs, settle_sides
from cascadeseg.cascade.density import Density, Histogram, histogram, together
from cascadeseg.cascade.locate import LAYERS, Coarse, locate
from cascadeseg.cascade.merge import Labels, box_on, merge
from cascadeseg.cascade.orientation import LEAST_ML, UNLIKE_THE_HEADER, Orientation, orientation_of, shipped
from cascadeseg.cascade.plan import Plan, plan
from cascadeseg.cascade.refine import Refined, refine
from cascadeseg.cascade.windowed import restored
from cascadeseg.errors import ConfigError, DeviceError, ModelError, ScanError
from cascadeseg.formats import has_its_own_affine, read_scan, scan_of
from cascadeseg.formats.scan import Before, Scan
from cascadeseg.geometry import Box, Mask, bounding_box, canonical_view
from cascadeseg.labels import LUNGS, Label
from cascadeseg.memory import peak_memory_mb
from cascadeseg.network.bounded import BoundedEngine
from cascadeseg.network.engine import Precision, find_device, give_back
from cascadeseg.network.model import Model, load_model
from cascadeseg.parallel import Each, one_by_one, own_threads, side_by_side

Progress = Callable[[str, float], None]
Verdict = Literal["ok", "review"]
LARGEST_LUNG_LITRES = 10.0
"""No lung comes near it."""
FACES = (("left", "right"), ("posterior", "anterior"), ("inferior", "superior"))
"""The patient's sides at the near and the far end of each canonical axis."""


@dataclass(frozen=True)
class LungResult:
    """One lung of a segmented scan.

    Attributes:
        label: which lung.
        height_mm: from its lowest slice to its highest.
        histogram: of the HU inside the mask; None where there is none.
        touches: faces of the scan that the lung touches (``"superior"``, ...): there it may go on outside.
        regrown: how many times its box had to grow.
        box_mm: the extent of its crop, the mask in it, in RAS+ mm, ((x, y, z) low, (x, y, z) high); None where stage 1
            found no lung.
        cut: whether it still reaches a face of its box, inside the scan, though that grew as far as it may.
        quality: the Dice to expect of the mask; None without a mask, or for a model without calibration.
        reasons: why the mask should be looked at; none for one that can be trusted.
        signs: what quality and reasons follow from; None without a mask.
    """

    label: Label
    height_mm: float
    histogram: Histogram | None = field(compare=False)
    touches: tuple[str, ...]
    regrown: int
    box_mm: tuple[tuple[float, ...], tuple[float, ...]] | None
    cut: bool = False
    quality: float | None = None
    reasons: tuple[str, ...] = ()
    signs: Signs | None = None

    @property
    def volume_ml(self) -> float:
        """What of it is in the scan; 0 where there is none."""
        return self.histogram.volume_ml if self.histogram else 0.0

    @property
    def mean_hu(self) -> float | None:
        """The mean HU inside the mask; None where there is none."""
        return self.histogram.mean_hu if self.histogram else None

    @property
    def density(self) -> Density | None:
        """Of what is inside the mask; None without one, and where the HU of lungs are not known."""
        return self.histogram.density if self.histogram else None

    @property
    def verdict(self) -> Verdict:
        return "review" if self.reasons else "ok"

    @property
    def complete(self) -> bool:
        """Whether the lung was found, and all of it is in the scan as far as one can see."""
        return self.volume_ml > 0 and not self.touches and not self.cut


@dataclass(frozen=True, eq=False)
class Segmentation:
    """A segmented scan.

    Attributes:
        labels: (X, Y, Z) uint8, 1 right lung, 2 left lung, on ``scan.grid``.
        scan: what was segmented.
        lungs: right and left, in the order of `labels.LUNGS`.
        seconds: by step, in order.
        peak_memory_mb: the process's largest resident memory so far; NaN on Windows.
        warnings: what was odd about the scan or the result.
        device: where the networks ran; where memory ran out, the warnings tell what went on elsewhere.
        precision: ``fp32``, ``bf16`` or ``fp16``; the same holds.
        model: name, version and sha256 of the model.
        orientation: how the body seems to lie; None where there is hardly any lung.
    """

    labels: Labels
    scan: Scan
    lungs: tuple[LungResult, ...]
    seconds: dict[str, float]
    peak_memory_mb: float
    warnings: tuple[str, ...]
    device: str
    precision: str
    model: dict[str, str] = field(default_factory=dict)
    orientation: Orientation | None = None

    @property
    def histogram(self) -> Histogram | None:
        """Of the HU in both lungs; None where neither was found."""
        return together(lung.histogram for lung in self.lungs)

    @property
    def quality(self) -> float | None:
        """The lower of both lungs' qualities; None where neither has one."""
        return min((lung.quality for lung in self.lungs if lung.quality is not None), default=None)

    @property
    def verdict(self) -> Verdict:
        """``review`` if either lung is to be looked at."""
        return "review" if any(lung.reasons for lung in self.lungs) else "ok"


class Segmenter:
    """Both networks, loaded once, for any number of scans."""

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        device: str = "auto",
        precision: Precision = "auto",
        max_memory_gb: float | None = None,
        max_vram_gb: float | None = None,
    ) -> None:
        """Loads a model onto a device.

        Args:
            model: a model folder, a loaded model, or None for the one in the package.
            device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
            precision: ``auto`` takes what the device is fast at.
            max_memory_gb: what the process may take, each scan and its mask included; None for what it needs.
            max_vram_gb: what it may take of a GPU.

        Raises:
            ConfigError: a limit that is no number above 0.
            ModelError: the model, or the network that looks at the orientation, cannot be read, or there is no second
                stage.
            DeviceError: there is no such device, no such precision, or no GPU whose memory to limit.
        """
        self.device = find_device(device)
        for name, limit in (("max_memory_gb", max_memory_gb), ("max_vram_gb", max_vram_gb)):
            if limit is not None and not (isinstance(limit, int | float | np.number) and 0 < limit < inf):
                raise ConfigError(name, repr(limit), "a number of GB above 0, or None for no limit")
        if max_vram_gb is not None and self.device.type != "cuda":
            found = f"a limit for a GPU, on {self.device}"
            remedy = "leave it out; --max-memory limits the whole program"
            raise DeviceError("--max-vram", found, "a cuda device", remedy)
        self.model = model if isinstance(model, Model) else load_model(model)
        if self.model.refiner is None:
            raise ModelError(
                self.model.name if isinstance(model, Model) else model or "model",
                "a locator without a refiner",
                "both stages",
                "train the second: cascadeseg train --stage 2",
            )
        shipped()  # where it is damaged, that is told before any scan is read
        self.max_memory_gb, self.max_vram_gb = max_memory_gb, max_vram_gb
        self.locator = BoundedEngine(self.model.locator, self.device, precision)
        self.refiner = BoundedEngine(self.model.refiner, self.device, precision)

    def plan(self, scan: Scan) -> Plan:
        """What a scan will need, and how it will be kept within the limits.

        Raises:
            ScanError: it cannot be.
        """
        return plan(scan, self.locator, self.refiner, self.max_memory_gb, self.max_vram_gb)

    def segment(self, scan: Any, affine: Any = None, *, progress: Progress | None = None) -> Segmentation:
        """Segments the lungs of one scan.

        Args:
            scan: a `Scan`, a path, a nibabel or SimpleITK image, or an array (X, Y, Z) in HU with its affine.
            affine: (4, 4) voxel index to RAS+ mm; for arrays only.
            progress: called with the step's name and the share of work done, 0 to 1.

        Raises:
            ScanError: it is no 3D CT volume, needs more memory than it may take, or has a lung larger than any.
        """
        own_threads()  # of a thread that is new to torch: another scan's share would be its own from then on
        clock = _Clock(progress or (lambda step, done: None), self.device)
        with clock.step("read", 0.0):
            scan = _as_scan(scan, affine, before=self.plan)
        planned = self.plan(scan)
        locator = self.locator.for_one_scan(planned.streamed)
        refiner = self.refiner.for_one_scan(planned.streamed, planned.largest_tile)
        with torch.autocast(self.device.type, enabled=False):  # whatever is on around the call
            labels, traces = _segmented(scan, locator, refiner, planned, clock)
        with clock.step("measure", 0.97):
            results = [_result(scan, labels, label, traces) for label in LUNGS]
            orientation = _orientation(scan, results, traces)
            lungs = _judged(scan, results, traces, orientation, Calibration.of(self.model))
        clock.progress("done", 1.0)
        return Segmentation(
            labels=labels,
            scan=scan,
            lungs=lungs,
            seconds=clock.seconds,
            peak_memory_mb=peak_memory_mb(),
            warnings=(*scan.warnings, *_concerns(lungs, orientation), *locator.notes, *refiner.notes),
            device=str(self.device),
            precision=self.refiner.precision,
            model={"name": self.model.name, "version": self.model.version, "sha256": self.model.sha256},
            orientation=orientation,
        )


def _segmented(
    scan: Scan, locator: BoundedEngine, refiner: BoundedEngine, planned: Plan, clock: _Clock
) -> tuple[Labels, _Traces]:
    """The method itself."""
    canonical = scan.canonical()
    with clock.step("locate", 0.15):
        seen = restored(canonical)
        coarse = locate(seen, locator)
        _refuse_giants(scan, coarse)
    with clock.step("crop", 0.35):
        coarse = settle_sides(coarse, seen)
        boxes = crop_lungs(coarse)
    with clock.step("refine", 0.4):
        each: Each = side_by_side if planned.takes_both(refiner, boxes) else one_by_one
        lungs = each(lambda box: refine(seen, box, coarse, refiner), boxes)
    with clock.step("merge", 0.8):
        labels = merge(lungs, scan.grid)
    with clock.step("clean", 0.9):
        clean(labels, [(lung.lung.label, box_on(lung, canonical.grid)) for lung in lungs], scan.grid, coarse)
    return labels, _Traces(lungs, coarse, seen)


def _refuse_giants(scan: Scan, coarse: Coarse) -> None:
    """Raises ScanError for lungs larger than any: all that follows would take minutes and gigabytes."""
    for label, lung in zip(LUNGS, coarse.lungs, strict=True):
        layers = range(0, lung.shape[2], LAYERS)
        count = sum(int(torch.count_nonzero(lung[..., z : z + LAYERS] > 0.5)) for z in layers)
        litres = count * coarse.grid.voxel_volume_ml / 1000
        if litres > LARGEST_LUNG_LITRES:
            found = f"a {label.title} of {litres:,.0f} litres"
            expected = f"{LARGEST_LUNG_LITRES:g} litres at most"
            raise ScanError(scan.source, found, expected, "correct the spacing in its header")


@dataclass(frozen=True)
class _Traces:
    """What the stages left behind: each lung's logits, stage 1's opinion, and the canonical scan as they saw it."""

    lungs: list[Refined]
    coarse: Coarse
    seen: Scan


class _Clock:
    """Seconds by step, and progress."""

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self.progress, self.device = progress, device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, done: float) -> Iterator[None]:
        self.progress(name, done)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        give_back(self.device)
        self.seconds[name] = time.perf_counter() - start


def _as_scan(scan: Any, affine: Any, before: Before) -> Scan:
    if affine is not None and isinstance(scan, Scan | str | Path):
        raise has_its_own_affine(scan.source if isinstance(scan, Scan) else scan)
    if isinstance(scan, Scan):
        return scan
    if isinstance(scan, str | Path):
        return read_scan(scan, before=before)
    return scan_of(scan, affine)


def _orientation(scan: Scan, results: Sequence[LungResult], traces: _Traces) -> Orientation | None:
    if sum(lung.volume_ml for lung in results) < LEAST_ML:
        return None
    return orientation_of(traces.seen, [lung.lung for lung in traces.lungs], scan.grid)


def _judged(
    scan: Scan,
    results: Sequence[LungResult],
    traces: _Traces,
    orientation: Orientation | None,
    calibration: Calibration | None,
) -> tuple[LungResult, ...]:
    """The lungs with their qualities, and with the reasons to look at them."""
    refined = {lung.lung.label: lung for lung in traces.lungs}
    judgements = []
    for result, other in zip(results, reversed(results), strict=True):
        if result.signs is None:
            found = refined.get(other.label) if other.volume_ml else None
            judgements.append(replace(result, reasons=missing_reason(result.label, found, scan.grid.canonical())))
            continue
        signs = compared(result.signs, result.height_mm, other.height_mm)
        quality, reasons = judged(signs, calibration)
        if result.label in traces.coarse.renamed:
            reasons = (RENAMED, *reasons)
        if result.cut:
            reasons = ("it goes on beyond the box that was segmented", *reasons)
        if orientation and orientation.doubtful:
            reasons = (UNLIKE_THE_HEADER, *reasons)
        judgements.append(replace(result, quality=quality, reasons=reasons, signs=signs))
    return tuple(judgements)


def _result(scan: Scan, labels: Labels, label: Label, traces: _Traces) -> LungResult:
    refined = next((lung for lung in traces.lungs if lung.lung.label == label), None)
    if refined is None:
        return LungResult(label, 0.0, None, (), 0, None)
    grid = scan.grid.canonical()
    box = box_on(refined, grid)
    view = canonical_view(labels, scan.grid)
    mask = view[box.slices] == label.value
    crops = [refined.lung.grid.cropped(refined.lung.box)]
    if inner := bounding_box(mask):  # stage 2 sees up to a stride more than the box, and the lung may end there
        crops.append(grid.cropped(inner.shifted(box.start)))
    corners = np.concatenate([crop.world(list(product(*((-0.5, n - 0.5) for n in crop.shape)))) for crop in crops])
    return LungResult(
        label=label,
        height_mm=inner.shape[2] * grid.spacing_mm[2] if inner else 0.0,
        histogram=histogram(scan.canonical(), mask, box) if inner else None,
        touches=_touches(mask, box, grid.shape),
        regrown=refined.lung.regrown,
        cut=refined.cut,
        box_mm=(tuple(corners.min(axis=0).round(1)), tuple(corners.max(axis=0).round(1))),
        signs=signs_of(traces.seen, view, refined, traces.coarse),
    )


def _touches(mask: Mask, box: Box, shape: tuple[int, ...]) -> tuple[str, ...]:
    touched = []
    for axis, names in enumerate(FACES):
        for far, name in enumerate(names):
            at_border = box.stop[axis] == shape[axis] if far else box.start[axis] == 0
            if at_border and np.moveaxis(mask, axis, 0)[-1 if far else 0].any():
                touched.append(name)
    return tuple(touched)


def _concerns(lungs: tuple[LungResult, ...], orientation: Orientation | None) -> tuple[str, ...]:
    """What a reader should know of a result."""
    missing = [lung.label.title for lung in lungs if lung.volume_ml == 0]
    if len(missing) == len(lungs):
        return ("no lung was found in this scan; the mask is empty",)
    concerns = [orientation.words] if orientation and orientation.doubtful else []
    concerns += [f"no {title} was found" for title in missing]
    for lung in lungs:
        if lung.touches:
            where = " and ".join(lung.touches)
            concerns.append(f"the {lung.label.title} touches the {where} border of the scan: its volume may be partial")
        if reasons := [reason for reason in lung.reasons if lung.volume_ml and reason != UNLIKE_THE_HEADER]:
            concerns.append(f"look at the {lung.label.title}: {'; '.join(reasons)}")
    return tuple(concerns)
