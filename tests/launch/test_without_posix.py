"""A Python without what only POSIX systems have, such as on Windows: shoal imports and trains in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import PATIENCE_SECONDS, ToyRun

pytestmark = pytest.mark.slow

TAKE_AWAY = """
import os, pkgutil, signal, sys
import multiprocessing.resource_tracker, tempfile, torch  # what belongs to Python and torch has its own ways
for module in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[module] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
for name in ("setpgid", "killpg", "getpgid", "setsid", "O_NONBLOCK", "O_NOFOLLOW", "pwrite", "pread"):
    delattr(os, name)
import shoal
from shoal.cli.main import main
for found in pkgutil.walk_packages(shoal.__path__, "shoal."):
    if not found.name.startswith(("shoal.project_template", "shoal.__main__")) and "_kernels" not in found.name:
        __import__(found.name)
sys.argv = ["shoal", "train", "run.yaml", "dataset.num_workers=1"]
main()
"""


def test_import_and_training_work_without_fcntl_sigusr1_and_setpgid(toy: ToyRun) -> None:
    command = [sys.executable, "-c", TAKE_AWAY]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=toy.folder, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert "finished at step 10" in ended.stdout
