"""What a launcher and its workers agree on about the end of a process."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run

FINAL_EXIT_CODE = "final exit code"
"""The key of the board under which a worker puts the exit code of a run that would fail again if restarted."""


def log_path(run: Run, rank: int) -> Path:
    """Returns the log file of a rank in the run folder."""
    return Path(run.config.output_dir) / "logs" / f"rank_{rank}.log"
