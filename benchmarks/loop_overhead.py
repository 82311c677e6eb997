"""Measures what a training loop costs: one small model on the CPU, under shoal and under other frameworks, in one run.

    python benchmarks/loop_overhead.py [--peers raw,shoal,fabric] [--turns 40] [--json FILE] [--write FILE]

The model is so small that most of the time goes into the loop; with a real model these differences do not matter.
Every peer trains the same network on the same samples, in fp32 with fused AdamW, clipped by norm, with a learning rate
that changes at every update, and records the loss every 50 steps. Each is written as its documentation shows, and runs
in a process of its own. They take turns of 100 steps, so that other work on the machine slows all of them equally.
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
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from cases import write_section
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

BATCH, WIDTH, CLASSES = 32, 64, 10
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 1e-3, 0.1, 1.0, 50
TURN, WARMUP = 100, 3  # steps; turns


class Stopwatch:
    """Counts the calls of the model. At the end of a turn it sends the time of the turn and waits for the next one."""

    connection: Connection
    began = 0.0

    def __init__(self) -> None:
        self.ticks = 0
        self.calls: Counter[str] = Counter()

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % TURN == 0:
            sys.setprofile(None)
            # CPU time: nothing here waits, and other processes disturb it less than the time on a clock.
            self.connection.send((time.process_time() - self.began, self.calls))
            self.calls.clear()
            sys.setprofile(self._count if self.connection.recv() == "count" else None)
            self.began = time.process_time()

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls[frame.f_code.co_filename] += 1


stopwatch = Stopwatch()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        stopwatch.tick()
        return self.layers(x)


class Samples:
    """A map-style dataset of dicts: one epoch."""

    def __init__(self, steps: int):
        self.x = torch.randn(BATCH * steps, WIDTH)
        self.labels = self.x[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


def build(steps: int) -> tuple[nn.Module, AdamW, LambdaLR, DataLoader[Any]]:
    """Builds what a peer trains. shoal and the Hugging Face Trainer build the same themselves."""
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
    """Plain PyTorch: no resuming, no check for gradients that are not finite, no speeds, no seed per step."""
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


def shoal(folder: Path, steps: int, with_own: bool = False) -> None:
    """Adds to every step: a seed, the mean over a count, the position in the data, and no update if the gradient is not
    finite. Adds to every record: gradient norm, speeds, memory, skipped updates."""
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

    class WithAccuracy(Classify):
        def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
            return {"accuracy": ((output.argmax(1) == batch["labels"]).sum(), len(output))}

        def after_step(self, run: Any) -> None:
            self.last_step = run.step

    recipe = WithAccuracy if with_own else Classify
    optimisation = {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_NORM}
    config = {
        "recipe": "loop_overhead:Classify",
        "experiment": {"output_dir": str(folder)},
        "training": {"max_steps": steps, "batch_size": BATCH, **optimisation},
        "logging": {"every": LOG_EVERY, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
        "callbacks": [{"name": "loss_spike"}] if with_own else [],
    }
    train(Run(Config.model_validate(config), recipe, recipe.Config(), sources={}))


def shoal_own(folder: Path, steps: int) -> None:
    """As shoal, with a metric, a hook that every step calls, and a callback that every record calls."""
    shoal(folder, steps, with_own=True)


def fabric(folder: Path, steps: int) -> None:
    """As raw; but its clipping raises an error if the gradient is not finite."""
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
    """As raw, and ready for gradient accumulation."""
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
    """A whole trainer with callbacks; it keeps its records in memory."""
    from transformers import Trainer, TrainingArguments

    optimisation = {"learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_NORM}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": LOG_EVERY}
    data = {"per_device_train_batch_size": BATCH, "remove_unused_columns": False, "dataloader_pin_memory": False}
    schedule = {"optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "max_steps": steps}
    arguments = TrainingArguments(str(folder), use_cpu=True, **optimisation, **schedule, **data, **quiet)

    def loss(output: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        return cross_entropy(output, labels)

    Trainer(Network(), arguments, default_collate, Samples(steps), compute_loss_func=loss).train()


def lightning(folder: Path, steps: int) -> None:
    """A whole trainer with hooks, callbacks and metrics."""
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


# name → (training function, packages): the version is that of the first, and calls into all of them count as its own
PEERS = {
    "raw": (raw, ["torch"]),
    "shoal": (shoal, ["shoal"]),
    "shoal_own": (shoal_own, ["shoal"]),
    "fabric": (fabric, ["lightning"]),
    "accelerate": (accelerate, ["accelerate"]),
    "hf_trainer": (hf_trainer, ["transformers", "accelerate"]),
    "lightning": (lightning, ["lightning"]),
}


def work(name: str, turns: int, connection: Connection) -> None:
    """Runs in the peer's process."""
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
    peer: str
    version: str
    microseconds: list[float]
    """Per step, one number for each turn."""
    calls: float
    """Python functions called per step."""
    own_calls: float
    """Those of them that are in the framework's code."""


