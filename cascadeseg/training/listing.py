"""Data sets on disk: which image belongs to which labels, and what the labels are called.

Four layouts are read: nnU-Net's raw folders, the Medical Segmentation Decathlon's ``dataset.json``, MONAI's datalists,
and plain CSV. Nothing of the volumes is read here; `preflight` does that.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cascadeseg.errors import ConfigError
from cascadeseg.formats import stem_of, suffix_of
from cascadeseg.labels import BACKGROUND, BESIDE, IGNORE, LEFT_LUNG, RIGHT_LUNG
from cascadeseg.training.config import LabelNames

LAYOUTS = (
    "a folder with dataset.json (nnU-Net raw or Medical Segmentation Decathlon), a MONAI datalist (.json), "
    "or a CSV of image,label[,patient,fold]"
)
OUTSIDE = {
    "background", "clear", "trachea", "heart", "oesophagus", "esophagus", "aorta", "mediastinum", "spine",
    "spinal_cord", "liver", "spleen", "stomach", "body", "bronchi", "airways", "airway", "ribs", "sternum",
}  # fmt: skip
"""Names of what is no lung beyond doubt."""
LOBES = {"rul": RIGHT_LUNG, "rml": RIGHT_LUNG, "rll": RIGHT_LUNG, "lul": LEFT_LUNG, "lll": LEFT_LUNG}


@dataclass(frozen=True)
class Entry:
    """One case of a data set.

    Attributes:
        name: unique in the data set.
        image: the scan's file.
        label: its label map's file.
        patient: cases of one patient are never split.
        fold: the data set's own fold, None where it has none.
    """

    name: str
    image: Path
    label: Path
    patient: str
    fold: int | None = None


@dataclass(frozen=True)
class Listing:
    """A data set: its cases, and its labels' names by number (empty where it does not say)."""

    entries: tuple[Entry, ...]
    names: Mapping[int, str] = field(default_factory=dict)


def listing(source: Path) -> Listing:
    """The cases of a data set, in the order of their names.

    Raises:
        ConfigError: it is none of the layouts, or names no cases.
    """
    if not source.exists():
        raise ConfigError("data.source", f"{source}: no such file or folder", LAYOUTS)
    if source.suffix.lower() == ".csv":
        found = _from_csv(source)
    elif source.is_dir() and (source / "dataset.json").exists():
        found = _from_json(source / "dataset.json")
    elif source.suffix.lower() == ".json":
        found = _from_json(source)
    else:
        raise ConfigError("data.source", str(source), LAYOUTS)
    if not found.entries:
        raise ConfigError("data.source", f"{source}: no training cases", LAYOUTS)
    return Listing(tuple(sorted(found.entries, key=lambda entry: entry.name)), found.names)


def _from_json(path: Path) -> Listing:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        names = _names(content.get("labels", {}))
        channel = _ct_channel(content.get("channel_names") or content.get("modality"), path)
        if "training" in content:
            cases = [_entry(path.parent, dict(case), channel) for case in content["training"]]
        else:
            cases = _nnunet_cases(path.parent, content["file_ending"], channel)
        return Listing(tuple(cases), names)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        found = f"{path}: not a description of a data set ({type(error).__name__}: {error})"
        raise ConfigError("data.source", found, LAYOUTS) from error


def _names(labels: Mapping[str, Any]) -> dict[int, str]:
    """nnU-Net writes name to number, the Decathlon number to name."""
    named = {}
    for key, value in labels.items():
        if isinstance(value, str):
            named[int(key)] = value
        elif isinstance(value, int):
            named[value] = key
        else:
            raise ValueError(f"label '{key}' is a region; expected one number for each label")
    return named


def _ct_channel(channels: Any, path: Path) -> int:
    """Which of several channels is the CT; a single one is, whatever it is called."""
    if not isinstance(channels, Mapping) or len(channels) < 2:
        return 0
    ct = [int(number) for number, name in channels.items() if str(name).strip().upper() == "CT"]
    if not ct:
        named = ", ".join(map(str, channels.values()))
        raise ConfigError("data.source", f"{path}: channels {named}", "one that is named CT")
    return min(ct)


