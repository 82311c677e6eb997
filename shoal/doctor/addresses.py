"""Checks of names and ports: whether this host and the master are found, and whether a run can listen."""

from __future__ import annotations

import socket
import time

from shoal.doctor.findings import Finding, TimeLimitReached, within
from shoal.doctor.machine import Case

_SLOW_SECONDS = 1.0
_LIMIT_SECONDS = 10.0


def check_own_name(case: Case) -> list[Finding]:
    """Resolves the name of this host, as gloo does if it is not told an interface."""
    check, name = "name of this host", case.machine.host
    fix = f"add a line with the address of this host and {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME in launch.env"
    began = time.monotonic()
    try:
        found = within(_LIMIT_SECONDS, lambda: socket.getaddrinfo(name, None))
    except TimeLimitReached:
        text = f"{name} is not resolved within {_LIMIT_SECONDS:g} s"
        return [Finding("will break" if case.nodes > 1 else "slow or surprising", check, text, fix)]
    except OSError as error:
        text = f"{name} cannot be resolved ({error.strerror or error})"
        if "GLOO_SOCKET_IFNAME" in case.machine.variables:
            return [Finding("fine", check, f"{text}, and GLOO_SOCKET_IFNAME names the network instead")]
        if case.nodes > 1:
            return [Finding("will break", check, f"{text}, so gloo cannot tell other machines an address", fix)]
        return [Finding("slow or surprising", check, f"{text}; several machines would need it", fix)]
    seconds = time.monotonic() - began
    addresses = ", ".join(sorted({str(info[4][0]) for info in found}))
    if seconds > _SLOW_SECONDS:
        text = f"{name} is {addresses}, but it took {seconds:.1f} s to find out"
        return [Finding("slow or surprising", check, text, fix)]
    return [Finding("fine", check, f"{name} is {addresses}")]


def check_master(case: Case) -> list[Finding]:
    """Resolves the address at which machines meet, and tries to listen on the port, as the run would."""
    findings = []
    if case.master_address:
        try:
            within(_LIMIT_SECONDS, lambda: socket.getaddrinfo(case.master_address, None))
            findings.append(Finding("fine", "master address", f"{case.master_address} is found"))
        except (TimeLimitReached, OSError) as error:
            why = getattr(error, "strerror", "") or f"no answer within {_LIMIT_SECONDS:g} s"
            text = f"the master address {case.master_address} cannot be resolved ({why})"
            findings.append(Finding("will break", "master address", text, "correct launch.master_addr, or /etc/hosts"))
    if not case.opens_port:
        text = f"the launcher has opened port {case.master_port} already"
        return [*findings, Finding("fine", "master port", text)]
    port = case.master_port
    try:
        with socket.create_server(("", port)) as listener:
            found = listener.getsockname()[1]
    except OSError as error:
        text = f"this machine cannot listen on launch.master_port = {port} ({error.strerror})"
        fix = "choose another launch.master_port, or end the program that uses it (ss -ltnp shows it)"
        return [*findings, Finding("will break", "master port", text, fix)]
    says = f"port {port} is free" if port else f"any free port is used, for example {found}"
    return [*findings, Finding("fine", "master port", says)]
