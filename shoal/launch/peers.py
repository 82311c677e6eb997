"""What the launchers of several machines tell each other over the board: who is there, what ended, what comes next.

Every launcher posts its `Status` several times a second. The launcher of node 0, which keeps the board, decides: it
posts the `RunState`, and the others follow. A launcher whose posts stop is lost.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from shoal.errors import UserError
from shoal.launch.cards import Card, check_equal

POLL_SECONDS = 0.2
SILENCE_SECONDS = 30.0
"""After how many seconds without a post a launcher is lost; `distributed.timeout` if that is shorter."""


@dataclass(frozen=True)
class Status:
    """What the launcher of a machine is doing."""

    node: int
    host: str
    token: str
    """Tells two launchers apart that say they are the same node."""
    phase: Literal["ready", "ended", "left"] = "ready"
    attempt: int = -1
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    """Once its processes have ended: the exit codes of those that failed by themselves, by rank."""
    succeeded: bool = False
    """Once its processes have ended: True if all ended well."""
    signal: int = 0
    """The signal that has told this launcher to stop; 0 if none has."""

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True)
class RunState:
    """What node 0 has decided."""

    attempt: int = 0
    phase: Literal["gathering", "running", "stopping", "over"] = "gathering"
    members: tuple[int, ...] = ()
    """The machines that take part in the attempt; a member's place in this list decides its ranks."""
    line: str = ""
    """Why the attempt before has ended, for the user."""
    exit_code: int = 0
    was_refused: bool = False
    """True if workers have refused the run in its first attempt."""


