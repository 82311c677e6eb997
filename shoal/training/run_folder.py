"""The folder of a run: made, locked against other runs, and given the resolved config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run, derive_batches
from shoal.config.batch import derived_values
from shoal.errors import UserError
from shoal.strategies import DistributedStrategy


@contextmanager
def open_run_folder(run: Run, strategy: DistributedStrategy) -> Iterator[RunLock]:
    """Makes the folder, holds it against other runs, and writes the resolved config into it."""
    folder = Path(run.config.output_dir)
    phases = derive_batches(run.config.training, strategy.data_size)
    run_lock = RunLock(folder, strategy.world.job, strategy.world.attempt)
    try:
        try:
            (folder / "logs" if strategy.world_size > 1 else folder).mkdir(parents=True, exist_ok=True)
            if strategy.is_main_process:
                run_lock.acquire()
                (folder / "config.yaml").write_text(run.to_yaml(derived_values(phases[0], strategy.data_size)))
        except OSError as error:
            raise UserError(f"experiment.output_dir = {str(folder)!r} cannot be written: {error.strerror}") from None
        yield run_lock
    finally:
        run_lock.release()
