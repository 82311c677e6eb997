"""Reads torch's flight recorder: which collectives a rank has called, and which of them are not finished.

torch records the last collectives of NCCL and gloo in memory. Of a hang it shows what no stack can: with GPUs the host
waits somewhere else, and under DDP a backward hides its all-reduces. Only the JSON form is read; torch's files are
pickles.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

MAX_PENDING = 20
"""So many unfinished collectives of a rank are compared."""
_ALIKE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
"""Operations, by the beginnings of their names, whose inputs have the same shape on all ranks."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has called and that is not finished."""

    group: str
    """The name of its process group, the same on all ranks."""
    number: int
    """Its place among the collectives of the group, the same on all ranks."""
    operation: str
    inputs: str
    """The dtypes and shapes of its inputs."""
    state: str
    """`scheduled`, or `started` if the GPU has begun it."""
    description: str = ""
    """The group's name for people."""

    def __str__(self) -> str:
        inputs = f", {self.inputs}" if self.inputs else ""
        return f"{self.operation} (number {self.number} of group {self.description or self.group}{inputs})"

    def is_same_call(self, other: Collective) -> bool:
        same_inputs = self.inputs == other.inputs or not self.operation.startswith(_ALIKE)
        return self.operation == other.operation and same_inputs


@dataclass(frozen=True)
class Flight:
    """What the flight recorder of one rank shows."""

    pending: Sequence[Collective] = ()
    """The oldest collectives that are not finished; sends and receives of pipelines are left out."""
    called: Mapping[str, int] = field(default_factory=dict)
    """The number of the last collective that was called in each group."""
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The ranks of each group, as far as the recorder knows them: gloo does not tell."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Flight:
        stored = json.loads(text)
        return cls([Collective(**one) for one in stored["pending"]], stored["called"], stored["members"])


def read_flight(dumps: Iterable[str | bytes]) -> Flight:
    """Reads what torch's recorders returned: NCCL and gloo each have one."""
    pending, called, members = dict[tuple[str, int], Collective](), dict[str, int](), dict[str, list[int]]()
    for dump in dumps:
        stored = json.loads(dump)
        for name, group in stored.get("pg_config", {}).items():
            members[str(name)] = [*json.loads(group["ranks"])]
        for entry in stored.get("entries", ()):
            if entry["is_p2p"]:
                continue
            one = _read_entry(entry)
            called[one.group] = max(called.get(one.group, 0), one.number)
            if entry["state"] != "completed" and not entry["retired"]:
                pending[one.group, one.number] = one  # once, also if two recorders have it
    oldest = [*pending.values()][:MAX_PENDING]
    return Flight(oldest, called, {name: ranks for name, ranks in members.items() if name in called})


def _read_entry(entry: Mapping[str, Any]) -> Collective:
    group, description = entry["process_group"]
    inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    return Collective(
        group=group,
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        inputs=", ".join(f"{dtype} {sizes}" for dtype, sizes in inputs),
        state=entry["state"],
        description="" if description == "undefined" else description,
    )


def find_absent(flights: Mapping[int, Flight]) -> tuple[list[int], list[str]]:
    """Returns the ranks that the others wait for, and what there is to say about each group that does not go on.

    Of ranks that wait for each other in a chain of groups, those at its end are returned: they wait for nobody.
    """
    absent, lines = set[int](), list[str]()
    waiting = {rank for rank, flight in flights.items() if flight.pending}
    for group in sorted({one.group for flight in flights.values() for one in flight.pending}):
        absent_here, line = _look_at(group, flights)
        absent |= absent_here
        lines.append(line)
    return sorted(absent - waiting or absent), lines


def _look_at(group: str, flights: Mapping[int, Flight]) -> tuple[set[int], str]:
    """Returns who is absent from the first unfinished collective of a group, and a sentence about it."""
    number = min(one.number for flight in flights.values() for one in flight.pending if one.group == group)
    calls = {
        rank: one
        for rank, flight in flights.items()
        for one in flight.pending
        if (one.group, one.number) == (group, number)
    }
    first, ranks = next(iter(calls.values())), format_ranks(calls)
    members = {rank for flight in flights.values() for rank in flight.members.get(group, ())}
    members |= {rank for rank, flight in flights.items() if group in flight.called}
    absent = {rank for rank in members if rank in flights and flights[rank].called.get(group, 0) < number}
    if absent:
        wait, has = "waits" if len(calls) == 1 else "wait", "has" if len(absent) == 1 else "have"
        return absent, f"{ranks} {wait} in {first}, which {format_ranks(absent)} {has} not called"
    if not all(call.is_same_call(first) for call in calls.values()):
        each = "; ".join(f"rank {rank} {call}" for rank, call in calls.items())
        return set(), f"ranks have called different collectives at the same place: {each}"
    behind = {rank for rank, call in calls.items() if call.state == "scheduled"}
    if behind and behind != set(calls):
        gpus = "GPU of" if len(behind) == 1 else "GPUs of"
        return behind, f"all have called {first}, but the {gpus} {format_ranks(behind)} did not begin it"
    return set(), f"{ranks} have all called {first}, and it does not end: look at the network between them"


def format_ranks(ranks: Collection[int]) -> str:
    """Returns ranks in words, such as `rank 3` or `ranks 0, 2-7`."""
    # Within a span of consecutive ranks, the difference between rank and index is constant.
    by_difference = groupby(enumerate(sorted(ranks)), lambda indexed: indexed[1] - indexed[0])
    spans = [[rank for _, rank in span] for _, span in by_difference]
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
