"""The way to GGUF that docs/finetune.md describes: an export, llama.cpp's converter, and what others read in its file.

It needs a clone of llama.cpp, the packages gguf and sentencepiece, and, to generate text with llama.cpp itself, the
package xllamacpp:

    LLAMA_CPP=~/llama.cpp pytest -m slow tests/checkpoint/test_gguf.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_SECONDS

from shoal.checkpoint.export import export
from shoal.config import check_run
from shoal.training import train

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

TEXT = "the quick brown <fox> jumps over the lazy dog. "
PROMPT = "the quick brown <fox> jumps"
GENERATE = """
import json, os, sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.port = sys.argv[1], 256, 1, 0
parameters.warmup, parameters.n_gpu_layers, parameters.cpuparams.n_threads = False, 0, 1
options = {"prompt": sys.argv[2], "max_tokens": 20, "temperature": 0, "stream": False}
answer = xllamacpp.Server(parameters).handle_completions(options)
answer = answer if isinstance(answer, dict) else json.loads(answer)
print("generated:" + answer["choices"][0]["text"], flush=True)
os._exit(0)  # its threads would keep the process
"""


def save_base(folder: Path) -> None:
    """Saves a small Llama with a tokenizer as Llama 2 has it, whose kind the converter recognises."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted({*TEXT.replace(" ", "▁")})]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("o", "v"), ("▁", "q")]
    vocabulary = {name: number for number, name in enumerate([*names, *(first + second for first, second in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        vocab_size=len(vocabulary),
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP does not name a clone of llama.cpp")
def test_a_merged_export_becomes_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    save_base(tmp_path / "base")
    (tmp_path / "book.txt").write_text(TEXT * 200)
    tree: dict[str, Any] = {
        "recipe": "causal_lm",
        "model": {"name": str(tmp_path / "base"), "load_in_4bit": True, "added_tokens": ["<fox>"]},
        "lora": {"r": 16, "alpha": 32, "target_modules": "all-linear", "trainable_token_indices": "added"},
        "dataset": {
            "name": "text",
            "files": str(tmp_path / "book.txt"),
            "seq_length": 32,
            "eval_fraction": 0.0,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {"max_steps": 60, "batch_size": 8, "learning_rate": 1e-2, "device": "cpu"},
        "experiment": {"output_dir": str(tmp_path / "out")},
        "logging": {"console": "off", "tensorboard": False},
    }
    train(check_run(tree))
    export(tmp_path / "out" / "checkpoints" / "step_00000060", tmp_path / "merged", "hf", merge_into="dequantised")
    script = str(Path(os.environ["LLAMA_CPP"]).expanduser() / "convert_hf_to_gguf.py")
    command = [sys.executable, script, str(tmp_path / "merged"), "--outfile", str(tmp_path / "m.gguf")]
    subprocess.run([*command, "--outtype", "f32"], check=True, timeout=PATIENCE_SECONDS)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, merged(tokens).logits)
    text = tokenizer.decode(merged.generate(tokens, max_new_tokens=20, do_sample=False)[0, tokens.shape[1] :])
    assert "over the lazy dog." in text
    pytest.importorskip("xllamacpp")
    command = [sys.executable, "-c", GENERATE, str(tmp_path / "m.gguf"), PROMPT]
    done = subprocess.run(command, check=True, timeout=PATIENCE_SECONDS, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].partition("generated:")[2].strip() == text.strip()
