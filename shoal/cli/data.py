"""`shoal data`: shows what a run trains on, before it trains."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides
from shoal.errors import printable

_BAR_WIDTH = 40


def data(
    config: ConfigFile,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("-n", "--number", help="Number of samples to show.", min=0)] = 3,
    debug: Debug = False,
) -> None:
    """Show what a run trains on: samples with the counted tokens coloured, lengths, and how well they pack.

    Tokens that count in the loss are green on a terminal, and between ⟦ and ⟧ elsewhere. Nothing is trained and no
    weights are downloaded; the data are prepared as `shoal train` would.
    """
    from rich.console import Console
    from rich.text import Text

    from shoal.config import load_run
    from shoal.seeding import mix, seed_generators

    run = load_run(config, overrides or ())
    seed_generators(mix(run.config.experiment.seed, "prepare_data"))  # as a run does
    recipe = run.make_recipe()
    view = recipe.view_data(number)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    titles = view.titles or [f"sample {index}" for index in range(len(view.samples))]
    for title, pieces in zip(titles, view.samples, strict=True):
        console.print(Text(printable(title), style="bold"))
        console.print(_coloured(pieces, console.is_terminal))
        console.print()
    width = max(map(len, view.facts))
    for name, fact in view.facts.items():
        console.print(Text(f"{name:<{width}}  {printable(fact)}"))
    if view.lengths:
        console.print(_histogram(view.lengths))
    for text in recipe.data_warnings():
        print(f"shoal: warning: {printable(text)}", file=sys.stderr)


def _coloured(pieces: list[tuple[str, bool]], is_terminal: bool) -> Any:
    """Returns the text of a sample in which counted pieces are coloured, or in brackets if there are no colours."""
    from rich.text import Text

    text = Text()
    for piece, counted in pieces:
        shown = printable(piece, keep="\n\t")
        text.append(f"⟦{shown}⟧" if counted and not is_terminal else shown, style="green" if counted else "dim")
    return text


def _histogram(lengths: list[tuple[int, int, int]]) -> Any:
    """Returns the lengths of samples as bars."""
    from rich.text import Text

    most = max(count for _, _, count in lengths)
    labels = [f"{low:,}–{high:,}" for low, high, _ in lengths]
    width = max(map(len, labels))
    bars = [
        f"{label:>{width}}  {'█' * max(bool(count), round(_BAR_WIDTH * count / most)):<{_BAR_WIDTH}}  {count:,}"
        for label, (_, _, count) in zip(labels, lengths, strict=True)
    ]
    return Text("\n".join(["\ntokens in a sample", *bars]))
