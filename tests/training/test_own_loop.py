"""Steps that are written by hand, in a run with everything: logs, evaluation, checkpoints, exact resume."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool, WorkerFailure
from safetensors.torch import load_file

import shoal
from shoal.checkpoint import step_folder, step_folders
from shoal.config import load_run
from shoal.errors import UserError

BODIES = """
import torch
from torch.nn.functional import mse_loss


def body(run, step):
    for batch in step.batches:
        with step.accumulate(), run.autocast():
            loss = mse_loss(run.model(batch["x"]), batch["y"])
            run.backward(loss)
            step.log(twice=2 * loss)
    run.step()
    step.log(last=loss, one=1.0)


def evaluation(run, batch):
    error = run.model(batch["x"]) - batch["y"]
    return {"loss": (error**2).mean(), "bias": error.mean()}
"""
QUIET = {"logging.console": "off", "training.device": "cpu", "logging.every": 1}
WITHOUT_LOSS = ("    def inputs(self, batch):\n", "    def unused(self, batch):\n")


@pytest.fixture
def bodies(toy: ToyRun) -> Any:
    (toy.folder / "bodies.py").write_text(BODIES)
    sys.modules.pop("bodies", None)
    import bodies

    yield bodies
    sys.modules.pop("bodies", None)


def states(output: Path, step: int) -> dict[str, bytes]:
    files = [*step_folder(output, step).glob("*.safetensors")]
    return {f"{f.name}/{k}": t.numpy().tobytes() for f in files for k, t in load_file(f).items()}


def forget_after(output: Path, step: int) -> None:
    for folder in step_folders(output):
        if folder > step_folder(output, step):
            shutil.rmtree(folder)


def train_by_hand(toy: ToyRun, body: Callable[[Any, Any], None], **sections: Any) -> Any:
    with shoal.Run(toy.config, **{**QUIET, **sections}) as run:
        for step in run.steps():
            body(run, step)
    return run.outcome


def test_it_trains_as_the_recipe_does(toy: ToyRun, bodies: Any) -> None:
    options = {"training.batch_size": 3, "training.global_batch_size": 8, "training.eval_steps": 5}  # 3 + 3 + 2
    whole = toy.train(*(f"{key}={value}" for key, value in options.items()), f"experiment.output_dir={toy.folder}/b")
    outcome = train_by_hand(toy, bodies.body, **options)
    assert (outcome.step, outcome.total_steps) == (10, 10)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(outcome.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        ours, theirs = toy.metrics(key), toy.metrics(key, toy.folder / "b")
        assert theirs
        assert ours == {step: pytest.approx(value, rel=1e-4) for step, value in theirs.items()}
    loss = toy.metrics()
    assert toy.metrics("train/twice") == {step: pytest.approx(2 * value, rel=1e-5) for step, value in loss.items()}
    assert toy.metrics("train/last")[3] != pytest.approx(loss[3], rel=1e-3)  # of the last micro-batch alone
    assert toy.metrics("train/one")[3] == 1
    assert "the loop of a script  (shoal.Run)" in (toy.output / "report.txt").read_text()


@pytest.mark.parametrize("form", ["loop", "key"])
def test_four_steps_are_two_and_two(toy: ToyRun, bodies: Any, form: str) -> None:
    options = {"training.gradient_accumulation": 3, "training.max_steps": 4}

    def go(output: Path) -> None:
        chosen = {**options, "experiment.output_dir": output}
        if form == "loop":
            train_by_hand(toy, bodies.body, **chosen)
        else:
            shoal.train(toy.config, **{**QUIET, **chosen, "training.body": "bodies:body"})

    go(toy.folder / "whole")
    go(toy.output)
    forget_after(toy.output, 2)
    torch.seed()
    go(toy.output)
    assert len(states(toy.output, 4)) >= 8
    assert states(toy.output, 4) == states(toy.folder / "whole", 4)
    assert toy.metrics("train/last") == toy.metrics("train/last", toy.folder / "whole")


def train_as_rank(config: Path, output: Path, form: str, options: dict[str, Any]) -> float:
    import bodies

    options = {**QUIET, "experiment.output_dir": output, **options}
    if form == "function":
        return shoal.Run(config, **options).train(bodies.body).metrics["train/loss"]
    with shoal.Run(config, **options) as run:
        for step in run.steps():
            bodies.body(run, step)
    assert run.outcome is not None
    return run.outcome.metrics["train/loss"]


LAYOUTS = {
    "ddp": {},
    "fsdp": {"distributed.strategy": "fsdp"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_resume_to_the_bit_and_train_as_one(toy: ToyRun, bodies: Any, pool2: Pool, layout: str) -> None:
    # 8 samples in micro-batches of 3 on two ranks: 3 + 3, then 2 and a filler.
    options = {**LAYOUTS[layout], "training.batch_size": 3, "training.global_batch_size": 8}
    options |= {"model.dropout": 0.0, "training.max_steps": 4}
    alone = train_by_hand(toy, bodies.body, **{**options, "experiment.output_dir": toy.folder / "one"})
    run = (train_as_rank, toy.config)
    whole = pool2.run(*run, toy.folder / "whole", "loop", options, init=False)
    assert whole[0] == whole[1] == pytest.approx(alone.metrics["train/loss"], rel=1e-4)
    pool2.run(*run, toy.output, "loop", options, init=False)
    forget_after(toy.output, 2)
    pool2.run(*run, toy.output, "loop", options, init=False)
    assert states(toy.output, 4) == states(toy.folder / "whole", 4)
    one = shoal.load(
        toy.folder / "one",
        recipe=load_run(toy.config).recipe_type,
    )
    two = shoal.load(toy.output, recipe=load_run(toy.config).recipe_type)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_four_processes_resume_to_the_bit(toy: ToyRun, bodies: Any, pool4: Pool) -> None:
    """DDP orders its buckets anew after a first backward, which four ranks notice in the last bits."""
    options = {"training.batch_size": 2, "checkpoint.keep_last": 9, "model.hidden": 4000}
    options |= {"distributed.ddp.bucket_cap_mb": 1, "training.max_steps": 6}
    pool4.run(train_as_rank, toy.config, toy.folder / "whole", "function", options, init=False)
    pool4.run(train_as_rank, toy.config, toy.output, "function", options, init=False)
    forget_after(toy.output, 2)
    pool4.run(train_as_rank, toy.config, toy.output, "function", options, init=False)
    assert states(toy.output, 6) == states(toy.folder / "whole", 6)


def test_an_evaluation_of_ones_own(toy: ToyRun, bodies: Any, change_recipe: Callable[[str, str], None]) -> None:
    whole = toy.train("training.eval_steps=1", "training.max_steps=2", f"experiment.output_dir={toy.folder}/b")
    change_recipe(*WITHOUT_LOSS)
    options = {**QUIET, "training.eval_steps": 1, "training.max_steps": 2}
    with (
        pytest.raises(UserError, match=r"recipe Toy has eval_data and no inputs; set run.evaluation"),
        shoal.Run(toy.config, **options) as run,
    ):
        run.steps()
    with shoal.Run(toy.config, **options) as run:
        run.evaluation = bodies.evaluation
        outcome = run.train(bodies.body)
    assert outcome.metrics["eval/loss"] == pytest.approx(whole.metrics["eval/loss"], rel=1e-4)
    assert [*toy.metrics("eval/bias")] == [1, 2]


def test_a_break_saves_the_steps_that_were_taken(toy: ToyRun, bodies: Any) -> None:
    options = {**QUIET, "training.max_steps": 6}
    train_by_hand(toy, bodies.body, **{**options, "experiment.output_dir": toy.folder / "whole"})
    with shoal.Run(toy.config, **options) as run:
        for step in run.steps():
            bodies.body(run, step)
            if step.number == 3:
                break
    assert run.outcome.step == 3
    assert (step_folder(toy.output, 3) / "manifest.json").exists()
    with shoal.Run(toy.config, **options) as run:
        for step in run.steps():
            if step.number == 5:  # before its update: its samples come again
                break
            bodies.body(run, step)
    assert (run.outcome.first_step, run.outcome.step) == (3, 4)
    train_by_hand(toy, bodies.body, **options)
    assert states(toy.output, 6) == states(toy.folder / "whole", 6)


def test_an_exception_leaves_the_last_checkpoint(toy: ToyRun, bodies: Any) -> None:
    def failing(run: Any, step: Any) -> None:
        bodies.body(run, step)
        assert step.number < 5

    with pytest.raises(AssertionError):
        train_by_hand(toy, failing)
    options = {**QUIET, "experiment.output_dir": toy.folder / "b"}
    with shoal.Run(toy.config, **options) as run, pytest.raises(AssertionError):  # caught before the run is left
        run.train(failing)
    assert len(step_folders(toy.folder / "b")) == 2
    assert [folder.name for folder in step_folders(toy.output)] == ["step_00000002", "step_00000004"]
    assert not (toy.output / "run.lock").exists()
    assert train_by_hand(toy, bodies.body).first_step == 4


def test_a_signal_saves_and_ends_the_loop(toy: ToyRun, bodies: Any) -> None:
    with shoal.Run(toy.config, **QUIET) as run:
        for step in run.steps():
            bodies.body(run, step)
            if step.number == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert (run.outcome.step, run.outcome.stopped_by) == (3, signal.SIGINT)
    assert (step_folder(toy.output, 3) / "manifest.json").exists()


def test_the_command_goes_on_with_a_function_and_refuses_a_loop(toy: ToyRun, bodies: Any) -> None:
    options = {**QUIET, "training.max_steps": 3}
    outcome = shoal.Run(toy.config, **options).train(bodies.body)
    result = toy.call("train", str(outcome.output_dir / "config.yaml"), "training.max_steps=4")
    assert "finished at step 4" in result.stdout, result.stderr
    assert re.search(r"^body +bodies:body", (toy.output / "report.txt").read_text(), re.M)
    with pytest.raises(UserError, match=r"training.body = None, but .* was saved with 'bodies:body'"):
        toy.train("training.max_steps=5")
    train_by_hand(toy, bodies.body, **{"experiment.output_dir": toy.folder / "b", "training.max_steps": 2})
    refused = toy.call("train", str(toy.folder / "b" / "config.yaml"))
    assert refused.returncode == 2
    assert "with a loop that cannot be imported; continue it there" in refused.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("run.step()", "step 1 ended without"),
        ("run.backward(torch.ones(3, requires_grad=True))", r"the loss has the shape \[3\]"),
        ("[*step.batches]\nrun.backward(loss)", r"run.backward: a step has 2 micro-batches; put `with step.acc"),
        ("[*step.batches]\nwith step.accumulate(): pass", r"step.accumulate\(\) outside of `for batch in"),
        ("for batch in step.batches: run.backward(loss)", "put `with step.accumulate"),
        ("step.log(x=torch.ones(2))", r"step.log\(x=...\): its shape is \[2\]"),
        ("step.log(x='many')", r"step.log\(x=...\): it is a str"),
        ("step.log(loss=1.0)", "the run logs a number of this name itself"),
        ("step.log(**{'eval/loss': 1.0})", "the run logs a number of this name itself"),
        ("compute()\nrun.step(max_norm=0.5)", r"max_grad_norm = 2.0, but the body calls run.step\(max_norm=0.5\)"),
        ("run.clip(max_norm=0.5)", r"training.max_grad_norm = 2.0, but the body calls run.clip\(max_norm=0.5\)"),
        ("run.backward(loss.item())", "the loss has no gradient"),
        ("run.backward(loss.detach())", "the loss has no gradient"),
        ("loss.backward()\nrun.step()", r"no run.backward\(\) came before it; .* in place of loss.backward"),
        ("compute(1)\nrun.step()", "only 1 of the 2 micro-batches of this step had a run.backward"),
    ],
)
def test_mistakes_in_a_body(toy: ToyRun, source: str, message: str) -> None:
    def body(run: Any, step: Any) -> None:
        def compute(number: int = 2) -> None:
            for batch, _ in zip(step.batches, range(number), strict=False):
                with step.accumulate():
                    run.backward(run.model(batch["x"]).mean())

        names = {"run": run, "step": step, "torch": torch, "compute": compute}
        if "without" not in message:
            exec(source, {**names, "loss": run.model(torch.ones(1, 1)).mean()})

    options = {**QUIET, "training.gradient_accumulation": 2, "training.max_grad_norm": 2.0}
    with pytest.raises(UserError, match=message):
        shoal.Run(toy.config, **options).train(body)


def test_mistakes_around_it(toy: ToyRun, bodies: Any) -> None:
    run = shoal.Run(toy.config, **QUIET)
    for use in (run.steps, lambda: run.model, lambda: run.optimizer):
        with pytest.raises(UserError, match=r"the run is not open; use it inside `with shoal.Run"):
            use()
    with pytest.raises(UserError, match=r"run.train\(\): there is no body"):
        run.train()
    with shoal.Run(toy.config, **QUIET) as run:
        assert run.model is run.session.model
        with pytest.raises(UserError, match="the run is open already"):
            run.train(bodies.body)
        with pytest.raises(UserError, match=r"run.step\(\) is for the body of a step"):
            run.step()
        run.steps()
        with pytest.raises(UserError, match="were taken already"):
            run.steps()
    named = {**QUIET, "training.body": "bodies:body"}
    with pytest.raises(UserError, match=r"training.body = 'bodies:body': run.steps\(\) has a body of its own"):
        shoal.Run(toy.config, **named).steps()
    with pytest.raises(UserError, match=r"run.train\(\) got another function"):
        shoal.Run(toy.config, **named).train(print)
    for value, message in {
        "bodies": r"training.body .* = 'bodies' should be package.module:function",
        "bodies:boby": "bodies has no 'boby'; did you mean 'body'?",
        "bodies:__name__": r"it is a str; give a function body\(run, step\)",
        "nowhere:body": "no module 'nowhere'",
    }.items():
        with pytest.raises(UserError, match=message):
            shoal.Run(toy.config, **{"training.body": value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"training.loss_chunks": 2}, "loss_chunks .*= 2: .*computes its loss itself"),
        (
            {"distributed.strategy": "mesh", "distributed.mesh": {"pp": 2}, "launch.procs_per_node": 2},
            r"distributed.mesh.pp = 2: a pipeline runs all micro-batches of a step at once",
        ),
    ],
)
def test_layouts_that_a_body_cannot_have(toy: ToyRun, bodies: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shoal.Run(toy.config, **keys).train(bodies.body)
    with pytest.raises(UserError, match=message):
        shoal.train(toy.config, **keys, **{"training.body": "bodies:body"})


def test_a_loop_cannot_start_processes(toy: ToyRun, bodies: Any) -> None:
    with (
        pytest.raises(UserError, match=r"launch.procs_per_node = 2: the loop of a script cannot .*nproc_per_node=2"),
        shoal.Run(toy.config, **{"launch.procs_per_node": 2}) as run,
    ):
        run.steps()


def test_a_body_without_autocast_is_noticed(toy: ToyRun, bodies: Any) -> None:
    def body(run: Any, step: Any) -> None:
        (batch,) = step.batches
        run.backward(torch.nn.functional.mse_loss(run.model(batch["x"]), batch["y"]))
        run.step()

    options = {**QUIET, "training.mixed_precision": "bf16", "training.max_steps": 1}
    with pytest.raises(UserError, match=r"nothing in the first step was computed in bf16; .*with run.autocast\(\):"):
        shoal.Run(toy.config, **options).train(body)
    assert shoal.Run(toy.config, **options).train(bodies.body).step == 1


def test_the_best_needs_its_metric(toy: ToyRun, bodies: Any) -> None:
    options = {**QUIET, "training.eval_steps": 1, "checkpoint.keep_best": 1, "training.max_steps": 1}
    with shoal.Run(toy.config, **options) as run:
        run.evaluation = lambda run, batch: {"bias": 1.0}
        with pytest.raises(UserError, match=r"checkpoint.metric = 'eval/loss': .* it gives eval/bias"):
            run.train(bodies.body)


COUNTING = """class Counting(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input):
        self.calls += 1
        return super().forward(input)


