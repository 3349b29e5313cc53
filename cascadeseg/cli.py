"""The command line. Heavy libraries are imported inside the subcommands, so that ``--help`` answers at once.

A user's mistake is one line on stderr and exit code 2. Other exit codes: 0 done, 3 some scans of several failed
(the others are done), 4 a training stopped by its time limit, 130 interrupted. Results go to stdout, everything else to
stderr.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cascadeseg import batch
from cascadeseg._version import __version__
from cascadeseg.errors import CascadesegError, ConfigError, DeviceError, ModelError, OutputError, ScanError
from cascadeseg.terminal import complain, in_one_line, progress_bar, say, survive_odd_terminals

if TYPE_CHECKING:
    from cascadeseg.cascade.plan import Plan
    from cascadeseg.evaluation.report import Row
    from cascadeseg.evaluation.tables import Case, Unscored
    from cascadeseg.formats import Scan
    from cascadeseg.outputs import Found, Job

DONE, MISTAKE, SOME_FAILED, UNFINISHED, INTERRUPTED = 0, 2, 3, 4, 130
TRAIN_EXAMPLES = """examples, which need no data:
  cascadeseg train --stage 1 -o runs/one
  cascadeseg train --stage 2 -o runs/two --set locator=runs/one/model optimisation.steps=5000
  cascadeseg train --stage 2 -o runs/two --resume
