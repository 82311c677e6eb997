"""What ranks measure together, what it means for the gradients of a config, and machines that are examined together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ToyRun
from pool import Pool

from shoal.config import Run, load_run
from shoal.doctor.forecast import ModelSize, choose_layout, forecast, shard_bytes, size_model
from shoal.doctor.network import Link, Network, Request, Timing, judge, measure, sample_shapes
from shoal.parallel.compression.payoff import METHODS, compare_methods, would_pay
from shoal.processes.detect import detect

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))  # two network namespaces as two machines
from launched import Launched
from test_two_hosts import Hosts, _tool, hosts  # noqa: F401, a fixture

MODEL = ModelSize(((1024, 1024), (1024,)), 1024 * 1024 + 1024, 12_595_200)


def measure_here(request: Request) -> Network:
    return measure(detect(), request)


def test_ranks_measure_collectives_links_and_coding(pool2: Pool) -> None:
    first, second = pool2.run(measure_here, Request(shapes=((64, 64), (64,)), sizes=(8, 1 << 20)))
    assert first == second
    assert (first.backend, first.device, first.ranks) == ("gloo", "cpu", 2)
    for timings in (first.all_reduce, first.all_gather):
        assert [one.tensor_bytes for one in timings] == [8, 1 << 20]
        assert all(one.seconds > 0 for one in timings)
    large = first.all_reduce[-1]
    assert large.bytes_per_second * large.seconds == pytest.approx(1 << 20)  # 2 ranks send each byte once
    gather = first.all_gather[-1]
    assert gather.bytes_per_second * gather.seconds == pytest.approx(1 << 19)
    (link,) = first.links
    assert link.ranks == (0, 1)
    assert 0 < link.latency_seconds < 10
    assert link.bytes_per_second > 0
    assert first.clock_offsets == {}
    assert [*first.coding_seconds] == [*METHODS]
    assert all(seconds > 0 for seconds in first.coding_seconds.values())
    assert [one.level for one in judge(first)] == ["fine", "fine", "fine", "not checked"]


def test_measuring_ends_when_its_time_is_over(pool2: Pool) -> None:
    first, _ = pool2.run(measure_here, Request(shapes=((64, 64),), sizes=(8, 64), limit_seconds=-1.0))
    assert (first.all_reduce, first.links, first.coding_seconds) == ((), (), {})
    levels = {finding.check: finding.level for finding in judge(first)}
    assert levels == dict.fromkeys(("all-reduce", "all-gather", "links", "clocks"), "not checked")


def network_of(bytes_per_second: float, ranks: int = 2) -> Network:
    timings = (Timing(8, 1e-4, 8e4), Timing(1 << 20, 1.0, bytes_per_second))
    coding = dict.fromkeys(METHODS, 0.001)
    return Network("gloo", "cpu", ranks, ("a",) * ranks, timings, timings, coding_seconds=coding)


def test_slow_links_and_wrong_clocks_are_named() -> None:
    links = tuple(Link((0, rank), ("a", f"host-{rank}"), 1e-4, 1e9) for rank in range(1, 4))
    network = replace(network_of(1e9), links=(*links[:2], replace(links[2], bytes_per_second=1e8)))
    network = replace(network, clock_offsets={"host-1": 0.01, "host-2": -42.0})
    found = {finding.check: finding for finding in judge(network)}
    assert (found["links"].level, found["clocks"].level) == ("slow or surprising", "slow or surprising")
    assert "rank 3 (host-3)" in found["links"].message
    assert "host-2 is 42 s behind" in found["clocks"].message


def test_compression_is_advised_where_it_pays(toy: ToyRun) -> None:
    run = load_run(toy.folder / "run.yaml")
    (slow,), comparison = forecast(run, MODEL, network_of(1e6), 2)
    assert comparison is not None
    assert slow.level == "slow or surprising"
    sent = 4 * MODEL.trained  # 2 ranks: an all-reduce sends each byte once
    assert comparison.plain_bytes == sent
    assert comparison.plain_seconds == pytest.approx(sent / 1e6, rel=0.01)
    best = next(option for option in comparison.options if option.is_compression)
    assert f"distributed.{best.setting}" in slow.fix
    assert f"less than {best.payoff.pays_while_computing:.3g} s" in slow.fix
    (fast,), _ = forecast(run, MODEL, network_of(1e12), 2)
    assert (fast.level, fast.fix) == ("fine", "")


def test_a_small_model_takes_no_longer_than_a_larger_tensor(toy: ToyRun) -> None:
    network = network_of((1 << 16) / 2e-3)
    timings = (Timing(8, 1.4e-3, 8 / 1.4e-3), Timing(1 << 16, 2e-3, (1 << 16) / 2e-3))
    run, small = load_run(toy.folder / "run.yaml"), replace(MODEL, shapes=((322,),), parameters=322)
    (found,), comparison = forecast(run, small, replace(network, all_reduce=timings), 2)
    assert comparison is not None
    assert found.level == "fine"
    assert "1.29 kB" in found.message
    assert 1.4e-3 < comparison.plain_seconds < 2e-3
    assert not any(option.payoff.pays for option in comparison.options if option.is_compression)
    noisy = (Timing(8, 5e-3, 8 / 5e-3), timings[1])  # the smallest tensor was slower than a larger one
    latency, speed = network.cost(noisy, 1288)
    assert latency + 1288 / speed < 2e-3
    assert latency + (1 << 16) / speed == pytest.approx(2e-3)


def test_the_settings_that_are_advised_load(toy: ToyRun) -> None:
    for option in compare_methods([torch.Size([64, 64])], 2, 1e6, dict.fromkeys(METHODS, 0.0)).options:
        (toy.folder / "advised.yaml").write_text(f"extends: run.yaml\ndistributed:\n  {option.setting}\n")
        distributed = load_run(toy.folder / "advised.yaml").config.distributed
        assert (distributed.compression.method != "none") is option.is_compression
        assert (distributed.local_sgd is None) is option.is_compression


def test_compression_pays_up_to_a_length_of_computing() -> None:
    limit = would_pay(8e6, 0.16e6, 12.5e6, 0.0, coding_seconds=0.02).pays_while_computing
    assert would_pay(8e6, 0.16e6, 12.5e6, 0.99 * limit, 0.02).pays
    assert not would_pay(8e6, 0.16e6, 12.5e6, 1.01 * limit, 0.02).pays
    assert would_pay(8e6, 0.16e6, 12.5e6, 0.0, coding_seconds=5.0).pays_while_computing == 0.0


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        (["distributed.strategy=fsdp"], 3),
        (["distributed.strategy=fsdp", "distributed.fsdp.sharding_strategy=SHARD_GRAD_OP"], 2),
        (["distributed.strategy=fsdp", "training.gradient_accumulation=4"], 9),
        (["distributed.strategy=deepspeed", "distributed.zero_stage=1"], 2),
        (["distributed.strategy=deepspeed", "distributed.zero_stage=3"], 3),
    ],
)
def test_shards_send_weights_and_gradients(toy: ToyRun, keys: list[str], times: int) -> None:
    """`times` is how often all tensors are gathered or reduced in a step; each time a rank of 2 sends one half."""
    run = load_run(toy.folder / "run.yaml", keys)
    accumulation = run.config.training.gradient_accumulation or 1
    assert isinstance(accumulation, int)
    assert shard_bytes(choose_layout(run, 2, 2), MODEL, accumulation) == times * 4 * MODEL.trained / 2
    (found,), comparison = forecast(run, MODEL, network_of(1e6), 2)
    assert (found.level, comparison) == ("slow or surprising", None)
    assert f"{times * 4 * MODEL.trained / 2 / 1e6:.3g} MB" in found.message


def test_a_model_is_sized_without_memory(toy: ToyRun) -> None:
    run: Run = load_run(toy.folder / "run.yaml", ["model.hidden=1000"])
    size = size_model(run)
    assert sorted(size.shapes) == [(1,), (1, 1000), (1000,), (1000, 1)]
    assert (size.parameters, size.trained) == (3001, 3001)
    assert size.checkpoint_bytes == 3 * 4 * 3001  # weights and two moments
    momentum = ["training.optimizer={name: sgd, momentum: 0.9}"]
    assert size_model(load_run(toy.folder / "run.yaml", ["model.hidden=1000", *momentum])).checkpoint_bytes == 8 * 3001


def test_gradients_are_sampled_by_rows() -> None:
    shapes = [(1 << 20, 64), (64,), ()]
    assert sample_shapes(shapes) == [(32767, 64), (1,)]
    assert sample_shapes([(3, 4)]) == [(3, 4)]


def findings_in(text: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(text)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.mark.slow
def test_torchrun_examines_all_ranks(toy: ToyRun) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal", "doctor", "run.yaml", "--json"]
    done = subprocess.run([sys.executable, *command], cwd=toy.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["network"]["ranks"] == 2
    assert len(document["machines"]) == 1
    assert {one["host"] for one in document["findings"] if one["check"] == "disk speed"} == {os.uname().nodename}
    assert not (toy.folder / "out").exists()


@pytest.mark.slow
def test_two_hosts_are_examined_together(hosts: Hosts, toy: ToyRun, tmp_path: Path) -> None:  # noqa: F811
    """The link between them is slow, and the clock of the second one is wrong."""
    (tmp_path / "sitecustomize.py").write_text("import time\nclock = time.time\ntime.time = lambda: clock() + 30\n")
    for namespace, device in zip(hosts.namespaces, hosts.devices, strict=True):
        shape = ("tbf", "rate", "20mbit", "burst", "64kb", "latency", "50ms")
        subprocess.run([_tool("tc"), "-n", namespace, "qdisc", "add", "dev", device, "root", *shape], check=True)

    def doctor(node: int) -> Launched:
        on_host = (_tool("ip"), "netns", "exec", hosts.namespaces[node], "unshare", "--uts", "sh", "-c")
        become = f'hostname host-{node} && exec "$@"'
        place = ("launch.nodes=2", f"launch.node_rank={node}", "launch.master_addr=10.77.0.1")
        command = (sys.executable, "-m", "shoal", "doctor", "run.yaml", "--json", *place)
        port = (f"launch.master_port={hosts.port}", "model.hidden=20000")
        variables = {"GLOO_SOCKET_IFNAME": hosts.devices[node]}
        if node == 1:
            variables["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        return Launched(toy, *on_host, become, "sh", *command, *port, **variables)

    with doctor(1) as second, doctor(0) as first:
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    found, document = findings_in(first.out), json.loads(first.out)
    assert [machine["host"] for machine in document["machines"]] == ["host-0", "host-1"]
    assert {one["host"] for one in found["disk speed"]} == {"host-0", "host-1"}
    assert "the clock of host-1 is 30" in found["clocks"][0]["message"]
    (link,) = document["network"]["links"]
    assert link["hosts"] == ["host-0", "host-1"]
    assert 2e5 < link["bytes_per_second"] < 3e6  # 20 Mbit/s are 2.5 MB/s, and the first 64 kB are free
    assert second.out == ""
