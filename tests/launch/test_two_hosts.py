"""Two network namespaces as two machines: a run over both, a cut link, and machines that leave and come back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Gate, ToyRun
from launched import Launched, saved, tensors
from ports import free_port
from test_interrupted import undisturbed
from test_launch import SAME, assert_same_weights

pytestmark = pytest.mark.slow
ONE_EACH = "launch.procs_per_node=1"
SILENCE_SECONDS = 10  # long enough for a busy machine


class Hosts:
    """Two hosts, `host-0` and `host-1`, with a cable between them."""

    def __init__(self) -> None:
        self.tag, self.port = uuid.uuid4().hex[:6], free_port()
        self.namespaces = [f"shoal-{self.tag}-{node}" for node in range(2)]
        self.devices = [f"s{self.tag}{node}" for node in range(2)]

    def build(self) -> None:
        for namespace in self.namespaces:
            _ip("netns", "add", namespace)
        _ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for node, (namespace, device) in enumerate(zip(self.namespaces, self.devices, strict=True)):
            _ip("link", "set", device, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"10.77.0.{node + 1}/24", "dev", device)
            for name in ("lo", device):
                _ip("-n", namespace, "link", "set", name, "up")

    def remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run([_tool("ip"), "netns", "del", namespace], capture_output=True)

    def cut(self) -> None:
        _ip("-n", self.namespaces[0], "link", "set", self.devices[0], "down")

    def mend(self) -> None:
        _ip("-n", self.namespaces[0], "link", "set", self.devices[0], "up")

    def launch(self, toy: ToyRun, node: int, nodes: str, *overrides: str) -> Launched:
        """Starts the launcher of a node, as a user would who is logged in there."""
        on_host = (_tool("ip"), "netns", "exec", self.namespaces[node], "unshare", "--uts", "sh", "-c")
        become = f'hostname host-{node} && exec "$@"'
        command = (sys.executable, "-m", "shoal", "launch", "run.yaml", "--on", "local", "--nodes", nodes)
        place = ("--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", str(self.port))
        timeout = f"distributed.timeout={SILENCE_SECONDS}"
        interface = {"GLOO_SOCKET_IFNAME": self.devices[node]}
        return Launched(toy, *on_host, become, "sh", *command, *place, ONE_EACH, timeout, *overrides, **interface)


def _tool(name: str) -> str:
    return shutil.which(name) or f"/usr/sbin/{name}"


def _ip(*words: str) -> None:
    subprocess.run([_tool("ip"), *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        hosts.build()
    except (OSError, subprocess.CalledProcessError) as error:
        hosts.remove()
        pytest.skip(f"NOT TESTED: network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    try:
        yield hosts
    finally:
        hosts.remove()


def test_two_hosts_train_one_run(hosts: Hosts, toy: ToyRun) -> None:
    with hosts.launch(toy, 1, "2", *SAME) as second, hosts.launch(toy, 0, "2", *SAME) as first:
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert first.out.count("finished at step 10") == 1
    assert (first.err, second.out) == ("", "")
    assert re.fullmatch(rf"{JOINED}shoal: the run has ended\n", second.err), second.err
    assert "started by   shoal's launcher, 2 processes on 2 machines" in first.out
    assert_same_weights(toy)


JOINED = (
    r"shoal: joined the run as node 1 of 2, rank 1; its output is on node 0 \(10\.77\.0\.1\), and the logs of this "
    r"machine in .+/logs/rank_1\.log\n"
)
CUT_OFF = (
    r"shoal: lost the connection to node 0 at MASTER_ADDR = 10\.77\.0\.1, MASTER_PORT = \d+ \(no answer for 10 s\)"
)
SILENT = "shoal: node 1 (host-1) did not answer for 10 s"


def test_a_cut_link_ends_both_sides_and_names_the_other(hosts: Hosts, toy: ToyRun, gate: Gate) -> None:
    gate.close_after(4)
    options = ("2", "launch.max_restarts=0")
    with hosts.launch(toy, 0, *options) as first, hosts.launch(toy, 1, *options) as second:
        first.until(saved(toy, 4))
        hosts.cut()
        assert (first.wait(), second.wait()) == (1, 1)
        assert first.nothing_left()
        assert second.nothing_left()
    assert first.err == f"{SILENT}; giving up after 0 restarts\n"
    assert re.fullmatch(rf"{JOINED}{CUT_OFF}.*\n", second.err), second.err


def test_a_machine_that_was_cut_off_joins_again_and_nothing_is_lost(
    hosts: Hosts, toy: ToyRun, gate: Gate, pool2: Any
) -> None:
    gate.close_after(4)
    with hosts.launch(toy, 0, "2") as first:
        with hosts.launch(toy, 1, "2") as second:
            first.until(saved(toy, 4))
            hosts.cut()
            assert second.wait() == 1
        gate.open()
        hosts.mend()
        with hosts.launch(toy, 1, "2") as second:
            assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    lines = [line for line in first.err.splitlines() if "waiting for node 1 (host-1)" not in line]
    assert lines == [f"{SILENT}; starting again, from the last checkpoint if there is one (1 of 3)"]
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, "launch.procs_per_node=2")


def test_machines_leave_an_elastic_run_and_come_back(hosts: Hosts, toy: ToyRun, gate: Gate) -> None:
    gate.close_after(4)
    options = ("1:2", *SAME, "checkpoint.every=1")
    with hosts.launch(toy, 0, *options) as first:
        with hosts.launch(toy, 1, *options) as second:
            first.until(saved(toy, 4))
            second.process.send_signal(signal.SIGTERM)  # as a cloud does that takes a machine back
            gate.close_after(6)  # the ranks agree to stop after step 5 or 6
            assert second.wait() == 143, second.err
        gate.close_after(7)
        first.until(saved(toy, 7))  # alone
        with hosts.launch(toy, 1, *options) as second:
            assert second.process.stderr is not None
            assert "the run goes on without this machine" in second.process.stderr.readline()
            os.kill(first.ranks()[0], signal.SIGKILL)
            gate.close_after(8)
            first.until(saved(toy, 8))  # together
            for pid in [second.process.pid, *second.ranks().values()]:
                os.kill(pid, signal.SIGKILL)
            gate.open()
            assert first.wait() == 0, first.err
    again = "starting again, from the last checkpoint if there is one"
    # While the gate holds a run of one process, that warns of no progress.
    lines = [line for line in first.err.splitlines() if line.startswith("shoal: ") and "warning" not in line]
    assert lines == [
        f"shoal: node 1 (host-1) left the run; {again}",
        f"shoal: rank 0 was killed by SIGKILL; {again} (1 of 3)",
        f"{SILENT}; {again} (2 of 3)",
    ]
    batches = re.findall(r"^batch +(.*?)  \(", (toy.output / "report.txt").read_text(), re.M)
    assert batches == ["8 = 4 × 1 accumulated × 2 data-parallel", "8 = 4 × 2 accumulated × 1 data-parallel"] * 2
    assert_same_weights(toy)
