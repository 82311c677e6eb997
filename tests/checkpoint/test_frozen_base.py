"""The frozen base: checkpoints refer to frozen weights by digests, and their stored tensors open without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoal
from shoal.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    FrozenBaseError,
    find_latest_checkpoint,
    open_checkpoint,
    write_checkpoint,
)
from shoal.checkpoint.export import export
from shoal.checkpoint.frozen_base import FrozenBase, find_base_in
from shoal.checkpoint.init_from import weights_for_model
from shoal.checkpoint.inspect import diff, list_checkpoints, show, verify
from shoal.checkpoint.manifest import manifest_digest
from shoal.cli.main import main
from shoal.config import load_run
from shoal.errors import UserError
from shoal.strategies import Loop, SingleStrategy, from_config
from shoal.training import train
from shoal.training.optimizers import build_optimizer
from shoal.types import ParallelPlan, TrainState, Weights
from shoal.weights import build
from shoal.weights.conversion import FileTensor, Stack, Transpose

RECIPE = """
import torch
from pathlib import Path
from pydantic import BaseModel
from torch import nn

from shoal.types import Weights
from toy_recipe import DataSection, Toy


class Block(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    def __init__(self, width=64, rank=2):
        super().__init__()
        self.embed = nn.Linear(1, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, rank) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, input):
        x = self.embed(input)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ModelSection(BaseModel):
    files: list[str]


class AdapterRecipe(Toy):
    class Config(BaseModel):
        model: ModelSection
        dataset: DataSection = DataSection()

    def build_model(self):
        return Adapted()

    def weights(self):
        files = tuple(map(Path, self.config.model.files))
        return Weights("files", files=files) if files else Weights("init")

"""
FROZEN = {"embed.weight", "embed.bias", *(f"blocks.{i}.base.{kind}" for i in range(2) for kind in ("weight", "bias"))}
TRAINED = {"head.weight", "head.bias", *(f"blocks.{i}.{kind}.weight" for i in range(2) for kind in ("down", "up"))}
HALF = "blocks.1.base.weight"
LAYOUTS = {"single": [], "ddp": [], "fsdp": ["distributed.strategy=fsdp"]}


class AdapterRun:
    """A run that trains an adapter, and the files that it reads weights from."""

    def __init__(self, toy: ToyRun):
        self.folder, self.output, self.config = toy.folder, toy.output, toy.config
        self.base, self.start = toy.folder / "base.safetensors", toy.folder / "adapter.safetensors"
        (toy.folder / "adapter_recipe.py").write_text(RECIPE)
        text = toy.config.read_text().replace("toy_recipe:Toy", "adapter_recipe:AdapterRecipe")
        toy.config.write_text(f"{text}model: {{files: [{self.base}, {self.start}]}}\n")
        torch.manual_seed(5)
        weights = {name: tensor.detach() for name, tensor in self.model().state_dict().items()}
        adapter = {name: tensor for name, tensor in weights.items() if "down" in name or "up" in name}
        base = {name: tensor for name, tensor in weights.items() if name not in adapter}
        base[HALF] = base[HALF].bfloat16()  # frozen weights are often stored in bf16
        save_file(base, self.base)
        save_file(adapter, self.start)

    def model(self) -> nn.Module:
        from adapter_recipe import Adapted  # type: ignore[import-not-found]

        made: nn.Module = Adapted()
        return made

    def train(self, *overrides: str) -> Any:
        return train(load_run(self.config, ["training.max_steps=4", *overrides]))

    def step(self, step: int = 4, output: Path | None = None) -> Path:
        return (output or self.output) / "checkpoints" / f"step_{step:08d}"

    def checkpoint(self, step: int = 4, output: Path | None = None) -> Checkpoint:
        return open_checkpoint(self.step(step, output))

    def files(self, *files: Path) -> str:
        return f"model.files=[{','.join(map(str, files or (self.base, self.start)))}]"


@pytest.fixture
def run(toy: ToyRun) -> Any:
    sys.modules.pop("adapter_recipe", None)
    yield AdapterRun(toy)
    sys.modules.pop("adapter_recipe", None)


def run_training(config: Path, overrides: list[str]) -> str:
    """Trains, and returns the message of a UserError, or an empty string."""
    try:
        train(load_run(config, overrides))
    except UserError as error:
        return str(error)
    return ""


def flip(path: Path, name: str, byte: int = 0) -> None:
    """Flips one bit of a tensor in a safetensors file."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + range(start, end)[byte]] ^= 16
    path.write_bytes(data)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


