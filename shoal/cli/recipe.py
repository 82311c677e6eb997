"""Training by the command lines that people know: `python -m shoal.recipes.text_lora --config run.yaml`, and a script.

Both do what `shoal train` does, and work alone, under torchrun, and under DeepSpeed's launcher.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UserError


def main(recipe: str | None = None, arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, and trains as `shoal train` does. `recipe` is the one whose module is run, if one is."""
    from shoal.cli.main import main as shoal_main

    given = sys.argv[1:] if arguments is None else [*arguments]
    program = f"python -m shoal.recipes.{recipe}" if recipe else f"python {sys.argv[0]}"
    parser = _parser(program)
    read = parser.parse_intermixed_args(given)
    words = [*read.words]
    config = read.config or (words.pop(0) if words and "=" not in words[0] else None)
    if config is None:
        parser.error("a config file is missing; give --config run.yaml, or the file alone")
    if strange := next((word for word in words if "=" not in word), None):
        parser.error(f"{strange!r} is not an override such as training.max_steps=50, and the config is {config}")
    if read.deepspeed is not None:
        words += ["distributed.strategy=deepspeed", f"distributed.deepspeed.config_file={read.deepspeed}"]
    switches = [f"--{name}" for name in ("fresh", "debug") if getattr(read, name)]
    try:
        words += _recipe_override(recipe, Path(config), words)
    except UserError as error:
        print(f"shoal: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = ["shoal", "train", *switches, "--", config, *words]
    shoal_main()


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train a run to its end, as `shoal train` does. It joins what torchrun or deepspeed has started.",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="the config, if not by --config; then overrides")
    parser.add_argument("--config", metavar="FILE", help="the config file of the run, such as run.yaml")
    parser.add_argument("--deepspeed", metavar="FILE", help="a DeepSpeed JSON: trains by DeepSpeed, as it says")
    parser.add_argument("--fresh", action="store_true", help="start anew: the run folder is renamed before")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # DeepSpeed's launcher adds it; the environment has the value already.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def _recipe_override(recipe: str | None, config: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the override that names the recipe whose module is run, if the config names none."""
    from shoal.config.overrides import read_with_overrides
    from shoal.config.run import RECIPES

    if recipe is None:
        return []
    if (named := read_with_overrides(config, overrides).tree.get("recipe")) is None:
        return [f"recipe={recipe}"]
    if named not in (recipe, RECIPES[recipe]):
        raise UserError(
            f"recipe = {named!r:.200} in {config}, but this is the module of {recipe}; run shoal train {config}, or "
            "leave the key out"
        )
    return []