"""
READABLE_HU = 1e7
"""Numbers from here on are told by their powers of ten."""
DEVICES = re.compile(r"auto|cpu|cuda|cuda:\d+|mps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    survive_odd_terminals()
    with batch.interrupted_once_by(signal.SIGTERM):
        return _ended(arguments)


def _ended(arguments: Sequence[str] | None) -> int:
    """The exit code of one command, whose mistakes are told."""
    verbose = "--verbose" in (sys.argv if arguments is None else arguments)
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SystemExit as stop:  # argparse after --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        line = in_one_line(error)
        if line is None:
            raise
        if verbose and not isinstance(error, CascadesegError):
            traceback.print_exc()
        complain(line)
        return MISTAKE


def program() -> NoReturn:
    """`main` as a program. `infer` begins without what only torch's compilers ask for, a fifth of torch's import, and
    ends at once: taking torch apart takes a third of a second, and all is written.
    """
    infers = sys.argv[1:2] == ["infer"]
    if infers:
        batch.import_when_used("torch._meta_registrations")
    code = main()
    if infers:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


# ---------------------------------------------------------------------------------------------------- options


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Complains of what it does not know itself; a command's parser would leave that to the program's."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        _, _, command = self.prog.partition(" ")
        raise ConfigError(command or "command line", message, remedy=f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cascadeseg",
        description="Left and right lung masks from any chest CT.",
        epilog="Exit codes: 0 done, 2 a mistake or bad input, 3 some scans of several failed, "
        "4 a training stopped by its time limit, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cascadeseg {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_add_infer, _add_demo, _add_check, _add_evaluate, _add_synth, _add_train, _add_export):
        add(commands)
    return parser


def _command(commands: Any, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    """A subcommand, named as its function is."""
    parser: argparse.ArgumentParser = commands.add_parser(
        run.__name__.removeprefix("_run_"), help=help, description=help, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.register("type", None, _not_empty)
    return parser


def _add_infer(commands: Any) -> None:
    parser = _command(commands, _run_infer, "Segment the lungs of CT scans.")
    add = parser.add_argument
    _add_scans(parser)
    add(
        "-o",
        "--output",
        metavar="OUT",
        help="the mask's file, or a folder for several; default: beside each scan, SCAN_lungs and the format's suffix",
    )
    _add_model(parser)
    _add_device(parser)
    _add_which(parser)
    add(
        "--format",
        choices=("nii.gz", "mha", "nrrd", "seg.nrrd", "dcm"),
        help="of the mask; default: mha or nrrd for such a scan, else nii.gz; seg.nrrd: a segmentation of 3D Slicer; "
        "dcm: a DICOM segmentation, of a DICOM series only",
    )
    add(
        "--report",
        type=_ends_in(".json", "--report", "the report's name", scans_before=True, may_be_left_out=True),
        nargs="?",
        const="",
        metavar="FILE",
        help="write a JSON report, beside the mask unless FILE is given",
    )
    add(
        "--preview",
        type=_ends_in(".png", "--preview", "the picture's name", scans_before=True, may_be_left_out=True),
        nargs="?",
        const="",
        metavar="FILE",
        help="write a PNG picture, beside the mask unless FILE is given",
    )
    add(
        "--csv",
        type=_ends_in(".csv", "--csv", "the table's name", scans_before=True),
        metavar="FILE",
        help="write a table of all scans, a row each: volumes, density, verdict, errors",
    )
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--force", action="store_true", help="overwrite results that are there")
    there.add_argument(
        "--resume",
        action="store_true",
        help="leave out scans whose results are all there, and make what others lack; masks that are there stay. A "
        "scan fails if its mask is of another one, by its grid (a DICOM segmentation: by its series), or was edited",
    )
    _add_limits(parser)
    _add_loudness(parser)


def _add_demo(commands: Any) -> None:
    parser = _command(commands, _run_demo, "Make a synthetic chest CT, segment it, and show how good the mask is.")
    add = parser.add_argument
    add("folder", nargs="?", default="cascadeseg-demo", metavar="DIR", help="default: ./cascadeseg-demo")
    _add_model(parser)
    _add_device(parser)
    add("--force", action="store_true", help="overwrite the files of an earlier demo")
    _add_loudness(parser)


def _add_check(commands: Any) -> None:
    what = "Say what is in a scan, what is odd about it, what would be repaired, and what memory `infer` takes."
    parser = _command(commands, _run_check, what)
    _add_scans(parser)
    _add_model(parser)
    _add_device(parser)
    _add_which(parser)


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, _run_evaluate, "Score masks against references: overlap, surface distances, volumes.")
    add = parser.add_argument
    add("prediction", metavar="PRED", help="a mask (also a DICOM segmentation), or a folder of masks")
    add("reference", metavar="REF", help="its reference, or a folder of references with the same names")
    for kind in ("json", "csv"):
        name = _ends_in(f".{kind}", f"--{kind}", "the table's name")
        add(f"--{kind}", type=name, metavar="FILE", help=f"write the table as {kind.upper()}")
    add("--force", action="store_true", help="overwrite tables that are there")


def _add_synth(commands: Any) -> None:
    parser = _command(commands, _run_synth, "Make synthetic chest CT scans with their lung labels.")
    add = parser.add_argument
    add("output", metavar="OUT", help="a folder; gets imagesTr, labelsTr, dataset.json and synthesis.json")
    add("--count", type=_positive(int), default=1, metavar="N", help="how many; default 1")
    add("--seed", type=int, default=0, metavar="S", help="of the first; the others count up; default 0")
    add(
        "--spacing",
        type=_positive(float),
        nargs="+",
        metavar="MM",
        help="voxel size, one number or three; default: as a scanner would have it",
    )
    add("--preset", default="default", metavar="NAME", help="which patients; an unknown name lists them all")
    add("--quiet", action="store_true", help="say nothing but errors")


def _add_train(commands: Any) -> None:
    parser = _command(commands, _run_train, "Train one stage of the cascade.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = TRAIN_EXAMPLES
    add = parser.add_argument
    add("--stage", type=int, choices=(1, 2), required=True, help="1, the locator, or 2, the refiner")
    add(
        "--data",
        metavar="SOURCE",
        help="'synthetic', a folder with dataset.json, a MONAI datalist or a CSV; default: the recipe's",
    )
    recipe = parser.add_mutually_exclusive_group()
    recipe.add_argument("--config", metavar="FILE", help="a TOML recipe; default: the stage's own")
    recipe.add_argument("--preset", metavar="NAME", help="another recipe of ours: smoke (minutes on a CPU), gpu")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change values of the recipe, section.key=value; the run's config.toml shows all keys",
    )
    add("--init", metavar="MODEL", help="start from these weights: 'shipped', or a model folder")
    add("-o", "--output", metavar="RUN", help="the run's folder; default: runs/stage1 or runs/stage2")
    add("--resume", action="store_true", help="go on with the run in that folder, by its own recipe")
    add("--time-limit", type=_positive(float), metavar="MIN", help="save and stop after so many minutes (exit code 4)")
    _add_device(parser)
    add("--devices", type=_positive(int), default=1, metavar="N", help="how many of them on each machine; default 1")
    add("--nodes", type=_positive(int), default=1, metavar="N", help="machines (torchrun or SLURM); default 1")
    add("--quiet", action="store_true", help="no progress")


def _add_export(commands: Any) -> None:
    parser = _command(commands, _run_export, "Write a model's networks as ONNX files, for programs without torch.")
    add = parser.add_argument
    add(
        "output",
        metavar="OUT",
        help="a folder; gets locator.onnx, refiner.onnx and cascade.json, which says how to use them",
    )
    _add_model(parser)
    add("--force", action="store_true", help="overwrite an export that is there")
    add("--quiet", action="store_true", help="say nothing but errors")


def _add_scans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scans",
        type=str,  # an empty one is told beside the others, which are segmented
        nargs="+",
        metavar="SCAN",
        help="a NIfTI, MHA/MHD or NRRD file, a DICOM series (folder, zip), or a folder of scans",
    )


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--series", metavar="UID", help="which DICOM series; default: the largest CT series")
    parser.add_argument("--volume", type=int, metavar="N", help="which volume of a 4D file, from 0")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="a trained model's folder; default: the one in the package")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto (default: cuda, else mps, else cpu), cpu, cuda, cuda:N or mps"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("speed and memory; none of these changes a mask by more than rounding")
    add = limits.add_argument
    for option, what in (("--max-memory", "of the whole program"), ("--max-vram", "of the GPU")):
        add(option, type=_positive(float), metavar="GB", help=f"memory {what}; default: what the scan needs")
    add(
        "--jobs",
        type=_positive(int),
        default=1,
        metavar="N",
        help="scans at once, each in a process with its share of processors and of the memory above; default 1",
    )


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--quiet", action="store_true", help="say nothing but warnings and errors")
    loudness.add_argument("--verbose", action="store_true", help="say more, and show where errors come from")


def _not_empty(text: str) -> str:
    """The argument type where no other is named: an empty name would be the current folder, or the shipped model."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; see what the shell put in")
    return text


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argument type: a number above zero."""

    def parse(text: str) -> float:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is no number above zero")
        return number

    parse.__name__ = kind.__name__  # argparse names the type in "invalid float value"
    return parse


def _ends_in(
    suffix: str, option: str, what: str, *, scans_before: bool = False, may_be_left_out: bool = False
) -> Callable[[str], str]:
    """An argument type: a file's name, empty where it may be left out. A scan or a mask taken for the option's value is
    not overwritten, and told as such before the scan is missed.
    """

    def parse(text: str) -> str:
        if Path(text).suffix.lower() != suffix and not (may_be_left_out and text == ""):
            remedy = f"give the scans before {option}" if scans_before else ""
            raise ConfigError(f"{option} {text or repr(text)}", what, f"a name that ends in {suffix}", remedy)
        return text

    return parse


# ------------------------------------------------------------------------------------------------------ infer


def _found(arguments: Sequence[str]) -> tuple[list[Found], list[CascadesegError]]:
    """The scans that the arguments mean, and what is wrong with the others; that is told, and what is passed over."""
    from cascadeseg import outputs

    found, failures, lines = outputs.find(arguments)
    for failure in failures:
        complain(str(failure))
    for line in lines:
        complain(line)
    return found, failures


def _run_infer(options: argparse.Namespace) -> int:
    from cascadeseg import outputs

    _check_device(options.device)
    found, failures = _found(options.scans)
    several = len(found) + len(failures) > 1
    table = _Table(Path(options.csv), options) if options.csv else None
    wishes = outputs.Wishes(
        output=options.output,
        suffix=f".{options.format}" if options.format else None,
        report=options.report,
        preview=options.preview,
        force=options.force,
        resume=options.resume,
        series=options.series,
        volume=options.volume,
        table=None if table is None else table.path,
        in_table=None if table is None else table.scans_done(),
    )
    with progress_bar("resume", options.quiet or not options.resume) as progress:  # DICOM headers take a second a scan
        jobs, refused = outputs.plan(found, wishes, several=several, progress=progress)
    if (done := len(found) - len(jobs) - len(refused)) and not options.quiet:
        say(f"{done} of {len(found)} scans are done already")
    if table is not None:
        table.begin([*(Path(failure.where) for failure in failures), *(scan.scan for scan in found)])
    failed = 0
    for row in _rows(failures, refused, jobs, options):
        failed += bool(row.get("error"))
        if table is not None:
            table.add(row)
    result = _batch_result(failed, len(found) + len(failures), several)
    if table is not None and table.unwritten is not None:
        complain(str(table.unwritten))
        return result or MISTAKE
    return result


def _rows(
    failures: Sequence[CascadesegError],
    refused: Mapping[Path, CascadesegError],
    jobs: Sequence[Job],
    options: argparse.Namespace,
) -> Iterator[Row]:
    """Of what is no scan, of scans that are refused, which is told, and then of each scan when it is done."""
    for failure in failures:
        yield {"scan": failure.where, "error": str(failure)}
    for scan, failure in refused.items():
        complain(str(failure))
        yield {"scan": str(scan), "error": str(failure)}
    yield from batch.segment_all(jobs, options)


class _Table:
    """The table of ``--csv``, whole on disk after every scan; with ``--resume`` the one that is there goes on.

    Several runs at a time may write one: each keeps its own rows and takes over those that the others have written.

    Attributes:
        unwritten: why what is on disk lacks rows; None where it does not. Another program may hold it for a while.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        from cascadeseg.evaluation.report import read_table
        from cascadeseg.outputs import followed

        if path.exists() and not (options.force or options.resume):
            raise OutputError(
                path, "exists", remedy="overwrite with --force, go on with --resume, or choose another name"
            )
        self.path = path
        self.written = self._state()
        rows = read_table(path) if options.resume and path.exists() else []
        scans = [Path(str(row["scan"])) for row in rows]
        self.rows = {followed(scan): row for scan, row in zip(scans, rows, strict=True)}
        relative = [scan for scan in scans if not scan.is_absolute()]
        if relative and not any(os.path.lexists(scan) for scan in relative):
            complain(
                f"{path}: none of its scans is found from here (such as {relative[0]}); where it was begun in another "
                "folder, resume it there, or each scan is done again and gets a second row"
            )
        self.anew = not options.resume
        self.own: set[Path] = set()
        self.unwritten: OutputError | None = None

    def scans_done(self) -> frozenset[Path]:
        return frozenset(scan for scan, row in self.rows.items() if not row["error"])

    def begin(self, scans: Iterable[Path]) -> None:
        """Rows to come have the order of these scans, in whatever order several processes are done with them.

        Those of an earlier run go, unless this one resumes it: they would speak of masks that are replaced.

        Raises:
            OutputError: they cannot.
        """
        from cascadeseg.outputs import followed

        if self.anew and self.path.exists():
            try:
                self.path.unlink()
            except OSError as problem:
                raise OutputError(self.path, f"cannot be replaced ({problem.strerror})") from problem
            self.written = None
        for scan in scans:
            self.rows.setdefault(followed(scan), {})

    def add(self, row: Row) -> None:
        from cascadeseg.atomic import replace_text
        from cascadeseg.evaluation.report import table_csv
        from cascadeseg.outputs import followed

        scan = followed(Path(str(row["scan"])))
        self.own.add(scan)
        self.rows[scan] = row
        if self._state() != self.written:
            self._take_over()
        try:
            replace_text(self.path, table_csv([row for row in self.rows.values() if row]))
        except OutputError as error:
            if self.unwritten is None:
                complain(f"{error}; the scans go on, and after each it is tried again")
            remedy = "rows are missing in it; run again with --resume"
            self.unwritten = OutputError(error.where, error.found, error.expected, remedy)
        else:
            self.unwritten = None
            self.written = self._state()

    def _state(self) -> tuple[int, int, int] | None:
        """What tells the table on disk from one that another run put in its place; None where there is none."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _take_over(self) -> None:
        """Rows of scans of a run at the same time, which writes the same table and has its own."""
        from cascadeseg.evaluation.report import read_table
        from cascadeseg.outputs import followed

        with suppress(OutputError):  # gone, or no table of ours any more
            for row in read_table(self.path):
                if (scan := followed(Path(str(row["scan"])))) not in self.own:
                    self.rows[scan] = row


def _batch_result(failed: int, total: int, several: bool) -> int:
    """The exit code; for several scans some of which failed, also a closing line."""
    if failed and several:
        complain(f"{failed} of {total} scans failed")
    if not failed:
        return DONE
    return SOME_FAILED if failed < total else MISTAKE


# ---------------------------------------------------------------------------------------- check, evaluate, synth


def _run_check(options: argparse.Namespace) -> int:
    _check_device(options.device)
    batch.set_up_libraries()
    found, failures = _found(options.scans)
    failed, total = len(failures), len(found) + len(failures)
    load = batch.Loader(options.model, options.device)
    for scan in found:
        try:
            read = batch.read(scan.scan, options)
            say(_examined(scan.scan, read, load().plan(read)))
        except (DeviceError, ModelError):  # of no scan
            raise
        except Exception as error:
            failed += 1
            complain(in_one_line(error, scan.scan) or batch.own_fault(scan.scan, error))
    return _batch_result(failed, total, total > 1)


def _examined(path: Path, scan: Scan, plan: Plan) -> str:
    """What the input doctor says about a scan, and what it takes to segment it."""
    lines = [
        f"{path}: usable{', but odd' if scan.warnings else ''}",
        f"  {batch.geometry(scan)}",
        f"  {scan.voxels.dtype.name} values, {_hu_range(scan)}",
        f"  infer takes {plan}",
        *(f"  odd: {warning}" for warning in scan.warnings),
    ]
    return "\n".join(lines)


def _hu_range(scan: Scan) -> str:
    """The lowest and highest HU in words, looked for slice by slice: no float copy of a whole scan."""
    import numpy as np

    from cascadeseg.geometry import canonical_view

    slices = np.moveaxis(canonical_view(scan.voxels, scan.grid), 2, 0)
    ends = [scan.slope * float(value) + scan.intercept for s in slices for value in _finite_ends(s)]
    if not ends:
        return "none of them a number"
    low, high = (f"{end:,.0f}" if abs(end) < READABLE_HU else f"{end:.3g}" for end in (min(ends), max(ends)))
    return f"{low} to {high} HU"


def _finite_ends(values: Any) -> list[float]:
    """The smallest and largest finite value, or nothing where there is none."""
    import numpy as np

    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return [finite.min(), finite.max()] if finite.size else []


def _run_evaluate(options: argparse.Namespace) -> int:
    from cascadeseg.atomic import replace_text
    from cascadeseg.evaluation import tables
    from cascadeseg.evaluation.cases import pair, without_reference

    _check_tables(options)
    pairs, unpaired, others = pair(Path(options.prediction), Path(options.reference))
    for line in without_reference(others, Path(options.reference)):
        complain(line)
    cases, unscored = _scored(pairs, unpaired, options.prediction)
    if cases:
        say(tables.as_text(cases, unscored).rstrip())
        for name, text in ((options.json, tables.as_json), (options.csv, tables.as_csv)):
            if name:
                replace_text(Path(name), text(cases, unscored))
    total = len(cases) + len(unscored)
    return _batch_result(len(unscored), total, total > 1)


def _check_tables(options: argparse.Namespace) -> None:
    """Refuses what is no place for the tables of ``evaluate``, before any work is done."""
    from cascadeseg.outputs import check_place

    for name in (options.json, options.csv):
        if name:
            if Path(name).exists() and not options.force:
                raise OutputError(name, "exists", remedy="overwrite with --force, or choose another name")
            check_place(Path(name))


def _scored(
    pairs: Sequence[tuple[Path, Path]], unpaired: Sequence[Path], predictions: str
) -> tuple[list[Case], list[Unscored]]:
    """The scores of all cases that have some, and the others, each of which is told."""
    from cascadeseg.evaluation.cases import case_name, score
    from cascadeseg.evaluation.tables import Unscored

    cases: list[Case] = []
    unscored = [
        Unscored(case_name(path), f"{path}: no prediction of this name in {predictions}", missing=True)
        for path in unpaired
    ]
    for missing in unscored:
        complain(missing.error)
    for prediction, reference in pairs:
        try:
            cases.append(score(prediction, reference))
        except ScanError as error:
            unscored.append(Unscored(case_name(reference), str(error)))
            complain(str(error))
    return cases, unscored


def _run_synth(options: argparse.Namespace) -> int:
    spacing = _three(options.spacing)
    from cascadeseg.outputs import make_folder
    from cascadeseg.synthesis import write_dataset

    patients = _preset(options.preset)
    output = Path(options.output)
    make_folder(output)
    with progress_bar(f"{options.count} scans", options.quiet) as progress:
        write_dataset(output, options.count, options.seed, spacing, patients, progress)
    if not options.quiet:
        noun = "scan with its" if options.count == 1 else "scans with their"
        say(f"{output}: {options.count} synthetic {noun} labels")
    return DONE


def _three(spacing: list[float] | None) -> tuple[float, float, float] | None:
    from cascadeseg.formats.placement import SPACING_RANGE_MM

    if spacing is None:
        return None
    if len(spacing) not in (1, 3):
        raise ConfigError("--spacing", f"{len(spacing)} numbers", "one or three, in mm")
    low, high = SPACING_RANGE_MM
    for mm in spacing:
        if not low <= mm <= high:
            raise ConfigError("--spacing", f"{mm:g} mm", f"{low:g} to {high:g} mm, as scans have that can be read")
    x, y, z = spacing * (3 // len(spacing))
    return x, y, z


def _preset(name: str) -> Any:
    from cascadeseg.synthesis import PRESETS

    if name not in PRESETS:
        raise ConfigError("--preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]


# ------------------------------------------------------------------------------------------------------- train


def _run_train(options: argparse.Namespace) -> int:
    _check_device(options.device)
    batch.limit_threads()
    output = Path(options.output or f"runs/stage{options.stage}")
    recipe = _recipe(options, output)
    from cascadeseg.outputs import check_folder
    from cascadeseg.training.loop import train
    from cascadeseg.training.processes import Processes, is_first

    check_folder(output)
    try:
        model = train(
            recipe,
            output,
            resume=options.resume,
            device=options.device,
            processes=Processes(options.devices, options.nodes),
            time_limit_s=60 * options.time_limit if options.time_limit else None,
            quiet=options.quiet,
        )
    except ExceptionGroup as several:
        for problem in several.exceptions:
            complain(str(problem))
        complain(f"{several.message}; nothing was started")
        return MISTAKE
    return _training_result(model, output, recipe, options) if is_first() else DONE


def _training_result(model: Path, output: Path, recipe: Any, options: argparse.Namespace) -> int:
    """The closing line, which says what the model folder holds and what comes next, and the exit code."""
    from cascadeseg.network import load_model

    if not (model / "model.json").exists():
        say(f"{output}: stopped before the first step; the same command begins anew")
        return UNFINISHED
    step = load_model(model).notes[f"stage{recipe.stage}_steps"]
    if step < recipe.optimisation.steps:
        command = shlex.join(["cascadeseg", "train", "--stage", str(recipe.stage), "-o", str(output), "--resume"])
        say(f"{model}: not trained yet, stopped after step {step} of {recipe.optimisation.steps}; go on with {command}")
        return UNFINISHED
    if recipe.stage == 1:
        given = {"--preset": options.preset, "--data": options.data, "--set": f"locator={model}"}
        command = shlex.join(word for pair in given.items() if pair[1] for word in pair)
        say(f"{model}: the trained locator; next is its refiner: cascadeseg train --stage 2 {command}")
    else:
        kind = "model" if recipe.locator else "refiner, behind the shipped locator"
        command = shlex.join(["cascadeseg", "infer", "SCAN", "--model", str(model)])
        say(f"{model}: the trained {kind}; use it with {command}")
    return DONE


def _recipe(options: argparse.Namespace, output: Path) -> Any:
    """The recipe with the overrides of the command line, ``--data`` and ``--init`` first.

    It is the one that was asked for; else, of a run to go on with, its own; else the stage's.
    """
    import json

    from cascadeseg import config
    from cascadeseg.training.config import TrainingConfig

    asked = {"data.source": options.data, "init": options.init}
    overrides = [f"{key}={json.dumps(value)}" for key, value in asked.items() if value]
    begun = output / "config.toml"
    if options.config:
        path = Path(options.config)
    elif options.resume and not options.preset and begun.exists():
        path = begun
    else:
        path = _shipped_recipe(options.stage, options.preset)
    recipe = config.load(path, TrainingConfig, [*overrides, *options.set])
    if recipe.stage != options.stage:
        raise ConfigError(path, f"a recipe for stage {recipe.stage}", f"one for --stage {options.stage}")
    return recipe


def _shipped_recipe(stage: int, preset: str | None = None) -> Path:
    """One of the stage's recipes: in the package, or beside it in a clone."""
    package = Path(__file__).parent
    folders = [folder / "configs" for folder in (package, package.parent)]
    name = f"stage{stage}-{preset}.toml" if preset else f"stage{stage}.toml"
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    known = {path.stem.partition("-")[2] for folder in folders for path in folder.glob(f"stage{stage}-*.toml")}
    if preset and known:
        raise ConfigError("--preset", preset, f"one of {', '.join(sorted(known))}")
    raise ConfigError("train", "no recipe was found", remedy="give one with --config FILE")


