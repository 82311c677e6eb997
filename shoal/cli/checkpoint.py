"""`shoal checkpoint …`: the commands that list, describe, verify, compare, export, import and remove checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.app import App
from shoal.cli.arguments import BasePath, Debug
from shoal.errors import UserError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.checkpoint.inspect import Difference, TensorDifference

app = App(help="List, verify, compare, export, import or remove checkpoints.", no_args_is_help=True)

StepDir = Annotated[
    Path, typer.Argument(readable=False, metavar="STEP_DIR", help="A folder such as RUN/checkpoints/step_00000100.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.")]
MAX_LISTED = 10


@app.command()
def ls(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints of a run. Only manifests are checked; `verify` reads the tensors, too."""
    from shoal.checkpoint.inspect import list_checkpoints

    rows = list_checkpoints(run)
    base = {file: problem for row in rows for file, problem in row["base"].items()}
    problems = (row["problem"] for row in rows if not row["good"])
    table = _table(("step", "when", "size", "written by", "metrics", ""), map(_table_row, rows))
    _answer(as_json, rows, table, *problems, *starmap(_describe_base_file, base.items()))


@app.command()
def show(step_dir: StepDir, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what a checkpoint holds: tensors, optimizer, layout, versions, config, position in the data."""
    from shoal.checkpoint import inspect

    shown = inspect.show(inspect.open_step_folder(step_dir))
    _answer(as_json, shown, *_describe(shown))


@app.command()
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="STEP_DIR_OR_RUN", help="A step folder, or a run folder for all its checkpoints."
        ),
    ],
    base: BasePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read every byte of a checkpoint and compare its digests; exit 1 if anything is damaged."""
    from shoal.checkpoint import inspect

    rows = []
    for row in inspect.verify(path, base):
        rows.append(row)
        state = "good" if row["good"] else f"DAMAGED: {row['problem']}"
        missing = f"; its frozen base was not verified: {row['missing']}" if row["missing"] else ""
        if not as_json:
            _print(f"{row['path']}  {state}{missing}")
    _answer(as_json, rows)
    raise typer.Exit(0 if all(row["good"] for row in rows) else 1)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(readable=False, metavar="A", help="A step folder.")],
    b: Annotated[
        Path,
        typer.Argument(readable=False, metavar="B", help="Another step folder; it may be written by another layout."),
    ],
    rtol: Annotated[
        float | None, typer.Option(help="Count differences up to this fraction of a tensor's largest value as equal.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", metavar="", help="List every tensor that differs, optimizer slots too.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints, to the bit unless --rtol is given; exit 1 if they differ.

    Weights, optimizer state and the position in the data are compared, whatever layouts wrote them.
    """
    from shoal.checkpoint import inspect

    if rtol is not None and not 0 <= rtol < float("inf"):
        raise UserError(f"--rtol {rtol}: it must be 0 or more; give a number such as 1e-5")
    difference = inspect.diff(inspect.open_step_folder(a), inspect.open_step_folder(b), rtol)
    lines = _describe_difference(difference, a, b, rtol, everything)
    _answer(as_json, {"equal": difference.equal, **asdict(difference)}, *lines)
    raise typer.Exit(0 if difference.equal else 1)


@app.command()
def export(
    step_dir: StepDir,
    out: Annotated[Path, typer.Argument(readable=False, metavar="OUT", help="The folder (hf) or file to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="hf: a folder for transformers; peft: an adapter; safetensors: one file; torch: a state dict."
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; without it, as stored.")] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace an earlier export.")] = False,
    base: BasePath = None,
    adapter_only: Annotated[
        bool,
        typer.Option("--adapter-only", metavar="", help="Leave out the frozen weights that the checkpoint refers to."),
    ] = False,
    average: Annotated[
        str | None,
        typer.Option("--average", metavar="CALLBACK", help="Export the average that a callback keeps, such as ema."),
    ] = None,
    merge_into: Annotated[
        str | None,
        typer.Option(
            "--merge-into", metavar="WEIGHTS", help="With hf: add adapters to the original or the dequantised weights."
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REPOSITORY", help="Then upload the folder to the Hugging Face Hub."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the weights for other programs, then read them again and compare them with the checkpoint."""
    from shoal.checkpoint.export import export as write
    from shoal.training.push import check_push, push_folder

    if push is not None:
        check_push(push, to)
    done = write(step_dir, out, to, dtype, force, base, adapter_only, average, merge_into)
    if push is not None:
        done["notes"] = (*done["notes"], f"uploaded to {push_folder(step_dir, out, push)}")
    size = f"{done['tensors']} tensors, {_size(done['nbytes'])}, {done['dtype']}"
    _answer(as_json, done, f"{out}  {size}; read again: equal", *done["notes"])


@app.command("import")
def import_(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The step folder to write.")],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    trust: Annotated[
        Path | None,
        typer.Option("--trust", metavar="FOLDER", help="A folder that DeepSpeed saved. Opening it may run code."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint that DeepSpeed saved (ZeRO 1 to 3). It is a pickle: give only a folder that you trust."""
    from shoal.checkpoint.deepspeed_import import import_deepspeed

    if trust is None or more:
        raise UserError(
            "DeepSpeed's files are pickles, and opening a pickle can run code; name the folder as trusted: shoal "
            "checkpoint import --trust FOLDER OUT"
        )
    done = import_deepspeed(trust, out)
    slots = f", optimizer {', '.join(done['slots'])}" if done["slots"] else ""
    layout = f"step {done['step']} of ZeRO {done['stage']} on {done['ranks']} ranks"
    advice = f"start a run from the weights with checkpoint.init_from={out}, or load everything with Loop.load"
    _answer(as_json, done, f"{out}  {done['tensors']} tensors{slots}, {layout}", advice)


@app.command()
def rm(
    step_dir: StepDir,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Remove it even if it is the newest good one of its run.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove a checkpoint without asking; the newest good one of a run only with --force."""
    from shoal.checkpoint.inspect import remove

    remove(step_dir, force)
    _answer(as_json, {"removed": str(step_dir)}, f"removed {step_dir}")


def _table_row(row: dict[str, Any]) -> list[str]:
    """Returns the cells of one checkpoint in the table of `ls`."""
    numbers = ((name, value) for name, value in row["metrics"].items() if isinstance(value, float | int))
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in numbers if abs(value) <= sys.float_info.max)
    step, state = "?" if row["step"] is None else str(row["step"]), "good" if row["good"] else "damaged"
    return [step, row["when"], _size(row["bytes"]), row["layout"] or "?", metrics, state]


def _describe(shown: dict[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables of `show`."""
    yield f"checkpoint  {shown['path']}"
    for name in ("position", "layout", "metrics", "versions"):
        if shown[name]:
            yield f"{name:<10}  {', '.join(f'{key} {_plain(value)}' for key, value in shown[name].items())}"
    yield from (f"{key} = {_plain(value)}" for key, value in shown["config"].items())
    tensors, frozen, slots = shown["tensors"], shown["base_tensors"], shown["slots"]
    rows = ([t["name"], " × ".join(map(str, t["shape"])) or "1", t["dtype"], _size(t["bytes"])] for t in tensors)
    yield from ("", _table(("tensor", "shape", "dtype", "size"), rows))
    yield f"{len(tensors)} tensors, {_size(sum(row['bytes'] for row in tensors))}"
    if frozen:
        yield f"and {len(frozen)} frozen tensors, {_size(sum(row['bytes'] for row in frozen))}, which it only refers to"
    yield from starmap(_describe_base_file, shown["base"].items())
    if slots:
        rows = ([slot["name"], str(slot["tensors"]), _size(slot["bytes"])] for slot in slots)
        yield from ("", _table(("optimizer slot", "tensors", "size"), rows))


def _describe_base_file(file: str, problem: str | None) -> str:
    """Returns a line about a file of the frozen base, and why it cannot be used, if so."""
    if problem:
        return f"refers to frozen weights, but {problem}: only the adapter can be used"
    return f"refers to frozen weights in {file}"


def _describe_difference(
    difference: Difference, a: Path, b: Path, rtol: float | None, everything: bool
) -> Iterator[str | Table]:
    """Yields the lines and tables of `diff`."""
    if difference.equal:
        how = "to the bit" if rtol is None else f"within {rtol:g}"
        yield f"equal {how}: {difference.compared} tensors and the position"
    yield from (f"{key}: {in_a} in {a}, {in_b} in {b}" for key, (in_a, in_b) in difference.position.items())
    for where, names in ((a, difference.only_in_a), (b, difference.only_in_b)):
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            yield f"only in {where}: {', '.join(names[:MAX_LISTED])}{more}"
    if difference.tensors:
        listed = [tensor for tensor in difference.tensors if everything or tensor.slot is None]
        shown, moments = listed if everything else listed[:MAX_LISTED], difference.tensors[len(listed) :]
        rows = [(t.name, t.problem, "") if t.problem else (t.name, *_largest([t])) for t in shown]
        if len(listed) > len(shown):
            rows.append((f"and {len(listed) - len(shown)} more", "", ""))
        for slot in dict.fromkeys(tensor.slot for tensor in moments):
            tensors = [tensor for tensor in moments if tensor.slot == slot]
            problems = sum(bool(tensor.problem) for tensor in tensors)
            unlike = f", {problems} of them cannot be compared" if problems else ""
            rows.append((f"optimizer/{slot}: {len(tensors)} tensors{unlike}", *_largest(tensors)))
        yield _table(
            (f"{len(difference.tensors)} of {difference.compared} tensors differ", "largest", "relative"), rows
        )
        if len(listed) > len(shown) or moments:
            yield "give --all to list every tensor"


def _largest(tensors: list[TensorDifference]) -> tuple[str, str]:
    """Returns the largest absolute and the largest relative difference of these tensors."""
    largest, relative = (max(getattr(tensor, key) or 0 for tensor in tensors) for key in ("max_abs", "relative"))
    return f"{largest:.3g}", f"{relative:.3g}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Returns a plain table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def _answer(as_json: bool, data: Any, *lines: str | Table) -> None:
    """Prints the data as JSON if `as_json` is set, and else the lines and tables."""
    if as_json:
        print(json.dumps(data, indent=1, default=str))
    for line in () if as_json else lines:
        _print(line)


def _print(line: str | Table) -> None:
    """Prints a line or a table. A table is as wide as the terminal, or 400 characters in a file."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 400
    console = Console(file=sys.stdout, highlight=False, markup=False, width=wide, soft_wrap=isinstance(line, str))
    console.print(printable(line) if isinstance(line, str) else line)


def _plain(value: Any) -> str:
    """Returns a value as text, sections and lists as JSON."""
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)


def _size(num_bytes: int) -> str:
    """Returns a number of bytes with a unit, such as 1.5 MB."""
    thousands = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**thousands:.1f} {' kMGT'[thousands]}B" if thousands else f"{num_bytes} B"
