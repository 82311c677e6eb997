"""The commands of `shoal checkpoint`, as a user or a script calls them."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ToyRun, call_shoal
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from shoal.checkpoint import CheckpointManager, write_checkpoint
from shoal.checkpoint.manifest import manifest_digest
from shoal.config import load_run
from shoal.training import train
from shoal.types import TrainState

ABOUT = {
    "layout": {"strategy": "ddp", "world_size": 4},
    "config": {"recipe": "toy:Toy", "model": {"hidden": 3}, "training": {"learning_rate": 0.01}},
}


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture
def shoal() -> Command:
    """Returns a function that runs the command in this process, because starting another takes seconds."""

    def call(*arguments: Any) -> Result:
        ended = call_shoal(Path.cwd(), "checkpoint", *map(str, arguments))
        return Result(ended.returncode, ended.stdout, ended.stderr)

    return call


def state(change: float = 0.0) -> TrainState:
    weights = {
        "weight": torch.arange(12.0).view(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "steps": torch.tensor(7),
    }
    weights["weight"][1, 1] += change
    return TrainState(weights, {"weight": {"exp_avg": torch.full((3, 4), 2.0), "step": torch.tensor(3.0)}})


def save(run: Path, step: int = 1, train_state: TrainState | None = None, **trainer: Any) -> Path:
    manager = CheckpointManager(run, 9)
    manager.save_state(train_state or state(), {"step": step, "samples": 4 * step, **trainer}, ABOUT)
    return manager.path_of(step)


def flip(path: Path, place: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_ls_lists_checkpoints_and_damage(tmp_path: Path, shoal: Command) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, metrics={"eval/loss": 1.25})
    flip(save(tmp_path, 3) / "manifest.json")
    rows = shoal("ls", tmp_path, "--json").json
    assert [(row["step"], row["good"], row["layout"]) for row in rows] == [
        (1, True, "ddp on 4"),
        (2, True, "ddp on 4"),
        (3, False, None),
    ]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in Path(rows[0]["path"]).iterdir())
    assert rows[1]["metrics"] == {"eval/loss": 1.25}
    for place in (tmp_path, tmp_path / "checkpoints"):
        table = shoal("ls", place)
        assert (table.code, table.err) == (0, "")
        header, one, two, three, why = table.out.splitlines()
        assert header.split()[:2] == ["step", "when"]
        assert one.split()[0] == "1"
        assert one.split()[-1] == "good"
        assert "eval/loss 1.25" in two
        assert three.split()[-1] == "damaged"
        assert "step_00000003" in why
    (alone,) = shoal("ls", tmp_path / "checkpoints" / "step_00000002", "--json").json
    assert alone == rows[1]


def test_ls_of_a_checkpoint_whose_folder_has_another_name(tmp_path: Path, shoal: Command) -> None:
    """A hand-written loop may save into any folder."""
    write_checkpoint(tmp_path / "mine", state(), {"step": 7}, {})
    (row,) = shoal("ls", tmp_path / "mine", "--json").json
    assert (row["step"], row["good"]) == (None, True)
    assert shoal("ls", tmp_path / "mine").out.splitlines()[1].split()[0] == "?"


def test_show_describes_a_checkpoint(tmp_path: Path, shoal: Command) -> None:
    path = save(tmp_path)
    shown = shoal("show", path, "--json").json
    tensors = {row["name"]: row for row in shown["tensors"]}
    assert tensors["weight"] == {"name": "weight", "shape": [3, 4], "dtype": "float32", "bytes": 48}
    assert tensors["half"]["bytes"] == 10
    assert shown["slots"] == [
        {"name": "exp_avg", "tensors": 1, "bytes": 48},
        {"name": "step", "tensors": 1, "bytes": 4},
    ]
    assert shown["position"] == {"step": 1, "samples": 4}
    assert shown["config"] == {"recipe": "toy:Toy", "model": {"hidden": 3}, "training.learning_rate": 0.01}
    assert shown["versions"]["torch"] == torch.__version__
    text = shoal("show", path).out
    for words in ("3 × 4", "bfloat16", "exp_avg", "samples 4", "world_size 4", "recipe = toy:Toy", '{"hidden": 3}'):
        assert words in text


def test_folders_of_checkpoints_are_told_how_to_name_one(tmp_path: Path, shoal: Command) -> None:
    run = tmp_path / "mine"
    step = save(run)
    assert f"{run} is a run folder; give {run}/last, {run}/best or one of its checkpoints, such as {step}" in (
        shoal("show", run).err
    )
    assert f"nor a run folder; give {run}/last, a checkpoint of a run in it" in shoal("show", tmp_path).err
    assert shoal("show", run / "last").code == 0


def test_names_with_control_characters_are_escaped(tmp_path: Path, shoal: Command) -> None:
    path = save(tmp_path, train_state=TrainState({"[red]a\x1b[2J": torch.zeros(2)}, {}))
    text = shoal("show", path).out
    assert "\x1b" not in text
    assert "[red]a\\x1b[2J" in text


def test_verify_reads_every_byte(tmp_path: Path, shoal: Command) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    assert shoal("verify", tmp_path).code == 0
    assert [row["good"] for row in shoal("verify", path, "--json").json] == [True]
    flip(path / "optimizer.safetensors")
    assert "damaged" not in shoal("ls", tmp_path).out  # which reads only manifests
    result = shoal("verify", tmp_path)
    assert result.code == 1
    good, bad = result.out.splitlines()
    assert good.endswith("step_00000001  good")
    assert "DAMAGED" in bad
    assert "does not match its digest" in bad
    result = shoal("verify", path, "--json")
    assert result.code == 1
    assert "optimizer.safetensors" in result.json[0]["problem"]


def test_diff_compares_to_the_bit_and_names_the_largest_difference(tmp_path: Path, shoal: Command) -> None:
    a, same, other = save(tmp_path / "a"), save(tmp_path / "b"), save(tmp_path / "c", train_state=state(change=1e-4))
    assert shoal("diff", a, same).code == 0
    assert shoal("diff", a, same, "--json").json["equal"] is True
    result = shoal("diff", a, other)
    assert result.code == 1
    assert "1 of 6 tensors differ" in result.out
    assert "model/weight" in result.out
    worst = shoal("diff", a, other, "--json").json["tensors"]
    assert worst[0]["max_abs"] == pytest.approx(1e-4, rel=0.01)
    assert worst[0]["relative"] == pytest.approx(1e-4 / 11, rel=0.01)
    assert shoal("diff", a, other, "--rtol", "1e-4").code == 0
    assert shoal("diff", a, other, "--rtol", "1e-6").code == 1
    later = shoal("diff", a, save(tmp_path / "a", 2), "--rtol", "1e-4")  # the same weights at another step
    assert later.code == 1
    assert "step: 1 in" in later.out
    assert "samples: 4 in" in later.out


def test_diff_lists_weights_first_and_summarises_optimizer_slots(tmp_path: Path, shoal: Command) -> None:
    def many(change: float) -> TrainState:
        weights = {f"w{n}": torch.ones(2) + change * n for n in range(12)}
        return TrainState(
            weights, {name: {"exp_avg": torch.ones(2) + 9 * change, "old": torch.ones(2)} for name in weights}
        )

    a, b = save(tmp_path / "a", train_state=many(0)), save(tmp_path / "b", train_state=many(0.5))
    lines = shoal("diff", a, b).out.splitlines()
    assert lines[0].split()[:5] == ["23", "of", "36", "tensors", "differ"]
    assert lines[1].split() == ["model/w11", "5.5", "0.846"]
    assert [line.split()[0] for line in lines[1:11]] == [f"model/w{n}" for n in range(11, 1, -1)]
    assert lines[11].split() == ["and", "1", "more"]
    assert lines[12].split() == ["optimizer/exp_avg:", "12", "tensors", "4.5", "0.818"]
    assert lines[13:] == ["give --all to list every tensor"]
    names = [line.split()[0] for line in shoal("diff", a, b, "--all").out.splitlines()[1:]]
    assert sorted(names) == sorted(
        [*(f"model/w{n}" for n in range(1, 12)), *(f"optimizer/exp_avg/w{n}" for n in range(12))]
    )


def with_weight(weight: Tensor, **others: Tensor) -> TrainState:
    return TrainState({"weight": weight, **others}, {})


@pytest.mark.parametrize(
    ("a", "b", "exact", "close", "words"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0, "weight"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), 0, 0, "equal"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([2.0, 1.0]), 1, 1, "inf"),
        (torch.tensor([torch.inf, 1.0]), torch.tensor([torch.inf, 1.0 + 1e-7]), 1, 0, "weight"),
        (torch.ones(3), torch.ones(3, dtype=torch.bfloat16), 1, 0, "float32 in one, bfloat16 in the other"),
        (torch.ones(3), torch.ones(4), 1, 1, "[3] in one, [4] in the other"),
        (torch.tensor(1), torch.tensor(2), 1, 1, "weight"),
    ],
)
def test_diff_of_special_values_dtypes_and_shapes(
    tmp_path: Path, shoal: Command, a: Tensor, b: Tensor, exact: int, close: int, words: str
) -> None:
    one, two = save(tmp_path / "a", train_state=with_weight(a)), save(tmp_path / "b", train_state=with_weight(b))
    result = shoal("diff", one, two)
    assert result.code == exact
    assert words in result.out
    assert shoal("diff", one, two, "--rtol", "1e-5").code == close


def test_diff_lists_missing_names(tmp_path: Path, shoal: Command) -> None:
    weight = torch.ones(3)
    a = save(tmp_path / "a", train_state=with_weight(weight, mine=weight))
    b = save(tmp_path / "b", train_state=with_weight(weight, theirs=weight))
    result = shoal("diff", a, b, "--rtol", "1")
    assert result.code == 1
    assert f"only in {a}: model/mine" in result.out
    assert f"only in {b}: model/theirs" in result.out


def test_diff_reads_one_tensor_at_a_time(tmp_path: Path, shoal: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.checkpoint.store import Checkpoint

    def refuse(checkpoint: Checkpoint) -> TrainState:
        raise AssertionError("all tensors at once")

    monkeypatch.setattr(Checkpoint, "read", refuse)
    assert shoal("diff", save(tmp_path / "a"), save(tmp_path / "b")).code == 0


def test_diff_across_layouts(toy: ToyRun, pool2: Pool, shoal: Command) -> None:
    keys = ["training.global_batch_size=8", "training.batch_size=2", "model.dropout=0.0", "training.max_steps=4"]
    toy.train(*keys)
    sharded = [*keys, "distributed.strategy=fsdp", f"experiment.output_dir={toy.folder}/sharded"]
    pool2.run(run_training, toy.config, sharded, init=False)
    a, b = (folder / "checkpoints" / "step_00000004" for folder in (toy.output, toy.folder / "sharded"))
    assert shoal("diff", a, b, "--rtol", "1e-4").code == 0
    assert shoal("diff", a, a.with_name("step_00000002"), "--rtol", "1e-4").code == 1
    assert [row["layout"] for row in shoal("ls", toy.folder / "sharded", "--json").json][-1] == "fsdp on 2: dp_shard 2"
    assert 'mesh {"dp_shard": 2}' in shoal("show", b).out
    assert [row["layout"] for row in shoal("ls", toy.output, "--json").json][-1] == "single on 1"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"strategy": "mesh", "world_size": 8, "mesh": {"tp": 2, "pp": 4}}, "mesh on 8: pp 4 × tp 2"),
        ({"strategy": "deepspeed", "world_size": 2, "mesh": {"dp_shard": 2}, "zero_stage": 3}, "on 2: ZeRO-3, dp_s"),
        ({"strategy": "3d", "mesh": {"tp": "2", "pp": [1]}}, "3d on ?"),
        ({"mesh": 7}, "unknown on ?"),
    ],
)
def test_ls_describes_layouts(tmp_path: Path, shoal: Command, layout: dict[str, Any], words: str) -> None:
    CheckpointManager(tmp_path).save_state(state(), {"step": 1}, {"layout": layout})
    (row,) = shoal("ls", tmp_path, "--json").json
    assert words in row["layout"]
    assert row["layout"].endswith(words) or "dp_s" in words


def run_training(config: Path, overrides: list[str]) -> None:
    train(load_run(config, overrides))


def test_export_reports_what_it_wrote(tmp_path: Path, shoal: Command) -> None:
    path = save(tmp_path)
    result = shoal("export", path, tmp_path / "w.safetensors", "--to", "safetensors", "--dtype", "bf16")
    assert (result.code, result.err) == (0, "")
    assert "4 tensors" in result.out
    assert load_file(tmp_path / "w.safetensors")["weight"].dtype == torch.bfloat16
    exported = shoal("export", path, tmp_path / "w.pt", "--to", "torch", "--json").json
    assert exported["path"] == str(tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == state().model.keys()


def test_rm_keeps_the_newest_good_one(tmp_path: Path, shoal: Command) -> None:
    first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
    flip(next(third.glob("model*.safetensors")))  # its manifest does not show it
    refused = shoal("rm", second)
    assert refused.code == 2
    assert "newest good" in refused.err
    assert second.is_dir()
    for path in (third, first):  # a damaged one and an older one
        assert shoal("rm", path).code == 0
        assert not path.exists()
    assert shoal("rm", second, "--force").code == 0
    assert not [*second.parent.iterdir()]


def test_rm_renames_before_it_deletes(tmp_path: Path, shoal: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader never sees a checkpoint with some of its files deleted."""
    first = save(tmp_path, 1)
    save(tmp_path, 2)
    seen: list[bool] = []
    rmtree = shutil.rmtree

    def watched(path: Path, ignore_errors: bool = False) -> None:
        seen.append(first.exists() and Path(path).exists())
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert shoal("rm", first).code == 0
    assert seen
    assert not any(seen)