# -------------------------------------------------------------------------------------------------------- demo


def _run_demo(options: argparse.Namespace) -> int:
    from cascadeseg.atomic import replace_text
    from cascadeseg.demo import DemoFiles, make_scan
    from cascadeseg.evaluation import tables
    from cascadeseg.evaluation.cases import score
    from cascadeseg.formats import read_scan
    from cascadeseg.outputs import check_place, make_folder

    _check_device(options.device)
    batch.set_up_libraries()
    files = DemoFiles(Path(options.folder))
    files.refuse_overwriting(options.force)
    make_folder(files.folder)
    check_place(files.table)
    load = batch.Loader(options.model, options.device)
    segmenter = load()  # a missing model is told before a scan is made
    seconds: dict[str, float] = {}
    with progress_bar("making a synthetic chest CT", options.quiet) as progress:
        make_scan(files, progress)
    with batch.timed(seconds, "read"):
        scan = read_scan(files.scan)
    with progress_bar("segmenting it", options.quiet) as progress:
        result = segmenter.segment(scan, progress=progress)
    batch.write_results(files.job, result, seconds)
    for warning in result.warnings:
        complain(f"{files.scan}: warning: {warning}")
    case = score(files.job.labels, files.reference)
    replace_text(files.table, tables.as_json([case]))
    if not options.quiet:
        say(batch.summary(files.job, result, seconds))
        if options.verbose:
            say(batch.details(files.job, result))
        say("")
        say(tables.as_text([case]))
        say("\n".join(f"{path}  {what}" for path, what in files.explained()))
    return DONE


