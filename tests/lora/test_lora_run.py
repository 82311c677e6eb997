"""A run with adapters: what it trains, what its checkpoints hold, and what other programs make of its exports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_SECONDS, call_shoal
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoal
from lora.fake_hub import Hub
from shoal.checkpoint.export import export
from shoal.config import check_run
from shoal.errors import UserError
from shoal.training import train
from shoal.training.chat import Chat
from shoal.training.push import check_push, push_folder

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
TOKENS = torch.arange(12)[None]


def save_base(folder: Path, seed: int = 0, **keys: Any) -> Path:
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **keys})).save_pretrained(folder)
    return folder


def tree_for(root: Path, base: Path, lora: dict[str, Any], out: str = "out", **training: Any) -> dict[str, Any]:
    text = root / "book.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return {
        "recipe": "causal_lm",
        "model": {"name": str(base)},
        "lora": lora,
        "dataset": {
            "name": "text",
            "files": str(text),
            "seq_length": 16,
            "eval_fraction": 0.0,
            "tokenizer": "bytes",
            "cache_dir": str(root / "cache"),
        },
        "training": {"max_steps": 4, "batch_size": 4, "learning_rate": 2e-2, "device": "cpu", **training},
        "experiment": {"output_dir": str(root / out)},
        "logging": {"every": 1, "console": "plain", "tensorboard": False},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    return save_base(root / "base")


@pytest.fixture(scope="module")
def step_dir(root: Path, base: Path) -> Path:
    """Returns the last checkpoint of a run with DoRA, a module that is trained as a whole, and LoRA+."""
    lora = {**LORA, "use_dora": True, "modules_to_save": ["lm_head"], "lora_plus_ratio": 4.0}
    train(check_run(tree_for(root, base, lora)))
    return root / "out" / "checkpoints" / "step_00000004"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(input_ids=TOKENS).logits
    return result


def test_the_checkpoint_holds_what_is_trained_alone(root: Path, base: Path, step_dir: Path) -> None:
    stored = load_file(step_dir / "model.safetensors")
    assert "model.layers.1.mlp.down_proj.lora_B.default.weight" in stored
    assert stored["model.layers.1.mlp.down_proj.lora_B.default.weight"].any()
    assert all(".lora_" in name or name == "lm_head.weight" for name in stored)
    begun = load_file(base / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], begun["lm_head.weight"])
    report = (root / "out" / "report.txt").read_text()
    assert "DoRA on 4 modules (q_proj, down_proj), rank 4, scaled by 2; " in report
    assert "learning rate 0.02 and 0.08" in report
    assert "frozen tensors are not copied" in report


def test_the_trained_model_is_loaded(base: Path, step_dir: Path, tmp_path: Path) -> None:
    model: Any = shoal.load(step_dir)
    with pytest.raises(UserError, match=r"shoal checkpoint export STEP_DIR OUT --to peft"):
        model.save_pretrained(tmp_path / "saved")  # transformers would leave out the adapters when it reads it
    assert not (tmp_path / "saved").exists()
    assert not torch.allclose(logits(model), logits(transformers.AutoModelForCausalLM.from_pretrained(base)))


def test_a_base_is_found_from_another_folder_and_where_it_was_moved(
    root: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model.name` was relative to the folder of the training."""
    shutil.copytree(base, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    tree = tree_for(root, base, LORA, str(tmp_path / "out"), max_steps=1)
    tree["model"]["name"] = "./mine"
    train(check_run(tree))
    assert "21 frozen tensors are not copied" in (tmp_path / "out" / "report.txt").read_text()
    (step,) = (tmp_path / "out" / "checkpoints").iterdir()
    monkeypatch.chdir(root)
    expected = logits(shoal.load(step))
    Chat(step)
    (tmp_path / "mine").rename(tmp_path / "moved")
    for find in (shoal.load, Chat):
        with pytest.raises(UserError, match=r"refers to frozen weights, but .*mine.* does not exist; give --base PATH"):
            find(step)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "moved", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"other/model.safetensors has other weights: .* does not match its digest"):
        shoal.load(step, base=other)
    tree["model"]["name"] = str(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"list it in checkpoint.allow_changed \(shoal then checks that the same weights are there\)"
    ):
        train(check_run({**tree, "training": {**tree["training"], "max_steps": 2}}))
    torch.testing.assert_close(logits(shoal.load(step, base=tmp_path / "moved")), expected)
    torch.testing.assert_close(logits(Chat(step, base=tmp_path / "moved").model), expected)
    export(step, tmp_path / "whole", "hf", base=tmp_path / "moved")
    found = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def adapter(root: Path, step_dir: Path) -> Path:
    """Returns the folder of the exported adapter."""
    done = export(step_dir, root / "adapter", "peft")
    assert "only the adapter, for frozen weights in" in done["notes"][0]
    assert "opened by PEFT, its logits equal" in done["notes"][1]
    assert done["tensors"] == 4 * 3 + 1
    return root / "adapter"