def test_a_checkpoint_stores_only_trained_weights(run: AdapterRun) -> None:
    model = run.train().model
    checkpoint = run.checkpoint()
    assert {name for name in checkpoint.tensors if name.startswith("model/")} == {
        f"model/{name}" for name in {*TRAINED, "table"}
    }
    assert checkpoint.base.keys() == FROZEN
    assert {reference.source.path for reference in checkpoint.base.values()} == {run.base}
    assert checkpoint.base[HALF].source.dtype == torch.bfloat16
    assert checkpoint.manifest["format"] == 2  # a shoal that knows only format 1 refuses it
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    on_disk = sum(path.stat().st_size for path in run.step().glob("*.safetensors"))
    assert 3 * trained < on_disk < 3 * trained + 3000 < frozen  # weights and two moments
    read = checkpoint.read().model
    assert same(read, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    assert f"6 frozen tensors are not copied, but stay in {run.base}" in (run.output / "report.txt").read_text()


def test_a_run_without_frozen_weights_has_format_1(toy: ToyRun) -> None:
    toy.train("training.max_steps=2")
    newest = find_latest_checkpoint(toy.output)
    assert newest
    assert open_checkpoint(newest).manifest["format"] == 1
    assert "base" not in open_checkpoint(newest).manifest


def test_every_layout_resumes_from_any_other(run: AdapterRun, pool2: Pool) -> None:
    keys = ["training.lr_scheduler=constant", "training.global_batch_size=8"]
    for step, layout in zip((2, 4, 6, 8), ("single", "ddp", "fsdp", "single"), strict=True):
        overrides = [*keys, f"training.max_steps={step}", *LAYOUTS[layout], f"checkpoint.async_save={layout != 'ddp'}"]
        if layout == "single":
            assert run_training(run.config, overrides) == ""
        else:
            assert pool2.run(run_training, run.config, overrides, init=False) == ["", ""]
        assert run.checkpoint(step).base.keys() == FROZEN
    undisturbed = run.folder / "undisturbed"
    run.train(*keys, "training.max_steps=8", f"experiment.output_dir={undisturbed}")
    difference = diff(run.checkpoint(8), run.checkpoint(8, undisturbed), rtol=1e-4)
    assert difference.equal, difference
    bases = [run.checkpoint(step).manifest["base"] for step in (4, 6, 8)]
    assert bases[0] == bases[1] == bases[2]


def read_and_write(config: Path, overrides: list[str], source: Path, target: Path) -> None:
    """Loads a checkpoint and saves it again, as a run that resumes does."""
    settings = load_run(config, overrides)
    strategy, recipe = from_config(settings.config), settings.recipe_type(settings.recipe_config)
    with strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=7)
        make = lambda m: build_optimizer(settings.config.training, recipe.param_groups(m))  # noqa: E731
        model, optimizer = strategy.prepare(model, make, recipe.parallel_plan(model), weights)
        model_state = strategy.state(model, optimizer).model
        base, checkpoint = FrozenBase(model, weights, model_state), open_checkpoint(source)
        state = checkpoint.checked_state(strategy.held())
        assert base.check(checkpoint, model_state) == {}  # the model has these values already
        strategy.load_state(model, optimizer, state)
        kept, about = base.without_base(strategy.state(model, optimizer))
        write_checkpoint(target, kept, {"step": 4}, about)


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_every_layout_reads_and_writes_the_same_bits(run: AdapterRun, pool2: Pool, layout: str) -> None:
    run.train()
    pool2.run(read_and_write, run.config, LAYOUTS[layout], run.step(), run.folder / "again", init=False)
    source, target = run.checkpoint(), open_checkpoint(run.folder / "again")
    assert target.manifest["base"] == source.manifest["base"]
    assert same(target.read().model, source.read().model)


