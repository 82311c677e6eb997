"""Trains models with and without what makes them faster, on Python's standard library, and compares their losses.

    python benchmarks/losses.py [--seeds 2] [--small | --medium] [--cases 'BDH'] [--write docs/benchmarks.md]

A faster path is as good as the plain one if its losses differ from those of the plain one by no more than two seeds do.
All runs of a case start together, because only their losses are of interest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import machine, write_section

# case → (config, steps, keys of the config)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "BDH, plain kernels": ("bdh_stdlib", 300, {"training.kernels": "plain"}),
    "BDH, fused kernels": ("bdh_stdlib", 300, {"training.kernels": "fused"}),
    "Llama, bf16": ("llama_stdlib", 200, {"training.mixed_precision": "bf16"}),
    "Llama, fp8": ("llama_stdlib", 200, {"training.mixed_precision": "fp8"}),
    "Llama, fp8, also the head": (
        "llama_stdlib",
        200,
        {"training.mixed_precision": "fp8", "training.fp8_head": True, "training.loss_chunks": 4},
    ),
}
LLAMA = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 8}
MEDIUM = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
MEDIUM |= {"num_attention_heads": 8, "num_key_value_heads": 4}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_BDH = {"n_layer": 2, "n_embd": 32, "n_head": 2, "mlp_internal_dim_multiplier": 16}
ABOUT = (
    "The loss of training data over the last 20 steps, on Python's standard library, for each seed. BDH has its "
    "published size, 32 × 512 tokens, 300 steps. The Llama has hidden size 1024 and 12 layers, 16 × 512 tokens, "
    "200 steps."
)
ABOUT_MEDIUM = (
    "The loss of training data over the last 20 steps, on Python's standard library, for each seed. The Llama has "
    "hidden size 256 and 4 layers, 16 × 256 tokens, 200 steps. CPUs compute the products in fp8, too."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="use tiny models, and 20 steps")
    size.add_argument("--medium", action="store_true", help="only a Llama that a CPU trains in minutes")
    parser.add_argument("--cases", default="", help="run cases whose name contains this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the results into this Markdown file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        size = "small" if options.small else "medium" if options.medium else "large"
        print(json.dumps(final_loss(options.case, options.seed, size)))
        return
    rows = []
    wanted = (name for name in CASES if options.cases in name and (name.startswith("Llama") or not options.medium))
    for name in wanted:
        command = [sys.executable, *sys.argv, "--case", name]
        processes = [
            subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, text=True)
            for seed in range(options.seeds)
        ]
        losses = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
        rows.append(f"| {name} | {', '.join(f'{loss:.4f}' for loss in losses)} |")
        print(rows[-1], flush=True)
    if options.write:
        table = "\n".join(["| | losses |", "| --- | --- |", *rows])
        command = f"Measured by `python benchmarks/losses.py{' --medium' * options.medium}` on {machine()}."
        text = f"{command} {ABOUT_MEDIUM if options.medium else ABOUT}\n\n{table}"
        write_section(options.write, "Losses of faster paths" + ", on a CPU" * options.medium, text)


def final_loss(name: str, seed: int, size: str) -> float:
    """Trains, and returns the mean of the last losses that the run logged."""
    from shoal.config import load_run
    from shoal.config.shipped import shipped_config
    from shoal.training import train

    config, steps, own = CASES[name]
    small = size == "small"
    keys: dict[str, Any] = {
        "experiment.seed": seed,
        "training.max_steps": 20 if small else steps,
        "training.eval_steps": "null",
        "training.eval_batches": 1,
        "checkpoint.every": "null",
        "logging.every": 10,
        "logging.console": "off",
        "logging.tensorboard": "false",
        "dataset.num_workers": 0,
    }
    if config == "llama_stdlib":
        sizes = {"small": SMALL, "medium": MEDIUM, "large": LLAMA}[size]
        keys |= {f"model.config.{key}": value for key, value in sizes.items()}
        length = 256 if size == "medium" else 512
        keys |= {"training.global_batch_size": 16, "dataset.seq_length": length, "training.compile": size == "large"}
    elif small:
        keys |= {f"model.{key}": value for key, value in SMALL_BDH.items()} | {"training.compile": False}
    if small:
        keys |= {"training.global_batch_size": 2, "dataset.seq_length": 32}
    with tempfile.TemporaryDirectory() as folder:
        keys["experiment.output_dir"] = folder
        train(load_run(shipped_config(config), [f"{key}={value}" for key, value in (keys | own).items()]))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return sum(losses[-2:]) / 2


if __name__ == "__main__":
    main()
