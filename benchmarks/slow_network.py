"""Measures steps over a slow network: two network namespaces of this machine, joined by a link of limited rate.

    python benchmarks/slow_network.py [--mbit 100] [--width 1024] [--layers 8] [--steps 10]     # as root, on Linux

Each namespace has one process with one thread. A row trains the same stack of linear layers through shoal's `ddp`, with
all small messages of a step. Bytes are read from the counters of the link itself. `compute` exchanges nothing. The rows
are measured one after another in one run. The fastest step of a row counts, because other work on the machine can only
make a step slower; the median is beside it. The table goes to docs/slow_networks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROWS: dict[str, dict[str, Any]] = {
    "compute": {},
    "plain": {},
    "fp16": {"compression": "fp16"},
    "int8": {"compression": "int8"},
    "powersgd rank 2": {"compression": {"method": "powersgd", "rank": 2, "start_step": 0}},
    "powersgd rank 4": {"compression": {"method": "powersgd", "rank": 4, "start_step": 0}},
    "powersgd rank 8": {"compression": {"method": "powersgd", "rank": 8, "start_step": 0}},
    "topk 1%": {"compression": {"method": "topk", "ratio": 0.01, "start_step": 0}},
    "local_sgd 16": {"local_sgd": {"sync_every": 16}},
    "local_sgd 128": {"local_sgd": {"sync_every": 128}},
}
NAMES = ("shoal_a", "shoal_b")
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def build_link(mbit: float) -> None:
    """Makes two namespaces with a link between them whose ends send no faster than `mbit`."""
    remove_link()
    for name in NAMES:
        _ip("netns", "add", name)
    _ip("link", "add", "va", "netns", NAMES[0], "type", "veth", "peer", "name", "vb", "netns", NAMES[1])
    for name, device, address in zip(NAMES, ("va", "vb"), ADDRESSES, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        limit = ["rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "50ms"]
        subprocess.run(
            ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit], check=True
        )


def remove_link() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def measure(options: argparse.Namespace) -> None:
    """Trains all rows in this process, and prints the measurements of rank 0 as JSON lines."""
    import torch
    from torch import nn

    from shoal.processes.detect import detect
    from shoal.recipes import Recipe
    from shoal.strategies import DDPStrategy, SingleStrategy
    from shoal.types import MicroBatch, ParallelPlan, Weights

    class Layers(Recipe):
        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"input": batch["x"]}

        def loss(self, output: Any, batch: Any) -> Any:
            return ((output - batch["x"]) ** 2).sum()

    from shoal.processes.world import World

    torch.set_num_threads(1)
    recipe, width = Layers(None), options.width
    first = DDPStrategy(device="cpu", world=detect(), timeout=600)
    first.setup()  # the process group of all rows

    def sent_bytes() -> int:
        return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())

    for row in options.rows:
        keys, alone = ROWS[row], row == "compute"
        strategy = (
            SingleStrategy(device="cpu", world=World())
            if alone
            else DDPStrategy(device="cpu", world=first.world, **keys)
        )
        if not alone:
            strategy.setup()
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(options.layers)])
        model, optimizer = strategy.prepare(
            model, lambda m: torch.optim.AdamW(m.parameters(), fused=True), ParallelPlan(), Weights("built")
        )
        generator = torch.Generator().manual_seed(first.rank)
        batch = MicroBatch({"x": torch.randn(options.batch, width, generator=generator)}, [0], [0])
        every = keys.get("local_sgd", {}).get("sync_every", 1)
        short = row.startswith(("compute", "powersgd", "topk"))  # short steps are disturbed more by other work
        warm, count = (every, 2 * every) if every > 1 else (2, options.steps * (5 if short else 1))
        seconds, before = list[float](), 0
        for step in range(warm + count):
            if step == warm:
                before = sent_bytes()
            since = time.perf_counter()
            strategy.forward_backward(model, [batch], recipe, step)
            info = strategy.step(optimizer, 1.0)
            seconds.append(time.perf_counter() - since)
        assert torch.isfinite(info.grad_norm)
        measured = seconds[warm:]
        syncs = measured[every - 1 :: every]
        locals_ = [time for index, time in enumerate(measured) if (index + 1) % every] or [0.0]
        exchange = strategy.engaged.exchange
        result = {
            "row": row,
            "seconds": (min(syncs) + (every - 1) * min(locals_)) / every,
            "median": (median(syncs) + (every - 1) * median(locals_)) / every,
            "sent": (sent_bytes() - before) / count,
            "promised": exchange.wire.numbers()["train/wire_bytes"] if exchange is not None else None,
            "coding": exchange.wire.numbers()["train/compression_seconds"] if exchange is not None else None,
            "gradient_bytes": sum(p.nbytes for p in model.parameters()),
        }
        first.barrier()
        if first.rank == 0:
            print("RESULT", json.dumps(result), flush=True)
    first.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
    build_link(options.mbit)
    try:
        workers = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--worker"],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": "29611",
                    "GLOO_SOCKET_IFNAME": device,
                },
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank, (name, device) in enumerate(zip(NAMES, ("va", "vb"), strict=True))
        ]
        results = {}
        for line in workers[0].stdout or ():
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                results[result["row"]] = result
                print(result, file=sys.stderr, flush=True)
            else:
                print(line, end="", file=sys.stderr)
        codes = [worker.wait() for worker in workers]
        assert codes == [0, 0], codes
    finally:
        remove_link()
    show(results, options.mbit)


def show(results: dict[str, dict[str, Any]], mbit: float) -> None:
    """Prints the table as Markdown."""
    plain = results.get("plain")
    size = next(iter(results.values()))["gradient_bytes"] / 1e6
    print(f"{size:.3g} MB of gradients, {mbit:g} Mbit/s, os load {os.getloadavg()[0]:.1f}\n")
    print("| row | seconds a step | median | of plain | MB sent by a rank in a step | promised | coding seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row, result in results.items():
        faster = f"{plain['seconds'] / result['seconds']:.1f}×" if plain else ""
        promised = "" if result["promised"] is None else f"{result['promised'] / 1e6:.3f}"
        coding = "" if result["coding"] is None else f"{result['coding']:.3f}"
        times = f"{result['seconds']:.3f} | {result['median']:.3f}"
        print(f"| {row} | {times} | {faster} | {result['sent'] / 1e6:.3f} | {promised} | {coding} |")


if __name__ == "__main__":
    main()
