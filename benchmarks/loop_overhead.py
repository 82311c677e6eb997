"""Measures the overhead of a training loop: one small model on the CPU, with shoal and with other frameworks.

    python benchmarks/loop_overhead.py [--peers raw,shoal,fabric] [--turns 40] [--json result.json]

The model is so small that most of the time is overhead of the loop; with a real model this overhead is negligible. All
frameworks train the same network on the same samples, in fp32 with fused AdamW, clipped by norm, with a learning rate
that changes at every update, and record the loss every 50 steps. The code for each framework follows its documentation
and runs in a separate process. The processes take turns of 100 steps, so that other load on the machine affects all of
them equally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

BATCH, WIDTH, CLASSES = 32, 64, 10
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 1e-3, 0.1, 1.0, 50
TURN, WARMUP = 100, 3  # steps; turns


class Stopwatch:
    """Counts the calls of the model. At the end of a turn it reports the time of the turn and waits for the next."""

    connection: Connection
    turn_start = 0.0

    def __init__(self) -> None:
        self.ticks = 0
        self.calls: Counter[str] = Counter()

    def tick(self) -> None:
        """Counts one step; the model calls it in every forward."""
        self.ticks += 1
        if self.ticks % TURN == 0:
            sys.setprofile(None)
            # CPU time: nothing in the loop waits, and other processes affect CPU time less than wall-clock time.
            self.connection.send((time.process_time() - self.turn_start, self.calls))
            self.calls.clear()
            sys.setprofile(self._count if self.connection.recv() == "count" else None)
            self.turn_start = time.process_time()

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls[frame.f_code.co_filename] += 1


stopwatch = Stopwatch()


class Network(nn.Module):
    """A small classifier that calls the stopwatch in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        stopwatch.tick()
        return self.layers(x)


