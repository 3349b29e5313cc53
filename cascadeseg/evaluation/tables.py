"""Tables of scores: for a terminal, a spreadsheet (CSV) and a program (JSON)."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cascadeseg.evaluation.metrics import LungScores, Scores
from cascadeseg.labels import LUNGS


@dataclass(frozen=True)
class Column:
    """One measure of a table.

    Attributes:
        key: the attribute of `Scores`, and the name in CSV and JSON.
        title: the column's head on a terminal.
        digits: decimals on a terminal.
        worst: which end is bad: ``"low"``, ``"high"``, or ``"far"`` from zero; empty where none is.
    """

    key: str
    title: str
    digits: int
    worst: str = ""


COLUMNS = (
    Column("dice", "Dice", 4, "low"),
    Column("nsd_1mm", "NSD 1 mm", 4, "low"),
    Column("nsd_2mm", "NSD 2 mm", 4, "low"),
    Column("hd95_mm", "HD95 mm", 2, "high"),
    Column("assd_mm", "ASSD mm", 2, "high"),
    Column("volume_ml", "ml", 0),
    Column("reference_ml", "ref ml", 0),
    Column("volume_error_ml", "error ml", 1, "far"),
    Column("volume_error_percent", "error %", 2, "far"),
    Column("volume_absolute_error_ml", "absolute ml", 1, "high"),
    Column("volume_absolute_error_percent", "absolute %", 2, "high"),
)
"""Of errors in both directions the mean is near zero; that of the absolute errors is not."""
EACH, AS_ONE = "both", "both_as_one"
"""What the rows of a summary count: each lung by itself, or both of a scan as one mask."""


@dataclass(frozen=True)
class Case:
    """One scan's scores.

    Attributes:
        name: of the scan.
        lungs: its lungs' scores.
        as_one: those of both lungs as one mask, as many papers and challenges have them.
    """

    name: str
    lungs: tuple[LungScores, ...]
    as_one: Scores

    @property
    def rows(self) -> dict[str, Scores]:
        """All its scores by their names in a table."""
        return {lung.label.name: lung for lung in self.lungs} | {AS_ONE: self.as_one}


@dataclass(frozen=True)
class Unscored:
    """One scan without scores, which no mean counts.

    Attributes:
        name: of the scan.
        error: the line that says why.
        missing: whether there is no prediction; else there is one that could not be scored.
    """

    name: str
    error: str
    missing: bool = False


def as_text(cases: Sequence[Case], unscored: Sequence[Unscored] = ()) -> str:
    """A table for a terminal: a row a lung and one for both as one mask, and below them the means and worst values.

    Unless all cases were scored, the last line says how many.
    """
    rows = [["case", "lung", *(column.title for column in COLUMNS)]]
    for case in cases:
        rows += [[case.name, _side(name), *_texts(_values(scores))] for name, scores in case.rows.items()]
    summary = _summary(cases)
    rows += [[name, _side(lungs), *_texts(values)] for (name, lungs), values in summary.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    rule = "-" * max(len(line) for line in lines)
    lines.insert(len(lines) - len(summary), rule)
    lines.insert(1, rule)
    if unscored:
        missing = sum(case.missing for case in unscored)
        counts = f"{missing} without a prediction, {len(unscored) - missing} failed"
        lines.append(f"scored: {len(cases)} of {len(cases) + len(unscored)} cases; {counts}")
    return "\n".join(lines) + "\n"


def as_csv(cases: Sequence[Case], unscored: Sequence[Unscored] = ()) -> str:
    """A row a lung and one for both as one mask; one for each case without scores; then the mean and worst rows, whose
    first column says so.

    Empty cells are undefined; the last column is empty unless there are no scores, and says why.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", "lung", *(column.key for column in COLUMNS), "error"])
    for case in cases:
        for lungs, scores in case.rows.items():
            writer.writerow([case.name, lungs, *map(_cell, _values(scores)), ""])
    for other in unscored:
        writer.writerow([other.name, "", *("" for _ in COLUMNS), other.error])
    for (name, lungs), values in _summary(cases).items():
        writer.writerow([name, lungs, *map(_cell, values), ""])
    return text.getvalue()


def as_json(cases: Sequence[Case], unscored: Sequence[Unscored] = ()) -> str:
    """The same as an object; what is undefined or infinite is null (an overlap of 0 or 1 tells which)."""
    keys = [column.key for column in COLUMNS]
    content: dict[str, Any] = {
        "scored": len(cases),
        "total": len(cases) + len(unscored),
        "missing": [case.name for case in unscored if case.missing],
        "failed": [{"case": case.name, "error": case.error} for case in unscored if not case.missing],
        "cases": [
            {"case": case.name, **{name: _object(keys, _values(scores)) for name, scores in case.rows.items()}}
            for case in cases
        ],
    }
    for (name, lungs), values in _summary(cases).items():
        content.setdefault(name, {})[lungs] = _object(keys, values)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _summary(cases: Sequence[Case]) -> dict[tuple[str, str], list[float]]:
    """The mean and the worst of every column, by (row, lungs)."""
    counted: dict[str, list[Scores]] = {
        EACH: [lung for case in cases for lung in case.lungs],
        AS_ONE: [case.as_one for case in cases],
    }
    columns = {lungs: list(zip(*map(_values, rows), strict=True)) for lungs, rows in counted.items()}
    return {("mean", lungs): [_mean(values) for values in columns[lungs]] for lungs in counted} | {
        ("worst", lungs): [_worst(c, values) for c, values in zip(COLUMNS, columns[lungs], strict=True)]
        for lungs in counted
    }


def _side(lungs: str) -> str:
    """A row's lungs on a terminal."""
    sides = {lung.name: lung.side for lung in LUNGS} | {AS_ONE: "as one"}
    return sides.get(lungs, lungs)


def _mean(values: Sequence[float]) -> float:
    """The mean of what is defined."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _worst(column: Column, values: Sequence[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    if not defined or not column.worst:
        return math.nan
    if column.worst == "low":
        return min(defined)
    return max(defined, key=abs)


def _values(scores: Scores) -> list[float]:
    return [getattr(scores, column.key) for column in COLUMNS]


def _texts(values: Sequence[float]) -> list[str]:
    return [
        "-" if math.isnan(value) else f"{value:.{column.digits}f}"
        for column, value in zip(COLUMNS, values, strict=True)
    ]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    return [
        text.ljust(width) if i < 2 else text.rjust(width)
        for i, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _object(keys: Sequence[str], values: Sequence[float]) -> dict[str, float | None]:
    return {key: round(value, 6) if math.isfinite(value) else None for key, value in zip(keys, values, strict=True)}
