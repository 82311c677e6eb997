"""Export and init_from: weights go to other programs and come back unchanged, and no code in a file is ever run."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.checkpoint import export as export_py
from shoal.checkpoint import export_folders, open_checkpoint, write_checkpoint
from shoal.checkpoint.export import export
from shoal.checkpoint.init_from import weights_for_model
from shoal.checkpoint.manifest import manifest_digest, tied_and_buffers
from shoal.config import check_run, load_run
from shoal.errors import UserError
from shoal.training import train
from shoal.types import TrainState

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY, **HEADS},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True, **TINY, **HEADS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 2, **TINY, **HEADS},
}


def save_model(folder: Path, model: nn.Module, config: dict[str, Any] | None, **about: Any) -> Path:
    """Writes a checkpoint as a run would, with optimizer slots beside the weights."""
    named = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = tied_and_buffers(model)
    weights = {name: tensor for name, tensor in named.items() if name not in names["tied"]}
    moments = {name: {"exp_avg": torch.zeros_like(p.detach())} for name, p in model.named_parameters()}
    layout = {"strategy": "single", "world_size": 1}
    extra = {} if config is None else {"config": config}
    write_checkpoint(folder, TrainState(weights, moments), {"step": 1}, {"layout": layout, **names, **extra, **about})
    return folder


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = ["<unk>", "<|endoftext|>", "The", "same", "words", ",", "before", "and", "after", "."]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Callable[[str], tuple[Path, nn.Module]]:
    """Returns a function from a kind of model to its step folder and model; each checkpoint is made once."""
    pytest.importorskip("transformers")
    root, made = tmp_path_factory.mktemp("saved"), dict[str, tuple[Path, nn.Module]]()

    def get(kind: str) -> tuple[Path, nn.Module]:
        if kind not in made:
            tree = {
                "recipe": "causal_lm",
                "model": {"config": MODELS[kind]},
                "dataset": {"tokenizer": str(tokenizer_file)} if kind == "llama" else {},
                "training": {"max_steps": 1, "batch_size": 1},
            }
            run = check_run(tree)
            torch.manual_seed(3)
            model = run.recipe_type(run.recipe_config).build_model().eval()
            for parameter in model.parameters():  # norms and biases too, so that confusing two of them shows
                nn.init.normal_(parameter, std=0.2)
            made[kind] = save_model(root / kind / "step_00000001", model, run.tree()), model
        return made[kind]

    return get


@pytest.mark.parametrize("kind", MODELS)
def test_an_exported_hugging_face_folder_computes_the_same_logits(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, kind: str
) -> None:
    import transformers

    step_dir, model = saved(kind)
    done = export(step_dir, tmp_path / "out", "hf")
    assert {"config.json", "generation_config.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1  # all files have the same mode
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(9)[None] % 10
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (tmp_path / "out" / "tokenizer.json").exists() == (kind == "llama")
    if kind == "llama":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.encode("The same words.", add_special_tokens=False) == [2, 3, 4, 9]
        assert tokenizer.eos_token == "<|endoftext|>"
    else:
        assert any("bytes" in note for note in done["notes"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_the_log_of_deepspeed_is_silent_during_an_export(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If DeepSpeed is installed, transformers imports it while saving, and it logs a warning about the accelerator."""
    import transformers

    heard: list[str] = []
    logger, handler = logging.getLogger("DeepSpeed"), logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: heard.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    save = transformers.PreTrainedModel.save_pretrained

    def loud(*args: Any, **options: Any) -> None:
        logger.warning("a guess")
        save(*args, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", loud)
    export(saved("tied")[0], tmp_path / "out", "hf")
    logger.warning("of its own run")
    assert heard == ["of its own run"]


def test_an_export_with_several_files_and_a_smaller_dtype(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(export_folders, "SHARD_SIZE", "20KB")
    step_dir, model = saved("tied")
    export(step_dir, tmp_path / "out", "hf", dtype="bf16")
    assert len([*(tmp_path / "out").glob("model-*-of-*.safetensors")]) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert weights_for_model(model, str(tmp_path / "out")).keys() == {name for name, _ in model.named_parameters()}
    assert torch.equal(again.model.norm.weight, model.model.norm.weight.bfloat16())  # type: ignore[union-attr, operator]
    with pytest.raises(UserError, match="exists"):
        export(step_dir, tmp_path / "out", "hf")
    export(step_dir, tmp_path / "out", "hf", force=True)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_an_export_that_differs_when_read_again_is_not_published(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every export is read again: if that gives other values or other logits, nothing is published."""
    import transformers

    step_dir, _ = saved("tied")
    opened = transformers.AutoModelForCausalLM.from_pretrained

    def with_another_value(*args: Any, **options: Any) -> Any:
        model = opened(*args, **options)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 3] += 1
        return model

    def other_file(*args: Any, **options: Any) -> dict[str, Tensor]:
        return {"model.norm.weight": torch.zeros(32)}

    def scaled(*args: Any, **options: Any) -> Any:
        model = opened(*args, **options)
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.01)
        return model

    monkeypatch.setattr(export_py, "load_file", other_file)
    monkeypatch.setattr(torch, "load", other_file)
    for spoil, message in (
        (with_another_value, "up_proj.weight differs in the exported file"),
        (scaled, "computes other logits"),
    ):
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spoil)
        with pytest.raises(UserError, match=message):
            export(step_dir, tmp_path / "out", "hf")
    for kind in ("safetensors", "torch"):
        with pytest.raises(UserError, match="differs in the exported file"):
            export(step_dir, tmp_path / "out", kind)
    assert not [*tmp_path.iterdir()]


class Tables(nn.Module):
    """A model with tied weights, a table in a buffer, a counter and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)
        self.table = nn.Buffer(torch.linspace(0, 1, 4))
        self.steps = nn.Buffer(torch.tensor(7))
        self.none = nn.Parameter(torch.zeros(0, 3))


@pytest.mark.parametrize(("kind", "file"), [("safetensors", "w.safetensors"), ("torch", "w.pt")])
def test_one_file_has_the_names_of_the_model(tmp_path: Path, kind: str, file: str) -> None:
    model, other = Tables(), Tables()
    step_dir = save_model(tmp_path / "step_00000001", model, None)
    done = export(step_dir, tmp_path / file, kind)
    # Tensors are views of whole files, which must not be written.
    assert done["nbytes"] == (tmp_path / file).stat().st_size < 10_000
    if kind == "torch":
        other.load_state_dict(torch.load(tmp_path / file, weights_only=True))
    else:
        from safetensors.torch import load_model

        load_model(other, tmp_path / file)
        assert "head.weight" not in load_file(tmp_path / file)
        assert "head.weight is embed.weight" in done["notes"][0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(UserError, match="exists"):
        export(step_dir, tmp_path / file, kind)
    export(step_dir, tmp_path / file, kind, dtype="bf16", force=True)
    load: Callable[[Path], dict[str, Tensor]] = torch.load if kind == "torch" else load_file
    types = {name: tensor.dtype for name, tensor in load(tmp_path / file).items()}
    assert types["embed.weight"] == torch.bfloat16
    assert (types["table"], types["steps"]) == (torch.float32, torch.int64)  # buffers keep their dtype
    kept = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert weights_for_model(model, str(tmp_path / file)).keys() == kept.keys()


def test_values_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e6)
    step_dir = save_model(tmp_path / "step_00000001", model, None)
    with pytest.raises(UserError, match=r"fp16 cannot hold weight.*1e\+06"):
        export(step_dir, tmp_path / "w.pt", "torch", dtype="fp16")
    assert not (tmp_path / "w.pt").exists()


def test_a_sharded_checkpoint_is_exported_whole_and_loaded_into_shards(toy: ToyRun, pool2: Pool) -> None:
    """FSDP on two ranks writes pieces, the export has whole tensors, and a new run on two ranks loads its shards."""
    keys = ["distributed.strategy=fsdp", "model.hidden=5", "training.max_steps=2", "training.batch_size=2"]
    pool2.run(run_training, toy.config, keys, init=False)
    step_dir = toy.output / "checkpoints" / "step_00000002"
    pieces = json.loads((step_dir / "manifest.json").read_text())["tensors"]["model/0.weight"]["pieces"]
    assert len(pieces) == 2
    file = toy.folder / "w.safetensors"
    export(step_dir, file, "safetensors")
    expected = open_checkpoint(step_dir).read().model
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, expected[name])
    begin = [f"checkpoint.init_from={file}", "training.learning_rate=1e-30", "training.weight_decay=0.0"]
    pool2.run(run_training, toy.config, [*keys, *begin, f"experiment.output_dir={toy.folder}/next"], init=False)
    after = open_checkpoint(toy.folder / "next" / "checkpoints" / "step_00000002").read().model
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name


def run_training(config: Path, overrides: list[str]) -> None:
    train(load_run(config, overrides))


@pytest.mark.parametrize("form", ["checkpoint", "run", "safetensors", "torch", "nested", "folder"])
def test_a_run_starts_from_init_from(toy: ToyRun, form: str) -> None:
    toy.train("training.max_steps=2")
    step_dir = toy.output / "checkpoints" / "step_00000002"
    expected = open_checkpoint(step_dir).read().model
    place = {"checkpoint": step_dir, "run": toy.output}.get(form, toy.folder / "w.safetensors")
    if form in ("safetensors", "folder"):
        place = toy.folder / "folder" / "model.safetensors" if form == "folder" else place
        export(step_dir, place, "safetensors")
        place = place.parent if form == "folder" else place
    elif form in ("torch", "nested"):
        place = toy.folder / "w.pt"
        export(step_dir, place, "torch")
        if form == "nested":
            torch.save({"model": torch.load(place), "step": 3}, place)
    begin = [f"checkpoint.init_from={place}", f"experiment.output_dir={toy.folder}/next"]
    still = ["training.learning_rate=1e-30", "training.weight_decay=0.0", "training.max_steps=1"]
    toy.train(*begin, *still)
    after = open_checkpoint(toy.folder / "next" / "checkpoints" / "step_00000001")
    assert after.trainer["samples"] == 4  # the position starts at zero
    for name, tensor in expected.items():
        assert torch.equal(after.read().model[name], tensor), name
    report = (toy.folder / "next" / "report.txt").read_text()
    assert f"from {place}" in report
    if form == "torch":  # a resumed run needs the file no more
        place.unlink()
        toy.train(*begin, "training.max_steps=2")
        assert (
            "checkpoint.init_from: the run goes on with its own weights"
            in (toy.folder / "next" / "report.txt").read_text()
        )


def test_init_from_refuses_a_damaged_checkpoint(toy: ToyRun) -> None:
    toy.train("training.max_steps=1")
    step_dir = toy.output / "checkpoints" / "step_00000001"
    data = bytearray((step_dir / "model.safetensors").read_bytes())
    data[-3] ^= 4
    (step_dir / "model.safetensors").write_bytes(data)
    for place in (step_dir, toy.output):
        with pytest.raises(UserError, match=r"checkpoint\.init_from = .* is a damaged checkpoint"):
            toy.train(f"checkpoint.init_from={place}", f"experiment.output_dir={toy.folder}/next")
    assert not (toy.folder / "next" / "checkpoints").exists()


def test_tied_weights_may_have_any_of_their_names(tmp_path: Path) -> None:
    model = Tables()
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for absent in ("head.weight", "embed.weight", ""):
        save_file({name: t for name, t in whole.items() if name != absent}, tmp_path / "w.safetensors")
        assert torch.equal(
            weights_for_model(model, str(tmp_path / "w.safetensors"))["embed.weight"], whole["embed.weight"]
        )
    save_file({**whole, "head.weight": whole["head.weight"] + 1}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"embed\.weight and head\.weight are tied"):
        weights_for_model(model, str(tmp_path / "w.safetensors"))


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


BAD_FILES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "nowhere": (lambda path, ran: None, "no such file"),
    "w.txt": (lambda path, ran: path.write_text("hello"), "unknown kind"),
    "code.pt": (lambda path, ran: torch.save({"a": Hostile(ran)}, path), "could be code"),
    "pickle.pt": (lambda path, ran: path.write_bytes(pickle.dumps(Hostile(ran))), "code|cannot be read"),
    "pickle.safetensors": (lambda path, ran: path.write_bytes(pickle.dumps(Hostile(ran))), "as safetensors"),
    "module.pt": (lambda path, ran: torch.save(nn.Linear(1, 1), path), "could be code"),
    "list.pt": (lambda path, ran: torch.save([torch.zeros(2)], path), "not a state dict"),
    "cut.pt": (lambda path, ran: path.write_bytes(b"PK\x03\x04" + bytes(50)), "cannot be read as a torch file"),
    "empty": (lambda path, ran: path.mkdir(), "not a checkpoint and has no model.safetensors and no adapter"),
    "outside": (lambda path, ran: write_index(path, "../secret.safetensors"), "not in its folder"),
    "missing": (lambda path, ran: write_index(path, "gone.safetensors"), "not in its folder"),
    "index": (lambda path, ran: write_index(path, None), "damaged"),
    "huge.safetensors": (
        lambda path, ran: path.write_bytes(huge_header(shape=[1 << 40, 1 << 20])),
        "as safetensors",
    ),
    "length.safetensors": (lambda path, ran: path.write_bytes(b"\xff" * 8 + b"{}"), "as safetensors"),
    "shape.safetensors": (
        lambda path, ran: save_file({"weight": torch.zeros(3)}, path),
        r"weight is \[3\] in the file and \[2, 2\] in the model",
    ),
    "names.safetensors": (
        lambda path, ran: save_file({"w": torch.zeros(2, 2)}, path),
        r"bias is absent in the file.*w is \[2, 2\] in the file and absent in the model.*weight is absent in the file",
    ),
}