@pytest.mark.parametrize("layout", ["single", pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_one_flipped_bit_in_the_frozen_base_is_noticed(run: AdapterRun, pool2: Pool, layout: str) -> None:
    run.train()
    flip(run.base, "head.weight")  # this weight is trained, so its first value does not matter
    more = ["training.max_steps=6", "training.global_batch_size=4", "training.batch_size=2", *LAYOUTS[layout]]
    for name in ("blocks.0.base.bias", HALF):
        shutil.copy(run.base, run.folder / "kept")
        flip(run.base, name, byte=-1)
        if layout == "single":
            messages = [run_training(run.config, more)]
        else:
            messages = pool2.run(run_training, run.config, more, init=False)
        for message in messages:
            assert message.startswith(f"{run.base} is not the base that {run.step()} was trained on: {name} differs")
        shutil.move(run.folder / "kept", run.base)
    assert sorted(path.name for path in (run.output / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert run_training(run.config, more[:3]) == ""  # the file is as it was


def test_a_frozen_base_may_be_moved_and_split_into_other_files(run: AdapterRun) -> None:
    """Only its tensors count; the config says in which files they are."""
    run.train()
    weights = load_file(run.base)
    for number, names in enumerate(([HALF], [name for name in weights if name != HALF])):
        save_file({name: weights[name] for name in names}, run.folder / f"part{number}.safetensors")
    run.base.unlink()
    assert str(run.base) in run_training(run.config, ["training.max_steps=6"])
    files = run.files(run.folder / "part0.safetensors", run.folder / "part1.safetensors", run.start)
    run.train("training.max_steps=6", files, "checkpoint.allow_changed=[model.files]")
    paths = {reference.source.path.name for reference in run.checkpoint(6).base.values()}
    assert paths == {"part0.safetensors", "part1.safetensors"}
    assert same(
        {name: run.checkpoint(6).read().model[name] for name in FROZEN},
        {name: weights[name].float() for name in FROZEN},
    )


def test_frozen_weights_may_be_trained_later(run: AdapterRun) -> None:
    """The reverse works as well: the files of the run are searched for the tensors that a checkpoint refers to."""
    run.train()
    path = run.folder / "adapter_recipe.py"
    path.write_text(path.read_text().replace("nn.Linear(1, width).requires_grad_(False)", "nn.Linear(1, width)"))
    sys.modules.pop("adapter_recipe")
    run.train("training.max_steps=6")
    assert run.checkpoint(6).base.keys() == {name for name in FROZEN if not name.startswith("embed")}
    assert not torch.equal(run.checkpoint(6).read().model["embed.weight"], load_file(run.base)["embed.weight"])
    path.write_text(RECIPE)
    sys.modules.pop("adapter_recipe")
    run.train("training.max_steps=8")
    assert run.checkpoint(8).base.keys() == {name for name in FROZEN if not name.startswith("embed")}
    assert torch.equal(run.checkpoint(8).read().model["embed.weight"], run.checkpoint(6).read().model["embed.weight"])


AVERAGE = """
        average = self.blocks[0].base.bias
        average.data.lerp_(self.head.weight.data[0], 0.5)
        x = self.embed(input)
"""


def test_a_frozen_parameter_that_changes_is_stored(run: AdapterRun) -> None:
    path = run.folder / "adapter_recipe.py"
    path.write_text(RECIPE.replace("        x = self.embed(input)\n", AVERAGE))
    sys.modules.pop("adapter_recipe", None)
    model = run.train("training.eval_steps=null").model
    assert run.checkpoint().base.keys() == FROZEN - {"blocks.0.base.bias"}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    stored = run.checkpoint().read().model
    assert not torch.equal(stored["blocks.0.base.bias"], load_file(run.base)["blocks.0.base.bias"])
    assert torch.allclose(stored["head.weight"], state["head.weight"])
    run.train("training.max_steps=6")
    assert run.checkpoint(6).base.keys() == FROZEN - {"blocks.0.base.bias"}


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", "checkpoint", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code if isinstance(ended.value.code, int) else 0, out + err


def test_the_commands_show_the_frozen_base(
    run: AdapterRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train()
    say = lambda *arguments: shown(capsys, monkeypatch, *arguments)  # noqa: E731
    there = f"refers to frozen weights in {run.base}\n"
    assert say("ls", run.output)[1].count(there) == 1
    text = say("show", run.step())[1]
    assert there in text
    assert "and 6 frozen tensors, " in text
    assert {row["name"] for row in show(run.checkpoint())["base_tensors"]} == FROZEN
    assert "embed.weight" not in {row["name"] for row in show(run.checkpoint())["tensors"]}
    code, text = say("verify", run.output)
    assert (code, text.count("  good\n")) == (0, 2)
    moved = run.folder / "elsewhere" / "named_otherwise.safetensors"
    moved.parent.mkdir()
    run.base.rename(moved)
    for command, path in (("ls", run.output), ("show", run.step())):
        gone = f"refers to frozen weights, but {run.base} does not exist: only the adapter can be used\n"
        assert gone in say(command, path)[1]
    assert [*list_checkpoints(run.output)[0]["base"].values()] == [f"{run.base} does not exist"]
    code, text = say("verify", run.step())
    assert code == 0
    assert text == f"{run.step()}  good; its frozen base was not verified: {run.base} does not exist\n"
    assert say("verify", run.step(), "--base", moved)[1] == f"{run.step()}  good\n"
    flip(moved, "embed.bias")
    moved.rename(run.base)
    code, text = say("verify", run.step())
    assert code == 1
    assert f"DAMAGED: {run.base} was altered: embed.bias" in text
    (row,) = json.loads(say("verify", run.step(), "--json")[1])
    assert (row["good"], row["missing"]) == (False, None)


def test_diff_compares_the_frozen_base_by_digests(run: AdapterRun) -> None:
    run.train()
    a, whole = run.checkpoint(), run.folder / "whole"
    state = a.read()
    write_checkpoint(whole, state, a.trainer, {})
    altered = {**state.model, "embed.bias": state.model["embed.bias"] + 1}
    write_checkpoint(run.folder / "altered", replace(state, model=altered), a.trainer, {})
    assert diff(a, open_checkpoint(whole)).equal
    assert diff(a, a).equal
    (worst,) = diff(a, open_checkpoint(run.folder / "altered")).tensors
    assert worst.name == "model/embed.bias"
    assert worst.max_abs == pytest.approx(1)
    run.base.unlink()  # digests are enough
    a = run.checkpoint()
    assert diff(a, a).equal
    # The other checkpoint stores this one as fp32.
    assert {found.name for found in diff(a, open_checkpoint(whole)).tensors} == {f"model/{HALF}"}
    found = {found.name: found.problem for found in diff(a, open_checkpoint(run.folder / "altered")).tensors}
    assert found.keys() == {f"model/{HALF}", "model/embed.bias"}
    assert all("does not exist" in problem for problem in found.values())


def test_an_export_has_the_frozen_base_or_names_the_missing_file(
    run: AdapterRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train()
    whole, out = run.checkpoint().read().model, run.folder / "exports"
    done = export(run.step(), out / "w.safetensors", "safetensors")
    assert done["notes"] == (f"6 frozen tensors are from {run.base}",)
    assert same(load_file(out / "w.safetensors"), whole)
    moved = run.base.rename(run.folder / "moved.safetensors")
    for to in ("safetensors", "torch", "hf"):
        with pytest.raises(UserError, match=rf"{run.base} does not exist; give --base PATH .*, or --adapter-only"):
            export(run.step(), out / f"none_{to}", to)
    export(run.step(), out / "w.pt", "torch", base=moved)
    assert same(torch.load(out / "w.pt", weights_only=True), whole)
    code, text = shown(
        capsys, monkeypatch, "export", run.step(), out / "a.safetensors", "--to", "safetensors", "--adapter-only"
    )
    assert code == 0
    assert f"only the adapter, for frozen weights in {run.base}" in text
    assert same(load_file(out / "a.safetensors"), {name: whole[name] for name in (*TRAINED, "table")})
    with pytest.raises(UserError, match="--to hf writes whole models"):
        export(run.step(), out / "none", "hf", adapter_only=True)
    with pytest.raises(UserError, match="give one of them"):
        export(run.step(), out / "none", "torch", base=moved, adapter_only=True)
    with pytest.raises(UserError, match="has no tensor"):
        export(run.step(), out / "none", "torch", base=run.start)
    with pytest.raises(UserError, match="no such file"):
        export(run.step(), out / "none", "torch", base=run.base)
    flip(moved, "embed.bias")
    with pytest.raises(UserError, match=f"{moved} has other weights: embed.bias"):
        export(run.step(), out / "none", "torch", base=moved)
    assert sorted(path.name for path in out.iterdir()) == ["a.safetensors", "w.pt", "w.safetensors"]
    write_checkpoint(run.folder / "whole", TrainState(whole, {}), {"step": 1}, {})
    with pytest.raises(UserError, match=r"--adapter-only: .* has no frozen base; leave it out"):
        export(run.folder / "whole", out / "none", "torch", adapter_only=True)


def warnings_of_new_run(run: AdapterRun, capsys: pytest.CaptureFixture[str], *keys: str) -> list[str]:
    """Starts a new run with a learning rate too small to change anything, and returns its warnings."""
    shutil.rmtree(run.folder / "next", ignore_errors=True)
    capsys.readouterr()
    run.train("training.max_steps=1", "training.learning_rate=1e-30", f"experiment.output_dir={run.folder}/next", *keys)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_init_from_refuses_an_adapter_for_another_base(run: AdapterRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.train()
    expected, first = run.checkpoint().read().model, f"checkpoint.init_from={run.step()}"
    moved = run.base.rename(run.folder / "moved.safetensors")
    next_step = run.step(1, run.folder / "next")

    assert warnings_of_new_run(run, capsys, first, run.files(moved, run.start)) == []  # the frozen base is the same
    assert same(open_checkpoint(next_step).read().model, expected)

    other = {name: tensor + 1 for name, tensor in load_file(moved).items()}
    save_file(other, run.folder / "other.safetensors")
    others = run.files(run.folder / "other.safetensors", run.start)
    refusal = rf"the adapter was trained on the base '{run.base}', and this run's base is .*/other.safetensors: blocks.0.base.bias differs \(sha256 \w{{12}} and \w{{12}}\)"  # noqa: E501
    with pytest.raises(UserError, match=rf"{refusal}; set model.name .*, or list model.name in checkpoint.allow_chang"):
        warnings_of_new_run(run, capsys, first, others)
    assert not (run.folder / "next").exists()
    allowed = "checkpoint.allow_changed=[model.name]"
    (warning,) = warnings_of_new_run(run, capsys, first, others, allowed)
    assert re.search(rf"{refusal}; it is loaded all the same, because checkpoint.allow_changed lists", warning)
    taken = open_checkpoint(next_step)
    assert taken.base.keys() == FROZEN
    for name, tensor in taken.read().model.items():
        assert torch.equal(tensor, other[name].float() if name in FROZEN else expected[name]), name

    with pytest.raises(UserError, match=r"and this run's base is not read from files; set model.name"):
        warnings_of_new_run(run, capsys, first, "model.files=[]")
    assert len(warnings_of_new_run(run, capsys, first, "model.files=[]", allowed)) == 1
    drawn = open_checkpoint(next_step)
    assert not drawn.base
    assert same({name: drawn.read().model[name] for name in TRAINED}, {name: expected[name] for name in TRAINED})


def test_init_from_loads_an_exported_adapter(run: AdapterRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.train()
    expected, file = run.checkpoint().read().model, run.folder / "a.safetensors"
    export(run.step(), file, "safetensors", adapter_only=True)
    assert warnings_of_new_run(run, capsys, f"checkpoint.init_from={file}") == []
    report = (run.folder / "next" / "report.txt").read_text()
    assert re.search(rf"^weights +from {file}, frozen ones read from 2 files", report, re.M)
    assert same(run.checkpoint(1, run.folder / "next").read().model, expected)
    flip(run.base, "embed.bias")
    with pytest.raises(
        UserError, match=r"trained on another base, and .*base.safetensors: embed.bias differs \(sha256"
    ):
        warnings_of_new_run(run, capsys, f"checkpoint.init_from={file}")
    with pytest.raises(
        UserError, match=r"blocks\.0\.base\.bias is absent in the file"
    ):  # without a frozen base the tensor is missing
        weights_for_model(run.model(), str(file))


def test_other_weights_in_the_place_of_the_base_are_stored(run: AdapterRun, capsys: pytest.CaptureFixture[str]) -> None:
    other = {name: tensor.float() + 1 for name, tensor in {**load_file(run.base), **load_file(run.start)}.items()}
    save_file(other, run.folder / "w.safetensors")
    assert warnings_of_new_run(run, capsys, f"checkpoint.init_from={run.folder}/w.safetensors") == []
    begun = run.checkpoint(1, run.folder / "next")
    assert not begun.base
    assert "not copied" not in (run.folder / "next" / "report.txt").read_text()
    assert same(begun.read().model, other)


def test_frozen_weights_that_changed_are_read_again(run: AdapterRun) -> None:
    """This happens when the best step is loaded at the end of a run."""
    run.train()
    strategy, weights = SingleStrategy(device="cpu"), Weights("files", files=(run.base, run.start))
    model, weights = build(run.model, weights, seed=0)
    make = lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad])  # noqa: E731
    with strategy:
        model, optimizer = strategy.prepare(model, make, ParallelPlan(), weights)
        model_state = strategy.state(model, optimizer).model
        base = FrozenBase(model, weights, model_state)
        model.get_parameter(HALF).data.zero_()
        state = run.checkpoint().checked_state(strategy.held())
        again = base.check(run.checkpoint(), strategy.state(model, optimizer).model)
        assert again.keys() == {HALF}
        state.model.update(again)
        strategy.load_state(model, optimizer, state)
        assert same(strategy.state(model, optimizer).model, run.checkpoint().read().model)


def test_a_tensor_made_from_several_file_tensors_is_stored(tmp_path: Path) -> None:
    """A frozen tensor that the files hold under another name is referred to; one that they hold in another form, also
    if it has the model's name there, is in the checkpoint itself."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.renamed, self.turned = nn.Linear(3, 2, bias=False), nn.Linear(3, 3, bias=False)
            self.experts = nn.Parameter(torch.empty(2, 3))
            self.requires_grad_(False)
            self.head = nn.Linear(2, 1, bias=False)

    path = tmp_path / "base.safetensors"
    save_file(
        {name: torch.randn(2, 3) for name in ("old.weight", "rest")}
        | {
            "turned.weight": torch.randn(3, 3),
            "expert.0": torch.randn(3),
            "expert.1": torch.randn(3),
            "head.weight": torch.randn(1, 2),
        },
        path,
    )
    weights = Weights(
        "files",
        files=(path,),
        sources={
            "renamed.weight": FileTensor("old.weight"),
            "turned.weight": Transpose((FileTensor("turned.weight"),), 0, 1),
            "experts": Stack((FileTensor("expert.0"), FileTensor("expert.1"))),
            "head.weight": FileTensor("head.weight"),
        },
    )
    model, weights = build(Frozen, weights, seed=0)
    make = lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad])  # noqa: E731
    with SingleStrategy(device="cpu") as strategy:
        model, optimizer = strategy.prepare(model, make, ParallelPlan(), weights)
        state = strategy.state(model, optimizer)
        left, about = FrozenBase(model, weights, state.model).without_base(state)
        assert left.model.keys() == {"turned.weight", "experts", "head.weight"}
        assert about["base"]["tensors"]["renamed.weight"]["key"] == "old.weight"
        step_dir = tmp_path / "step_00000001"
        write_checkpoint(step_dir, left, {"step": 1}, about)
        assert same(open_checkpoint(step_dir).read().model, state.model)
        assert set(FrozenBase(model, weights, state.model).check(open_checkpoint(step_dir), state.model)) == set()


def test_a_hand_written_loop_loads_the_frozen_base(run: AdapterRun) -> None:
    run.train()
    with SingleStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(run.model(), lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]))
        assert loop.load(run.step())["step"] == 4
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        assert same(state, run.checkpoint().read().model)
        run.base.unlink()
        with pytest.raises(UserError, match=f"refers to frozen weights, but {run.base} does not exist"):
            loop.load(run.step())


def test_a_checkpoint_of_format_2_still_opens() -> None:
    """The fixture was written by two ranks. The file in its manifest does not exist; a copy is beside the fixture."""
    fixtures = Path(__file__).parent / "fixtures"
    checkpoint = open_checkpoint(fixtures / "format_2")
    assert checkpoint.manifest["format"] == 2
    adapter = checkpoint.stored_state().model
    assert torch.equal(adapter["adapter.weight"].read(), torch.arange(6.0).reshape(2, 3))  # type: ignore[attr-defined]
    assert checkpoint.shapes == {"adapter.weight": [2, 3], "base.weight": [4, 2], "base.bias": [4]}
    with pytest.raises(FrozenBaseError, match=r"nowhere/base\.safetensors does not exist"):
        checkpoint.read()
    moved = find_base_in(fixtures / "format_2_base.safetensors", checkpoint.base)
    read = replace(checkpoint, base=moved).read()
    assert torch.equal(read.model["base.weight"], torch.arange(8.0).reshape(4, 2))  # bf16 in the file
    assert torch.equal(read.model["base.bias"], torch.arange(4.0))


def change(about: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["base"]["tensors"]["embed.weight"].update(about)


def also_stored(manifest: dict[str, Any]) -> None:
    tensors = manifest["base"]["tensors"]
    tensors["head.weight"] = tensors.pop("embed.weight")


FALSE_CLAIMS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (change({"shape": [2**40, 2**40]}), "impossible"),
    "dtype": (change({"dtype": "load"}), "unknown dtype"),
    "file dtype": (change({"file_dtype": None}), "unknown dtype"),
    "file": (change({"file": "/etc/passwd"}), "not one of the base's files"),
    "no file": (change({"file": None}), "NoneType"),
    "no base": (lambda manifest: manifest.update(base=None), "NoneType"),
    "size": (lambda manifest: manifest["base"].update(files={"/x": {"bytes": "many"}}), "many"),
    "twice": (also_stored, "has 'head.weight' both as a stored and as a frozen tensor"),
}


def test_false_claims_about_the_frozen_base_are_refused(run: AdapterRun) -> None:
    run.train("training.max_steps=1")
    for name, (claim, words) in FALSE_CLAIMS.items():
        shutil.copytree(run.step(1), run.folder / name)
        forge_manifest(run.folder / name, claim)
        with pytest.raises(DamagedCheckpoint, match=words):
            open_checkpoint(run.folder / name)


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest and computes its digest again, as an attacker can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("digest")
    change(manifest)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize("what", ["pickle", "folder", "pipe", "zeros", "shape", "name"])
def test_the_file_in_the_place_of_a_frozen_base_is_not_trusted(run: AdapterRun, what: str) -> None:
    """Nothing hangs, no code is run, and nothing is loaded."""
    run.train()
    if what == "shape":
        forge_manifest(run.step(), change({"shape": [1, 64]}))
    elif what == "name":
        forge_manifest(run.step(), change({"key": "\x00\x1b[2J"}))
    else:
        size = run.base.stat().st_size
        run.base.unlink()
        if what == "folder":
            run.base.mkdir()
        elif what == "pipe":
            os.mkfifo(run.base)
        else:
            run.base.write_bytes((b"cposix\nsystem\n" if what == "pickle" else b"").ljust(size, b"\0"))
    with pytest.raises(FrozenBaseError):
        run.checkpoint().read()
    (verified,) = verify(run.step())
    assert verified["problem"] or verified["missing"]
    assert show(run.checkpoint())["base"].keys() == {str(run.base)}
    assert open_checkpoint(run.step()).stored_state().model.keys() == {*TRAINED, "table"}


def test_load_reads_the_frozen_base_from_its_files(run: AdapterRun) -> None:
    trained = run.train().model.state_dict()
    from adapter_recipe import AdapterRecipe  # type: ignore[import-not-found]

    model = shoal.load(run.output, recipe=AdapterRecipe)
    assert run.checkpoint().base.keys() == FROZEN
    assert same(model.state_dict(), trained)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == FROZEN
    run.base.rename(run.folder / "moved")
    with pytest.raises(UserError, match=r"refers to frozen weights, but .*base.safetensors"):
        shoal.load(run.output, recipe=AdapterRecipe)
