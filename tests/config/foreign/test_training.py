"""The ready file in Hugging Face's words trains as it is: FSDP over two processes, a base in 4 bits, adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pool import Pool

from shoal.config import load_run
from shoal.config.shipped import FOLDER
from shoal.training import train

sys.path.append(str(Path(__file__).parents[2] / "data"))
from chat_tokenizers import save_tokenizer, write_lines

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")


def train_file(overrides: list[str]) -> dict[str, float]:
    return train(load_run(FOLDER / "fsdp_qlora_llama7b.yaml", overrides)).metrics


@pytest.mark.slow
def test_the_ready_file_trains_on_two_processes(pool2: Pool, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "llama31", template=False)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=340,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    records = [{"instruction": f"Say {number}", "output": "Rome " * (number % 3 + 1)} for number in range(72)]
    overrides = [
        f"model.name={folder}",
        f"dataset.train_file={write_lines(tmp_path / 'train.jsonl', records[:64])}",
        f"dataset.eval_file={write_lines(tmp_path / 'eval.jsonl', records[64:])}",
        "dataset.preprocessing_num_workers=1",
        "dataset.preview_prompts=0",
        f"dataset.cache_dir={tmp_path}/cache",
        f"experiment.output_dir={tmp_path}/out",
        "launch.procs_per_node=2",
        "training.learning_rate=1e-2",
        "training.tf32=false",  # which a CPU does not have
        "logging={every: 1, tensorboard: false}",
    ]
    metrics = pool2.run(train_file, overrides, init=False)[0]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 6, "3 epochs of 64 samples, 4 × 4 × 2 in a step"
    assert losses[-1] < losses[0]
    assert metrics["eval/loss"] < losses[0]
    report = (tmp_path / "out" / "report.txt").read_text()
    for row in (
        "fsdp",
        "32 = 4 × 4 accumulated × 2 data-parallel",
        "14 linear layers",
        "paged_adamw_32bit",
        "2 modules, full",
        "precision     bf16",
        "rank 64",
        "one set, every 100 steps and at the end, in micro-batches of 4",
        "the best 1 by eval/loss (min)",
        "launch.master_addr, launch.master_port: the run is on one machine",
    ):
        assert row in report, report