def test_an_adapter_goes_to_peft_and_back(
    root: Path, base: Path, step_dir: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    opened = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(opened), logits(shoal.load(step_dir)), rtol=1e-5, atol=1e-5)
    lora = {**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}
    tree = tree_for(root, base, lora, out="again", max_steps=1, learning_rate=1e-9)
    train(check_run({**tree, "checkpoint": {"init_from": str(adapter)}}))
    assert "warning" not in capsys.readouterr().out
    assert f"from {adapter}, frozen ones read from 1 file" in (root / "again" / "report.txt").read_text()
    again = shoal.load(root / "again")
    torch.testing.assert_close(logits(again), logits(opened), rtol=1e-4, atol=1e-5)


def test_adapters_are_merged_for_transformers(root: Path, step_dir: Path) -> None:
    done = export(step_dir, root / "merged", "hf", merge_into="original")
    assert "adapters are merged into the original weights" in done["notes"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / "merged")
    torch.testing.assert_close(logits(merged), logits(shoal.load(step_dir)), rtol=1e-4, atol=1e-5)
    assert export(step_dir, root / "half", "hf", dtype="bf16")["dtype"] == "bf16"
    assert load_file(root / "half" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "base",
            "the adapter was trained on the base .*base', and this run's base is .*/other/model.safetensors: "
            r"model.embed_tokens.weight differs \(sha256 \w+ and \w+\); set model.name",
        ),
        (
            "name",
            "the adapter was trained on the base 'Qwen/Qwen3-0.6B', and this run's base is .*base; set model.name",
        ),
        ("alpha", "q_proj is scaled by 2, and lora: says 4; set lora.r = 4, lora.lora_alpha = 8"),
        pytest.param("rank", "has the weights of another model: .*lora_A", marks=pytest.mark.slow),
        pytest.param("kind", "it holds an adapter of kind 'IA3'; give a LoRA", marks=pytest.mark.slow),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, root: Path, base: Path, adapter: Path, change: str, words: str
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    lora = {**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}
    if change == "base":
        base = save_base(tmp_path / "other", seed=5)
    if change == "name":  # an adapter that PEFT itself has written, without digests
        save_file(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
        config["base_model_name_or_path"] = "Qwen/Qwen3-0.6B"
    if change == "alpha":
        lora["alpha"] = 16
    if change == "rank":
        lora |= {"r": 8, "alpha": 16}
    if change == "kind":
        config["peft_type"] = "IA3"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tree = tree_for(root, base, lora, out="refused", max_steps=1)
    with pytest.raises(UserError, match=words):
        train(check_run({**tree, "checkpoint": {"init_from": str(folder)}}))


def test_a_checkpoint_with_an_adapter_is_for_its_base_alone(
    tmp_path: Path, root: Path, base: Path, step_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its base is recognised in another folder, and whether it is quantised or not."""

    def start(base: Path, **sections: Any) -> None:
        lora = {**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}
        tree = tree_for(root, base, lora, max_steps=1, learning_rate=1e-9)
        tree |= {"checkpoint": {"init_from": str(step_dir)}, "experiment": {"output_dir": str(tmp_path / "next")}}
        train(check_run({**tree, **{name: {**tree[name], **section} for name, section in sections.items()}}))

    moved, other = shutil.copytree(base, tmp_path / "moved"), save_base(tmp_path / "other", seed=5)
    start(moved)
    assert "warning" not in capsys.readouterr().out
    torch.testing.assert_close(logits(shoal.load(tmp_path / "next")), logits(shoal.load(step_dir)))
    shutil.rmtree(tmp_path / "next")
    for words, where, sections in (
        (
            f"on the base '{base}/model.safetensors', and this run's base is {other}/model.safetensors: .*; set",
            other,
            {},
        ),
        ("q_proj is scaled by 2, and lora: says 4; set .* as in its config", base, {"lora": {"alpha": 16}}),
    ):
        with pytest.raises(UserError, match=words):
            start(where, **sections)
        assert not (tmp_path / "next").exists()
    if find_spec("bitsandbytes"):
        start(base, model={"load_in_4bit": True})


def test_a_base_in_half_precision(root: Path, base: Path) -> None:
    """What is trained as a whole is exported for PEFT as it was trained, and PEFT rounds it. A merged model may be
    wider than the one that was trained."""
    tree = tree_for(root, base, {**LORA, "modules_to_save": ["lm_head"]}, out="half_base", mixed_precision="bf16")
    tree["model"]["dtype"] = "bf16"
    train(check_run(tree))
    step = root / "half_base" / "checkpoints" / "step_00000004"
    assert "opened by PEFT" in export(step, root / "half_adapter", "peft")["notes"][1]
    written = load_file(root / "half_adapter" / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert torch.equal(written, load_file(step / "model.safetensors")["lm_head.weight"])
    assert written.dtype == torch.float32
    for dtype, expected in ((None, torch.bfloat16), ("fp32", torch.float32)):
        export(step, root / f"half_merged_{dtype}", "hf", dtype=dtype)
        found = load_file(root / f"half_merged_{dtype}" / "model.safetensors").values()
        assert {tensor.dtype for tensor in found} == {expected}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("whole", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("head", {"target_modules": ["lm_head", "q_proj"]}),
        pytest.param("embedding", {"target_modules": ["embed_tokens", "q_proj"]}, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_a_tied_model_are_exported(root: Path, name: str, lora: dict[str, Any]) -> None:
    """An adapter of one of two tied modules is merged into that one alone, which then is no longer tied."""
    peft = pytest.importorskip("peft")
    base = save_base(root / f"tied_{name}", tie_word_embeddings=True)
    train(check_run(tree_for(root, base, {**LORA, **lora}, out=name)))
    expected = logits(shoal.load(root / name))
    assert not torch.allclose(expected, logits(transformers.AutoModelForCausalLM.from_pretrained(base)), atol=1e-3)
    step = root / name / "checkpoints" / "step_00000004"
    export(step, root / f"{name}_peft", "peft")
    opened = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), root / f"{name}_peft"
    )
    torch.testing.assert_close(logits(opened), expected, rtol=1e-5, atol=1e-5)
    notes = export(step, root / f"{name}_hf", "hf")["notes"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}_hf")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    is_tied = merged.lm_head.weight is merged.model.embed_tokens.weight
    assert is_tied == merged.config.tie_word_embeddings == (name == "whole")
    assert ("has weights of its own now" in " ".join(notes)) == (name != "whole")
    tree = tree_for(root, base, {**LORA, **lora}, out=f"{name}_again", max_steps=1, learning_rate=1e-9)
    train(check_run({**tree, "checkpoint": {"init_from": str(root / f"{name}_peft")}}))
    torch.testing.assert_close(logits(shoal.load(root / f"{name}_again")), expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_is_said(root: Path, step_dir: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("--to", "peft", "--merge-into", "original"), "--merge-into original is for --to hf"),
        (("--to", "hf", "--merge-into", "best"), "--merge-into best is not one of original, dequantised"),
        (("--to", "peft", "--adapter-only"), "--to peft writes the adapter alone in any case"),
        (("--to", "torch", "--push", "me/model"), "--push me/model: --to torch writes a file"),
    ):
        result = call_shoal(tmp_path, "checkpoint", "export", str(step_dir), str(tmp_path / "out"), *arguments)
        assert result.returncode == 2
        assert words in result.stderr


def test_a_trained_model_is_talked_to(root: Path, step_dir: Path) -> None:
    """The same text as transformers generates, piece by piece; a line of the input is one text."""
    arguments = ("chat", str(root / "out"), "--prompt", "the quick", "--temperature", "0", "--max-new-tokens", "20")
    result = call_shoal(root, *arguments)
    assert result.returncode == 0, result.stderr
    model: Any = shoal.load(step_dir)
    ids = torch.tensor([list(b"the quick")])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=0, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    assert result.stdout == bytes(t for t in expected.tolist() if t).decode(errors="replace") + "\n"
    for arguments, words in (
        ((str(root / "out"), "--prompt", "a" * 64), "the prompt has 64 tokens, and the model takes 64"),
        ((str(root / "out"), "--temperature", "-1"), "--temperature -1.0: it must be 0 or more"),
        ((str(root / "base"),), "no manifest"),
    ):
        refused = call_shoal(root, "chat", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr


class _Templated:
    """A tokenizer of bytes with a chat template."""

    vocab_size, eos, template = 256, None, "a template"

    def render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        text = "".join(f"<{turn['role'][0]}>{turn['content']}|" for turn in messages)
        return text + ("<a>" if prompt else "")

    def encode(self, text: str) -> Any:
        return torch.tensor([*text.encode()])

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_conversation_follows_its_template(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.recipes.causal_lm import CausalLMRecipe

    monkeypatch.setattr(CausalLMRecipe, "tokenizer", _Templated())
    chat, prompts = Chat(step_dir, temperature=0, max_new_tokens=4), []
    generate = chat.model.generate

    def note(ids: Tensor, **options: Any) -> Any:
        prompts.append(bytes(ids[0].tolist()).decode())
        assert options["eos_token_id"] == [ord("|")]
        return generate(ids, **options)

    chat.model.generate = note
    pieces: list[str] = []
    first = chat.answer("hi", pieces.append)
    assert first == "".join(pieces)
    chat.answer("yo", pieces.append)
    assert prompts == ["<u>hi|<a>", f"<u>hi|<a>{first}|<u>yo|<a>"]
    with pytest.raises(UserError, match=r"the prompt cannot be used: .*; give another text"):
        chat.answer("\udcff", pieces.append)  # a byte on the command line that is no text


def test_an_adapter_is_uploaded_with_a_model_card(
    step_dir: Path, adapter: Path, tmp_path: Path, fake_hub: type[Hub]
) -> None:
    out = shutil.copytree(adapter, tmp_path / "adapter")
    check_push("me/adapter", "peft")
    assert push_folder(step_dir, out, "me/adapter").startswith("https://huggingface.co/me/adapter")
    assert "/api/repos/create" in fake_hub.requests
    assert fake_hub.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert fake_hub.files["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    card = fake_hub.files["README.md"].decode()
    assert 'library_name: "peft"' in card
    assert "base_model" not in card  # a folder of this machine
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/adapter")' in card
    assert "| `r` | `4` |" in card
    with pytest.raises(UserError, match=r"--push me/refused: the upload failed: .*; the export is in"):
        push_folder(step_dir, out, "me/refused")


def test_without_the_hub_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"--push me/model: the Hugging Face Hub cannot be reached; export without it"):
        check_push("me/model", "hf")
    with pytest.raises(UserError, match=r"--push me/model: --to torch writes a file"):
        check_push("me/model", "torch")


FRESH = """
import sys, torch, transformers
from peft import AutoPeftModelForCausalLM

adapter, merged, out = sys.argv[1:]
tokens = torch.arange(12)[None]
opened = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
plain = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
with torch.no_grad():
    torch.save([model(input_ids=tokens).logits for model in (opened, plain)], out)
"""


@pytest.mark.slow
def test_a_fresh_process_with_peft_alone_gives_the_same_logits(root: Path, step_dir: Path, adapter: Path) -> None:
    export(step_dir, root / "for_fresh", "hf", merge_into="original")
    arguments = [str(adapter), str(root / "for_fresh"), str(root / "logits.pt")]
    subprocess.run([sys.executable, "-c", FRESH, *arguments], check=True, timeout=PATIENCE_SECONDS, cwd=root)
    for found in torch.load(root / "logits.pt", weights_only=True):
        torch.testing.assert_close(found, logits(shoal.load(step_dir)), rtol=1e-4, atol=1e-5)
