"""`shoal verify` and `shoal chaos` on a run whose steps are a function of the user's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ToyRun
from pool import Pool

from shoal.config import Run, load_run
from shoal.errors import UserError
from shoal.verify import prove
from verify.runs import failed, llama, runner_on

BODIES = '''
from torch.nn.functional import mse_loss


def body(run, step):
    for batch in step.batches:
        with step.accumulate(), run.autocast():
            run.backward(mse_loss(run.model(batch["x"]), batch["y"]))
    run.step()


def gives_sums(run, step):
    """Gives the sum over each micro-batch in place of the mean."""
    for batch in step.batches:
        with step.accumulate():
            run.backward(mse_loss(run.model(batch["x"]), batch["y"], reduction="sum"))
    run.step()


def steps_twice(run, step):
    body(run, step)
    body(run, step)
'''


@pytest.fixture
def run_of(toy: ToyRun) -> Any:
    (toy.folder / "bodies.py").write_text(BODIES)
    sys.modules.pop("bodies", None)

    def load(body: str, *overrides: str) -> Run:
        batch = ("training.global_batch_size=8", "training.batch_size=3", "training.device=cpu")
        return load_run(toy.config, [f"training.body=bodies:{body}", "recipe=toy_recipe:Divisible", *batch, *overrides])

    yield load
    sys.modules.pop("bodies", None)


@pytest.mark.parametrize(
    "layouts",
    [
        ["ddp", "fsdp"],
        pytest.param(
            ["single", "fsdp_shard_grad_op", "fsdp_no_shard", "tp", "zero_1", "zero_2", "zero_3"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layouts_compute_the_same_steps(run_of: Any, pool2: Pool, layouts: list[str]) -> None:
    adamw = len(layouts) > 2
    for verdict in prove(run_of("body", "model.hidden=256"), 2, layouts, 2, runner=runner_on(pool2, adamw=adamw)):
        assert verdict.checks, verdict
        assert failed(verdict) == {}, verdict.layout


def test_other_gradients_are_noticed(run_of: Any, pool2: Pool) -> None:
    (ddp,) = prove(run_of("gives_sums"), 2, ["ddp"], 2, runner=runner_on(pool2, adamw=False))
    assert ddp.outcome == "different"
    assert "gradients" in failed(ddp)


def test_a_body_that_cannot_be_compared_is_refused(run_of: Any, pool2: Pool) -> None:
    with pytest.raises(UserError, match=r"training.body: it calls run.step\(\) more than once in a step"):
        prove(run_of("steps_twice"), 2, ["ddp"], 2, runner=runner_on(pool2, adamw=False))
    with pytest.raises(UserError, match=r"--strategies pp: distributed.mesh.pp = 2: a pipeline runs all micro-batches"):
        prove(run_of("body"), 2, ["pp"], 2)


def predict_tokens(run: Any, step: Any) -> None:
    """A language model's body: a mean over the tokens of a micro-batch."""
    for batch in step.batches:
        with step.accumulate(), run.autocast():
            output = run.model(**run.recipe.inputs(batch))
            run.backward(run.recipe.loss(output, batch) / run.recipe.count(batch))
    run.step()


@pytest.mark.slow
def test_layouts_that_share_layers_and_tokens(tmp_path: Path, pool2: Pool) -> None:
    run = llama(tmp_path, global_batch_size=8, batch_size=3, body="verify.test_body:predict_tokens")
    for verdict in prove(run, 2, ["ddp", "tp", "tp_sp", "cp"], 2, runner=runner_on(pool2, adamw=False)):
        assert verdict.checks, verdict
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_chaos(toy: ToyRun, run_of: Any) -> None:
    run_of("body")
    keys = ["training.body=bodies:body", "training.device=cpu", "training.max_steps=40", "training.eval_steps=10"]
    result = toy.call("chaos", "run.yaml", *keys, "logging.console=off", "--kills", "1", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["passed"]
