"""Synthetic scans as files in nnU-Net's raw layout, and as a torch dataset that makes them as they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from cascadeseg.atomic import replace_text
from cascadeseg.errors import OutputError
from cascadeseg.formats import Scan, write_labels, write_scan
from cascadeseg.labels import VALUES
from cascadeseg.memory import is_out_of_memory
from cascadeseg.synthesis.config import PRESETS, SynthesisConfig
from cascadeseg.synthesis.patient import Patient, sample_patient
from cascadeseg.synthesis.render import Phantom, render

Spacing = float | tuple[float, float, float]
Progress = Callable[[str, float], None]
RECORD = "synthesis.json"


def write_dataset(
    out: Path | str,
    count: int,
    seed: int = 0,
    spacing_mm: Spacing | None = None,
    config: SynthesisConfig | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``count`` synthetic scans with their labels: ``imagesTr``, ``labelsTr``, ``dataset.json``.

    Case ``synth_00007`` is the patient of seed 7. A case that is already there, scan and labels, is kept, so an
    interrupted run goes on where it stopped. ``synthesis.json`` says what the folder's scans are made by; it takes no
    others.

    Args:
        out: the folder.
        count: how many; their seeds are ``seed .. seed + count - 1``.
        seed: of the first.
        spacing_mm: voxel size; None for what each patient's scanner saved.
        config: which patients.
        progress: called with a case's name and the finished share, 0 to 1.

    Raises:
        OutputError: the folder cannot be written, or holds other scans, or there is no memory for a scan.
    """
    folder = Path(out)
    try:
        _claim(folder, {"preset": _preset_name(config), "spacing_mm": _three(spacing_mm), "seed": seed})
        for name in ("imagesTr", "labelsTr"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            name = f"synth_{seed + number:05d}"
            if progress is not None:
                progress(name, number / count)
            _write_case(folder, name, seed + number, spacing_mm, config)
        _write_json(folder)
    except OSError as error:
        raise OutputError(folder, f"cannot be written: {error.strerror or error}", remedy="choose another") from error
    if progress is not None:
        progress("done", 1.0)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Notes what the folder's scans are made by; refuses a folder of other scans, not one that has none yet."""
    record = folder / RECORD
    before = _read_record(record) if record.exists() else None
    places = [folder / name for name in ("dataset.json", "imagesTr", "labelsTr")]
    held = [place for place in places if place.is_file() or (place.is_dir() and any(place.iterdir()))]
    if held and before is None:
        remedy = "choose another folder"
        raise OutputError(folder, f"{held[0].name} of unknown settings, without a {RECORD}", "a new folder", remedy)
    if held and before is not None:
        if other := [
            f"{key} was {json.dumps(before.get(key))}" for key in settings if before.get(key) != settings[key]
        ]:
            found = f"synthetic scans of other settings ({', '.join(other)})"
            raise OutputError(folder, found, "the same settings", "choose another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(record, json.dumps(settings, indent=2) + "\n")


def _read_record(record: Path) -> dict[str, Any]:
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise OutputError(
            record, "no record of synthetic scans", "preset, spacing_mm and seed", "choose another folder"
        )
    return content


def _preset_name(config: SynthesisConfig | None) -> str:
    """The preset's name; of patients that are no preset's, a digest."""
    config = config or SynthesisConfig()
    for name, preset in PRESETS.items():
        if preset == config:
            return name
    return hashlib.sha256(repr(config).encode()).hexdigest()[:12]


def _three(spacing_mm: Spacing | None) -> list[float] | None:
    return None if spacing_mm is None else [float(mm) for mm in np.broadcast_to(spacing_mm, 3)]


def _write_case(folder: Path, name: str, seed: int, spacing_mm: Spacing | None, config: SynthesisConfig | None) -> None:
    scan, labels = folder / "imagesTr" / f"{name}_0000.nii.gz", folder / "labelsTr" / f"{name}.nii.gz"
    if scan.exists() and labels.exists():
        return
    patient = sample_patient(seed, config)
    grid = patient.field_of_view(spacing_mm or _saved_spacing(patient))
    try:
        phantom = render(patient, grid)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = f"no memory for its {' x '.join(map(str, grid.shape))} voxels"
        raise OutputError(scan, found, remedy="choose a larger spacing, or use a larger machine") from error
    voxels = phantom.voxels()
    write_scan(voxels, phantom.grid, scan)
    write_labels(phantom.labels.numpy(), labels, Scan(voxels, phantom.grid))


def _saved_spacing(patient: Patient) -> tuple[float, float, float]:
    x, y, z = patient.native_spacing_mm
    return x, y, z * patient.scanner.slice_step


def _write_json(folder: Path) -> None:
    cases = sorted(path.name.removesuffix(".nii.gz") for path in (folder / "labelsTr").glob("*.nii.gz"))
    cases = [case for case in cases if not case.startswith(".")]
    content = {
        "name": "cascadeseg synthetic chest CT",
        "description": "Procedural anatomy; no patient data.",
        "channel_names": {"0": "CT"},
        "labels": VALUES,
        "numTraining": len(cases),
        "file_ending": ".nii.gz",
    }
    replace_text(folder / "dataset.json", json.dumps(content, indent=2) + "\n")


class SyntheticDataset(Dataset[dict[str, Any]]):
    """Synthetic scans made as they are asked for: item ``i`` is the patient of seed ``seed + i``.

    `loader` makes them ahead of the consumer. Volumes differ in size: use a batch size of one, or a ``transform`` that
    crops.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        spacing_mm: Spacing = 2.0,
        config: SynthesisConfig | None = None,
        transform: Callable[[Phantom], dict[str, Any]] | None = None,
    ) -> None:
        self._count, self._seed, self._spacing_mm = count, seed, spacing_mm
        self._config = config
        self._transform = transform or _as_dict

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        patient = sample_patient(self._seed + index, self._config)
        return self._transform(render(patient, patient.field_of_view(self._spacing_mm)))

    def loader(self, workers: int = 2, ahead: int = 2, batch_size: int | None = None) -> DataLoader[dict[str, Any]]:
        """Items in order, made by worker processes while the last ones are being used.

        Args:
            workers: processes, one thread each; 0 makes each item when it is asked for.
            ahead: items that each worker keeps ready.
            batch_size: None for items as they are, without a batch axis.
        """
        if workers == 0:
            return DataLoader(self, batch_size=batch_size)
        return DataLoader(self, batch_size=batch_size, num_workers=workers, prefetch_factor=ahead)


def _as_dict(phantom: Phantom) -> dict[str, Any]:
    """``hu`` (X, Y, Z) float32, ``labels`` and ``tissues`` (X, Y, Z) uint8, ``affine`` (4, 4)."""
    return {
        "hu": phantom.hu,
        "labels": phantom.labels,
        "tissues": phantom.tissues,
        "affine": torch.from_numpy(phantom.grid.affine.copy()),
    }
