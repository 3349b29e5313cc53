"""Tables of scores: rows, means, worst values, and what is undefined."""

from __future__ import annotations

import csv
import io
import json
import math

from cascadeseg.evaluation.metrics import LungScores, Scores
from cascadeseg.evaluation.tables import Case, Unscored, as_csv, as_json, as_text
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG

GOOD = LungScores(0.98, 0.95, 0.99, 1.5, 0.4, 2000, 2100, label=RIGHT_LUNG)
POOR = LungScores(0.5, 0.25, 0.33, 40, 12, 1500, 1000, label=LEFT_LUNG)
ABSENT = LungScores(1, 1, 1, math.nan, math.nan, 0, 0, label=LEFT_LUNG)
MISSED = LungScores(0, 0, 0, math.inf, math.inf, 0, 900, label=LEFT_LUNG)
AS_ONE = Scores(0.75, 0.65, 0.7, 30, 5, 3500, 3100)
CASES = [Case("a", (GOOD, POOR), AS_ONE), Case("scan with a long name", (GOOD, ABSENT), GOOD)]
UNSCORED = [Unscored("m", "m.nii: no prediction", missing=True), Unscored("f", "f.nii: cut off, after 3 bytes")]


def words(line: str) -> str:
    return " ".join(line.split())


def test_text_has_a_row_a_lung_and_a_summary() -> None:
    lines = as_text(CASES).splitlines()
    head = "case lung Dice NSD 1 mm NSD 2 mm HD95 mm ASSD mm ml ref ml error ml error % absolute ml absolute %"
    assert words(lines[0]) == head
    assert words(lines[2]) == "a right 0.9800 0.9500 0.9900 1.50 0.40 2000 2100 -100.0 -4.76 100.0 4.76"
    assert words(lines[4]) == "a as one 0.7500 0.6500 0.7000 30.00 5.00 3500 3100 400.0 12.90 400.0 12.90"
    assert words(lines[6]) == "scan with a long name left 1.0000 1.0000 1.0000 - - 0 0 0.0 - 0.0 -"
    assert words(lines[-4]).startswith(f"mean both {(0.98 + 0.5 + 0.98 + 1) / 4:.4f}")
    assert words(lines[-3]).startswith(f"mean as one {(0.75 + 0.98) / 2:.4f}")
    assert words(lines[-2]) == "worst both 0.5000 0.2500 0.3300 40.00 12.00 - - 500.0 50.00 500.0 50.00"
    assert words(lines[-1]) == "worst as one 0.7500 0.6500 0.7000 30.00 5.00 - - 400.0 12.90 400.0 12.90"


def test_csv_is_read_by_a_spreadsheet() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(CASES))))
    assert [row["case"] for row in rows] == ["a"] * 3 + ["scan with a long name"] * 3 + ["mean"] * 2 + ["worst"] * 2
    lungs = ["lung_right", "lung_left", "both_as_one"]
    assert [row["lung"] for row in rows] == lungs * 2 + ["both", "both_as_one"] * 2
    assert (rows[2]["dice"], rows[6]["dice"], rows[7]["dice"]) == ("0.75", "0.865", "0.865")
    assert float(rows[1]["hd95_mm"]) == 40
    assert rows[4]["hd95_mm"] == ""
    assert as_csv([Case("a", (MISSED,), MISSED)]).splitlines()[1].split(",")[5] == "inf"


def test_json_has_no_nan() -> None:
    content = json.loads(as_json([*CASES, Case("c", (GOOD, MISSED), AS_ONE)]), parse_constant=lambda _: 1 / 0)
    assert content["cases"][0]["lung_left"]["dice"] == 0.5
    assert content["cases"][1]["lung_left"]["hd95_mm"] is None
    assert content["worst"]["both"]["dice"] == 0
    assert content["worst"]["both_as_one"]["dice"] == content["cases"][0]["both_as_one"]["dice"] == 0.75
    assert content["worst"]["both"]["hd95_mm"] is None, "infinite"
    assert content["mean"]["both"]["nsd_2mm"] < 1


def test_a_mean_over_nothing_defined_is_undefined() -> None:
    assert json.loads(as_json([Case("a", (ABSENT,), ABSENT)]))["mean"]["both"]["assd_mm"] is None


def test_errors_of_both_directions_do_not_cancel() -> None:
    larger = LungScores(0.98, 0.95, 0.99, 1.5, 0.4, 2100, 2000, label=LEFT_LUNG)
    cases = [Case("a", (GOOD, larger), GOOD)]
    content = json.loads(as_json(cases))
    errors = [content["cases"][0][lung]["volume_error_ml"] for lung in ("lung_right", "lung_left")]
    assert errors == [-100, 100]
    mean = content["mean"]["both"]
    assert (mean["volume_error_ml"], mean["volume_absolute_error_ml"]) == (0, 100)
    row = list(csv.DictReader(io.StringIO(as_csv(cases))))[3]
    assert (row["case"], row["volume_absolute_error_ml"], row["volume_absolute_error_percent"]) == (
        "mean",
        "100",
        "4.88095",
    )
    lines = as_text(cases).splitlines()
    assert words(lines[0]).endswith("absolute ml absolute %")
    assert words(lines[-4]).endswith(" 100.0 4.88")


def test_cases_without_scores_are_told_in_every_table() -> None:
    assert words(as_text(CASES, UNSCORED).splitlines()[-1]) == "scored: 2 of 4 cases; 1 without a prediction, 1 failed"
    rows = list(csv.DictReader(io.StringIO(as_csv(CASES, UNSCORED))))
    assert [row["case"] for row in rows][6:] == ["m", "f", "mean", "mean", "worst", "worst"]
    assert [row["error"] for row in rows] == [""] * 6 + [case.error for case in UNSCORED] + [""] * 4
    assert all(None not in row and None not in row.values() for row in rows), "as many cells in every row"
    content = json.loads(as_json(CASES, UNSCORED))
    assert (content["scored"], content["total"], content["missing"]) == (2, 4, ["m"])
    assert content["failed"] == [{"case": "f", "error": "f.nii: cut off, after 3 bytes"}]
    assert len(content["cases"]) == 2


def test_where_all_were_scored_the_tables_say_so() -> None:
    assert "scored" not in as_text(CASES)
    content = json.loads(as_json(CASES))
    assert [content[key] for key in ("scored", "total", "missing", "failed")] == [2, 2, [], []]
