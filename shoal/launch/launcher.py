"""Starts the processes of a machine, and starts all of them again when one dies or a machine leaves.

On several machines each has a launcher. That of node 0 leads: it decides which machines take part in an attempt, what
ended it, and whether there is another one. The others follow it (see `shoal.launch.peers`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from shoal.config import Run
from shoal.errors import UserError, printable
from shoal.launch.cards import card_of
from shoal.launch.ends import FINAL_EXIT_CODE, REFUSED, log_path
from shoal.launch.guard import guarded_workers
from shoal.launch.peers import SILENCE_SECONDS, Peers, Status
from shoal.launch.workers import Workers, worker_command
from shoal.processes.board import HANG_REPORT, REMINDER_SECONDS, connect_to_board
from shoal.processes.group import LOST_PEERS_EXIT_CODE, describe_exit
from shoal.processes.watchdog import kill_local_processes
from shoal.processes.world import World
from shoal.training.refused_start import StartTraces

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""A worker that gets one of these signals saves and exits with 128 + its number. It is not restarted."""

DISTANCE_FROM_CAUSE = {LOST_PEERS_EXIT_CODE: 1, -6: 2, -signal.SIGINT: 3, -signal.SIGTERM: 4}
"""When one process dies, its peers fail or are stopped. The exit code with the lowest number here is the likely cause.

Other exit codes have the number 0. NCCL calls abort(), which is signal 6, when it loses a peer.
"""
LAST_CALL_SECONDS = (30.0, 3.0)
"""How long an elastic run that has enough machines waits for more: in its first attempt, and in later ones."""
_POLL_SECONDS = 0.1


