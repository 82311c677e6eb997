"""The plain functions, and the page that says which replaces what."""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import pkgutil
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PATIENCE_SECONDS
from pool import start_process
from test_docs import blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
import shoal.distributed as plain
from shoal.errors import UserError
from shoal.launch.spawn import _choose_method
from shoal.strategies import DDPStrategy, Loop

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plain_pytorch.md"


def run_python(folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3) * (1 + plain.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_functions(folder: str) -> dict[str, Any]:
    before = plain.get_rank(), plain.get_world_size(), plain.is_main_process()
    rank, world_size, local_rank = plain.setup_distributed(device="cpu")
    assert before == (rank, world_size, local_rank == 0)
    plain.seed_everything(plain.get_rank())  # DDP sends rank 0's weights
    model = plain.wrap_model_ddp(nn.Linear(3, 1), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert plain.auto_resume(folder, model, optimizer) == {}
    for step in (1, 2):
        take_step(model, optimizer)
        plain.save_checkpoint_distributed(model, optimizer, None, step, plain.CheckpointManager(folder))
    weight = plain.get_loop(model).model.weight
    last = weight.tolist()
    first = plain.load_checkpoint_distributed(model, optimizer, None, plain.checkpoint_path(folder, 1))
    assert weight.tolist() != last
    assert plain.auto_resume(folder, model, optimizer) == {"step": 2}
    assert weight.tolist() == last
    kind, options = type(model), getattr(model, "find_unused_parameters", None)
    plain.cleanup_distributed()
    plain.cleanup_distributed()
    return {"rank": before[0], "size": before[1], "last": last, "first": first, "kind": kind, "options": options}


def test_a_script_of_plain_functions(pool2, tmp_path):
    one, other = pool2.run(by_functions, str(tmp_path / "two"), init=False)
    assert (one["rank"], other["rank"], one["size"]) == (0, 1, 2)
    assert one["last"] == other["last"]
    assert one["first"] == 1
    assert one["kind"] is DistributedDataParallel
    assert one["options"] is True
    alone = by_functions(str(tmp_path / "one"))
    assert (alone["rank"], alone["size"], alone["kind"]) == (0, 1, nn.Linear)


def train_replicated_and_sharded(folder: str) -> tuple[list[float], list[float]]:
    """Trains the same model under DDP and under FSDP by plain torch calls; returns both sets of weights."""
    plain.setup_distributed(device="cpu", find_unused_parameters=True)
    trained = {}
    for name, wrap in {"ddp": plain.wrap_model_ddp, "fsdp": plain.wrap_model_fsdp}.items():
        plain.seed_everything(plain.get_rank())  # all ranks get rank 0's weights
        model = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):  # before and after the optimizer joins the loop, in the first save
            take_step(model, optimizer)
            plain.save_checkpoint_distributed(model, optimizer, None, 1, plain.CheckpointManager(Path(folder) / name))
        trained[name] = model, optimizer
    replicated, optimizer = trained["ddp"]
    compiled = torch.compile(replicated, backend="eager")
    weights = plain.get_loop(compiled).model.state_dict()
    one = torch.cat([weight.flatten() for weight in weights.values()]).tolist()
    # The first of two wrapped models.
    plain.load_checkpoint_distributed(compiled, optimizer, None, Path(folder) / "fsdp" / "last")
    other = torch.cat([weight.flatten() for weight in weights.values()]).tolist()
    with pytest.raises(UserError, match="this model was not wrapped"):
        plain.get_loop(nn.Linear(3, 1))
    plain.cleanup_distributed()
    return one, other


def test_plain_torch_calls_train_the_same_model_under_ddp_and_fsdp(pool2, tmp_path):
    (replicated, sharded), others = pool2.run(train_replicated_and_sharded, str(tmp_path), init=False)
    assert (replicated, sharded) == others
    plain.seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples_of_both = torch.cat([torch.ones(2, 3), 2 * torch.ones(2, 3)])
    for _ in range(3):
        model(samples_of_both).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([weight.flatten() for weight in model.state_dict().values()]).tolist()
    assert replicated == pytest.approx(expected, abs=1e-6)
    assert sharded == pytest.approx(expected, abs=1e-6)


def step_an_early_optimizer(wrap_name: str) -> str:
    """Builds an optimizer before the model is wrapped; returns the refusal of its step."""
    plain.setup_distributed(device="cpu")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = getattr(plain, wrap_name)(model)
    take_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    try:
        take_step(wrapped, early)
    except UserError as error:
        return str(error)
    finally:
        plain.cleanup_distributed()
    return ""


def test_an_optimizer_of_the_parameters_before_sharding_is_refused(pool2):
    for refusal in pool2.run(step_an_early_optimizer, "wrap_model_fsdp", init=False):
        assert refusal.startswith("the SGD was built before the model was sharded")
    assert pool2.run(step_an_early_optimizer, "wrap_model_ddp", init=False) == ["", ""]


def damage(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)


def test_auto_resume_passes_over_a_damaged_checkpoint(tmp_path, capsys):
    with DDPStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        loop.wrap(nn.Linear(3, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        for step in (1, 2):
            loop.save(plain.checkpoint_path(tmp_path, step), step=step)
        newest = plain.find_latest_checkpoint(tmp_path)
        assert newest == tmp_path / "checkpoints" / "step_00000002"
        damage(newest)
        assert plain.resume(tmp_path, loop) == {"step": 1}
        assert "step_00000002 is damaged" in capsys.readouterr().err
        damage(plain.checkpoint_path(tmp_path, 1))
        with pytest.raises(UserError, match=r"all 2 checkpoints are damaged .*; move them away"):
            plain.resume(tmp_path, loop)


def test_mistakes_are_told_in_one_line():
    for wrap in (plain.wrap_model_ddp, plain.wrap_model_fsdp):
        with pytest.raises(UserError, match=r"call shoal\.distributed\.setup_distributed\(\) first"):
            wrap(nn.Linear(1, 1))
    plain.setup_distributed(device="cpu")
    try:
        with pytest.raises(UserError, match=r"call cleanup_distributed\(\) first"):
            plain.setup_distributed()
    finally:
        plain.cleanup_distributed()


def test_a_loop_that_could_not_load_says_so(tmp_path):
    with DDPStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        with pytest.raises(UserError, match=r"wrap: torch\.compile .*; give wrap the plain model"):
            loop.wrap(torch.compile(nn.Linear(3, 1), backend="eager"))
        (model,) = loop.wrap(nn.Linear(3, 1))
        plain.checkpoint_path(tmp_path, 1).mkdir(parents=True)
        for use in (lambda: plain.resume(tmp_path, loop), lambda: loop.save(tmp_path / "there")):
            with pytest.raises(UserError, match=r"the loop has no optimizer; .* call loop\.add\(optimizer\)"):
                use()
        loop.add(torch.optim.SGD(model.parameters(), lr=0.1))
        loop.save(tmp_path / "there", step=3)
        assert loop.load(tmp_path / "there") == {"step": 3}


def test_seed_everything():
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    seeds = [(1,), (1,), (2,), (1, 0), (1, 1), (1, 0, 1), (1, 1, 0)]
    drawn = [(plain.seed_everything(*seed), draw())[1] for seed in seeds]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(seeds) - 1


# launch_distributed

SCRIPT = '''
import os, signal, sys
import torch
import torch.distributed as dist
from shoal.distributed import launch_distributed, setup_distributed


class Picky(Exception):
    """Does not survive pickling."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def sums(scale):
    rank, _, _ = setup_distributed(device="cpu")
    total = torch.tensor(scale * (1.0 + rank))
    dist.all_reduce(total)  # waits for all
    return rank, total


def fail(how):
    rank, _, _ = setup_distributed(device="cpu")
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Picky(1, 2) if how == "picky" else ValueError(how)
    dist.barrier()  # in which the peer never arrives


def attempt(how):
    try:
        launch_distributed(fail, how, processes=2, start_method="fork")
    except Exception as error:
        print(type(error).__name__, error, *error.__notes__ if hasattr(error, "__notes__") else ())


if __name__ == "__main__":
    print(launch_distributed(sums, 10.0, processes=2, start_method="fork"))
    bonus = 1.0
    print(launch_distributed(lambda: [sums(bonus)[1].item()], processes=3))  # a lambda with a closure: forked
    for how in ("the sky is green", "picky", "killed"):
        attempt(how)
'''


def test_launch_distributed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    out, err = tmp_path / "out", tmp_path / "err"
    process = start_process(runpy.run_path, tmp_path / "script.py", None, "__main__", out=out, err=err)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0, err.read_text()
    lines = out.read_text().splitlines()
    assert lines[0] == "[(0, tensor(30.)), (1, tensor(30.))]"
    assert lines[1] == "[[6.0], [6.0], [6.0]]"
    assert lines[2] == "ValueError the sky is green This was raised in rank 1:"
    assert 'raise Picky(1, 2) if how == "picky" else ValueError(how)' in out.read_text()
    assert "RuntimeError Picky: 1 and 2 This was raised in rank 1:" in lines
    assert "RuntimeError rank 1 was killed by SIGKILL before it returned" in lines


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-c", "-"])
def test_launch_distributed_where_there_is_no_file_to_import(tmp_path, way):
    code = (
        "from shoal.distributed import get_rank, launch_distributed\n"
        "def ranks(): return get_rank()\n"
        "print(launch_distributed(ranks, processes=2))"
    )
    result = run_python(tmp_path, *["-c", code] if way == "-c" else ["-"], typed=code)
    assert result.stdout == "[0, 1]\n", result.stderr


def test_launch_distributed_refuses_mistakes(monkeypatch):
    with pytest.raises(UserError, match="processes = 0"):
        plain.launch_distributed(print, processes=0)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match="already rank 3"):
        plain.launch_distributed(print)


def test_a_function_that_cannot_be_imported_is_sent_by_value_once_cuda_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    bonus = 5
    method, function, args = _choose_method(lambda number: number + bonus, (1,), "auto")
    function, args = pickle.loads(pickle.dumps((function, args)))  # as multiprocessing sends them
    assert (method, pickle.loads(function(*args).pickled)) == ("spawn", 6)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _choose_method(lambda: None, (), "auto")[0] == "fork"
    assert _choose_method(plain.get_rank, (), "auto") == ("spawn", plain.get_rank, ())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match=r'cannot be forked; .* pip install "shoal\[notebook\]"'):
        _choose_method(lambda: None, (), "spawn")


def test_launch_distributed_is_a_name_of_the_package():
    assert shoal.launch_distributed is plain.launch_distributed


# The page


def run_script(path):
    """Runs a script in a worker of the pool, which is what torchrun would have started; returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("way", ["pool", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_loop_in_the_docs_runs_on_one_process_and_on_two(tmp_path, monkeypatch, pool2, way):
    _, loop, *_ = blocks(PAGE, "python")
    assert len([line for line in loop.splitlines() if line.strip()]) <= 30
    (tmp_path / "loop.py").write_text(loop)
    monkeypatch.chdir(tmp_path)
    if way == "pool":
        on_two, on_rank_1 = pool2.run(run_script, "loop.py", init=False)
        assert on_rank_1 == ""
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        two = run_python(tmp_path, *torchrun, "loop.py")
        assert two.returncode == 0, two.stderr
        on_two = two.stdout
    assert (tmp_path / "out" / "last" / "manifest.json").exists()
    losses = []
    for output in (run_script("loop.py"), on_two):
        words = [line.split() for line in output.splitlines()]
        assert [word[1] for word in words] == [str(epoch) for epoch in range(20)]
        losses.append([float(word[3]) for word in words])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # printed with five digits behind the point
    assert losses[0][-1] < losses[0][0] / 10


def call_train(source):
    names = {"__name__": "launch"}
    exec(source, names)
    return names["train"](10)


def run_as_rank(path):
    """Runs the script of the page that has a run; returns its last step and loss."""
    outcome = runpy.run_path(path)["run"].outcome
    return outcome.step, outcome.metrics["train/loss"]


def test_the_other_scripts_in_the_docs_run(tmp_path, monkeypatch, pool2):
    bare, _, run, body, _ = blocks(PAGE, "python")
    assert '"num_epochs": 20' in run
    run = run.replace('"num_epochs": 20', '"num_epochs": 2')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in {"bare.py": bare, "run.py": run, "steps.py": body}.items():
        (tmp_path / name).write_text(source)
    losses = [float(line.split()[3]) for line in run_script("bare.py").splitlines()]
    assert losses[-1] < losses[0] / 10
    on_two = pool2.run(run_as_rank, "run.py", init=False)
    shutil.move("out/run", "out/two")
    step, loss = run_as_rank("run.py")
    assert on_two == [(step, pytest.approx(loss, rel=1e-4))] * 2
    names = runpy.run_path("run.py")  # it has ended, and nothing is left to do
    assert names["run"].outcome.first_step == step == 16
    with shoal.Run(recipe=names["Squares"], training={"max_steps": 2, "batch_size": 8, "body": "steps:body"}) as again:
        assert again.train().step == 2


def test_what_the_docs_launch_runs(pool2):
    *_, launch = blocks(PAGE, "python")
    assert pool2.run(call_train, launch, init=False) == [0, 10]


@pytest.mark.slow
def test_the_launch_in_the_docs_runs(tmp_path):
    *_, launch = blocks(PAGE, "python")
    (tmp_path / "launch.py").write_text(launch)
    result = run_python(tmp_path, "launch.py")
    assert result.stdout == "[0, 10]\n", result.stderr


def test_the_page_names_what_there_is():
    text = PAGE.read_text()
    for name in plain.__all__:
        assert f"{name}(" in text + (ROOT / "docs" / "familiar.md").read_text(), name
        assert inspect.getdoc(getattr(plain, name)), name
    for name in re.findall(r"`run\.(\w+)", text):
        assert hasattr(shoal.Run, name), name
    for name in re.findall(r"strategy\.(\w+)", text):
        assert hasattr(DDPStrategy(device="cpu"), name), name
    for name, arguments in re.findall(r"loop\.(\w+)(?:\(([^()]*))?", text):
        assert hasattr(Loop, name), name
        for keyword in re.findall(r"(\w+)=", arguments):
            parameters = inspect.signature(getattr(Loop, name)).parameters
            assert keyword in parameters or "state" in parameters, f"{name}({keyword}=…)"


def test_the_new_names_in_the_changelog_exist():
    table = re.findall(r"^\| (.*) \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    new_names = [name for _, now in table for name in re.findall(r"(shoal(?:\.\w+)+|(?:loop|strategy)\.\w+)", now)]
    assert len(new_names) > 30
    for name in new_names:
        owner, _, attribute = name.partition(".")
        owners = {"loop": Loop, "strategy": DDPStrategy(device="cpu")}
        if owner == "shoal":
            pkgutil.resolve_name(name)
        elif attribute != "engaged":  # made when a model is wrapped
            assert hasattr(owners[owner], attribute), name
