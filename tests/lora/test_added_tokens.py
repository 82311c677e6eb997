"""New tokens: rows of embedding and head that start as a mean, alone or all trained, in checkpoints and exports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoal
from lora.test_lora_run import TINY, tree_for
from shoal.checkpoint import open_checkpoint
from shoal.checkpoint.export import export
from shoal.config import check_run
from shoal.errors import UserError
from shoal.training import train
from shoal.weights.added_rows import AddedRows, AddedRowsSource, Rows
from shoal.weights.conversion import FileTensor, open_files

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_tokenizers import save_tokenizer

transformers = pytest.importorskip("transformers")

NEW = ["<fox>", "<dog>"]
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
DELTA = "token_adapter.trainable_tokens_delta.default"


def save_base(root: Path, tied: bool, spare: int = 0) -> Path:
    """Saves a small Llama with a tokenizer, and `spare` rows more than this has tokens."""
    folder = root / f"base_{'tied' if tied else 'untied'}_{spare}"
    if not folder.exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(save_tokenizer(root, "qwen3"))
        sizes = {**TINY, "vocab_size": len(tokenizer) + spare, "initializer_range": 0.3}
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def tree(root: Path, base: Path, lora: dict[str, Any] | None, out: str, **training: Any) -> dict[str, Any]:
    text = root / "new.txt"
    if not text.exists():
        text.write_text("the quick brown <fox> jumps over the lazy <dog>. " * 100)
    made = tree_for(root, base, lora or {}, out, **training)
    made["model"]["added_tokens"] = NEW
    made["dataset"] |= {"files": str(text), "tokenizer": str(base)}
    return made if lora is not None else {key: value for key, value in made.items() if key != "lora"}


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(input_ids=tokens).logits
    return result


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("added_tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_part_of_a_table_gets_the_same_new_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    """Two tokens are new; the files have a row for one of them, and the last row is padding."""
    table = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"table": table}, tmp_path / "table.safetensors")
    files = open_files([tmp_path / "table.safetensors"])
    for added in (AddedRows(5, 7, 9), AddedRows(8, 10, 10)):
        source = AddedRowsSource((FileTensor("table"),), added)
        assert source.meta(files).shape == (added.rows, 6)
        whole = torch.empty(added.rows, 6)
        source.fill(whole, [slice(0, added.rows), slice(0, 6)], files)
        assert torch.equal(whole, added(table))
        assert torch.equal(whole[: added.first], table[: added.first].float())
        assert torch.equal(whole[added.stop :], table[added.stop :].float())
        torch.testing.assert_close(whole[added.first], table[: added.first].double().mean(0).float())
        for rows in (slice(0, 3), slice(3, 8), slice(8, added.rows)):
            part = torch.empty(rows.stop - rows.start, 2)
            source.fill(part, [rows, slice(2, 4)], files)
            assert torch.equal(part, whole[rows, 2:4])
        chosen = torch.empty(2, 6)
        Rows((source,), (added.first, 1, 8)).fill(chosen, [slice(1, 3), slice(0, 6)], files)
        assert torch.equal(chosen, whole[[1, 8]])


@pytest.mark.parametrize("claim", [{"first": 0}, {"stop": 30}, {"rows": 1 << 40}, {"first": 20}, {"rows": "9"}])
def test_impossible_rows_in_a_manifest_are_refused(claim: dict[str, Any]) -> None:
    about = {"first": 8, "stop": 10, "rows": 10}
    assert AddedRows.from_json(about, 9).as_json() == about
    with pytest.raises(ValueError, match="the added rows"):
        AddedRows.from_json({**about, **claim}, 9)


def exported(root: Path, base: Path, step: Path, name: str) -> tuple[Any, Any, Any]:
    """Returns the trained model, and what PEFT and transformers make of its exports."""
    peft = pytest.importorskip("peft")
    export(step, root / f"{name}_adapter", "peft")
    export(step, root / f"{name}_merged", "hf")
    adapter = peft.AutoPeftModelForCausalLM.from_pretrained(root / f"{name}_adapter")
    return shoal.load(step), adapter, transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}_merged")


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_new_rows_alone_are_trained_and_exported(root: Path, tied: bool) -> None:
    base, name = save_base(root, tied), f"rows_{tied}"
    train(check_run(tree(root, base, {**LORA, "trainable_token_indices": "added"}, name)))
    step = root / name / "checkpoints" / "step_00000004"
    stored = {key for file in step.glob("model*.safetensors") for key in load_file(file)}
    deltas = {f"{module}.{DELTA}" for module in ([EMBEDDING] if tied else [EMBEDDING, HEAD])}
    assert {key for key in stored if ".lora_" not in key} == deltas
    size = vocabulary(base) + 2
    assert open_checkpoint(step).base[f"{EMBEDDING}.weight"].shape[0] == size
    report = (root / name / "report.txt").read_text()
    assert f"and {len(deltas) * 2} rows of tokens" in report
    assert "read from 1 file; 2 new tokens start as the mean of the others" in report
    trained, adapter, merged = exported(root, base, step, name)
    begun = load_file(base / "model.safetensors")[f"{EMBEDDING}.weight"]
    rows = merged.get_input_embeddings().weight
    assert torch.equal(rows[:-2], begun)
    assert not torch.allclose(rows[-2], rows[-1])
    tokens = torch.tensor([[*range(5), size - 2, 7, size - 1, 9]])
    expected = logits(trained, tokens)
    torch.testing.assert_close(logits(adapter, tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(merged, tokens), expected, rtol=1e-4, atol=1e-5)
    for folder in (f"{name}_adapter", f"{name}_merged"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(root / folder)
        assert tokenizer.encode("<fox>a<dog>", add_special_tokens=False)[::2] == [size - 2, size - 1]
    again = tree(root, base, {**LORA, "trainable_token_indices": "added"}, f"{name}_again", learning_rate=1e-9)
    again["training"]["max_steps"] = 1
    train(check_run({**again, "checkpoint": {"init_from": str(root / f"{name}_adapter")}}))
    torch.testing.assert_close(logits(shoal.load(root / f"{name}_again"), tokens), expected, rtol=1e-4, atol=1e-5)

    again["model"]["added_tokens"] = NEW[::-1]
    again["experiment"]["output_dir"] = str(root / "other_order")
    for start in (root / f"{name}_adapter", step):
        with pytest.raises(
            UserError, match=r"its new tokens are <fox>, <dog>, and model.added_tokens has <dog>, <fox>"
        ):
            train(check_run({**again, "checkpoint": {"init_from": str(start)}}))


def vocabulary(base: Path) -> int:
    return len(transformers.AutoTokenizer.from_pretrained(base))


@pytest.mark.slow
def test_all_rows_are_trained_and_exported(root: Path) -> None:
    """Without adapters, and with the embedding as a module that is trained whole; some rows are spare already."""
    base = save_base(root, tied=False, spare=1)
    train(check_run(tree(root, base, None, "full")))
    step = root / "full" / "checkpoints" / "step_00000004"
    export(step, root / "full_hf", "hf")
    tokens = torch.tensor([[1, 2, vocabulary(base), vocabulary(base) + 1]])
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(root / "full_hf")
    torch.testing.assert_close(logits(reloaded, tokens), logits(shoal.load(step), tokens))
    assert reloaded.config.vocab_size == vocabulary(base) + 2
    train(check_run(tree(root, base, {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, "whole")))
    step = root / "whole" / "checkpoints" / "step_00000004"
    trained, adapter, merged = exported(root, base, step, "whole")
    for model in (adapter, merged):
        torch.testing.assert_close(logits(model, tokens), logits(trained, tokens), rtol=1e-4, atol=1e-5)


def finish(run: dict[str, Any]) -> None:
    train(check_run(run))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_a_run_on_two_processes_resumes_to_the_bit(root: Path, pool2: Pool, strategy: str) -> None:
    base = save_base(root, tied=True)
    keys = {"lr_scheduler": "constant", "warmup_steps": 0}
    outs = {}
    for out, steps in (("whole", (4,)), ("parts", (2, 4))):
        for number in steps:
            run = tree(root, base, {**LORA, "trainable_token_indices": "added"}, f"{strategy}_{out}", **keys)
            run["training"]["max_steps"] = number
            run |= {"distributed": {"strategy": strategy}, "checkpoint": {"every": 2}}
            pool2.run(finish, run, init=False)
        folder = root / f"{strategy}_{out}" / "checkpoints" / "step_00000004"
        outs[out] = {k: v for file in sorted(folder.glob("model*.safetensors")) for k, v in load_file(file).items()}
    assert outs["whole"].keys() == outs["parts"].keys()
    assert all(torch.equal(value, outs["parts"][name]) for name, value in outs["whole"].items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"lora": LORA},
            r"model.added_tokens: with lora: the rows of new tokens are frozen; set .* \[embed_tokens, …\]",
        ),
        ({"model": {"added_tokens": ["<a>", "<a>"]}}, "the token '<a>' is named twice"),
        ({"model": {"added_tokens": [" "]}}, "the token ' ' is empty"),
        ({"model": {"added_tokens": ["the"]}}, "the tokenizer has 'the' already; leave it out"),
        ({"dataset": {"tokenizer": "bytes"}}, "dataset.tokenizer = bytes has bytes alone"),
    ],
)
def test_what_does_not_fit_is_refused(root: Path, change: dict[str, Any], words: str) -> None:
    made = tree(root, save_base(root, tied=True), {**LORA, "trainable_token_indices": "added"}, "refused")
    for section, keys in change.items():
        made[section] = keys if section == "lora" else {**made[section], **keys}
    with pytest.raises(UserError, match=words):
        train(check_run(made))
