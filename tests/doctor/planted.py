"""Runs checks of one machine in a process of their own, which a test has put into a broken surrounding.

`python planted.py CHECKS KEYS NODES` prints the findings as JSON. It imports no torch, so that it is fast.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from shoal.config import Run
from shoal.config.schema import Config
from shoal.doctor import addresses, disk, limits
from shoal.doctor.findings import Finding
from shoal.doctor.machine import Case, Machine

CHECKS = {
    "shared memory": limits.check_shared_memory,
    "open files": limits.check_open_files,
    "processes": limits.check_processes,
    "name of this host": addresses.check_own_name,
    "disk": lambda case: disk.check_disk(case, 100_000_000),
}


def case_of(keys: dict[str, Any], **options: Any) -> Case:
    """Returns the case of a config with these sections, on this machine."""
    config = Config.model_validate({"recipe": "none", "training": {"max_steps": 1}, **keys})
    facts = {"variables": dict(os.environ), **options.pop("facts", {})}
    return Case(Machine(host=socket.gethostname(), **facts), Run(config, object, None, {}), **options)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


if __name__ == "__main__":
    checks, keys, nodes = sys.argv[1].split(","), json.loads(sys.argv[2]), int(sys.argv[3])
    case = case_of(keys, nodes=nodes)
    print(json.dumps([finding.as_dict() for check in checks for finding in CHECKS[check](case)]))
