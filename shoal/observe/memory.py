"""How much memory a rank uses."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_GIB = 2**30


def memory_gib(device: torch.device | str) -> float:
    """The most a GPU has had allocated so far; on the CPU, what the process holds now.

    Only Linux tells a process its present size cheaply; elsewhere it is the peak.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    if (statm := Path("/proc/self/statm")).exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
