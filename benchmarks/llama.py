"""Measures on one GPU how fast a Llama trains under each strategy, and how much memory that takes.

    python benchmarks/llama.py [--steps 12] [--small] [--cases 'raw;single'] [--write docs/llama.md]

The cases run one after another, each in a process of its own: first a compiled loop in plain PyTorch, then the same
steps under shoal's strategies. A case with several ranks uses torch's `fake` backend: rank 0 computes for real, and its
collectives return at once. So it measures the computing and the memory of one rank, and not the network.
"""

from __future__ import annotations

import argparse
import json
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
    "`raw` is a loop in plain PyTorch: the whole model compiled, bf16 autocast, fused AdamW, clipping. The other rows "
    "are shoal's strategies on the same batch, with each block compiled; from the third row on the loss is computed in "
    '8 chunks (`loss_chunks: 8`). `lean` is pure_bf16 with full activation checkpointing, not compiled. "Rank 0 of '
    "N\" is one rank of N, without the others: with torch's `fake` backend it computes its part and uses the memory of "
    "its part, but it never waits for a network. `8B` is a Llama of 8 billion parameters in pure_bf16 with full "
    "activation checkpointing. A rank of `tp 8` has an eighth of every layer, and a rank of `pp 4` a quarter of the "
    "layers, so there tokens/s are those of the 8 or 4 ranks together; all weights of this model are one number, and "
    "no stage waits for another."
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
    "single, loss in 8 chunks, all recomputed": (1, SINGLE, {**CHUNKED, "activation_checkpointing": "full"}),
    "single, loss in 8 chunks, some recomputed": (1, SINGLE, {**CHUNKED, "activation_checkpointing": "selective"}),
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
    parser.add_argument("--small", action="store_true", help="use a model that is small enough for a CPU")
    parser.add_argument("--cases", help="run cases whose name contains one of these; semicolons between")
    parser.add_argument("--write", help="also write the results to this Markdown file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.steps, options.small)))
        return
    results: dict[str, dict[str, float]] = {}
    chosen = options.cases.split(";") if options.cases else [""]
    for name in CASES:
        if not any(part in name for part in chosen):
            continue
        command = [sys.executable, __file__, "--case", name, "--steps", str(options.steps)]
        done = subprocess.run([*command, *(["--small"] if options.small else [])], capture_output=True, text=True)
        if done.returncode:
            print(f"{name:32} failed with {done.returncode}: {done.stderr.strip()[-300:]}", flush=True)
            continue
        results[name] = result = json.loads(done.stdout.splitlines()[-1])
        against = result["tokens_per_second"] / results["raw"]["tokens_per_second"] if "raw" in results else 0
        shown = f"{result['tokens_per_second']:9,.0f} tokens/s  {against:5.3f} of raw  {result['peak_gib']:6.2f} GiB"
        print(f"{name:32} {shown}  loss {result['loss']:.3f}", flush=True)
    if options.write:
        Path(options.write).write_text(page(results, options.steps))


def page(results: dict[str, dict[str, float]], steps: int) -> str:
    """Returns the results as a Markdown page."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    head = "# A Llama of 1.1 billion parameters on one GPU\n\n"
    head += "How fast does a Llama train under each strategy on one GPU, and how much memory does a rank need? "
    head += f"Measured by `python benchmarks/llama.py` on {date.today().isoformat()}: {device}, torch "
    head += f"{torch.__version__}, 8 × 2048 tokens a step, {steps} steps after 3 for warm-up.\n\n{ABOUT}\n\n"
    raw = results.get("raw", {}).get("tokens_per_second")
    rows = []
    for name, result in results.items():
        speed = result["tokens_per_second"]
        against = f"{speed / raw:.3f}" if raw else "-"
        rows.append(f"| {name} | {speed:,.0f} | {against} | {result['peak_gib']:.2f} |\n")
    return f"{head}| | tokens/s | of raw | peak GiB |\n| --- | --- | --- | --- |\n{''.join(rows)}"


def measure(name: str, steps: int, small: bool) -> dict[str, float]:
    """Runs one case and returns its speed, peak memory and last loss."""
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
    for _ in range(3):  # compiles and allocates
        step()
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronise()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"tokens_per_second": steps * rows * length / seconds, "peak_gib": peak, "loss": loss.item()}


def raw_step(sizes: dict[str, int], tokens: Any) -> Callable[[], Any]:
    """Returns a step in plain PyTorch: the whole model compiled, fp32 weights, autocast, fused AdamW, clipping."""
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
    """Returns the same step under a strategy. Without `random_weights` all weights are one number: drawing billions of
    numbers takes minutes and changes neither speed nor memory."""
    from shoal.config import check_run
    from shoal.processes.world import World
    from shoal.strategies import from_config
    from shoal.training.session import assemble
    from shoal.types import MicroBatch, Weights

    run = check_run(
        {
            "recipe": "causal_lm",
            "model": {"config": {"model_type": "llama", **sizes}},
            "training": {"max_steps": 1, **training},
            "distributed": {**distributed, "backend": "gloo"},
        }
    )
    if world > 1:
        open_fake_group(world)
    ranks = World(size=world, local_size=world, group="imagined" if world > 1 else "to make")
    strategy = from_config(run.config, ranks)
    strategy.setup()
    weights = None if random_weights else Weights("init", reset=fill)
    session = assemble(run.recipe_type(run.recipe_config), strategy, run.config.training, seed=0, weights=weights)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    stages = (distributed.get("mesh") or {}).get("pp", 0)
    parts = 2 * stages or 1  # a pipeline gets the same tokens in twice as many micro-batches as it has stages
    rows = range(len(tokens))
    micro_batches = [
        MicroBatch({key: value[i::parts] for key, value in batch.items()}, rows[i::parts], rows[i::parts])
        for i in range(parts)
    ]

    def step() -> Any:
        output = strategy.forward_backward(session.model, micro_batches, session.recipe, 0)
        strategy.step(session.optimizer, 1.0)
        return output.loss

    return step


def fill(model: Any, module: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(0.02)


def open_fake_group(size: int) -> None:
    """Makes this process rank 0 of a process group whose other ranks do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; torch has no public one

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


if __name__ == "__main__":
    main()