class Samples:
    """A map-style dataset of dicts that is as long as the run."""

    def __init__(self, steps: int):
        self.x = torch.randn(BATCH * steps, WIDTH)
        self.labels = self.x[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


def build(steps: int) -> tuple[nn.Module, AdamW, LambdaLR, DataLoader[Any]]:
    """Builds model, optimizer, schedule and data. shoal and the Hugging Face Trainer build the same by themselves."""
    model = Network()
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    return model, optimizer, schedule, DataLoader(Samples(steps), batch_size=BATCH, shuffle=True)


def record(folder: Path, step: int, loss: Tensor) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")


def raw(folder: Path, steps: int) -> None:
    """Trains in plain PyTorch: no resuming, no check for NaN gradients, no throughput, no seed per step."""
    model, optimizer, schedule, loader = build(steps)
    for step, batch in enumerate(loader):
        loss = cross_entropy(model(batch["x"]), batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            record(folder, step, loss)


def shoal(folder: Path, steps: int) -> None:
    """Trains with shoal. Every step also seeds the generators, divides the loss by the counted samples, tracks the
    position in the data, and skips the update if the gradient is not finite. Every record also has the gradient norm,
    the throughput, the memory and the skipped updates."""
    from shoal.config import Run
    from shoal.config.schema import Config
    from shoal.recipes import Recipe
    from shoal.training import train

    class Classify(Recipe):
        def build_model(self) -> nn.Module:
            return Network()

        def train_data(self) -> Samples:
            return Samples(steps)

        def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": batch["x"]}

        def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return cross_entropy(output, batch["labels"], reduction="sum")

    optimizer_keys = {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_NORM}
    config = {
        "recipe": "loop_overhead:Classify",
        "experiment": {"output_dir": str(folder)},
        "training": {"max_steps": steps, "batch_size": BATCH, **optimizer_keys},
        "logging": {"every": LOG_EVERY, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
    }
    train(Run(Config.model_validate(config), Classify, Classify.Config(), sources={}))


def fabric(folder: Path, steps: int) -> None:
    """Trains with Lightning Fabric. Its clipping raises an error for NaN gradients; the rest is as in raw."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    runner = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(folder))
    model, optimizer, schedule, loader = build(steps)
    model, optimizer = runner.setup(model, optimizer)
    for step, batch in enumerate(runner.setup_dataloaders(loader)):
        loss = cross_entropy(model(batch["x"]), batch["labels"])
        runner.backward(loss)
        runner.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            runner.log("loss", loss, step)


def accelerate(folder: Path, steps: int) -> None:
    """Trains with Accelerate, which also handles gradient accumulation; the rest is as in raw."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = accelerator.prepare(*build(steps))
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            record(folder, step, loss)


def hf_trainer(folder: Path, steps: int) -> None:
    """Trains with the Hugging Face Trainer, which has callbacks; it keeps its records in memory."""
    from transformers import Trainer, TrainingArguments

    optimizer_keys = {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_NORM}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": LOG_EVERY}
    data = {"per_device_train_batch_size": BATCH, "remove_unused_columns": False, "dataloader_pin_memory": False}
    schedule = {"optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "max_steps": steps}
    arguments = TrainingArguments(str(folder), use_cpu=True, **optimizer_keys, **schedule, **data, **quiet)

    def loss(output: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        return cross_entropy(output, labels)

    Trainer(Network(), arguments, default_collate, Samples(steps), compute_loss_func=loss).train()


def lightning(folder: Path, steps: int) -> None:
    """Trains with the Trainer of Lightning, which has hooks, callbacks and metrics."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    model, optimizer, schedule, loader = build(steps)

    class Classify(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = cross_entropy(self.model(batch["x"]), batch["labels"])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logging = {"logger": CSVLogger(folder), "log_every_n_steps": LOG_EVERY}
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=MAX_NORM, **logging, **quiet)
    trainer.fit(Classify(), loader)


PEERS = {  # the version is that of the first package; calls into any of the packages count as the framework's
    "raw": (raw, ["torch"]),
    "shoal": (shoal, ["shoal"]),
    "fabric": (fabric, ["lightning"]),
    "accelerate": (accelerate, ["accelerate"]),
    "hf_trainer": (hf_trainer, ["transformers", "accelerate"]),
    "lightning": (lightning, ["lightning"]),
}


def work(name: str, turns: int, connection: Connection) -> None:
    """Trains with one framework; this runs in its process."""
    torch.manual_seed(0)
    stopwatch.connection = connection
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        train, _ = PEERS[name]
        train(Path(stack.enter_context(tempfile.TemporaryDirectory())), steps=turns * TURN + 1)


@dataclass(frozen=True)
class Result:
    """What was measured for one framework."""

    peer: str
    version: str
    microseconds: list[float]
    """The time per step, one number for each turn."""
    calls: float
    """The number of Python function calls per step."""
    own_calls: float
    """The number of these calls that are in the framework's code."""


def compare(names: list[str], turns: int) -> list[Result]:
    """Runs the frameworks in turns and returns what was measured for each."""
    context = multiprocessing.get_context("spawn")
    plan = ["time"] * (WARMUP + turns) + ["count"]
    turns_by_name: dict[str, list[tuple[float, Counter[str]]]] = {name: [] for name in names}
    connections, processes = {}, []
    for name in names:
        connections[name], child_connection = context.Pipe()
        processes.append(context.Process(target=work, args=(name, len(plan) + 1, child_connection), daemon=True))
        processes[-1].start()
        child_connection.close()
        connections[name].recv()  # it has finished its first turn
    for kind_of_turn in plan:
        for name, connection in connections.items():
            connection.send(kind_of_turn)
            turns_by_name[name].append(connection.recv())
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.send("finish")
        process.join()

    results = []
    for name in names:
        *timed, (_, calls) = turns_by_name[name]
        _, packages = PEERS[name]
        folders = tuple(str(Path(find_spec(package).origin).parent) for package in packages)
        own_calls = sum(number for file, number in calls.items() if file.startswith(folders))
        microseconds = [seconds / TURN * 1e6 for seconds, _ in timed[WARMUP:]]
        results.append(Result(name, version(packages[0]), microseconds, calls.total() / TURN, own_calls / TURN))
    return results


def table(results: list[Result]) -> str:
    """Returns the table of results: medians over the turns, and after ± the standard error of the median."""
    raw_times = next((r.microseconds for r in results if r.peer == "raw"), None)
    lines = [f"{'':20}{'µs/step':>9}{'middle half':>13}{'over raw':>13}{'calls/step':>12}{'own':>9}"]
    for r in results:
        low, middle, high = statistics.quantiles(r.microseconds, n=4)
        over_raw = "-"
        if raw_times and r.peer != "raw":
            differences = [a - b for a, b in zip(r.microseconds, raw_times, strict=True)]
            first, second, third = statistics.quantiles(differences, n=4)
            over_raw = f"{second:+.0f} ± {0.93 * (third - first) / math.sqrt(len(differences)):.0f}"
        own = "-" if r.peer == "raw" else f"{r.own_calls:.0f}"
        name, spread = f"{r.peer} {r.version}", f"{low:.0f}–{high:.0f}"
        lines.append(f"{name:20}{middle:9.0f}{spread:>13}{over_raw:>13}{r.calls:12.0f}{own:>9}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the overhead of training loops.")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="the frameworks to measure, separated by commas; default: %(default)s"
    )
    parser.add_argument(
        "--turns", type=int, default=40, help=f"the number of turns of {TURN} steps for each; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="also write the results as JSON to this path")
    options = parser.parse_args()
    names = options.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers {unknown[0]}: unknown; use one of {', '.join(PEERS)}")
    if options.turns < 2:
        parser.error(f"--turns {options.turns}: it must be at least 2")

    missing = [name for name in names if not all(map(find_spec, PEERS[name][1]))]
    results = compare([name for name in names if name not in missing], options.turns)
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(table(results), *(f"{name:20}not installed" for name in missing), sep="\n")
    print(f"{options.turns} turns of {TURN} steps, CPU time; {machine}")
    if options.json:
        report = {"machine": machine, "results": [asdict(r) for r in results], "not_installed": missing}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
