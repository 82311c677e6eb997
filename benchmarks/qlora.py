"""Measures on one GPU how fast a Llama is fine-tuned: adapters beside a base in 4 bits or in bf16, or all weights.

    python benchmarks/qlora.py [--kind qlora|lora|full] [--steps 10] [--small] [--cases 'peer;shoal'] [--length 2048]
                               [--write docs/benchmarks.md]

The cases run one after another, each in a process of its own: first a plain loop with transformers, PEFT and
bitsandbytes, then the same steps under shoal. Weights are random in both: products with equal numbers are faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cases import machine, options_of, parser_of, run_cases, step_of, table_of, time_steps, write_section

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
SMALL = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 64, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": TARGETS}
ROWS = 4
BF16 = {"mixed_precision": "bf16", "loss_chunks": 8}
RECOMPUTED = {"activation_checkpointing": "full"}
RECORDED = {"cuda_graphs": True}

ONE_BILLION = {**SIZES, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
ONE_BILLION |= {"num_key_value_heads": 8, "vocab_size": 128256}

CASES: dict[str, dict[str, Any] | None] = {
    "peer, recomputed": None,
    "shoal, recomputed": {**BF16, **RECOMPUTED},
    "shoal, recomputed, compiled": {**BF16, **RECOMPUTED, "compile": True},
    "shoal, recomputed, compiled, inputs in host memory": {
        **BF16,
        "activation_checkpointing": {"mode": "full", "offload": True},
        "compile": True,
    },
    "shoal, compiled": {**BF16, "compile": True},
    "shoal, recorded, recomputed, compiled": {**BF16, **RECOMPUTED, **RECORDED, "compile": True},
    "shoal, recorded, compiled": {**BF16, **RECORDED, "compile": True},
}
FULL_CASES: dict[str, dict[str, Any] | None] = {"peer": None, "shoal, compiled": {**BF16, "compile": True}}
"""The keys of `training` by case; None for the loop without shoal."""


@dataclass(frozen=True)
class Kind:
    """A way to fine-tune."""

    heading: str
    about: str
    base: dict[str, Any] | None
    """The keys of `model` for a frozen base; None if all weights are trained."""
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    cases: dict[str, dict[str, Any] | None] = field(default_factory=lambda: CASES)


ADAPTERS = "adapters of rank 64 on all seven projections, dropout 0.05"
KINDS = {
    "qlora": Kind(
        "QLoRA",
        f"A Llama of 7 billion parameters with random weights in nf4 with quantised scales, {ADAPTERS}. `peer` is a "
        "plain loop with transformers, PEFT and bitsandbytes.",
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "dtype": "bf16"},
    ),
    "lora": Kind(
        "LoRA",
        f"A Llama of 7 billion parameters with random weights in bf16, {ADAPTERS}. `peer` is a plain loop with "
        "transformers and PEFT.",
        {"dtype": "bf16"},
    ),
    "full": Kind(
        "Full fine-tuning",
        "All weights of a Llama of 1.2 billion parameters (128,256 tokens, tied), in fp32 with bf16 autocast, AdamW. "
        "`peer` is a plain loop with transformers; nothing is recomputed.",
        None,
        {**ONE_BILLION, "tie_word_embeddings": True},
        FULL_CASES,
    ),
}


def main() -> None:
    parser = parser_of(__doc__, steps=10)
    parser.add_argument("--length", type=int, default=2048, help="tokens in each of the four sequences")
    parser.add_argument("--kind", choices=KINDS, default="qlora", help="what is trained; full has 8 sequences")
    options = options_of(parser)
    kind, rows = KINDS[options.kind], 2 * ROWS if options.kind == "full" else ROWS
    length = min(options.length, 32) if options.small else options.length
    if options.case:
        print(json.dumps(measure(kind, options.case, options.steps, (rows, length), options.small)))
        return
    results = run_cases(kind.cases, options)
    if options.write:
        command = f"python benchmarks/qlora.py --kind {options.kind} --length {length}"
        size = f"{rows} × {length} tokens a step, {options.steps} steps after 4 for warm-up"
        size += " (recorded: 18)" * any("recorded" in name for name in results)
        heading = kind.heading + f", {length} tokens" * (length != 2048)
        text = f"Measured by `{command}` on {machine()}: {size}. {kind.about}"
        write_section(options.write, heading, f"{text}\n\n{table_of(results, next(iter(kind.cases)))}")


def measure(kind: Kind, name: str, steps: int, size: tuple[int, int], small: bool) -> dict[str, float]:
    """Runs one case with (rows, tokens) and returns its speed, peak memory and last loss."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    (rows, length), sizes, training = size, SMALL if small else kind.sizes, kind.cases[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (rows, length + 1), generator=generator)
    if training is None:
        step = peer_step(kind, sizes, tokens.to(device))
    else:
        step = shoal_step(kind, sizes, tokens, device, training)
    return time_steps(step, steps, rows * length, recorded=bool(training and training.get("cuda_graphs")))


