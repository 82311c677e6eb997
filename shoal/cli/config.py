"""`shoal config`: prints all values of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides

Changed = Annotated[bool, typer.Option("--changed", metavar="", help="Print only values that are no defaults.")]


def show_config(
    config: ConfigFile, overrides: Overrides = None, changed: Changed = False, debug: Debug = False
) -> None:
    """Print all values of a run, and where each was set. Nothing is trained.

    The source is a line of a file, the command line, or the default. The output is itself a config file. Mistakes in
    keys and values are found as by `shoal train`.
    """
    from shoal.config import derive_batches, load_run
    from shoal.config.batch import derived_values
    from shoal.config.layout import check_layout
    from shoal.config.mesh import data_size

    run = load_run(config, overrides or ())
    recipe, launch = run.make_recipe(), run.config.launch
    ranks = data_size(check_layout(run.config, recipe, launch.processes, launch.procs_per_node).mesh)
    derived = derived_values(derive_batches(run.config.training, ranks)[0], ranks)
    print(run.to_yaml(derived, only_changed=changed), end="")
