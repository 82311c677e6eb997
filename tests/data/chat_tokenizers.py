"""Small tokenizers with the special tokens of well-known models, and templates that render as theirs do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL_TOKENS = {
    "llama31": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]),
    "qwen3": (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>", "<think>", "</think>"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]),
    "rewriting": (None, "</s>", []),
}
"""By model: the token that begins a text, the one that ends it, and others."""
WORDS = "the capital of France is Paris and that of Italy is Rome. What is the weather today? It is sunny. " * 3


def save_tokenizer(folder: Path, model: str, template: bool = True) -> str:
    """Saves a tokenizer, and returns its folder. It has merges, so that tokens may cross the borders of answers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    begin, end, others = SPECIAL_TOKENS[model]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[token for token in (begin, end, *others) if token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end)
    if template:
        fast.chat_template = (TEMPLATES / f"{model}.jinja").read_text()
    fast.save_pretrained(folder / model)
    return str(folder / model)


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> str:
    """Writes JSON lines, and returns the path."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)
