"""The demo: one synthetic chest CT with its labels, and the files that `cascadeseg demo` leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cascadeseg.errors import OutputError
from cascadeseg.outputs import Job

SEED = 11
"""Of a patient whose two lungs are both fully in view."""
PRESET = "healthy"
SPACING_MM = 1.5


@dataclass(frozen=True)
class DemoFiles:
    """What the demo writes, and where.

    Attributes:
        folder: of all of it.
    """

    folder: Path

    @property
    def scan(self) -> Path:
        return self.folder / "scan.nii.gz"

    @property
    def reference(self) -> Path:
        return self.folder / "scan_ref.nii.gz"

    @property
    def job(self) -> Job:
        """The scan with what `infer` makes of it."""
        labels, report, preview = (self.folder / f"scan_lungs{suffix}" for suffix in (".nii.gz", ".json", ".png"))
        return Job(self.scan, labels, report, preview)

    @property
    def table(self) -> Path:
        return self.folder / "scores.json"

    def explained(self) -> list[tuple[Path, str]]:
        """Every file with what it is."""
        labels, preview, report = self.job.outputs
        return [
            (self.scan, "the synthetic scan"),
            (self.reference, "its true lungs"),
            (labels, "the mask: 1 right lung, 2 left lung"),
            (preview, "a picture of both: look here first"),
            (report, "volumes, times, versions"),
            (self.table, "the mask against the truth"),
        ]

    def refuse_overwriting(self, force: bool) -> None:
        """Raises OutputError if files of an earlier demo are there, unless they may go."""
        there = [path for path, _ in self.explained() if path.exists()]
        if there and not force:
            raise OutputError(there[0], "exists", remedy="overwrite with --force, or choose another folder")


def make_scan(files: DemoFiles, progress: Callable[[str, float], None]) -> None:
    """Renders the demo's patient and writes the scan and its true lungs.

    Raises:
        OutputError: they cannot be written.
    """
    from cascadeseg.formats import Scan, write_labels, write_scan
    from cascadeseg.synthesis import PRESETS, render, sample_patient

    progress("anatomy", 0.05)
    patient = sample_patient(SEED, PRESETS[PRESET])
    grid = patient.field_of_view(SPACING_MM)
    phantom = render(patient, grid)
    progress("writing", 0.9)
    voxels = phantom.voxels()
    write_scan(voxels, grid, files.scan)
    write_labels(phantom.labels.numpy(), files.reference, Scan(voxels, grid))
