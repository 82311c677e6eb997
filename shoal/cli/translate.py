"""`shoal translate`: writes a config file of another project as one of shoal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import Debug, Overrides

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A config file of another project, such as axolotl's.", show_default=False),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PROJECT",
        help="The project that the file belongs to: accelerate, axolotl, llama_factory, torchtune or lightning. "
        "Default: it is recognised by its keys.",
        show_default=False,
    ),
]


def translate(file: File, overrides: Overrides = None, project: From = None, debug: Debug = False) -> None:
    """Print a config file of another project as a config of shoal.

    Reads files of accelerate, axolotl, LLaMA-Factory, torchtune and Lightning CLI. Every line names the key that it
    comes from, and what has no counterpart is a comment. KEY=VALUE sets values of shoal in the place of what the file
    says. Nothing is printed if the result would not be a valid config.
    """
    from shoal.config.foreign.project import translate_project
    from shoal.config.foreign.projects import find_project
    from shoal.config.foreign.render import render
    from shoal.config.layout import check_layout
    from shoal.config.run import check_run
    from shoal.config.yaml import flatten, read_yaml

    tree, sources = read_yaml(file)
    translation = translate_project(tree, sources, find_project(tree, str(file), project), overrides or ())
    run = check_run(translation.tree, dict(translation.translated.sources), import_from=file.parent)
    launch = run.config.launch
    check_layout(run.config, run.make_recipe(), launch.processes, launch.procs_per_node)
    print(render(translation, file.name, [*flatten(run.tree())]), end="")
    if translation.placeholders:
        keys = ", ".join(translation.placeholders)
        print(f"shoal: note: placeholders are to be replaced: {keys}", file=sys.stderr)