def test_rm_refuses_what_is_not_a_checkpoint(tmp_path: Path, shoal: Command) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    disguised = tmp_path / "step_00000001"
    shutil.copytree(home, disguised)
    (tmp_path / "step_00000002").symlink_to(save(tmp_path / "run"))
    run = tmp_path / "run"
    for path in (home, disguised, home / "thesis.tex", tmp_path / "step_00000002", run, tmp_path / "nowhere"):
        result = shoal("rm", path, "--force")
        assert result.code == 2, path
        assert result.err.count("\n") == 1
    assert (disguised / "thesis.tex").exists()
    assert (home / "thesis.tex").exists()
    assert shoal("verify", run).code == 0


@pytest.mark.parametrize("command", ["show", "diff", "export", "verify", "ls"])
@pytest.mark.parametrize("what", ["nowhere", "file", "empty", "run"])
def test_a_path_that_is_no_checkpoint_is_refused_in_one_line(
    tmp_path: Path, shoal: Command, command: str, what: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    good = save(tmp_path / "run")
    if what == "run" and command in ("verify", "ls"):
        return
    more = {"diff": [good], "export": [tmp_path / "out", "--to", "torch"]}.get(command, [])
    result = shoal(command, tmp_path / what, *more)
    assert result.code == 2
    assert result.err.startswith("shoal: error: ")
    assert result.err.count("\n") == 1
    assert str(tmp_path / what) in result.err
    if what == "run":
        assert "step_00000001" in result.err


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def spoil(folder: Path, how: str, ran: Path) -> None:
    if how == "format":
        forge_manifest(folder, lambda manifest: manifest.update(format=99))
    elif how == "outside":
        shutil.copy(folder / "model.safetensors", folder.parent)

        def point(manifest: dict[str, Any]) -> None:
            manifest["files"]["../model.safetensors"] = manifest["files"].pop("model.safetensors")

        forge_manifest(folder, point)
    elif how == "shape":
        forge_manifest(folder, lambda manifest: manifest["tensors"]["model/weight"].update(shape=[1 << 50, 4]))
    else:
        path = folder / how
        length = path.stat().st_size
        path.write_bytes(pickle.dumps(Hostile(ran)).ljust(length, b"\0"))


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest and computes its digest again, as an attacker can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("digest")
    change(manifest)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]


