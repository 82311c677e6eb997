"""Measures what shoal's strategies cost a Llama of 1.1 billion parameters, and what sharding saves, on one GPU.

    python benchmarks/llama.py [--steps 12] [--small] [--cases 'raw;single'] [--write docs/llama.md]

Every case runs in a separate process, one after another: first a compiled training loop in plain PyTorch, then the same
steps under shoal's strategies. Worlds of several ranks use torch's `fake` backend: rank 0 really computes and its
collectives return immediately, so the benchmark measures the work and memory of one rank, but not the network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LARGE = {**SIZES, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
SMALL = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
SPEED = {"mixed_precision": "bf16", "compile": True}
CHUNKED = {**SPEED, "loss_chunks": 8}
LEAN = {"mixed_precision": "pure_bf16", "activation_checkpointing": "full", "loss_chunks": 8}
ABOUT = (
    "`raw` is a training loop in plain PyTorch: the whole model compiled, bf16 autocast, fused AdamW, clipping. The "
    "others are shoal's strategies on the same batch, compiled block by block, from the third on with `loss_chunks: "
    '8`. `lean` is pure_bf16 with full activation checkpointing, not compiled. "Rank 0 of N" is one real rank in a '
    "world whose other ranks do not exist (torch's `fake` backend): its computation and memory are real, but it never "
    "waits for a network. `8B` is a Llama of 8 billion parameters in pure_bf16 with full activation checkpointing; a "
    "rank of `tp 8` has an eighth of every layer and a rank of `pp 4` a quarter of the layers, so tokens/s are those "
    "of all ranks that share the layers together."
)
SINGLE, DDP, FSDP = ({"strategy": name} for name in ("single", "ddp", "fsdp"))
TP_FSDP = {"strategy": "mesh", "mesh": {"tp": 8, "dp_shard": 8}, "tensor": {"sequence_parallel": True}}
PP_FSDP = {"strategy": "mesh", "mesh": {"pp": 4, "dp_shard": 8}, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}
EIGHT_BILLION = {**CHUNKED, "mixed_precision": "pure_bf16", "activation_checkpointing": "full"}

# name → (ranks in the world, keys of `distributed`, keys of `training`)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "raw": (1, {}, {}),
    "single": (1, SINGLE, SPEED),
    "single, loss in 8 chunks": (1, SINGLE, CHUNKED),
    "single, loss in 8 chunks, fp8": (1, SINGLE, {**CHUNKED, "mixed_precision": "fp8"}),
    "ddp, world 1": (1, DDP, CHUNKED),
    "ddp, rank 0 of 8": (8, DDP, CHUNKED),
    "fsdp, world 1": (1, FSDP, CHUNKED),
    "fsdp, rank 0 of 8": (8, FSDP, CHUNKED),
    "fsdp, world 1, pure_bf16": (1, FSDP, {**CHUNKED, "mixed_precision": "pure_bf16"}),
    "fsdp, rank 0 of 8, pure_bf16": (8, FSDP, {**CHUNKED, "mixed_precision": "pure_bf16"}),
    "lean fsdp, world 1": (1, FSDP, LEAN),
    "lean fsdp, rank 0 of 8": (8, FSDP, LEAN),
    "lean fsdp, rank 0 of 64": (64, FSDP, LEAN),
    "lean fsdp, rank 0 of 512": (512, FSDP, LEAN),
    "8B, tp 8 × dp_shard 8, rank 0 of 64": (64, TP_FSDP, EIGHT_BILLION),
    "8B, pp 4 × dp_shard 8, rank 0 of 32": (32, PP_FSDP, EIGHT_BILLION),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="use a small model that runs on a CPU, to try the script")
    parser.add_argument(
        "--cases", help="run only the cases whose name contains one of these texts, separated by semicolons"
    )
    parser.add_argument("--write", help="also write the table as a Markdown page to this path")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.steps, options.small)))
        return
    results: dict[str, dict[str, float]] = {}
    patterns = options.cases.split(";") if options.cases else [""]
    for name in CASES:
        if not any(pattern in name for pattern in patterns):
            continue
        command = [sys.executable, __file__, "--case", name, "--steps", str(options.steps)]
        process = subprocess.run([*command, *(["--small"] if options.small else [])], capture_output=True, text=True)
        if process.returncode:
            print(f"{name:32} failed with exit code {process.returncode}: {process.stderr.strip()[-300:]}", flush=True)
            continue
        results[name] = result = json.loads(process.stdout.splitlines()[-1])
        ratio = result["tokens_per_second"] / results["raw"]["tokens_per_second"] if "raw" in results else 0
        shown = f"{result['tokens_per_second']:9,.0f} tokens/s  {ratio:5.3f} of raw  {result['peak_gib']:6.2f} GiB"
        print(f"{name:32} {shown}  loss {result['loss']:.3f}", flush=True)
    if options.write:
        Path(options.write).write_text(page(results, options.steps))


def page(results: dict[str, dict[str, float]], steps: int) -> str:
    """Returns the results as a Markdown page."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    head = "# A Llama of 1.1 billion parameters on one GPU\n\nWritten by `python benchmarks/llama.py --write "
    head += f"docs/llama.md` on {date.today().isoformat()}: {device}, torch {torch.__version__}, "
    head += f"8 × 2048 tokens a step, {steps} steps after 3. {ABOUT}\n\n"
    raw = results.get("raw", {}).get("tokens_per_second")
    rows = []
    for name, result in results.items():
        speed = result["tokens_per_second"]
        ratio = f"{speed / raw:.3f}" if raw else "-"
        rows.append(f"| {name} | {speed:,.0f} | {ratio} | {result['peak_gib']:.2f} |\n")
    return f"{head}| | tokens/s | of raw | peak GiB |\n| --- | --- | --- | --- |\n{''.join(rows)}"


