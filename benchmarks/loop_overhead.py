"""What a training loop costs: one small model on the CPU through shoal and its peers, in one run.

    python benchmarks/loop_overhead.py [--peers raw,shoal,fabric] [--rounds 15] [--json result.json]

The model is so small that the loop is most of what there is to see; on a real one all of this is noise. Every peer
trains the same network on the same samples, in fp32 with fused AdamW, clipped by norm, with a learning rate that
changes at every update, and records the loss every 50 steps. Each is written as its own documentation writes it and
lives in a process of its own. They take turns, round after round, and only steps in the middle of a run are looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

BATCH, WIDTH, CLASSES = 32, 64, 10
WARMUP, WINDOW, TOTAL = 200, 1000, 1300  # steps; the window holds 20 records of the loss
LOG_EVERY, LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 50, 1e-3, 0.1, 1.0


class Stopwatch:
    """Ticks whenever the model is called; times the window of steady steps, or counts the Python calls in it."""

    def reset(self, counting: bool) -> None:
        self.ticks, self.counting = 0, counting
        self.calls: Counter[str] = Counter()

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == WARMUP:
            self.began = time.process_time()
            sys.setprofile(self._count if self.counting else None)
        elif self.ticks == WARMUP + WINDOW:
            sys.setprofile(None)
            self.seconds = time.process_time() - self.began

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
    """A map-style dataset of dicts, long enough for one epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(BATCH * TOTAL, WIDTH, generator=generator)
        self.labels = self.x[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


def build() -> tuple[nn.Module, AdamW, LambdaLR, DataLoader[Any]]:
    """What everyone but shoal and the Hugging Face Trainer is given; those two build the same themselves."""
    model = Network()
    weights = [p for p in model.parameters() if p.ndim >= 2]
    biases = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / TOTAL)))
    return model, optimizer, schedule, DataLoader(Samples(), batch_size=BATCH, shuffle=True)