class Toy"""


def count_calls(config: Path) -> float:
    """Takes a step of 8 samples in micro-batches of 3; returns how often the model was called, by its buffer."""
    import bodies

    options = {**QUIET, "training.batch_size": 3, "training.global_batch_size": 8, "training.max_steps": 1}
    with shoal.Run(config, **options) as run:
        for step in run.steps():
            bodies.body(run, step)
            calls = run.session.model.calls.item()
    return calls


def test_a_filler_leaves_buffers_as_they_are(
    toy: ToyRun, bodies: Any, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("class Toy", COUNTING)
    change_recipe("return nn.Sequential(", "return Counting(")
    assert pool2.run(count_calls, toy.config, init=False) == [2, 1]  # the second of rank 1 is a filler


@pytest.mark.parametrize("layout", LAYOUTS)
def test_synced_batch_norms_train_as_one_process(
    toy: ToyRun, bodies: Any, pool2: Pool, change_recipe: Callable[[str, str], None], layout: str
) -> None:
    change_recipe("nn.Tanh(),", "nn.Sequential(nn.Tanh(), nn.BatchNorm1d(hidden)),")
    options = {**LAYOUTS[layout], "training.sync_batch_norm": True, "model.dropout": 0.0, "training.max_steps": 3}
    whole = {"training.batch_size": 6, "training.global_batch_size": 8, "experiment.output_dir": toy.folder / "one"}
    alone = train_by_hand(toy, bodies.body, **options, **whole)  # 6 + 2
    halves = {"training.batch_size": 3, "training.global_batch_size": 8}  # 3 + 3, then 2 and a filler
    pool2.run(train_as_rank, toy.config, toy.output, "loop", {**options, **halves}, init=False)
    model = shoal.load(toy.output, recipe=load_run(toy.config).recipe_type)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_objectives_are_refused(toy: ToyRun, bodies: Any, change_recipe: Callable[[str, str], None]) -> None:
    objectives = "    def objectives(self):\n        return {'first': ['0'], 'last': ['3']}\n\n    def inputs("
    change_recipe("    def inputs(", objectives)
    with pytest.raises(UserError, match=r"training.body = 'the loop of a script': the recipe has several objectives"):
        train_by_hand(toy, bodies.body)
    with pytest.raises(UserError, match=r"training.body = 'bodies:body': .*objectives \(first, last\), which steps"):
        shoal.train(toy.config, **{**QUIET, "training.body": "bodies:body"})


CALLBACKS = """
from shoal.callbacks import Callback


