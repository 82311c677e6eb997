"""Python as a way in: `shoal.train` and `shoal.load`, and the names that `import shoal` offers."""

from __future__ import annotations

import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import PATIENCE_SECONDS, Gate, ToyRun
from pool import Pool
from safetensors.torch import load_file
from test_docs import blocks
from verify.runs import bdh

import shoal
from shoal.checkpoint import step_folder
from shoal.config.from_python import run_from_python
from shoal.errors import UserError

ROOT = Path(__file__).parent.parent
QUIET = {"logging.console": "off", "logging.tensorboard": False}
SHORT = {"training": {"max_steps": 3, "batch_size": 4, "device": "cpu"}}


def toy_recipe() -> Any:
    import toy_recipe

    return toy_recipe


def weights(output: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(step_folder(output, step) / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_import_does_not_import_torch() -> None:
    probe = "import sys, shoal; print('torch' in sys.modules, shoal.UserError.__name__, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["False", "UserError", "False"]


def test_public_names() -> None:
    assert {name for name in shoal.__all__ if getattr(shoal, name) is None} == set()
    assert {*shoal.__all__} <= {*dir(shoal)}
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        shoal.trian  # noqa: B018
    page = (ROOT / "docs" / "from_python.md").read_text()
    assert [name for name in shoal.__all__ if f"`{name}" not in page and f"shoal.{name}" not in page] == []


def test_the_script_in_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = blocks(ROOT / "docs" / "from_python.md", "python")
    Path("script.py").write_text(source.replace('"max_steps": 50', '"max_steps": 5'))
    names = runpy.run_path("script.py", run_name="__main__")
    assert names["outcome"].step == 5
    assert torch.equal(names["model"][0].weight, names["outcome"].model[0].weight)


def test_sections_are_merged_over_the_file(toy: ToyRun) -> None:
    dotted = {"training.max_steps": 4, "experiment.output_dir": toy.folder / "other"}
    run = run_from_python(toy.config, None, {"training": {"learning_rate": 0.5, "max_steps": 3}, **dotted}, "python")
    assert (run.config.training.max_steps, run.config.training.learning_rate) == (4, 0.5)
    assert run.config.training.batch_size == 4
    assert run.config.output_dir == str(toy.folder / "other")
    assert run.sources["training.max_steps"] == "python"
    assert run.sources["training.batch_size"] == f"{toy.config}:3"


def test_it_trains_as_the_command_does(toy: ToyRun) -> None:
    toy.train("training.max_steps=4")
    outcome = shoal.train(toy.config, training={"max_steps": 4}, experiment={"output_dir": toy.folder / "b"}, **QUIET)
    assert (outcome.step, outcome.last_checkpoint) == (4, step_folder(toy.folder / "b", 4))
    assert weights(toy.folder / "b", 4) == weights(toy.output, 4)
    assert "(shoal.train(...))" in (toy.folder / "b" / "report.txt").read_text()


def test_a_recipe_object_without_a_file_and_again(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toy.folder)
    recipe = toy_recipe().Toy(toy_recipe().Toy.Config.model_validate({"model": {"hidden": 5}}))
    first = shoal.train(recipe=recipe, **SHORT, **QUIET)
    assert first.model[0].weight.shape == (5, 1)
    assert not dist.is_initialized()
    config = (first.output_dir / "config.yaml").read_text()
    assert "recipe: toy_recipe:Toy " in config
    assert "hidden: 5" in config
    sharded = {"distributed.strategy": "fsdp", "experiment.deterministic": True}  # needs a process group, and settings
    again = shoal.train({"recipe": recipe, **SHORT}, training={"max_steps": 5}, **sharded, **QUIET)
    assert (again.first_step, again.step) == (3, 5)
    assert not dist.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    goes_on = toy.call("train", str(first.output_dir / "config.yaml"), "training.max_steps=6", "training.device=cpu")
    assert goes_on.returncode == 0, goes_on.stderr
    assert "finished at step 6" in goes_on.stdout


def test_a_class_is_built_from_the_config(toy: ToyRun) -> None:
    run = run_from_python({**SHORT, "model": {"hidden": 5}}, toy_recipe().Toy, {}, "python")
    assert run.recipe_object is None
    assert run.make_recipe().config.model.hidden == 5


def test_a_recipe_that_cannot_be_imported_is_not_resumed_by_the_command(toy: ToyRun) -> None:
    class Local(toy_recipe().Toy):
        def __init__(self, size: int):
            super().__init__()
            self.size = size

    outcome = shoal.train(toy.config, recipe=Local(3), training={"max_steps": 2}, **QUIET)
    assert shoal.train(toy.config, recipe=Local(3), training={"max_steps": 3}, **QUIET).first_step == 2
    refused = toy.call("train", str(outcome.output_dir / "config.yaml"))
    assert refused.returncode == 2
    assert "with a recipe that cannot be imported; continue it there" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1

    module = toy_recipe()
    later = module.Toy()
    later.extra = 1
    module.Sized, Local.__module__, Local.__qualname__ = Local, "toy_recipe", "Sized"  # as if it were defined there
    for recipe, recorded in (
        (module.Toy(), "toy_recipe:Toy"),
        (module.Toy, "toy_recipe:Toy"),
        (later, "not importable: toy_recipe.Toy"),
        (module.Sized(3), "not importable: toy_recipe.Sized"),
    ):
        assert run_from_python(SHORT, recipe, {}, "python").config.recipe == recorded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": 3}, "recipe = 3: int is not a recipe"),
        ({"training": {"max_stps": 3}}, "training.max_stps (shoal.train(...)) is not a key; did you mean"),
        ({"training": {"max_steps": "3"}}, "training.max_steps (shoal.train(...)) = '3': "),
        ({"training": {"learning_rate": torch.tensor(1.0)}}, "training.learning_rate = tensor(1.): a Tensor cannot"),
        ({"training": 3}, "training (shoal.train(...)) = 3 should be a section"),
        ({"config": 3}, "shoal.train(...): the config is a int; give the path"),
        ({"config": "missing.yaml"}, "missing.yaml cannot be read"),
        ({"config": {}}, "recipe is missing; set it to one of"),
        ({"launch": {"nodes": 2}}, "launch.nodes = 2: Python starts processes on this machine only"),
    ],
)
def test_mistakes_are_one_line(toy: ToyRun, arguments: dict[str, Any], message: str) -> None:
    config = arguments.pop("config", toy.config)
    with pytest.raises(UserError) as error:
        shoal.train(config, **arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_sections_that_contradict_the_object_are_refused(toy: ToyRun) -> None:
    recipe = toy_recipe().Toy()
    with pytest.raises(UserError, match=r"model.hidden \(x\) = 5, but the recipe object was built with 16; build it"):
        run_from_python(SHORT, recipe, {"model.hidden": 5}, "x")
    same = run_from_python(SHORT, recipe, {"model.hidden": 16, "dataset.num_workers": 1}, "x")
    assert same.config.dataset.num_workers == 1
    with pytest.raises(UserError, match=r"model.hiden \(x\) is not a key; did you mean model.hidden"):
        run_from_python(SHORT, recipe, {"model.hiden": 16}, "x")
    del recipe.config
    with pytest.raises(UserError, match=r"model.hidden \(x\): the recipe object of Toy keeps no config"):
        run_from_python(SHORT, recipe, {"model.hidden": 16}, "x")


def test_the_average_that_was_evaluated_is_loaded(toy: ToyRun) -> None:
    saving = {"checkpoint.keep_best": 1, "checkpoint.load_best_model_at_end": True, "training.eval_steps": 1}
    options = {**QUIET, **saving, "callbacks": [{"name": "ema", "decay": 0.5}]}
    outcome = shoal.train(toy.config, **SHORT, **options)
    run = run_from_python(toy.config, None, {**SHORT, **options}, "x")
    plain, average = (shoal.load(outcome.best_checkpoint, recipe=run.recipe_type, average=a) for a in (None, "ema"))
    assert torch.equal(average[0].weight, outcome.model[0].weight)
    assert not torch.equal(plain[0].weight, average[0].weight)
    for expected, options in ((average, {}), (average, {"average": "evaluated"}), (plain, {"average": "none"})):
        best = shoal.load(toy.output, recipe=run.recipe_type, which="best", **options)
        assert torch.equal(best[0].weight, expected[0].weight)
    with pytest.raises(UserError, match=r"average swa: .* has no average of this callback; it has those of ema"):
        shoal.load(outcome.best_checkpoint, recipe=run.recipe_type, average="swa")
    shutil.rmtree(toy.output)
    outcome = shoal.train(toy.config, **SHORT, **QUIET)
    weights = shoal.load(step_folder(toy.output, 3), recipe=run.recipe_type, average="evaluated")
    assert torch.equal(weights[0].weight, outcome.model[0].weight)


def test_an_exception_says_what_to_do(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    looked_up = "torch.embedding(torch.ones(2, 2), torch.tensor([7]))"
    change_recipe("def loss(self, output, batch):", f"def loss(self, output, batch):\n        {looked_up}")
    with pytest.raises(IndexError) as caught:
        shoal.train(toy.config, **SHORT, **QUIET)
    assert caught.value.__notes__[-1].startswith("shoal: a label or token is not below the number of classes")


def test_a_run_has_the_name_of_its_file(toy: ToyRun) -> None:
    other = toy.config.with_name("other.yaml")
    other.write_text(re.sub("experiment:.*", "", toy.config.read_text()))
    assert run_from_python(other, None, {}, "x").config.experiment.name == "other"
    assert run_from_python(other, None, {"experiment": {"name": "mine"}}, "x").config.experiment.name == "mine"


def test_outside_the_main_thread(toy: ToyRun) -> None:
    before = signal.getsignal(signal.SIGINT)
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(shoal.train(toy.config, **SHORT, **QUIET)))
    thread.start()
    thread.join()
    assert outcomes[0].step == 3
    assert signal.getsignal(signal.SIGINT) is before
    assert "not in the main thread" in (toy.output / "report.txt").read_text()


def train_as_rank(config: Path, recipe: str) -> tuple[int, bool]:
    import toy_recipe

    outcome = shoal.train(config, recipe=getattr(toy_recipe, recipe)(), **SHORT, **QUIET)
    again = shoal.train(config, recipe=getattr(toy_recipe, recipe)(), training={"max_steps": 4}, **QUIET)
    return again.step - outcome.step, dist.is_initialized()


def test_on_two_processes_that_a_launcher_started(toy: ToyRun, pool2: Pool) -> None:
    assert pool2.run(train_as_rank, toy.config, "Toy", init=False) == [(1, False), (1, False)]
    model = shoal.load(toy.output, recipe=toy_recipe().Toy)
    assert not model.training
    assert torch.equal(model[0].weight, load_model(toy.output, 4)["0.weight"])


def load_model(output: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted(step_folder(output, step).glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


SCRIPT = """
import shoal
from toy_recipe import Toy as Imported


class Toy(Imported):
    pass


if __name__ == "__main__":
    options = {"training.device": "cpu", "training.max_steps": 3, "launch.procs_per_node": 2, "logging.console": "off"}
    outcome = shoal.train("run.yaml", recipe=Toy(), **options)
    print(outcome.step, outcome.model[0].weight.shape, outcome.model.training)
"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [False, True])
def test_it_starts_processes(toy: ToyRun, notebook: bool) -> None:
    (toy.folder / "script.py").write_text(SCRIPT)
    options = {"cwd": toy.folder, "capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
    if notebook:  # nothing can be imported from what comes by standard input
        result = subprocess.run([sys.executable, "-"], input=SCRIPT, **options)
    else:
        result = subprocess.run([sys.executable, "script.py"], **options)
    assert result.stdout == "3 torch.Size([16, 1]) False\n", result.stderr
    assert (toy.output / "logs" / "rank_1.log").exists()
    refused = toy.call("train", str(toy.output / "config.yaml"), "launch.procs_per_node=1")
    assert "cannot be imported" in refused.stderr


@pytest.mark.slow
def test_a_signal_is_passed_on(toy: ToyRun, gate: Gate) -> None:
    script = SCRIPT.replace('"training.max_steps": 3', '"training.max_steps": 30')
    (toy.folder / "script.py").write_text(script.replace("print(", "print(outcome.stopped_by, "))
    gate.close_after(2)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=toy.folder, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + PATIENCE_SECONDS
    while not step_folder(toy.output, 2).exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # to the first process alone, as a notebook does
    time.sleep(1)
    gate.open()
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    stopped_by, step = output.split()[:2]
    assert int(stopped_by) == signal.SIGINT
    assert 2 <= int(step) < 30
    assert (step_folder(toy.output, int(step)) / "manifest.json").exists()


def test_which_processes_are_started(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal import api

    run = run_from_python(toy.config, None, {"launch.procs_per_node": 2}, "x")
    assert api.starts_processes(run)
    assert not api.starts_processes(run_from_python(toy.config, None, {}, "x"))
    started: list[Any] = []

    def as_if_started(function: Any, args: Any, processes: int, method: str) -> list[Any]:
        started.append(processes)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        here = run_from_python(toy.config, None, SHORT, "x")
        return [function(here, *args[1:])]

    monkeypatch.setattr(api, "run_function", as_if_started)
    outcome = api.train_in_processes(run, api.train_run)
    assert started == [2]
    assert torch.equal(outcome.model[0].weight, load_model(toy.output, 3)["0.weight"])


def test_load_takes_the_latest_or_the_best(toy: ToyRun) -> None:
    recipe = toy_recipe().Toy
    kept = {"checkpoint.keep_last": 9, "training.eval_steps": 1, "checkpoint.keep_best": 1, "checkpoint.every": 1}
    outcome = shoal.train(toy.config, **{**QUIET, **kept, "training.max_steps": 4, "checkpoint.mode": "max"})
    assert outcome.best_checkpoint is not None
    best = shoal.load(toy.output, recipe=recipe, which="best")
    assert torch.equal(best[0].weight, load_model(toy.output, outcome.best_step)["0.weight"])
    assert outcome.best_step != 4  # or nothing would tell the two apart
    latest = shoal.load(toy.output, recipe=recipe())
    assert torch.equal(latest[0].weight, outcome.model[0].weight)
    assert latest[0].weight.requires_grad
    third = shoal.load(step_folder(toy.output, 3), recipe=recipe)
    data = step_folder(toy.output, 4) / "model.safetensors"
    data.write_bytes(data.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.warns(UserWarning, match="step_00000004 is damaged and passed over"):
        assert torch.equal(shoal.load(toy.output, recipe=recipe)[0].weight, third[0].weight)
    with pytest.raises(UserError, match="is a damaged checkpoint"):
        shoal.load(step_folder(toy.output, 4), recipe=recipe)


def test_load_finds_the_recipes_that_shoal_ships(tmp_path: Path) -> None:
    tree = bdh(tmp_path, max_steps=1, batch_size=2).tree()
    tree["experiment"]["output_dir"] = tmp_path / "out"
    outcome = shoal.train(tree, **QUIET)
    model = shoal.load(tmp_path / "out")
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens)[0], outcome.model.eval()(tokens)[0])


def test_load_runs_nothing_that_a_checkpoint_names(toy: ToyRun) -> None:
    toy.train("training.max_steps=2")
    (toy.folder / "toy_recipe.py").write_text("raise SystemExit('it was imported')")
    sys.modules.pop("toy_recipe", None)
    with pytest.raises(UserError, match=r"by recipe 'toy_recipe:Toy', which is not built in.*pass it as shoal.load"):
        shoal.load(toy.output)
    with pytest.raises(UserError, match=r"recipe = 3 is not a recipe"):
        shoal.load(toy.output, recipe=3)
    with pytest.raises(UserError, match="no such folder"):
        shoal.load(toy.folder / "nowhere")
    with pytest.raises(UserError, match="which = 'worst': use latest or best"):
        shoal.load(toy.output, which="worst")
