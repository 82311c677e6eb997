"""`shoal checkpoint …`: looks at checkpoints, compares, exports and removes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.checkpoint.inspect import Difference, Differing

app = typer.Typer(help="Look at checkpoints, compare, export or remove them.", no_args_is_help=True)

StepDir = Annotated[
    Path, typer.Argument(readable=False, metavar="STEP_DIR", help="A folder such as RUN/checkpoints/step_00000100.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
BasePath = Annotated[
    Path | None,
    typer.Option("--base", metavar="PATH", help="Where the frozen weights are that it refers to, if they were moved."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
WORST = 10


@app.command()
def ls(
    run: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List a run's checkpoints. Manifests are checked, tensors are not: that is `verify`."""
    from shoal.checkpoint.inspect import list_checkpoints

    rows = list_checkpoints(run)
    base = {file: problem for row in rows for file, problem in row["base"].items()}
    problems = (row["problem"] for row in rows if not row["good"])
    table = _table(("step", "when", "size", "written by", "worth", ""), map(_row_of, rows))
    _answer(as_json, rows, table, *problems, *starmap(_say_base, base.items()))


@app.command()
def show(step_dir: StepDir, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what a checkpoint holds: tensors, optimizer, layout, versions, config, position."""
    from shoal.checkpoint import inspect

    shown = inspect.show(inspect.open_step(step_dir))
    _answer(as_json, shown, *_describe(shown))


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(readable=False, metavar="STEP_DIR_OR_RUN", help="A step folder, or a run for all of its.")
    ],
    base: BasePath = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read every byte and compare every digest; exit 1 if anything is damaged."""
    from shoal.checkpoint import inspect

    rows = []
    for row in inspect.verify(path, base):
        rows.append(row)
        state = "good" if row["good"] else f"DAMAGED: {row['problem']}"
        missing = f"; not looked at: its base {row['missing']}" if row["missing"] else ""
        if not as_json:
            _print(f"{row['path']}  {state}{missing}")
    _answer(as_json, rows)
    if not all(row["good"] for row in rows):
        raise typer.Exit(1)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(readable=False, metavar="A", help="A step folder.")],
    b: Annotated[Path, typer.Argument(readable=False, metavar="B", help="Another, written by any layout.")],
    rtol: Annotated[
        float | None, typer.Option(help="Differences up to this share of a tensor's largest value count as equal.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every tensor that differs, and every moment by itself.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare weights, moments and position, to the bit unless --rtol is given; exit 1 if they differ."""
    from shoal.checkpoint import inspect
    from shoal.errors import UserError

    if rtol is not None and not 0 <= rtol < float("inf"):
        raise UserError(f"--rtol {rtol} should be 0 or more, such as 1e-5")
    difference = inspect.diff(inspect.open_step(a), inspect.open_step(b), rtol)
    data = {"equal": difference.equal, **asdict(difference)}
    _answer(as_json, data, *_describe_difference(difference, a, b, rtol, everything))
    if not difference.equal:
        raise typer.Exit(1)


@app.command()
def export(
    step_dir: StepDir,
    out: Annotated[Path, typer.Argument(readable=False, metavar="OUT", help="The folder (hf) or file to write.")],
    to: Annotated[
        str,
        typer.Option("--to", help="hf: a folder for transformers; safetensors: one file; torch: a state dict."),
    ],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as stored unless given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    base: BasePath = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Leave out frozen weights that the checkpoint only refers to.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the weights for other programs; they are opened again and compared before it is done."""
    from shoal.checkpoint.export import export as write

    done = write(step_dir, out, to, dtype, force, base, adapter_only)
    size = f"{done['tensors']} tensors, {_size(done['nbytes'])}, {done['dtype']}"
    _answer(as_json, done, f"{out}  {size}; opened again and compared: equal", *done["notes"])


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
    """Make a checkpoint of DeepSpeed's, ZeRO 1 to 3, into one of shoal's. Its files are pickles, so name a folder you
    trust."""
    from shoal.checkpoint.deepspeed_import import import_deepspeed
    from shoal.errors import UserError

    if trust is None or more:
        raise UserError(
            "DeepSpeed's files are pickles, and opening one may run what is in it; name the folder as trusted: shoal "
            "checkpoint import --trust FOLDER OUT"
        )
    done = import_deepspeed(trust, out)
    slots = f", optimizer {', '.join(done['slots'])}" if done["slots"] else ""
    layout = f"of step {done['step']} of ZeRO {done['stage']} on {done['ranks']} ranks"
    advice = f"take the weights by checkpoint.init_from={out}, or all of it by strategy.load_checkpoint"
    _answer(as_json, done, f"{out}  {done['tensors']} tensors{slots}, {layout}", advice)


@app.command()
def rm(
    step_dir: StepDir,
    force: Annotated[bool, typer.Option("--force", help="Also the newest good one of its run.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove a checkpoint, without asking; the newest good one of a run only with --force."""
    from shoal.checkpoint.inspect import remove

    remove(step_dir, force)
    _answer(as_json, {"removed": str(step_dir)}, f"removed {step_dir}")


def _row_of(row: dict[str, Any]) -> list[str]:
    numbers = ((name, value) for name, value in row["metrics"].items() if isinstance(value, float | int))
    worth = ", ".join(f"{name} {value:.4g}" for name, value in numbers)
    step, state = "?" if row["step"] is None else str(row["step"]), "good" if row["good"] else "damaged"
    return [step, row["when"], _size(row["bytes"]), row["layout"] or "?", worth, state]


def _describe(shown: dict[str, Any]) -> Iterator[str | Table]:
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
        yield f"and {len(frozen)} frozen, {_size(sum(row['bytes'] for row in frozen))}, which are not in it"
    yield from starmap(_say_base, shown["base"].items())
    if slots:
        rows = ([slot["name"], str(slot["tensors"]), _size(slot["bytes"])] for slot in slots)
        yield from ("", _table(("optimizer slot", "tensors", "size"), rows))


def _say_base(file: str, problem: str | None) -> str:
    state = f", but {problem}: the adapter alone can be opened" if problem else f" in {file}"
    return f"refers to frozen weights{state}"


def _describe_difference(
    difference: Difference, a: Path, b: Path, rtol: float | None, everything: bool
) -> Iterator[str | Table]:
    if difference.equal:
        how = "to the bit" if rtol is None else f"within {rtol:g}"
        yield f"equal {how}: {difference.compared} tensors and the position"
    yield from (f"{key}: {here} in {a}, {there} in {b}" for key, (here, there) in difference.position.items())
    for where, names in ((a, difference.only_in_a), (b, difference.only_in_b)):
        if names:
            more = f" and {len(names) - WORST} more" if len(names) > WORST else ""
            yield f"only in {where}: {', '.join(names[:WORST])}{more}"
    if difference.tensors:
        single = [tensor for tensor in difference.tensors if everything or tensor.slot is None]
        shown, moments = single if everything else single[:WORST], difference.tensors[len(single) :]
        rows = [(t.name, t.problem, "") if t.problem else (t.name, *_worst([t])) for t in shown]
        if len(single) > len(shown):
            rows.append((f"and {len(single) - len(shown)} more", "", ""))
        for slot in dict.fromkeys(tensor.slot for tensor in moments):
            tensors = [tensor for tensor in moments if tensor.slot == slot]
            problems = sum(bool(tensor.problem) for tensor in tensors)
            alike = f", {problems} of them not alike" if problems else ""
            rows.append((f"optimizer/{slot}: {len(tensors)} tensors{alike}", *_worst(tensors)))
        yield _table(
            (f"{len(difference.tensors)} of {difference.compared} tensors differ", "largest", "relative"), rows
        )
        if len(single) > len(shown) or moments:
            yield "--all lists them one by one"


def _worst(tensors: list[Differing]) -> tuple[str, str]:
    """The largest of these differences, absolute and relative."""
    largest, relative = (max(getattr(tensor, key) or 0 for tensor in tensors) for key in ("max_abs", "relative"))
    return f"{largest:.3g}", f"{relative:.3g}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_printable, row))
    return table


def _answer(as_json: bool, data: Any, *lines: str | Table) -> None:
    """Prints the data as JSON, or else the lines and tables."""
    if as_json:
        print(json.dumps(data, indent=1, default=str))
    for line in () if as_json else lines:
        _print(line)


def _print(line: str | Table) -> None:
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 400
    console = Console(file=sys.stdout, highlight=False, markup=False, width=wide, soft_wrap=isinstance(line, str))
    console.print(_printable(line) if isinstance(line, str) else line)


def _printable(text: str) -> str:
    """Names in a checkpoint may be anything: they are text, neither markup nor commands to a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)


def _size(num_bytes: int) -> str:
    thousands = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**thousands:.1f} {' kMGT'[thousands]}B" if thousands else f"{num_bytes} B"
