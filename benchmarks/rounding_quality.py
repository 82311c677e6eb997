"""Trains a small Llama with weights in fp32 and in bf16, and compares the evaluation losses at the end.

    python benchmarks/rounding_quality.py [--steps 600] [--seeds 2] [--learning-rate 1e-3]

The third row rounds weights and optimizer state to the nearest number instead of stochastically. No config can ask for
that; it is here to show what stochastic rounding is for. The table goes to docs/choosing.md.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any
from unittest.mock import patch

from torch import Tensor

from shoal.config import load_run
from shoal.config.shipped import shipped_config
from shoal.training import rounded_adamw, train

ROWS = {
    "fp32": "fp32",
    "bf16, stochastic rounding": "bf16",
    "bf16, rounded to nearest": "bf16",
}


def final_loss(row: str, seed: int, options: argparse.Namespace) -> float:
    """Trains the Llama, and returns the evaluation loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, Any] = {
            "experiment.output_dir": folder,
            "experiment.seed": seed,
            "model.config.hidden_size": 128,
            "model.config.intermediate_size": 352,
            "model.config.num_hidden_layers": 4,
            "model.config.num_attention_heads": 4,
            "model.config.num_key_value_heads": 2,
            "dataset.seq_length": 128,
            "dataset.num_workers": 0,
            "training.device": options.device,
            "training.max_steps": options.steps,
            "training.global_batch_size": 8,
            "training.learning_rate": options.learning_rate,
            "training.mixed_precision": "bf16",
            "training.weights_dtype": ROWS[row],
            "training.compile": "false",
            "training.eval_steps": "null",
            "training.eval_batches": 20,
            "checkpoint.every": "null",
            "logging.console": "off",
            "logging.tensorboard": "false",
        }
        run = load_run(shipped_config("llama_stdlib"), [f"{key}={value}" for key, value in keys.items()])
        if row != "bf16, rounded to nearest":
            return train(run).metrics["eval/loss"]
        with patch.object(rounded_adamw, "round_to_bf16", round_to_nearest):
            return train(run).metrics["eval/loss"]


def round_to_nearest(values: Tensor, bits: Tensor) -> Tensor:
    return values.bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(f"| `weights_dtype` | {' | '.join(f'seed {seed}' for seed in range(options.seeds))} |")
    print(f"|{' --- |' * (options.seeds + 1)}", flush=True)
    for row in ROWS:
        losses = [final_loss(row, seed, options) for seed in range(options.seeds)]
        print(f"| {row} | {' | '.join(f'{loss:.4f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
