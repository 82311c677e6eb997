"""The flight recorder: which ranks are absent from a collective, by what torch has recorded on each of them.

The dumps in `flights` are written by hand in the format that torch 2.13 gives for NCCL, one for each rank; none of them
comes from a run over NCCL. A run over gloo that really hangs is in `test_watchdog.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from shoal.processes.flight_recorder import Flight, find_absent, read_flight
from shoal.strategies import DDPStrategy
from shoal.torch_private import dump_flight_recorders

DUMPS = Path(__file__).parent / "flights"
Change = Callable[[int, dict[str, Any]], None]


def flights(name: str, change: Change = lambda rank, dump: None) -> dict[int, Flight]:
    """Reads the dumps of a hang, after a change, by way of the board's text."""
    dumps = json.loads((DUMPS / f"{name}.json").read_text())
    for rank, dump in enumerate(dumps):
        change(rank, dump)
    read = {rank: read_flight([json.dumps(dump)]) for rank, dump in enumerate(dumps)}
    return {rank: Flight.from_json(flight.as_json()) for rank, flight in read.items()}


def test_a_rank_that_never_called_a_collective() -> None:
    absent, lines = find_absent(flights("absent"))
    assert absent == [2]
    assert lines == [
        "ranks 0-1, 3 wait in all_reduce (number 7 of group default_pg, Float [262144]), which rank 2 has not called"
    ]


def test_a_silent_rank_has_no_dump() -> None:
    """Then its stack and its silence are what there is to say; the others are not accused."""
    seen = {rank: flight for rank, flight in flights("absent").items() if rank != 2}
    absent, lines = find_absent(seen)
    assert absent == []
    assert "and it does not end" in lines[0]


def test_different_collectives_at_the_same_place() -> None:
    absent, (line,) = find_absent(flights("different"))
    assert absent == []
    assert line.startswith("ranks have called different collectives at the same place: ")
    assert "rank 1 all_reduce (number 5 of group default_pg, Float [131072])" in line
    assert "rank 2 all_reduce (number 5 of group default_pg, Float [262144])" in line


def test_the_end_of_a_chain_of_groups() -> None:
    """Rank 0 waits for rank 2 in one group, and rank 2 for rank 3 in another."""
    absent, lines = find_absent(flights("chain"))
    assert absent == [3]
    assert "rank 2 waits in all_reduce (number 2 of group mesh_tp, BFloat16 [8, 512]), which rank 3 has not called" in (
        lines
    )


def test_a_gpu_that_does_not_begin() -> None:
    def enqueue(rank: int, dump: dict[str, Any]) -> None:
        for entry in dump["entries"]:
            entry["input_sizes"] = [[262144]]
            if entry["collective_seq_id"] == 5 and rank == 3:
                entry["state"] = "scheduled"

    absent, (line,) = find_absent(flights("different", enqueue))
    assert absent == [3]
    assert line == (
        "all have called all_reduce (number 5 of group default_pg, Float [262144]), but the GPU of rank 3 did not "
        "begin it"
    )


def test_a_network_that_is_gone() -> None:
    def alike(rank: int, dump: dict[str, Any]) -> None:
        for entry in dump["entries"]:
            entry["input_sizes"] = [[262144]]

    absent, (line,) = find_absent(flights("different", alike))
    assert absent == []
    assert line.endswith("and it does not end: look at the network between them")


def test_nothing_is_recorded() -> None:
    assert find_absent({0: read_flight([b"{}"]), 1: read_flight([])}) == ([], [])


def recorded_calls() -> Flight:
    dist.all_reduce(torch.ones(3, 2))
    for _ in range(50):  # a thread of torch notes the end of a collective a little later
        before = read_flight(dump_flight_recorders())
        if not before.pending:
            break
        time.sleep(0.1)
    dist.barrier()
    return before


def test_torch_records_gloo_in_this_format(pool2: Pool) -> None:
    for flight in pool2.run(recorded_calls):
        assert flight.pending == []
        assert [*flight.called.values()] >= [1]


def buffer_size() -> str | None:
    with DDPStrategy(device="cpu"):
        return os.environ.get("TORCH_FR_BUFFER_SIZE")


def test_a_run_records_unless_it_is_turned_off(pool2: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert pool2.run(buffer_size, init=False) == ["2000"] * 2
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert pool2.run(buffer_size, init=False) == ["0"] * 2


@pytest.mark.parametrize("key", ["process_group", "collective_seq_id", "state"])
def test_another_format_is_noticed(key: str) -> None:
    dump = json.loads((DUMPS / "absent.json").read_text())[0]
    del dump["entries"][0][key]
    with pytest.raises(LookupError):
        read_flight([json.dumps(dump)])