class Journal(Callback):
    calls = []

    def note(self, hook, run, *more):
        self.calls.append((hook, run.step, *more))

    def on_start(self, run):
        self.note("on_start", run)

    def before_step(self, run):
        self.note("before_step", run)

    def before_update(self, run):
        self.note("before_update", run, len(run.strategy.gradients(run.model)))

    def after_step(self, run):
        self.note("after_step", run, run.output is not None)

    def after_log(self, run, metrics):
        self.note("after_log", run)

    def after_evaluation(self, run, metrics):
        self.note("after_evaluation", run, *metrics)

    def before_save(self, run):
        self.note("before_save", run)

    def on_end(self, run):
        self.note("on_end", run)


class Halves(Callback):
    def after_step(self, run):
        run.scale_learning_rate(0.5)
        run.log("halves/step", run.step)
        if run.step == 3:
            run.stop("enough")


class GoesBack(Callback):
    def after_log(self, run, metrics):
        run.go_back("it looks bad")
"""


@pytest.fixture
def hooks(toy: ToyRun) -> Any:
    (toy.folder / "callbacks_of_test.py").write_text(CALLBACKS)
    sys.modules.pop("callbacks_of_test", None)
    import callbacks_of_test

    yield callbacks_of_test
    sys.modules.pop("callbacks_of_test", None)


def test_hooks_are_called_as_in_a_run_of_the_recipe(toy: ToyRun, bodies: Any, hooks: Any) -> None:
    calls, journal = hooks.Journal.calls, "callbacks=['callbacks_of_test:Journal']"
    toy.train("training.max_steps=3", "training.eval_steps=2", "logging.every=1", journal)
    expected = calls[:]
    assert {hook for hook, *_ in expected} == {
        name for name in vars(hooks.Journal) if re.match("on_|before|after", name)
    }
    calls.clear()
    options = {**QUIET, "callbacks": ["callbacks_of_test:Journal"], "training.eval_steps": 2}
    options["experiment.output_dir"] = toy.folder / "b"
    train_by_hand(toy, bodies.body, **{**options, "training.max_steps": 3})
    assert calls == expected
    calls.clear()
    options["experiment.output_dir"] = toy.folder / "c"
    with shoal.Run(toy.config, **{**options, "training.max_steps": 9}) as run:
        for step in run.steps():
            bodies.body(run, step)
            if step.number == 3:
                break
    assert calls == expected  # also the line that is due in the step of the break


def test_hooks_may_change_the_learning_rate_and_end_the_run(toy: ToyRun, bodies: Any, hooks: Any) -> None:
    options = {"callbacks": ["callbacks_of_test:Halves"], "training.lr_scheduler": "constant"}
    outcome = train_by_hand(toy, bodies.body, **options)
    assert (outcome.step, outcome.stop_reason) == (3, "enough")
    assert toy.metrics("train/learning_rate") == {1: 0.01, 2: 0.005, 3: 0.0025}
    assert toy.metrics("halves/step") == {1: 1, 2: 2, 3: 3}


def test_the_step_of_an_early_signal_is_counted(toy: ToyRun, bodies: Any, hooks: Any) -> None:
    """The signal comes in `on_start`, and the run ends after its first step, with its line."""
    hooks.Journal.on_start = lambda self, run: os.kill(os.getpid(), signal.SIGTERM)
    options = {**QUIET, "callbacks": ["callbacks_of_test:Journal"], "logging.every": 3}
    outcome = shoal.Run(toy.config, **options).train(bodies.body)
    assert (outcome.step, outcome.stopped_by, sorted(toy.metrics())) == (1, signal.SIGTERM, [1])


def test_going_back_is_refused(toy: ToyRun, bodies: Any, hooks: Any) -> None:
    message = "callbacks: loss_spike: steps that you write yourself cannot be taken back"
    for callback, text in {"loss_spike": message, "callbacks_of_test:GoesBack": "it looks bad: steps that you"}.items():
        options = {**QUIET, "callbacks": [callback]}
        with pytest.raises(UserError, match=text):
            train_by_hand(toy, bodies.body, **options)
        with pytest.raises(UserError, match=text):
            shoal.train(toy.config, **options, **{"training.body": "bodies:body"})


def test_an_interrupt_raised_by_a_body_saves(toy: ToyRun, bodies: Any) -> None:
    def interrupted(run: Any, step: Any) -> None:
        if step.number == 4:
            raise KeyboardInterrupt
        bodies.body(run, step)

    outcome = shoal.Run(toy.config, **QUIET).train(interrupted)
    assert (outcome.step, outcome.stopped_by) == (3, signal.SIGINT)
    assert (step_folder(toy.output, 3) / "manifest.json").exists()
    options = {**QUIET, "experiment.output_dir": toy.folder / "b"}
    with shoal.Run(toy.config, **options) as run:
        assert run.train(interrupted).step == 3


@pytest.mark.parametrize(("last", "lines"), [(1, [1]), (7, [1, 3, 6]), (10, [1, 3, 6, 9, 10])])
def test_the_first_and_the_last_line_are_logged_after_a_break(
    toy: ToyRun, bodies: Any, last: int, lines: list[int]
) -> None:
    with shoal.Run(toy.config, **{**QUIET, "logging.every": 3}) as run:
        for step in run.steps():
            bodies.body(run, step)
            if step.number == last:
                break
    assert sorted(toy.metrics()) == lines


def test_several_sets_are_evaluated(toy: ToyRun, bodies: Any, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("return Squares(17)", "return {'old': Squares(17), 'new': Squares(5)}")
    options = {**QUIET, "training.max_steps": 1, "checkpoint.keep_best": 1, "checkpoint.metric": "eval/new/bias"}
    with shoal.Run(toy.config, **options) as run:
        run.evaluation = bodies.evaluation
        outcome = run.train(bodies.body)
    found = {name for name in outcome.metrics if name.startswith("eval/")}
    assert found == {f"eval/{name}/{metric}" for name in ("old", "new") for metric in ("loss", "bias")}


def test_parameters_that_no_update_uses_are_reported(toy: ToyRun) -> None:
    def in_parts(run: Any, step: Any, parts: tuple[int, ...] = (0, 3)) -> None:
        (batch,) = step.batches
        for part in parts:
            loss = torch.nn.functional.mse_loss(run.model(batch["x"]), batch["y"])
            run.backward(loss)
            for name, parameter in run.session.model.named_parameters():
                if not name.startswith(f"{part}."):
                    parameter.grad = None
            run.step()

    shoal.Run(toy.config, **QUIET, **{"training.max_steps": 1}).train(in_parts)
    assert "no gradient" not in (toy.output / "report.txt").read_text()
    options = {**QUIET, "training.max_steps": 1, "experiment.output_dir": toy.folder / "b"}
    shoal.Run(toy.config, **options).train(lambda run, step: in_parts(run, step, (0,)))
    assert re.search(r"3\.weight", (toy.folder / "b" / "report.txt").read_text())


def test_any_optimizer_and_schedule_of_the_config(toy: ToyRun, bodies: Any) -> None:
    options = {"training.optimizer": "lion", "training.lr_scheduler": "one_cycle", "training.max_steps": 4}
    recipe = [f"{key}={value}" for key, value in options.items()]
    whole = toy.train(*recipe, f"experiment.output_dir={toy.folder}/b").model.state_dict()
    for name, tensor in train_by_hand(toy, bodies.body, **options).model.state_dict().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


UNUSED = ("        return nn.Sequential(\n", "        return WithUnused(\n")
UNUSED_CLASS = """class WithUnused(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.unused = nn.Linear(2, 2)

    def forward(self, input):
        for module in [*self][:-1]:
            input = module(input)
        return input


class Toy"""


@pytest.mark.slow
def test_unused_parameters_under_ddp_are_explained(
    toy: ToyRun, bodies: Any, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe(*UNUSED)
    change_recipe("class Toy", UNUSED_CLASS)
    with pytest.raises(WorkerFailure, match=r"took no part in the loss .*unused.*find_unused_parameters"):
        pool2.run(train_as_rank, toy.config, toy.output, "loop", {}, init=False)
    options = {"distributed.ddp.find_unused_parameters": True, "training.max_steps": 2}
    first, second = pool2.run(train_as_rank, toy.config, toy.output, "loop", options, init=False)
    assert first == second


SCRIPT = """
import shoal
from bodies import body as imported, evaluation


def body(run, step):
    imported(run, step)


if __name__ == "__main__":
    run = shoal.Run("run.yaml", launch={"procs_per_node": 2}, training={"max_steps": 3, "device": "cpu"})
    run.evaluation = evaluation
    outcome = run.train(body)
    print("end", outcome.step, *sorted(name for name in outcome.metrics if name.startswith("eval/")), outcome.model[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [False, True])
def test_a_function_is_run_in_processes(toy: ToyRun, bodies: Any, notebook: bool) -> None:
    (toy.folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-" if notebook else "script.py"]
    result = subprocess.run(command, input=SCRIPT, cwd=toy.folder, capture_output=True, text=True, check=False)
    last = result.stdout.splitlines()[-1:]
    assert last == ["end 3 eval/bias eval/loss Linear(in_features=1, out_features=16, bias=True)"], result.stderr


def test_values_of_all_steps_reach_the_next_line(toy: ToyRun, bodies: Any) -> None:
    """Also those of a step before a line, and before a restart."""

    def body(run: Any, step: Any) -> None:
        bodies.body(run, step)
        if step.number % 3 == 2:
            step.log(now_and_then=step.number)

    options = {"logging.every": 3, "training.max_steps": 6, "checkpoint.every": 1, "checkpoint.keep_last": 9}
    train_by_hand(toy, body, **options)
    undisturbed = toy.metrics("train/now_and_then")
    assert undisturbed == {3: 2, 6: 5}
    forget_after(toy.output, 5)
    train_by_hand(toy, body, **options)
    assert toy.metrics("train/now_and_then") == undisturbed


def test_a_break_leaves_out_no_line(toy: ToyRun, bodies: Any) -> None:
    with shoal.Run(toy.config, **QUIET) as run:
        for step in run.steps():
            bodies.body(run, step)
            if step.number == 3:
                break
    assert [*toy.metrics("train/loss")] == [*toy.metrics("train/one")] == [1, 2, 3]


def test_the_report_says_how_a_body_clips_and_what_it_does_not_use(
    toy: ToyRun, bodies: Any, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("    def loss(self", "    def metrics(self, output, batch):\n        return {}\n\n    def loss(self")

    def body(run: Any, step: Any) -> None:
        for batch in step.batches:
            run.backward(torch.nn.functional.mse_loss(run.model(batch["x"]), batch["y"]))
        run.clip(max_value=0.25)
        run.step(max_norm=0.5 if step.number == 1 else None)

    train_by_hand(toy, body, **{"training.max_steps": 2})
    report = (toy.output / "report.txt").read_text()
    assert "clipped to 0.5, each element clipped to 0.25" in report
    assert "Toy.metrics, used in evaluations alone" in report


def test_a_limit_of_the_body_replaces_the_default(toy: ToyRun) -> None:
    """Plain SGD moves by the learning rate times the norm, of which nothing is left."""

    def body(run: Any, step: Any) -> None:
        for batch in step.batches:
            run.backward(torch.nn.functional.mse_loss(run.model(batch["x"]), batch["y"]))
        before = [p.detach().clone() for p in run.model.parameters()]
        run.clip(max_norm=1e-6)
        run.step()
        moved = torch.stack([(p - b).norm() for p, b in zip(run.model.parameters(), before, strict=True)]).norm()
        assert moved < 1e-6

    train_by_hand(toy, body, **{"training.max_steps": 1, "training.optimizer": "sgd", "training.weight_decay": 0})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the evaluation returned a NoneType; return a dict of means"),
        ({"loss": torch.ones(2)}, r"test_own_loop.py:\d+: loss: its shape is \[2\]; give a single number"),
        ({"a b": 1.0}, "the metric 'a b' is no good name"),
    ],
)
def test_mistakes_in_an_evaluation(toy: ToyRun, bodies: Any, returned: Any, message: str) -> None:
    run = shoal.Run(toy.config, **QUIET, **{"training.max_steps": 1})
    run.evaluation = lambda run, batch: returned
    with pytest.raises(UserError, match=message):
        run.train(bodies.body)


def test_a_metric_of_some_batches_is_the_mean_of_those(toy: ToyRun, bodies: Any) -> None:
    """The evaluation has batches of 4, 4, 4, 3 and 2 samples."""

    def evaluation(run: Any, batch: Any) -> dict[str, float]:
        return {"loss": 1.0, **({"of_two": 7.0} if len(batch["x"]) == 2 else {})}

    run = shoal.Run(toy.config, **QUIET, **{"training.max_steps": 1})
    run.evaluation = evaluation
    run.train(bodies.body)
    assert (toy.metrics("eval/loss"), toy.metrics("eval/of_two")) == ({1: 1.0}, {1: 7.0})