def raw(folder: Path) -> None:
    """By hand. No resuming, no check for gradients that are not finite, no rates, no seeds per step."""
    model, optimizer, schedule, loader = build()
    with (folder / "metrics.jsonl").open("w") as log:
        for step, batch in enumerate(loader):
            loss = cross_entropy(model(batch["x"]), batch["labels"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                log.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                log.flush()


def shoal(folder: Path) -> None:
    """Also, in every step: reseeds for the step, weighs by what was counted, skips an update that is not finite and
    keeps the position in the data; in every record: norm, rates, memory and skipped updates."""
    from shoal.config import Run
    from shoal.config.schema import Config
    from shoal.recipes import Recipe
    from shoal.training import train

    class Classify(Recipe):
        def build_model(self) -> nn.Module:
            return Network()

        def train_data(self) -> Samples:
            return Samples()

        def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": batch["x"]}

        def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return cross_entropy(output, batch["labels"], reduction="sum")

    config = {
        "recipe": "loop_overhead:Classify",
        "experiment": {"output_dir": str(folder)},
        "training": {
            "max_steps": TOTAL,
            "batch_size": BATCH,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_NORM,
        },
        "logging": {"every": LOG_EVERY, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
    }
    train(Run(Config.model_validate(config), Classify, Classify.Config(), sources={}))


def fabric(folder: Path) -> None:
    """Its clipping refuses gradients that are not finite; the rest of the loop is the user's, as in raw."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    runner = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(folder))
    model, optimizer, schedule, loader = build()
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


def accelerate(folder: Path) -> None:
    """Like raw, the loop is the user's; accumulation and the schedule follow the accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = accelerator.prepare(*build())
    with (folder / "metrics.jsonl").open("w") as log:
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
                log.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                log.flush()


def hf_trainer(folder: Path) -> None:
    """A whole trainer: callbacks, and the loss added up and checked in every step."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=TOTAL,
        per_device_train_batch_size=BATCH,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="cosine",
        logging_steps=LOG_EVERY,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    Trainer(
        Network(),
        arguments,
        data_collator=default_collate,
        train_dataset=Samples(),
        compute_loss_func=lambda output, labels, num_items_in_batch=None: cross_entropy(output, labels),
    ).train()


def lightning(folder: Path) -> None:
    """A whole trainer: hooks, callbacks, metrics."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    model, optimizer, schedule, loader = build()

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

    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=TOTAL,
        gradient_clip_val=MAX_NORM,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Classify(), loader)


@dataclass(frozen=True)
class Peer:
    train: Callable[[Path], None]
    packages: tuple[str, ...]
    """Whose calls count as the peer's own; the first is the one to install."""


PEERS = {
    "raw": Peer(raw, ("torch",)),
    "shoal": Peer(shoal, ("shoal",)),
    "fabric": Peer(fabric, ("lightning",)),
    "accelerate": Peer(accelerate, ("accelerate",)),
    "hf_trainer": Peer(hf_trainer, ("transformers", "accelerate")),
    "lightning": Peer(lightning, ("lightning",)),
}


def run_once(name: str, counting: bool = False) -> tuple[float, float, float]:
    """Microseconds, Python calls, and calls in the peer's own code, per steady step. Runs in the peer's process."""
    peer = PEERS[name]
    torch.manual_seed(0)
    stopwatch.reset(counting)
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            peer.train(Path(folder))
    homes = tuple(str(Path(find_spec(package).origin).parent) for package in peer.packages)
    own = sum(calls for file, calls in stopwatch.calls.items() if file.startswith(homes))
    return stopwatch.seconds / WINDOW * 1e6, stopwatch.calls.total() / WINDOW, own / WINDOW


@dataclass(frozen=True)
class Result:
    name: str
    version: str
    microseconds: list[float]
    """Per step, one number for each round."""
    over_raw: float | None
    """Microseconds: the median of the differences to the raw loop of the same round."""
    calls: float
    own_calls: float


def compare(names: list[str], rounds: int) -> list[Result]:
    """Every peer trains once in each round, so that whatever else the machine does falls on all of them alike."""
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for name in names
        }
        counted = {name: process.submit(run_once, name, counting=True).result() for name, process in processes.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for round in range(rounds):
            print(f"round {round + 1} of {rounds}", end="\r", file=sys.stderr)
            for name, process in processes.items():
                times[name].append(process.submit(run_once, name).result()[0])
    results = []
    for name in names:
        pairs = zip(times[name], times.get("raw", ()), strict=False)
        differences = [own - raw for own, raw in pairs]
        over_raw = statistics.median(differences) if differences else None
        _, calls, own_calls = counted[name]
        results.append(Result(name, version(PEERS[name].packages[0]), times[name], over_raw, calls, own_calls))
    return results


def table(results: list[Result], missing: list[str]) -> str:
    lines = [f"{'':24}{'µs/step':>9}{'middle half':>15}{'over raw':>10}{'calls/step':>12}{'its own':>9}"]
    for r in results:
        low, middle, high = statistics.quantiles(r.microseconds, n=4)
        over_raw = "" if r.over_raw is None or r.name == "raw" else f"{r.over_raw:+.0f}"
        own = "" if r.name == "raw" else f"{r.own_calls:.0f}"
        lines.append(
            f"{r.name + ' ' + r.version:24}{middle:9.0f}{f'{low:.0f}–{high:.0f}':>15}{over_raw:>10}{r.calls:12.0f}{own:>9}"
        )
    return "\n".join([*lines, *(f"{name:24}not installed" for name in missing)])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training loop costs, beside its peers.")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="how often each peer trains; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    chosen = options.peers.split(",")
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"--peers: {', '.join(unknown)} is none of {', '.join(PEERS)}")
    if options.rounds < 2:
        parser.error(f"--rounds = {options.rounds}: a spread needs at least 2")

    present = [name for name in chosen if all(map(find_spec, PEERS[name].packages))]
    missing = [name for name in chosen if name not in present]
    results = compare(present, options.rounds)
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{table(results, missing)}\n{machine}; CPU time, {options.rounds} rounds of {WINDOW} steps")
    if options.json:
        report = {"machine": machine, "results": [asdict(r) for r in results], "not_installed": missing}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
