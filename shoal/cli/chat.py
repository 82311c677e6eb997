"""`shoal chat`: talks to a trained language model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import BasePath, Debug
from shoal.errors import UserError


def chat(
    path: Annotated[
        Path, typer.Argument(readable=False, metavar="RUN_OR_STEP_DIR", help="A run folder, or one of its checkpoints.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Answer this text and exit; without it, lines are read.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="How freely tokens are drawn; 0 takes the likeliest.")] = 0.7,
    device: Annotated[str, typer.Option(help="Where the model computes, such as cuda.")] = "cpu",
    base: BasePath = None,
    debug: Debug = False,
) -> None:
    """Talk to a trained language model, with adapters or without.

    A model that was trained on conversations answers by its chat template and remembers the turns before. Any other
    continues each text. Type a line, or pipe lines in; an empty line or the end of the input ends it.
    """
    from shoal.training.chat import Chat

    interactive = prompt is None and sys.stdin.isatty()
    if interactive:
        print(f"reading the model of {path} …", file=sys.stderr)
    conversation = Chat(path, device, max_new_tokens, temperature, base)
    if interactive:
        remembers = "answers, and remembers the turns before" if conversation.has_template else "continues each text"
        print(f"{conversation.folder} {remembers}; an empty line ends", file=sys.stderr)
    while True:
        if interactive:
            print("> ", end="", flush=True)
        text = prompt if prompt is not None else sys.stdin.readline().rstrip("\n")
        if not text:
            return
        try:
            conversation.answer(text, lambda piece: print(piece, end="", flush=True))
        except UserError as error:
            if not interactive:
                raise
            print(f"shoal: {error}", file=sys.stderr)
        print(flush=True)
        if prompt is not None:
            return