def write_index(folder: Path, name: str | None) -> None:
    folder.mkdir()
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, folder.parent / "secret.safetensors")
    index = {"weight_map": {"weight": name, "bias": name}} if name else [1]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def huge_header(shape: list[int]) -> bytes:
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_weight_files_are_refused_in_one_line_and_run_no_code(tmp_path: Path, name: str) -> None:
    make, message = BAD_FILES[name]
    make(tmp_path / name, tmp_path / "ran")
    with pytest.raises(UserError, match=message) as caught:
        weights_for_model(nn.Linear(2, 2), str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert "checkpoint.init_from" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_pickle_in_the_place_of_any_file_is_refused(tmp_path: Path, file: str) -> None:
    step_dir = save_model(tmp_path / "step_00000001", nn.Linear(2, 2), None)
    length = (step_dir / file).stat().st_size
    (step_dir / file).write_bytes(pickle.dumps(Hostile(tmp_path / "ran")).ljust(length, b"\0"))
    before = sorted(tmp_path.rglob("*"))
    for kind in ("hf", "torch", "safetensors"):
        if file == "optimizer.safetensors" and kind != "hf":
            continue  # an export does not open this file
        with pytest.raises(UserError):
            export(step_dir, tmp_path / "out", kind)
    assert sorted(tmp_path.rglob("*")) == before


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest and computes its digest again, as an attacker can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("digest")
    change(manifest)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


HOSTILE_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "remote code": (lambda m: m["config"]["model"].update(trust_remote_code=True), "does not run"),
    "vocabulary": (lambda m: m["config"]["model"]["config"].update(vocab_size=10**15), "cannot be built|another model"),
    "shape": (lambda m: m["config"]["model"]["config"].update(intermediate_size=64), "another model"),
    "no config": (lambda m: m.update(config=[1]), "without a recipe"),
    "key": (lambda m: m["config"]["model"]["config"].update(color="red"), "color"),
    "no tokenizer": (lambda m: m["config"]["dataset"].update(tokenizer="/no/such/tokenizer.json"), "does not exist"),
}