def _nnunet_cases(folder: Path, ending: str, channel: int) -> list[Entry]:
    """By the union of images and labels, so that whatever lacks its other half is noticed."""
    images, labels, image_ending = folder / "imagesTr", folder / "labelsTr", f"_{channel:04d}{ending}"
    names = {path.name.removesuffix(image_ending) for path in images.glob(f"*{image_ending}")}
    names |= {path.name.removesuffix(ending) for path in labels.glob(f"*{ending}")}
    names = {name for name in names if not name.startswith(".")}
    return [Entry(name, images / f"{name}{image_ending}", labels / f"{name}{ending}", name) for name in names]


def _from_csv(path: Path) -> Listing:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        return Listing(tuple(_entry(path.parent, row) for row in rows))
    except (OSError, ValueError, KeyError, csv.Error) as error:
        found = f"{path}: not a table of cases ({type(error).__name__}: {error})"
        raise ConfigError("data.source", found, "a CSV of image,label[,patient,fold]") from error


def _entry(folder: Path, case: Mapping[str, Any], channel: int = 0) -> Entry:
    for key in ("image", "label"):
        if not case[key]:  # what a row that is too short lacks is None
            raise ValueError(f"no {key} in the case {dict(case)}")
    image = folder / (case["image"][channel] if isinstance(case["image"], list) else case["image"])
    name = stem_of(image).removesuffix(f"_{channel:04d}")
    with_channel = image.with_name(f"{name}_{channel:04d}{suffix_of(image)}")
    if with_channel.exists() and not image.exists():  # nnU-Net's first version lists images without it
        image = with_channel
    patient, fold = case.get("patient"), case.get("fold")
    patient = name if patient in (None, "") else str(patient)
    return Entry(name, image, folder / case["label"], patient, None if fold in (None, "") else int(fold))


def sides(listed: Listing, wanted: LabelNames) -> tuple[dict[int, int], list[str]]:
    """What each of a data set's label numbers becomes of ours, and what is wrong with its names.

    Args:
        listed: the data set.
        wanted: the recipe's mapping; where it is silent, names that say lung (or lobe) and side are understood.

    Returns:
        Numbers to `labels` values (0 to background always; 255, and what is called ignore, to ignore unless it is
        named otherwise), and one line for every name that is not understood or is 0's and no background.
    """
    meaning = {name: value for value, names in wanted.by_value().items() for name in names}
    mapping, problems = {BACKGROUND: BACKGROUND}, []
    numbers = set(listed.names) | {int(name) for name in meaning if name.isdecimal()}
    for number in sorted(numbers):
        name = listed.names.get(number, "")
        value = meaning.get(name, meaning.get(str(number)))
        value = _understood(name) if value is None else value
        if number == BACKGROUND:
            if value not in (None, BACKGROUND):
                problems.append(
                    f"label 0 '{name}': named as something else, but 0 is always background; "
                    "give what it is a number of its own"
                )
        elif value is None:
            problems.append(
                f"label {number} '{name}': neither a lung with its side nor known to be outside the lungs; "
                "name it under data.labels as right, left, background or ignore"
            )
        else:
            mapping[number] = value
    mapping.setdefault(IGNORE, IGNORE)
    needed = [name for name, value in meaning.items() if value not in BESIDE]
    unknown = [name for name in needed if not name.isdecimal() and name not in listed.names.values()]
    problems += [f"data.labels names '{name}', which the data set does not have" for name in unknown]
    if not {RIGHT_LUNG.value, LEFT_LUNG.value} & set(mapping.values()):
        problems.append("no label is a lung with its side; name the labels under data.labels (right, left)")
    return mapping, problems


def _understood(name: str) -> int | None:
    """The lung that a name says beyond doubt, background for what is no lung beyond doubt, ignore; else None."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if plain in OUTSIDE:
        return BACKGROUND
    if plain == "ignore":  # nnU-Net's reserved name
        return IGNORE
    words = set(plain.split("_"))
    lungs = {"lung", "lungs", "lobe", *LOBES}
    if not words & lungs or words - lungs - {"upper", "middle", "lower"} - _SIDES.keys():
        return None
    named = {_SIDES[word].value for word in words & _SIDES.keys()}
    return named.pop() if len(named) == 1 else None


_SIDES = {"right": RIGHT_LUNG, "r": RIGHT_LUNG, "left": LEFT_LUNG, "l": LEFT_LUNG, **LOBES}
