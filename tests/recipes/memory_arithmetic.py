"""The memory that each ready config for fine-tuning needs on a GPU, by arithmetic. Nothing here is measured.

The bytes of weights are those of the model that shoal builds on the meta device from the published config.json. What a
step adds is estimated from the shapes, and rounded up where the code may do better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.config import load_run
from shoal.config.run import Run
from shoal.config.shipped import FOLDER
from shoal.weights import parameters_on_meta

PUBLISHED = Path(__file__).parent / "published"
"""A folder for each model, with the numbers of its published config.json."""
MODELS = sorted(folder.name for folder in PUBLISHED.iterdir())
METHODS = ("lora", "qlora", "qlora_fsdp", "full")
CONFIGS = [f"{model}_{method}" for model in MODELS for method in METHODS]
GIB = 1 << 30
OPTIMIZER_BYTES = {"adamw": 8, "paged_adamw_32bit": 8}
"""Of the state for each trained number: two moments in fp32."""
CHUNKED_LOGIT_BYTES = 10
"""For each logit of a chunk: bf16, and fp32 for the softmax and for its gradient."""
CAPPED_LOGIT_BYTES = 22
"""For each logit of a loss without chunks: bf16 from the head, three more for the cap, fp32 for the loss, its softmax
and its gradient, and bf16 for the gradient of the head's output."""
SCORE_BYTES = 24
"""For each score of eager attention: seven tensors in bf16, one in fp32 for the softmax, and gradients."""
CUDA_BYTES = 0.7 * GIB
"""What CUDA and its libraries take for themselves."""
FRAGMENTS = 1.1
"""The allocator's memory, as a multiple of that of tensors."""


@dataclass(frozen=True)
class Memory:
    """The bytes on one GPU."""

    frozen: float
    """Frozen weights; of a sharded model this rank's part."""
    trained: float
    """Trained weights, their gradients, and the optimizer's state."""
    gathered: float
    """What a sharded model gathers for a moment."""
    activations: float
    """Inputs of all blocks, one block that is computed again, and logits."""

    @property
    def total(self) -> float:
        """The sum, with what the allocator and CUDA take besides."""
        return FRAGMENTS * (self.frozen + self.trained + self.gathered + self.activations) + CUDA_BYTES


def model_of(config: str) -> str:
    """Returns the name of the model of a ready config."""
    return next(model for model in MODELS if config.startswith(f"{model}_"))


def load_ready(config: str, folder: Path | None = None, *overrides: str) -> Run:
    """Loads a ready config with a local folder in place of the model's name."""
    place = folder or PUBLISHED / model_of(config)
    return load_run(FOLDER / f"{config}.yaml", [f"model.name={place}", *overrides])


def build(run: Run) -> nn.Module:
    """Builds the model of a run on the meta device."""
    with parameters_on_meta():
        model: nn.Module = run.make_recipe().build_model()
    return model


def card_gb(config: str) -> int:
    """Returns the size of the GPU that a ready config says it is for."""
    found = re.search(r"GPUs? of (\d+) GB", (FOLDER / f"{config}.yaml").read_text())
    assert found, config
    return int(found[1])


def memory_of(run: Run, model: nn.Module) -> Memory:
    """Returns the memory of one rank of a run."""
    ranks = run.config.launch.procs_per_node
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = trained * (4 + 4 + OPTIMIZER_BYTES[run.config.training.optimizer.name]) / ranks
    return Memory(
        sum(map(_bytes, frozen)) / ranks,
        state,
        _gathered(run, model) if ranks > 1 else 0,
        _activations(run, model),
    )


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


def _gathered(run: Run, model: Any) -> float:
    """Returns the bytes of two blocks and of all that is in no block, with gradients where they are trained."""

    def with_gradients(parameters: Any) -> float:
        return sum(_bytes(p) * (2 if p.requires_grad else 1) for p in parameters)

    blocks = _blocks(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    # Gradients that wait for the last micro-batch of a step are whole, unless ranks sum each micro-batch's.
    every = run.config.distributed.fsdp.reduce_every_micro_batch
    waiting = 0 if every else sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    return 2 * max(with_gradients(block.parameters()) for block in blocks) + with_gradients(outside) + waiting


def _activations(run: Run, model: Any) -> float:
    training, dataset, config = run.config.training, run.recipe_config.dataset, model.config
    assert training.batch_size is not None
    assert training.activation_checkpointing.mode == "full"
    length, tokens = dataset.max_seq_length, training.batch_size * dataset.max_seq_length
    is_frozen = run.recipe_config.lora is not None
    # Trained weights are fp32, and so is then the sum of all blocks' outputs, also under autocast.
    inputs = config.num_hidden_layers * tokens * config.hidden_size * (2 if is_frozen else 4)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    numbers = 6 * config.hidden_size + 3 * queries + 3 * keys + 4 * config.intermediate_size
    if is_frozen:  # each adapter keeps its input after dropout
        numbers += 5 * config.hidden_size + queries + config.intermediate_size
    block = tokens * numbers * 2 * 2  # in bf16, with gradients
    if config._attn_implementation == "eager":
        block += SCORE_BYTES * training.batch_size * config.num_attention_heads * length**2
    matrix = 2 * 2 * config.hidden_size * config.intermediate_size  # two copies in bf16: of 4 bits, or by autocast
    chunked = training.loss_chunks > 1
    logit_bytes = CHUNKED_LOGIT_BYTES if chunked else CAPPED_LOGIT_BYTES
    return inputs + block + matrix + tokens / training.loss_chunks * config.vocab_size * logit_bytes


def table_row(config: str, run: Run, model: nn.Module) -> str:
    """Returns a ready config with its memory as a row of a table."""
    memory, trained = memory_of(run, model), sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = (memory.frozen, memory.trained, memory.gathered, memory.activations, memory.total)
    sizes = [f"{part / GIB:.1f}" if part else "" for part in parts]
    cards = f"{run.config.launch.procs_per_node} × {card_gb(config)} GB"
    return f"| `{config}` | {cards} | {trained / 1e6:,.0f} million | {' | '.join(sizes)} |\n"


def table() -> str:
    """Returns a table of the ready configs with their memory, for the docs."""
    head = "config", "GPUs", "trained numbers", "frozen weights", "trained state", "gathered", "activations", "in all"
    lines = f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |\n"
    runs = {config: load_ready(config) for config in CONFIGS}
    return lines + "".join(table_row(config, run, build(run)) for config, run in runs.items())
