"""Measures on one GPU how fast a Llama trains under each strategy, and how much memory that takes.

    python benchmarks/llama.py [--large | --fp8] [--steps 12] [--small] [--cases 'raw;single']
                               [--write docs/benchmarks.md]

The cases run one after another, each in a process of its own: first a compiled loop in plain PyTorch, then the same
steps under shoal's strategies. A case with several ranks uses torch's `fake` backend: rank 0 computes for real, and its
collectives return at once. So it measures the computing and the memory of one rank, and not the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cases import machine, options_of, parser_of, run_cases, step_of, table_of, time_steps, write_section

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LARGE = {**SIZES, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
TIED = {**SIZES, "vocab_size": 128256, "tie_word_embeddings": True}
SMALL = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
SPEED = {"mixed_precision": "bf16", "compile": True}
CHUNKED = {**SPEED, "loss_chunks": 8}
OFFLOADED = {**CHUNKED, "activation_checkpointing": {"mode": "full", "offload": True}}
LEAN = {"mixed_precision": "pure_bf16", "activation_checkpointing": "full", "loss_chunks": 8}
ABOUT = (
    "`raw` is a loop in plain PyTorch: the whole model compiled, bf16 autocast, fused AdamW, clipping. The other "
    "rows are shoal's strategies on the same batch, with each block compiled if nothing else is said, and but for "
    "`single` with the loss in 8 chunks (`loss_chunks: 8`). With `inputs on the host`, the inputs of recomputed blocks "
    "wait in host memory (`activation_checkpointing.offload`): the peak is at the end of the backward here, when the "
    "gradients of all weights are there and those inputs are gone; [QLoRA](#qlora) shows what it saves where the base "
    "is frozen. `lean` is pure_bf16 with full activation "
    'checkpointing, not compiled. "Rank 0 of N" is one rank of N, without the others: with torch\'s `fake` backend it '
    "computes its part and uses the memory of its part, but it never waits for a network."
)
ABOUT_LARGE = (
    "`8B transformers` is transformers' model with its own recomputation and fused AdamW; with `bf16 weights` its "
    "updates are rounded to nearest. The other rows are shoal's, in which `bf16 weights` are rounded stochastically "
    "(`weights_dtype: bf16`). All compile each block. A rank of many is one without the others, in pure_bf16 with full "
    "activation checkpointing and 8 × 2048 tokens. One of `tp 8` has an eighth of every layer, and one of `pp 4` a "
    "quarter of the layers, so there tokens/s are those of the 8 or 4 ranks together; all their weights are one "
    "number, and no stage waits for another."
)
SINGLE, DDP, FSDP = ({"strategy": name} for name in ("single", "ddp", "fsdp"))
TP_FSDP = {"strategy": "mesh", "mesh": {"tp": 8, "dp_shard": 8}, "tensor": {"sequence_parallel": True}}
PP_FSDP = {"strategy": "mesh", "mesh": {"pp": 4, "dp_shard": 8}, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}
FP8 = {**CHUNKED, "mixed_precision": "fp8"}
EIGHT_BILLION = {**CHUNKED, "mixed_precision": "pure_bf16", "activation_checkpointing": "full"}
BF16_WEIGHTS = {**CHUNKED, "weights_dtype": "bf16"}

# name → (ranks in the world, keys of `distributed`, keys of `training`)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "raw": (1, {}, {}),
    "single": (1, SINGLE, SPEED),
    "single, loss in 8 chunks": (1, SINGLE, CHUNKED),
    "single, loss in 8 chunks, fp8": (1, SINGLE, FP8),
    "single, loss in 8 chunks, all recomputed": (1, SINGLE, {**CHUNKED, "activation_checkpointing": "full"}),
    "single, loss in 8 chunks, all recomputed, inputs on the host": (1, SINGLE, OFFLOADED),
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
    "8B transformers, bf16 weights, all recomputed": (1, {}, {}),
    "8B, bf16 weights": (1, SINGLE, BF16_WEIGHTS),
    "8B, bf16 weights, fp8": (1, SINGLE, {**BF16_WEIGHTS, "mixed_precision": "fp8"}),
    "8B transformers, all recomputed": (1, {}, {}),
    "8B, all recomputed": (1, SINGLE, {**CHUNKED, "activation_checkpointing": "full"}),
    "8B, tp 8 × dp_shard 8, rank 0 of 64": (64, TP_FSDP, EIGHT_BILLION),
    "8B, pp 4 × dp_shard 8, rank 0 of 32": (32, PP_FSDP, EIGHT_BILLION),
}
FP8_CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "bf16": (1, SINGLE, CHUNKED),
    "fp8": (1, SINGLE, FP8),
    "fp8, also the head": (1, SINGLE, {**FP8, "fp8_head": True}),
}
"""The cases of the option --fp8, of a model with a large vocabulary."""
ABOUT_FP8 = (
    "A Llama of 1.2 billion parameters with 128,256 tokens that share their embedding with the head, compiled, loss in "
    "8 chunks, 8 × 2048 tokens a step. `fp8` is `mixed_precision: fp8`, and `also the head` is `fp8_head: true`. How "
    "well such a model learns is [above](#losses-of-faster-paths-on-a-cpu)."
)


def main() -> None:
    parser = parser_of(__doc__, steps=12)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--large", action="store_true", help="the cases of a Llama of 8 billion parameters")
    which.add_argument("--fp8", action="store_true", help="bf16 and fp8 with a large vocabulary")
    options = options_of(parser)
    if options.case:
        print(json.dumps(measure(options.case, options.steps, options.small, options.fp8)))
        return
    names = [*FP8_CASES] if options.fp8 else [name for name in CASES if name.startswith("8B") == options.large]
    if options.large:
        options.at_once = 1  # each needs most of a GPU
    results = run_cases(names, options)
    if options.write and options.fp8:
        head = (
            f"Measured by `python benchmarks/llama.py --fp8` on {machine()}: {options.steps} steps after 4 for warm-up."
        )
        write_section(options.write, "fp8", f"{head} {ABOUT_FP8}\n\n{table_of(results, names[0])}")
    elif options.write:
        size, tokens, about = ("8", "2 × 4096", ABOUT_LARGE) if options.large else ("1.1", "8 × 2048", ABOUT)
        head = (
            f"How fast does a Llama of {size} billion parameters train under each strategy on one GPU, and how much "
            f"memory does a rank need? Measured by `python benchmarks/llama.py{' --large' * options.large}` on "
            f"{machine()}: {options.steps} steps after 4 for warm-up, {tokens} tokens a step.\n\n{about}"
        )
        heading = "Llama of 8 billion parameters" if options.large else "Llama"
        write_section(options.write, heading, f"{head}\n\n{table_of(results, names[0])}")


def measure(name: str, steps: int, small: bool, fp8: bool = False) -> dict[str, float]:
    """Runs one case and returns its speed, peak memory and last loss."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = name.startswith("8B")
    world, distributed, training = FP8_CASES[name] if fp8 else CASES[name]
    rows, length = (8, 64) if small else (2, 4096) if large and world == 1 else (8, 2048)
    generator = torch.Generator().manual_seed(0)
    sizes = SMALL if small else LARGE if large else TIED if fp8 else SIZES
    tokens = torch.randint(0, sizes["vocab_size"], (rows, length + 1), generator=generator)
    if name == "raw":
        step = raw_step(sizes, tokens.to(device))
    elif "transformers" in name:
        step = transformers_step(sizes, tokens.to(device), "bf16 weights" in name)
    else:
        training = {**training, "device": device}
        step = shoal_step(sizes, tokens, world, distributed, training, random_weights=not large)
    return time_steps(step, steps, rows * length)


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