class Peers:
    """The launchers of the other machines, as seen from this one. A thread exchanges the posts.

    The thread alone uses the board: a call may block as long as the network is cut.
    """

    def __init__(self, board: Any, node: int, max_nodes: int, silence_seconds: float, hosts: tuple[str, ...] = ()):
        self.own = Status(node, socket.gethostname(), secrets.token_hex(8))
        self.run = RunState()
        self.statuses: dict[int, Status] = {}
        """The last status of every other machine; on machines other than node 0 there are none."""
        self.connection_lost = False
        """True once the board does not answer, because node 0 has ended."""
        self.report_key = ""
        """The key of the board under which a hang report of this attempt would be."""
        self.report = ""
        """The hang report of this attempt, if there is one."""
        self.hosts = hosts
        self._silence = dict.fromkeys([0] if node else range(1, max_nodes), 0.0)
        self._limit_seconds = silence_seconds
        self._posts: dict[int, str] = {}
        self._refusals: deque[str] = deque()  # the thread appends while the launcher takes
        self._refusals_read = 0
        self._raw_board = board
        self._board = _section(board)
        self._ended = threading.Event()
        self._posted = threading.Event()
        self._thread = threading.Thread(target=self._exchange_until_ended, name="shoal-peers", daemon=True)
        self._ticked = time.monotonic()

    # Called by the launcher

    def join(self, card: Card) -> None:
        """Takes the place of this node in the run, and starts to exchange posts.

        Raises UserError if another launcher is this node, or if versions or config are not those of node 0.
        """
        if self.own.node == 0:
            self._board.set("card", card.to_json())
        else:
            try:
                check_equal(card, self._board.get("card").decode())
                self._check_unique()
            except UserError as error:
                number = self._board.add("refusals", 1)
                self._board.set(f"refusal {number}", f"node {self.own.node} ({self.own.host}): {error}")
                raise
            self._read_run_state(self._board)
        self._thread.start()

    def _check_unique(self) -> None:
        """Raises UserError if another launcher is this node, and not only was: then it still posts."""
        node, key = self.own.node, f"launcher of node {self.own.node}"
        if self._board.compare_set(key, "", self.own.token).decode() == self.own.token:
            return
        before = self._last_post()
        time.sleep(5 * POLL_SECONDS)
        if (post := self._last_post()) != before:
            host = Status(**json.loads(post)[1]).host
            raise UserError(
                f"NODE_RANK={node}: {host} is node {node} of this run already; give every machine a number of its own, "
                "or use another port if they are two runs"
            )
        self._board.set(key, self.own.token)

    def post(self, **changes: Any) -> None:
        """Changes the status of this machine."""
        self.own = replace(self.own, **changes)

    def decide(self, **changes: Any) -> None:
        """Changes the state of the run; only node 0 may."""
        self.run = replace(self.run, **changes)

    def tick(self) -> None:
        """Counts the time in which nothing was heard of a machine.

        It adds up short times instead of reading a clock twice: Ctrl-Z of a launcher must not look like silence.
        """
        now = time.monotonic()
        elapsed, self._ticked = min(1.0, now - self._ticked), now
        for node in self._silence:
            self._silence[node] += elapsed

    def is_lost(self, node: int) -> bool:
        """Returns whether a machine has been silent for too long, and has not said that it leaves."""
        has_left = node in self.statuses and self.statuses[node].phase == "left"
        return not has_left and self._silence.get(node, 0.0) > self._limit_seconds

    def present(self) -> list[Status]:
        """Returns the other machines that have come, and have neither left nor become silent."""
        known = sorted(self.statuses.items())
        return [status for node, status in known if status.phase != "left" and not self.is_lost(node)]

    def name_of(self, node: int) -> str:
        """Returns a machine in words, with its host if that is known."""
        if node in self.statuses:
            return self.statuses[node].name
        return f"node {node} ({self.hosts[node]})" if node < len(self.hosts) else f"node {node}"

    def take_refusals(self) -> list[str]:
        """Returns why machines were refused, each once; only node 0 is told."""
        return [self._refusals.popleft() for _ in range(len(self._refusals))]

    def leave(self, seconds: float = 5.0) -> None:
        """Ends the exchange after a last post that says so. Node 0 waits for the others to read the end of the run."""
        self.post(phase="left")
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and not self.connection_lost and time.monotonic() < deadline:
            if self.own.node == 0 and not self.present():
                break
            if self.own.node and self._posted.wait(POLL_SECONDS):
                break
            time.sleep(POLL_SECONDS / 4)
        self._ended.set()

    # What the thread runs

    def _exchange_until_ended(self) -> None:
        raw, count = self._raw_board.clone(), 0  # a connection is used by one thread only
        board = _section(raw)
        try:
            while not self._ended.wait(POLL_SECONDS):
                count += 1
                own, key = self.own, self.report_key
                board.set(f"status {own.node}", json.dumps((count, asdict(own))))
                if own.node == 0:
                    board.set("run", json.dumps((count, asdict(self.run))))
                    self._read_statuses(board)
                else:
                    self._read_run_state(board)
                self.report = raw.get(key).decode() if key and raw.check([key]) else ""
                if own.phase == "left":
                    self._posted.set()
        except dist.DistError:
            self.connection_lost = True

    def _read_statuses(self, board: Any) -> None:
        for node in self._silence:
            if board.check([f"status {node}"]):
                post = board.get(f"status {node}").decode()
                self.statuses[node] = Status(**json.loads(post)[1])
                self._note(node, post)
        while self._refusals_read < board.add("refusals", 0):
            self._refusals_read += 1
            self._refusals.append(board.get(f"refusal {self._refusals_read}").decode())

    def _read_run_state(self, board: Any) -> None:
        post = board.get("run").decode()  # waits until node 0 has posted it
        self._note(0, post)
        state = RunState(**json.loads(post)[1])
        self.run = replace(state, members=tuple(state.members))

    def _note(self, node: int, post: str) -> None:
        """Notes that a machine has posted something new."""
        if post != self._posts.get(node):
            self._posts[node], self._silence[node] = post, 0.0

    def _last_post(self) -> str:
        key = f"status {self.own.node}"
        return self._board.get(key).decode() if self._board.check([key]) else ""


def _section(board: Any) -> Any:
    return dist.PrefixStore("launchers", board)  # type: ignore[attr-defined]
