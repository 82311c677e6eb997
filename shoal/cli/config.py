"""`shoal config`: prints all values of a run."""

from __future__ import annotations

from shoal.cli.arguments import ConfigFile, Debug, Overrides


def show_config(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print all values of the run, each with its source: a file and line, the command line, or the default."""
    from shoal.config import derive_batches, load_run
    from shoal.config.batch import derived_values
    from shoal.config.layout import check_layout
    from shoal.config.mesh import data_size

    run = load_run(config, overrides or ())
    recipe, launch = run.make_recipe(), run.config.launch
    ranks = data_size(check_layout(run.config, recipe, launch.processes, launch.procs_per_node).mesh)
    print(run.to_yaml(derived_values(derive_batches(run.config.training, ranks)[0], ranks)), end="")