# ------------------------------------------------------------------------------------------------------ export


def _run_export(options: argparse.Namespace) -> int:
    from cascadeseg.outputs import check_folder, check_place, make_folder

    folder = Path(options.output)
    batch.set_up_libraries()
    from cascadeseg.cascade.export import DESCRIPTION, FILES, exported, write_export
    from cascadeseg.network import load_model

    check_folder(folder)
    places = [folder / name for name in FILES]
    if (there := [place for place in places if place.exists()]) and not options.force:
        raise OutputError(there[0], "exists", remedy="overwrite with --force, or choose another folder")
    for place in places if folder.is_dir() else ():
        check_place(place)
    model = load_model(options.model)
    with progress_bar("exporting", options.quiet) as progress:
        exports = exported(model, progress)
    make_folder(folder)
    write_export(exports, model, folder)
    if not options.quiet:
        for one in exports:
            say(f"{folder / one.file}: {len(one.content) / 1e6:.3g} MB, as torch to {one.largest_difference:.1g}")
        say(f"{folder / DESCRIPTION}: what a program has to know of them")
    return DONE


def _check_device(name: str) -> None:
    """Refuses what cannot be a device's name; whether it is there is found out when torch is loaded."""
    if not DEVICES.fullmatch(name):
        raise DeviceError("--device", name, "auto, cpu, cuda, cuda:N or mps")
