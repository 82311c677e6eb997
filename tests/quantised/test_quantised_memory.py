"""Starting a quantised model takes hardly more memory than the model has in the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
BLOCK_BYTES = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
"""The size of a block in fp32."""
PROGRAM = """
import json, re, sys, threading, time
from pathlib import Path
import torch
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.weights import build, materialise

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def start(folder):
    values = {"model": {"name": folder, "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "dataset": {}}
    recipe = CausalLMRecipe(CausalLMRecipe.Config.model_validate(values))
    model, weights = build(recipe.build_model, recipe.weights(), 0)
    materialise(model, torch.device("cpu"), 0, weights)
    return model

warm = start(sys.argv[1])  # imports and caches
before, peak, running = anonymous(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = start(sys.argv[2])
running = False
thread.join()
final = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"peak": peak - before, "final": final}))
"""


@pytest.mark.slow
def test_the_start_takes_at_most_a_block_more_than_the_model(tmp_path: Path) -> None:
    for name, layers in (("small", 1), ("large", 10)):
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        del model
    folders = [str(tmp_path / name) for name in ("small", "large")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, check=True)
    sizes = json.loads(re.findall(r"\{.*\}", done.stdout)[-1])
    print(sizes)
    assert sizes["peak"] < sizes["final"] + BLOCK_BYTES
    assert sizes["final"] < 1.06 * 10 * BLOCK_BYTES / 8 + 4 * (2 * 256 + 21) * 1024


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu() -> None:
    root = Path(__file__).parents[2]
    script, environment = root / "benchmarks" / "qlora.py", {**os.environ, "PYTHONPATH": str(root)}
    options = ["--small", "--steps", "1", "--cases", "peer;shoal, recomputed, compiled, inputs"]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=True, env=environment
    )
    assert len(re.findall(r"tokens/s", done.stdout)) == 2, done.stdout