@pytest.mark.parametrize("what", HOSTILE_CONFIGS)
def test_a_config_in_a_checkpoint_is_not_trusted(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, what: str
) -> None:
    change, message = HOSTILE_CONFIGS[what]
    step_dir = tmp_path / "step_00000001"
    shutil.copytree(saved("llama")[0], step_dir)
    rewrite_manifest(step_dir, change)
    with pytest.raises(UserError, match=message) as caught:
        export(step_dir, tmp_path / "out", "hf")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize(
    "recipe", ["evil:Recipe", "evil", ["evil:Recipe"], {"evil": "Recipe"}, "shoal.recipes.causal_lm:CausalLMRecipe", 7]
)
def test_a_module_that_a_manifest_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    step_dir = save_model(tmp_path / "step_00000001", nn.Linear(2, 2), {"recipe": recipe})
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Recipe: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"is not built in.*use --to safetensors or --to torch") as caught:
        export(step_dir, tmp_path / "out", "hf")
    assert "\n" not in str(caught.value)
    for kind in ("safetensors", "torch"):  # these need no recipe
        export(step_dir, tmp_path / kind, kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.py", "safetensors", "step_00000001", "torch"]
    assert "evil" not in sys.modules


def test_an_export_adds_no_folder_to_the_import_path(
    saved: Callable[[str], tuple[Path, nn.Module]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the current folder, which may be the untrusted run's, must not be imported in the place of another,
    such as transformers."""
    before = [folder for folder in sys.path if folder]
    monkeypatch.setattr(sys, "path", [*before])
    export(saved("tied")[0], tmp_path / "out", "hf")
    assert sys.path == before


def test_bdh_has_no_model_of_transformers(tmp_path: Path) -> None:
    step_dir = save_model(tmp_path / "step_00000001", nn.Linear(2, 2), {"recipe": "bdh"})
    with pytest.raises(UserError, match=r"recipe bdh.*--to safetensors"):
        export(step_dir, tmp_path / "out", "hf")


def test_force_replaces_only_an_earlier_export(tmp_path: Path) -> None:
    step_dir = save_model(tmp_path / "step_00000001", nn.Linear(2, 2), None)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    (tmp_path / "link.pt").symlink_to(home / "thesis.tex")
    for place, kind in ((home, "hf"), (home, "torch"), (tmp_path / "link.pt", "torch")):
        with pytest.raises(UserError, match="not an earlier export"):
            export(step_dir, place, kind, force=True)
    with pytest.raises(UserError, match="inside the checkpoint"):
        export(step_dir, step_dir / "w.pt", "torch")
    assert (home / "thesis.tex").read_text() == "years of work"


def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    step_dir = save_model(tmp_path / "step_00000001", nn.Linear(2, 2), None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export(step_dir, tmp_path / "file" / "w.pt", "torch")