def peer_step(kind: Kind, sizes: dict[str, Any], tokens: Any) -> Callable[[], Any]:
    """Returns a step of the usual loop: transformers, PEFT's adapters, bitsandbytes' layers, recomputation."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    device = tokens.device
    layers = sizes["num_hidden_layers"]
    in_4_bits = kind.base is not None and "load_in_4bit" in kind.base
    dtype = torch.float32 if kind.base is None else torch.bfloat16
    with torch.device(device):  # one layer at a time, because the whole model may not fit
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 0})).to(dtype)
        for index in range(layers):
            # The config of a model names the kernel of its attention; that of a bare LlamaConfig is the slow one.
            block = LlamaDecoderLayer(model.config, index).to(dtype)
            for name, linear in [*block.named_modules()]:
                if isinstance(linear, torch.nn.Linear) and in_4_bits:
                    block.set_submodule(name, quantised_by_bitsandbytes(linear, device))
            model.model.layers.append(block)
    model.config.num_hidden_layers = layers
    model.is_loaded_in_4bit = in_4_bits
    if kind.base is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    adapted = model if kind.base is None else get_peft_model(model, LoraConfig(**LORA))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()

    def step() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = adapted(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def quantised_by_bitsandbytes(linear: Any, device: Any) -> Any:
    """Returns bitsandbytes' layer in nf4 with quantised scales."""
    import bitsandbytes as library
    import torch

    layer = library.nn.Linear4bit(
        linear.in_features, linear.out_features, False, torch.bfloat16, True, "nf4", device="meta"
    )
    options = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4", "module": layer}
    layer.weight = library.nn.Params4bit(linear.weight.data.cpu(), **options).to(device)
    return layer


def shoal_step(
    kind: Kind, sizes: dict[str, Any], tokens: Any, device: str, training: dict[str, Any]
) -> Callable[[], Any]:
    """Returns the same step under shoal, on one device."""
    from shoal.types import Weights

    tree = {
        "recipe": "causal_lm",
        "model": {"config": {"model_type": "llama", **sizes}, **(kind.base or {})},
        **({"lora": LORA} if kind.base else {}),
        "training": {"device": device, "learning_rate": 3e-4, **training},
        "distributed": {"strategy": "single"},
    }
    step: Callable[[], Any] = step_of(tree, tokens, weights=Weights("init", reset=fill), drawn_on_device=True)
    return step


def fill(model: Any, module: Any) -> None:
    """Fills the parameters of a module without drawing billions of numbers: layers of a shape have the same weights."""
    from shoal.quantised import QuantisedLinear

    if isinstance(module, QuantisedLinear):
        weight, statistics = random_layer(module.scheme, module.shape)
        module.weight.data.copy_(weight)
        module.statistics.data.copy_(statistics)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(1.0 if parameter.ndim == 1 else 0.02)


@cache
def random_layer(scheme: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the weight and the statistics of a quantised layer with random codes and scales."""
    import torch

    weight = torch.randint(256, scheme.shapes(shape)["weight"], dtype=torch.uint8)
    scales = torch.rand(-(-shape[0] * shape[1] // 64)) * 0.02 + 0.02
    return weight, scheme.statistics_of(*scheme.nested(scales))


if __name__ == "__main__":
    main()