def measure(name: str, steps: int, small: bool) -> dict[str, float]:
    """Runs one case and returns its speed, its peak memory and the loss of its last step."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, length = (8, 64) if small else (8, 2048)
    generator = torch.Generator().manual_seed(0)
    large = name.startswith("8B")
    sizes = SMALL if small else LARGE if large else SIZES
    tokens = torch.randint(0, sizes["vocab_size"], (rows, length + 1), generator=generator)
    world, distributed, training = CASES[name]
    if name == "raw":
        step = raw_step(sizes, tokens.to(device))
    else:
        training = {**training, "device": device, "batch_size": rows}
        step = shoal_step(sizes, tokens, world, distributed, training, random_weights=not large)
    for _ in range(3):  # the first steps compile and allocate
        step()
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronise()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"tokens_per_second": steps * rows * length / seconds, "peak_gib": peak, "loss": loss.item()}


def raw_step(sizes: dict[str, int], tokens: Any) -> Callable[[], Any]:
    """Returns a training step in plain PyTorch: the whole model compiled, fp32 weights, autocast, fused AdamW,
    clipping."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(tokens.device):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(inputs: Any, labels: Any) -> Any:
        logits = model(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    compiled = torch.compile(loss_of)

    def step() -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def shoal_step(
    sizes: dict[str, int],
    tokens: Any,
    world: int,
    distributed: dict[str, Any],
    training: dict[str, Any],
    random_weights: bool = True,
) -> Callable[[], Any]:
    """Returns a training step under a strategy of shoal.

    Without `random_weights` all weights have the same value: drawing billions of numbers takes minutes, and their
    values do not change the speed.
    """
    if world > 1:
        fake_world(world)

    from shoal.config import check_run
    from shoal.strategies import from_config
    from shoal.training.optimizers import build_optimizer
    from shoal.types import MicroBatch, Weights
    from shoal.weights import build

    model_keys = {"config": {"model_type": "llama", **sizes}}
    run = check_run(
        {
            "recipe": "causal_lm",
            "model": model_keys,
            "training": {"max_steps": 1, **training},
            "distributed": {**distributed, "backend": "gloo"},
        }
    )
    recipe, strategy = run.recipe_type(run.recipe_config), from_config(run.config)
    strategy.setup()
    model, weights = build(recipe.build_model, recipe.weights(), seed=0)
    if not random_weights:
        weights = Weights("init", reset=fill_with_constant)
    plan = recipe.parallel_plan(model)
    model, optimizer = strategy.prepare(
        model, lambda m: build_optimizer(run.config.training, recipe.param_groups(m)), plan, weights
    )
    rows = range(len(tokens))
    batch = MicroBatch({"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}, rows, rows)
    batches = [batch]
    if stages := (distributed.get("mesh") or {}).get("pp"):  # the same tokens, split into two micro-batches per stage
        batches = [
            MicroBatch({key: value[i :: 2 * stages] for key, value in batch.data.items()}, rows[i::8], rows[i::8])
            for i in range(2 * stages)
        ]

    def step() -> Any:
        output = strategy.forward_backward(model, batches, recipe, 0)
        strategy.step(optimizer, 1.0)
        return output.loss

    return step


def fill_with_constant(model: Any, module: Any) -> None:
    """Sets the parameters of a module to one value."""
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(0.02)


def fake_world(size: int) -> None:
    """Makes this process rank 0 of a world whose other ranks do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import (
        FakeStore,  # this import registers the backend; torch has no public one
    )

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


if __name__ == "__main__":
    main()