def start(run: Run, world: World, arguments: Sequence[str]) -> int:
    """Runs `shoal <arguments>` in every process of this machine, and returns the exit code for the user's shell."""
    for note in world.notes:
        _say(f"warning: {note}")
    init_timeout = run.config.distributed.init_timeout
    board = connect_to_board(world, init_timeout, remind=_say)  # open until the run has ended
    os.environ["SHOAL_LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world.starts)))
    grace_seconds = float(os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300"))  # to save large models
    with guarded_workers(grace_seconds), _Signals() as signals:
        traces = StartTraces(Path(run.config.output_dir))
        launcher = _Launcher(run, world, board, arguments, signals, grace_seconds)
        try:
            code = launcher.lead() if world.rank == 0 else launcher.follow()
        except _Ended as ended:
            code = ended.exit_code
        finally:
            launcher.peers.leave()
    if launcher.was_refused:  # workers that were stopped have left their logs
        traces.take_back()
    return code


class _Ended(Exception):
    """The launcher has to end while no processes of its run are left."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


class _Signals:
    """Notes signals, so that the loop of the launcher can pass them on."""

    def __init__(self) -> None:
        self.number = 0
        self.is_new = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Schedulers send SIGUSR1 as a warning. Workers treat it as SIGTERM.
        self.number = number if number == signal.SIGINT else signal.SIGTERM
        self.is_new = True

    def take(self) -> int:
        """Returns a signal that has not been passed on yet, or 0."""
        number, self.is_new = self.number if self.is_new else 0, False
        return number


class _Launcher:
    """The attempts of a run, as one machine sees them."""

    def __init__(
        self, run: Run, world: World, board: Any, arguments: Sequence[str], signals: _Signals, grace_seconds: float
    ):
        self.run, self.world, self.board, self.signals, self.grace_seconds = run, world, board, signals, grace_seconds
        self.command, self.node, self.nodes = worker_command(arguments), world.rank, world.size
        self.is_elastic = run.config.launch.is_elastic
        self.silence_seconds = min(SILENCE_SECONDS, run.config.distributed.timeout)
        self.peers = Peers(board, self.node, self.nodes, self.silence_seconds, world.hosts)
        self.was_refused = False
        """True if workers have refused the run in their first attempt."""
        if self.nodes > 1:
            try:
                self.peers.join(card_of(run))
            except dist.DistError:
                raise UserError(
                    f"MASTER_ADDR = {world.address}, MASTER_PORT = {world.port}: node 0 of this run is not there, or "
                    "has ended; run the same command on every machine, with the address and a free port of the first"
                ) from None

    # Node 0

    def lead(self) -> int:
        """Starts attempt after attempt, until the run ends well or must not be restarted; returns the exit code."""
        failures, max_restarts = 0, self.run.config.launch.max_restarts
        for attempt in count():
            members = self._gather(attempt)
            self._run_workers(attempt, [*members])
            results = self._wait_for_results(attempt, members)
            lost = [self.peers.name_of(node) for node in members if node not in results]
            exit_codes = {int(rank): code for one in results.values() for rank, code in one.exit_codes.items()}
            code = self._final_exit_code(exit_codes, [*results.values()], lost)
            if code is not None:
                return self._end(code)
            if not lost and (leaving := [one.name for one in results.values() if one.signal]):
                cause = f"{', '.join(leaving)} left the run"
            else:
                failures += 1
                cause = printable(self._describe_cause(attempt, exit_codes, lost, results))
            if failures > max_restarts:
                return self._end(1, f"{cause}; giving up after {max_restarts} restarts")
            number = f" ({failures} of {max_restarts})" if failures else ""
            line = f"{cause}; starting again, from the last checkpoint if there is one{number}"
            _say(line)
            self.peers.decide(attempt=attempt + 1, phase="gathering", members=(), line=line)
        raise AssertionError

    def _gather(self, attempt: int) -> dict[int, str]:
        """Waits until enough machines have come; returns those that take part in the attempt, with their tokens."""
        peers, init_timeout = self.peers, self.run.config.distributed.init_timeout
        min_nodes = self.run.config.launch.min_nodes if self.is_elastic else self.nodes
        where = f"MASTER_ADDR = {self.world.address}, MASTER_PORT = {self.world.port}"
        began = time.monotonic()
        reminder = began + REMINDER_SECONDS
        while True:
            present = peers.present()
            ready = [peers.own, *(one for one in present if (one.phase, one.attempt) == ("ready", attempt))]
            waited = time.monotonic() - began
            # Those who are present and not ready are still ending their processes.
            is_last_call_over = waited >= LAST_CALL_SECONDS[attempt > 0] and len(ready) > len(present)
            if len(ready) == self.nodes or (len(ready) >= min_nodes and is_last_call_over):
                members = {status.node: status.token for status in ready}
                peers.decide(phase="running", members=tuple(members))
                return members
            came = [status.node for status in ready]
            missing = ", ".join(peers.name_of(node) for node in range(self.nodes) if node not in came)
            if waited > init_timeout:
                nodes = self.run.config.launch.nodes if self.is_elastic else self.nodes
                problem = f"{missing} did not come within distributed.init_timeout = {init_timeout:g} s"
                error = f"launch.nodes = {nodes}: {problem}; run the same command on every machine, with {where}"
                peers.decide(phase="over", exit_code=2, line=f"error: {error}")
                raise UserError(error)
            if time.monotonic() >= reminder:
                reminder += REMINDER_SECONDS
                limit = f"until distributed.init_timeout = {init_timeout:g} s"
                _say(f"waiting for {missing} to connect to {where} for {waited:.0f} s ({limit})")
            self._pause()

    def _wait_for_results(self, attempt: int, members: Mapping[int, str]) -> dict[int, Status]:
        """Waits until the processes of all members have ended; returns how, by machine, without those that are lost."""
        while True:
            gone = [node for node in members if self._is_gone(node, members)]
            results = {node: self._result(node, attempt) for node in members if node not in gone}
            if all(results.values()):
                return {node: result for node, result in results.items() if result}
            if self._has_failed_elsewhere(attempt, members) or not self.peers.own.succeeded:
                self.peers.decide(phase="stopping")
            self._pause(may_end=False)

    def _result(self, node: int, attempt: int) -> Status | None:
        """Returns the status of a machine whose processes have ended, else None."""
        status = self.peers.statuses.get(node) if node else self.peers.own
        return status if status and status.attempt == attempt and status.phase != "ready" else None

    def _is_gone(self, node: int, members: Mapping[int, str]) -> bool:
        """Returns whether a member is silent, or another launcher has taken its place."""
        return node > 0 and (self.peers.is_lost(node) or self.peers.statuses[node].token != members[node])

    def _final_exit_code(
        self, exit_codes: Mapping[int, int], results: Sequence[Status], lost: Sequence[str]
    ) -> int | None:
        """Returns the exit code of a run that has ended; None if it should be started again."""
        if not lost and all(result.succeeded for result in results):
            return 0
        # An error that would come again; the worker has printed it. It comes first: the launcher then stops the other
        # workers, whose exit codes look as if somebody had stopped the run.
        if self.board.check([FINAL_EXIT_CODE]):
            return int(self.board.get(FINAL_EXIT_CODE))
        if self.signals.number:
            return 128 + self.signals.number
        codes = {*exit_codes.values()}
        if codes <= {-number for number in STOP_SIGNALS}:  # the signal came before the first step
            codes = {128 - code for code in codes}
        signals = {result.signal for result in results if result.signal}
        stopped = codes & {128 + number for number in STOP_SIGNALS} | {128 + number for number in signals}
        # The processes of a launcher that was killed stop by themselves, and so do those of a machine that leaves.
        return min(stopped) if stopped and not lost and not (signals and self.is_elastic) else None

    def _end(self, code: int, line: str = "") -> int:
        """Tells the user and the other machines that the run is over."""
        if line:
            _say(line)
        self.peers.decide(phase="over", exit_code=code, line=line, was_refused=self.was_refused)
        return code

    def _describe_cause(
        self, attempt: int, exit_codes: Mapping[int, int], lost: Sequence[str], results: Mapping[int, Status]
    ) -> str:
        """Returns which machine or rank failed first, and how."""
        report_key = _report_key(attempt)
        if self.board.check([report_key]):  # the workers have printed what hangs, and have killed each other
            return f"{json.loads(self.board.get(report_key))['who']} hung"
        if lost:
            return f"{', '.join(lost)} did not answer for {self.silence_seconds:g} s"
        if not exit_codes:  # a launcher has ended
            return f"{', '.join(one.name for node, one in results.items() if node and not one.succeeded)} ended"
        rank = min(exit_codes, key=lambda rank: DISTANCE_FROM_CAUSE.get(exit_codes[rank], 0))
        if exit_codes[rank] == LOST_PEERS_EXIT_CODE:
            return f"rank {rank} lost the connection to other ranks (see {log_path(self.run, rank)})"
        return f"rank {rank} {describe_exit(exit_codes[rank])}"

    # The other machines

    def follow(self) -> int:
        """Takes part in the attempts that node 0 starts; returns the exit code."""
        peers, takes_part = self.peers, True
        while True:
            attempt = peers.run.attempt
            peers.post(phase="ready", attempt=attempt, exit_codes={}, succeeded=False)
            while peers.run.attempt == attempt and peers.run.phase == "gathering":
                self._pause()
            state = peers.run
            takes_part, took_part = state.attempt == attempt and self.node in state.members, takes_part
            if takes_part and state.phase == "running":
                self._say_joined(state.members)
                self._run_workers(attempt, state.members)
            elif took_part and state.attempt == attempt and state.phase != "over":
                _say("the run goes on without this machine, which joins when the run is next started again")
            while peers.run.attempt == attempt and peers.run.phase != "over":
                self._pause()
            if peers.run.line:
                _say(peers.run.line)
            if peers.run.phase == "over":
                code, self.was_refused = peers.run.exit_code, peers.run.was_refused
                _say("the run has ended" + (f" with exit code {code}; the output of node 0 says why" if code else ""))
                return code

    def _say_joined(self, members: Sequence[int]) -> None:
        """Tells the user of a machine other than node 0, who sees no output of the run, where that is."""
        first = members.index(self.node) * self.world.starts
        last = first + self.world.starts - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        logs = ", ".join(dict.fromkeys(str(log_path(self.run, rank)) for rank in (first, last)))
        _say(
            f"joined the run as node {self.node} of {len(members)}, {ranks}; its output is on node 0 "
            f"({self.world.address}), and the logs of this machine in {printable(logs)}"
        )

    # All machines

    def _run_workers(self, attempt: int, members: Sequence[int]) -> None:
        """Runs the processes of this machine until they end, and posts how they did."""
        place = members.index(self.node)
        variables = worker_variables(self.world.starts, place, len(members), self.board.host, self.board.port, attempt)
        self.peers.report_key = _report_key(attempt)
        with Workers(self.command, variables) as workers:
            while workers.are_running():
                if number := self.signals.take():
                    self.peers.post(signal=number)
                    workers.stop(number, self.grace_seconds)
                elif not workers.were_stopped and (workers.failed or self._has_failed_elsewhere(attempt, members)):
                    if self.node == 0:
                        self.peers.decide(phase="stopping")
                    workers.stop(signal.SIGTERM, self.grace_seconds)
                if self._is_cut_off(attempt, members):
                    workers.kill()
                if self.peers.report:
                    # Workers do this for other workers of their machine, but on a machine on which all are silent.
                    kill_local_processes(json.loads(self.peers.report)["silent"])
                self._pause(may_end=False)
        if self.node == 0:  # which has the board; others would wait for it where the network is cut
            self.was_refused = attempt == 0 and self.board.check([REFUSED])
        codes = {str(rank): code for rank, code in workers.failed.items()}
        self.peers.post(phase="ended", attempt=attempt, exit_codes=codes, succeeded=workers.succeeded)

    def _has_failed_elsewhere(self, attempt: int, members: Collection[int]) -> bool:
        """Returns whether the processes of this machine have to stop because others have failed."""
        if self.node:
            return self.peers.connection_lost or (self.peers.run.attempt, self.peers.run.phase) == (attempt, "stopping")
        results = [self._result(node, attempt) for node in members]
        return any(one and not one.succeeded for one in results) or self._is_cut_off(attempt, members)

    def _is_cut_off(self, attempt: int, members: Collection[int]) -> bool:
        """Returns whether the processes of this machine have lost others for good, so that they could only hang."""
        if self.node == 0:
            return any(self.peers.is_lost(node) for node in members)
        # If node 0 was killed, and has not only become silent, its processes still save with those of this machine.
        is_silent = self.peers.is_lost(0) and not self.peers.connection_lost
        return is_silent or self.peers.run.attempt != attempt or self.peers.run.phase == "over"

    def _pause(self, may_end: bool = True) -> None:
        """Waits a moment. If the launcher got a signal or has lost node 0, it ends, if it may."""
        time.sleep(_POLL_SECONDS)
        self.peers.tick()
        for refusal in self.peers.take_refusals():
            _say(f"warning: another machine was refused: {printable(refusal)}")
        if not may_end:
            return
        if self.signals.number:
            if self.node == 0:
                self.peers.decide(phase="over", exit_code=128 + self.signals.number)
            raise _Ended(128 + self.signals.number)
        if self.peers.run.phase != "over" and (self.peers.connection_lost or self.peers.is_lost(0)):
            silent = "" if self.peers.connection_lost else f" (no answer for {self.silence_seconds:g} s)"
            place = f"MASTER_ADDR = {self.world.address}, MASTER_PORT = {self.world.port}"
            _say(f"lost the connection to node 0 at {place}{silent}; when it runs, run the same command here again")
            raise _Ended(1)


def worker_variables(
    procs_per_node: int, place: int, nodes: int, address: str, port: int, attempt: int
) -> dict[int, dict[str, str]]:
    """Returns the variables, by rank, of the processes on the machine that has this place among the machines."""
    shared = {
        "WORLD_SIZE": nodes * procs_per_node,
        "LOCAL_WORLD_SIZE": procs_per_node,
        "GROUP_RANK": place,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": _run_id(attempt),
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher keeps the board, so rank 0 must not open it
    }
    by_rank = {}
    for local_rank in range(procs_per_node):
        rank = place * procs_per_node + local_rank
        own = {"RANK": rank, "LOCAL_RANK": local_rank, **shared}
        by_rank[rank] = {name: str(value) for name, value in own.items()}
    return by_rank


def _run_id(attempt: int) -> str:
    return f"attempt {attempt}"


def _report_key(attempt: int) -> str:
    return HANG_REPORT.format(World(run_id=_run_id(attempt)).attempt_name)


def _say(line: str) -> None:
    print(f"shoal: {line}", file=sys.stderr, flush=True)