def transformers_step(sizes: dict[str, int], tokens: Any, bf16_weights: bool) -> Callable[[], Any]:
    """Returns a step of transformers' model with its own recomputation and loss, each block compiled, fused AdamW.

    With bf16 weights, gradients and moments are bf16 too, rounded to nearest.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.bfloat16 if bf16_weights else torch.float32
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    # Its tables are computed where it is built.
    rotary = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 0, "vocab_size": 8})).model.rotary_emb
    model.to_empty(device=tokens.device)
    model.model.rotary_emb = rotary.to(tokens.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for block in model.model.layers:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not bf16_weights):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss
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
    """Returns the same step under a strategy. Without `random_weights` all weights of a rank of several are one number:
    drawing billions of numbers takes minutes and does not change its memory."""
    from shoal.processes.world import World
    from shoal.types import Weights

    tree = {
        "recipe": "causal_lm",
        "model": {"config": {"model_type": "llama", **sizes}},
        "training": training,
        "distributed": {**distributed, "backend": "gloo"},
    }
    if world > 1:
        open_fake_group(world)
    ranks = World(size=world, local_size=world, group="imagined" if world > 1 else "to make")
    weights = None if random_weights else Weights("init", reset=fill)
    stages = (distributed.get("mesh") or {}).get("pp", 0)
    # A pipeline gets the same tokens in twice as many micro-batches as it has stages.
    step: Callable[[], Any] = step_of(
        tree,
        tokens,
        world=ranks,
        weights=weights,
        parts=2 * stages or 1,
        drawn_on_device=world == 1 and not random_weights,
    )
    return step


def fill(model: Any, module: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(1.0 if parameter.ndim == 1 else 0.02)  # the weights of norms are 1


def open_fake_group(size: int) -> None:
    """Makes this process rank 0 of a process group whose other ranks do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; torch has no public one

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)


if __name__ == "__main__":
    main()
