"""The config of a run: its keys, how files and overrides are merged, and what is refused before anything starts."""

from shoal.config.batch import derive_batches
from shoal.config.run import Run, check_run, load_run
from shoal.config.schema import Config
from shoal.config.section import Section

__all__ = ["Config", "Run", "Section", "check_run", "derive_batches", "load_run"]
