"""The diagnosis as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.doctor.diagnosis import Diagnosis
from shoal.doctor.findings import LEVELS, Finding
from shoal.doctor.network import Network, say_speed
from shoal.errors import printable
from shoal.parallel.compression.payoff import Comparison

_WIDTH = 118


def format_text(diagnosis: Diagnosis) -> str:
    """Returns what `shoal doctor` prints: findings by level, then tables of what was measured."""
    lines = []
    findings = _merge_hosts(diagnosis.findings, len(diagnosis.machines))
    for level in LEVELS:
        found = [finding for finding in findings if finding.level == level]
        if found:
            lines += [level.upper(), *(line for finding in found for line in _lines(finding)), ""]
    if diagnosis.network:
        lines += [*_network_lines(diagnosis.network), ""]
    if diagnosis.comparison:
        lines += [*_comparison_lines(diagnosis.comparison), ""]
    return "\n".join([*lines, _verdict(findings)])


def _merge_hosts(findings: Sequence[Finding], machines: int) -> list[Finding]:
    """Returns the findings, with one in place of those that several machines share."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    return [
        replace(finding, host="all machines" if 1 < machines == len(names) else ", ".join(names))
        for finding, names in hosts.items()
    ]


def _lines(finding: Finding) -> Iterator[str]:
    host = f"{finding.host}: " if finding.host else ""
    yield from _wrap(f"  {finding.check}: {host}{printable(finding.message)}", "      ")
    if finding.fix:
        yield from _wrap(f"    → {printable(finding.fix)}", "      ")
    if finding.source:
        yield f"      ({finding.source})"


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _network_lines(network: Network) -> Iterator[str]:
    yield f"NETWORK: {network.ranks} ranks, {network.backend}, tensors on {network.device}"
    yield f"  {'tensor':>10}  {'all-reduce':>24}  {'all-gather':>24}"
    gathers = {one.tensor_bytes: one for one in network.all_gather}
    for one in network.all_reduce:
        cells = [one, *([gathers[one.tensor_bytes]] if one.tensor_bytes in gathers else [])]
        shown = [f"{cell.seconds * 1e3:9.3f} ms {say_speed(cell.bytes_per_second):>11}" for cell in cells]
        yield f"  {_size(one.tensor_bytes):>10}  " + "  ".join(f"{text:>24}" for text in shown)
    for link in network.links:
        a, b = (f"rank {rank} ({host})" for rank, host in zip(link.ranks, link.hosts, strict=True))
        yield f"  {a} – {b}: {link.latency_seconds * 1e3:.3f} ms one way, {say_speed(link.bytes_per_second)}"
    if network.links_left_out:
        yield f"  {network.links_left_out} more links were not measured"


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    yield "EXCHANGE OF A STEP, if computing takes no time"
    yield f"  {'distributed:':<46} {'MB sent':>10} {'seconds':>9}   pays while a step computes less than"
    yield f"  {'as it is':<46} {comparison.plain_bytes / 1e6:>10.4g} {comparison.plain_seconds:>9.3g}"
    for option in comparison.options:
        payoff = option.payoff
        pays = f"{payoff.pays_while_computing:.3g} s" if payoff.pays else "never"
        yield f"  {option.setting:<46} {option.sent_bytes / 1e6:>10.4g} {payoff.compressed_seconds:>9.3g}   {pays}"
    yield "  These are times alone: what a method costs in quality is in docs/slow_networks.md."


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    return ", ".join(f"{count} {level}" for level, count in counts.items() if count)


def _size(nbytes: int) -> str:
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