def compare(names: list[str], turns: int) -> list[Result]:
    """Lets the peers take turns and returns what each of them took."""
    context = multiprocessing.get_context("spawn")
    plan = ["time"] * (WARMUP + turns) + ["count"]
    turns_of: dict[str, list[tuple[float, Counter[str]]]] = {name: [] for name in names}
    connections, processes = {}, []
    for name in names:
        connections[name], other_end = context.Pipe()
        processes.append(context.Process(target=work, args=(name, len(plan) + 1, other_end), daemon=True))
        processes[-1].start()
        other_end.close()
        connections[name].recv()  # it has taken its first turn
    for request in plan:
        for name, connection in connections.items():
            connection.send(request)
            turns_of[name].append(connection.recv())
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.send("finish")
        process.join()

    results = []
    for name in names:
        *timed, (_, calls) = turns_of[name]
        _, packages = PEERS[name]
        homes = tuple(str(Path(find_spec(package).origin).parent) for package in packages)
        own_calls = sum(number for file, number in calls.items() if file.startswith(homes))
        microseconds = [seconds / TURN * 1e6 for seconds, _ in timed[WARMUP:]]
        results.append(Result(name, version(packages[0]), microseconds, calls.total() / TURN, own_calls / TURN))
    return results


def table(results: list[Result]) -> str:
    """Returns medians over the turns; after ± is the standard error of the median."""
    base = next((r.microseconds for r in results if r.peer == "raw"), None)
    lines = [f"{'':20}{'µs/step':>9}{'middle half':>13}{'over raw':>13}{'calls/step':>12}{'its own':>9}"]
    for r in results:
        low, middle, high = statistics.quantiles(r.microseconds, n=4)
        over_raw = "-"
        if base and r.peer != "raw":
            differences = [a - b for a, b in zip(r.microseconds, base, strict=True)]
            first, second, third = statistics.quantiles(differences, n=4)
            over_raw = f"{second:+.0f} ± {0.93 * (third - first) / math.sqrt(len(differences)):.0f}"
        own = "-" if r.peer == "raw" else f"{r.own_calls:.0f}"
        name, spread = f"{r.peer} {r.version}", f"{low:.0f}–{high:.0f}"
        lines.append(f"{name:20}{middle:9.0f}{spread:>13}{over_raw:>13}{r.calls:12.0f}{own:>9}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a training loop costs, beside other frameworks.")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; default: %(default)s")
    parser.add_argument("--turns", type=int, default=40, help=f"of {TURN} steps for each peer; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the result into this Markdown file")
    options = parser.parse_args()
    names = options.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: {unknown[0]!r} is none of {', '.join(PEERS)}")
    if options.turns < 2:
        parser.error(f"--turns = {options.turns}: a spread needs at least 2")

    missing = [name for name in names if not all(map(find_spec, PEERS[name][1]))]
    results = compare([name for name in names if name not in missing], options.turns)
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    shown = "\n".join([table(results), *(f"{name:20}not installed" for name in missing)])
    print(shown)
    print(f"{options.turns} turns of {TURN} steps, CPU time; {machine}")
    if options.write:
        head = (
            f"Measured by `python benchmarks/loop_overhead.py` on {date.today().isoformat()}, {machine}: a model so "
            f"small that most of a step is the loop, {options.turns} turns of {TURN} steps for each peer, CPU time. "
            "`raw` is a loop in plain PyTorch; after ± is the standard error of the median."
        )
        write_section(options.write, "The loop", f"{head}\n\n```text\n{shown}\n```")
    if options.json:
        report = {"machine": machine, "results": [asdict(r) for r in results], "not_installed": missing}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
