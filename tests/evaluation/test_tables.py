"""Tables of scores: rows, means, worst values, and what is undefined."""

from __future__ import annotations

import csv
import io
import json
import math

from cascadeseg.evaluation.metrics import LungScores
from cascadeseg.evaluation.tables import Case, as_csv, as_json, as_text
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG

GOOD = LungScores(RIGHT_LUNG, 0.98, 0.95, 0.99, 1.5, 0.4, 2000, 2100)
POOR = LungScores(LEFT_LUNG, 0.5, 0.25, 0.33, 40, 12, 1500, 1000)
ABSENT = LungScores(LEFT_LUNG, 1, 1, 1, math.nan, math.nan, 0, 0)
MISSED = LungScores(LEFT_LUNG, 0, 0, 0, math.inf, math.inf, 0, 900)
CASES = [Case("a", (GOOD, POOR)), Case("scan with a long name", (GOOD, ABSENT))]


def words(line: str) -> str:
    return " ".join(line.split())


def test_text_has_a_row_a_lung_and_a_summary() -> None:
    lines = as_text(CASES).splitlines()
    head = "case lung Dice NSD 1 mm NSD 2 mm HD95 mm ASSD mm ml ref ml error ml error %"
    assert words(lines[0]) == head
    assert words(lines[2]) == "a right 0.9800 0.9500 0.9900 1.50 0.40 2000 2100 -100.0 -4.76"
    assert words(lines[5]) == "scan with a long name left 1.0000 1.0000 1.0000 - - 0 0 0.0 -"
    assert words(lines[-2]).startswith(f"mean both {(0.98 + 0.5 + 0.98 + 1) / 4:.4f}")
    assert words(lines[-1]) == "worst both 0.5000 0.2500 0.3300 40.00 12.00 - - 500.0 50.00"


def test_csv_is_read_by_a_spreadsheet() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(CASES))))
    assert [row["case"] for row in rows] == ["a", "a"] + ["scan with a long name"] * 2 + ["mean", "worst"]
    assert rows[0]["lung"] == "lung_right"
    assert float(rows[1]["hd95_mm"]) == 40
    assert rows[3]["hd95_mm"] == ""
    assert as_csv([Case("a", (MISSED,))]).splitlines()[1].split(",")[5] == "inf"


def test_json_has_no_nan() -> None:
    content = json.loads(as_json([*CASES, Case("c", (GOOD, MISSED))]), parse_constant=lambda _: 1 / 0)
    assert content["cases"][0]["lung_left"]["dice"] == 0.5
    assert content["cases"][1]["lung_left"]["hd95_mm"] is None
    assert content["worst"]["both"]["dice"] == 0
    assert content["worst"]["both"]["hd95_mm"] is None, "infinite"
    assert content["mean"]["both"]["nsd_2mm"] < 1


def test_a_mean_over_nothing_defined_is_undefined() -> None:
    assert json.loads(as_json([Case("a", (ABSENT,))]))["mean"]["both"]["assd_mm"] is None