@pytest.mark.parametrize("how", ["format", "outside", "shape", *FILES])
def test_hostile_folders_are_refused_and_run_no_code(tmp_path: Path, shoal: Command, how: str) -> None:
    good, bad = save(tmp_path / "good"), save(tmp_path / "bad")
    spoil(bad, how, tmp_path / "ran")
    before = sorted(tmp_path.rglob("*"))
    verified = shoal("verify", bad)
    assert verified.code == 1
    assert verified.out.count("\n") == 1
    refused = [shoal("diff", good, bad)]
    if how != "optimizer.safetensors":  # an export does not open it
        refused.append(shoal("export", bad, tmp_path / "out.pt", "--to", "torch"))
    if how not in ("model.safetensors", "optimizer.safetensors"):  # show opens neither
        refused.append(shoal("show", bad))
    for result in refused:
        assert result.code == 2, result
        assert result.err.count("\n") == 1
    assert shoal("ls", tmp_path / "bad").code == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_the_docs_list_all_commands_and_options() -> None:
    from typer.main import get_command

    from shoal.cli.checkpoint import app

    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    known = get_command(app).commands  # type: ignore[attr-defined]
    described = re.findall(r"^shoal checkpoint (\w+)(.*)$", page, re.M)
    assert {name for name, _ in described} == known.keys()
    for name, rest in described:
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {*re.findall(r"--[\w-]+", rest)} <= options, name
