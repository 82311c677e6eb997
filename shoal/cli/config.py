"""`shoal config`: prints all values of a run."""

from __future__ import annotations

from shoal.cli.arguments import ConfigFile, Debug, Overrides


def show_config(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print all values of the run, each with its source: a file and line, the command line, or the default."""
    from shoal.config import derive_batches, load_run
    from shoal.config.batch import derived_values
    from shoal.config.mesh import check_layout

    run = load_run(config, overrides or ())
    ranks = check_layout(run.config, run.recipe_type(run.recipe_config), run.config.launch.processes)
    print(run.to_yaml(derived_values(derive_batches(run.config.training, ranks)[0], ranks)), end="")
