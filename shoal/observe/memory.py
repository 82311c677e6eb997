"""The memory that a rank uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_GIB = 2**30


def memory_gib(device: torch.device | str) -> float:
    """Returns the peak of allocated GPU memory, or on the CPU the memory that the process holds now.

    Only Linux reports the present size of a process cheaply; on other systems this is the peak, and 0 where Python has
    no module for it (Windows).
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    if (statm := Path("/proc/self/statm")).exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / _GIB
