"""Ports for tests that give one to a program, which listens on it later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_CHOICE = random.SystemRandom()  # tests seed the global generator


def free_port() -> int:
    """Returns a port that no process listens on.

    It is below those that the kernel gives to connections and to servers that take any port: between this call and the
    program's start, another process would sometimes get the same one.
    """
    while True:
        port = _CHOICE.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
