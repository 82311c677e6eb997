"""Measures on one GPU how fast BDH trains, beside the public implementation.

    python benchmarks/bdh.py [--public FOLDER] [--steps 20] [--rows 32] [--length 512] [--small] [--write FILE]

FOLDER is a clone of github.com/pathwaycom/bdh. The case `public` trains its model with the steps of its train.py: the
whole model compiled, bf16 autocast, AdamW, no clipping; without FOLDER it is left out. The other cases train the same
model under shoal, each level compiled, with clipping. Each runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import machine, options_of, parser_of, run_cases, step_of, table_of, time_steps, write_section

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "mlp_internal_dim_multiplier": 16}
CASES: dict[str, dict[str, Any] | None] = {
    "public": None,
    "shoal": {"kernels": "plain"},
    "shoal, fused": {"kernels": "fused"},
    "shoal, all recomputed": {"kernels": "plain", "activation_checkpointing": "full"},
}
"""The keys of `training` by case; None for the public implementation."""
ABOUT = (
    "`public` is the model of github.com/pathwaycom/bdh with the steps of its train.py: compiled, bf16 autocast, "
    "AdamW. The other rows train the same model under shoal: each level compiled, bf16, fused AdamW, clipping. `fused` "
    "is `training.kernels: fused`, on a Hopper GPU in Triton; the others are `plain`."
)


def main() -> None:
    parser = parser_of(__doc__, steps=20)
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="a clone of github.com/pathwaycom/bdh")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    options = options_of(parser)
    if options.case:
        print(json.dumps(measure(options.case, options)))
        return
    names = [name for name in CASES if name != "public" or options.public]
    results = run_cases(names, options)
    if options.write:
        size = f"{options.rows} × {options.length} tokens a step, {options.steps} steps after 4 for warm-up"
        head = f"Measured by `python benchmarks/bdh.py` on {machine()}: {size}. {ABOUT}"
        heading = "BDH" if (options.rows, options.length) == (32, 512) else f"BDH, {options.rows} × {options.length}"
        write_section(options.write, heading, f"{head}\n\n{table_of(results, names[0])}")


def measure(name: str, options: Any) -> dict[str, float]:
    """Runs one case and returns its speed, peak memory and last loss."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, training = SMALL if options.small else {}, CASES[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (options.rows, options.length + 1), generator=generator)
    if training is None:
        step = public_step(options.public, sizes, tokens.to(device))
    else:
        precision = {"mixed_precision": "bf16", "compile": True, "device": device, **training}
        step = step_of({"recipe": "bdh", "model": sizes, "training": precision}, tokens)
    return time_steps(step, options.steps, options.rows * options.length)


def public_step(folder: Path, sizes: dict[str, int], tokens: Any) -> Callable[[], Any]:
    """Returns a step of the public train.py."""
    import torch

    sys.path.insert(0, str(folder))
    sys.modules.pop("bdh", None)  # this file, if it was imported by that name
    import bdh as public

    torch.backends.cuda.matmul.allow_tf32 = True
    model = torch.compile(public.BDH(public.BDHConfig(**sizes)).to(tokens.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            _, loss = model(inputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
