"""Layouts compute the same training, and the prover notices when one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import ToyRun
from pool import Pool

from shoal.errors import UserError
from shoal.verify import prove
from shoal.verify.compare import Promise
from shoal.verify.layouts import LAYOUTS, layout_case, layout_run
from verify.planted import trace_with
from verify.runs import bdh, failed, on, ragged


@pytest.mark.parametrize("procs", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("global_batch_size", [12, 11])
def test_ddp_equals_one_device(pool2: Pool, pool4: Pool, procs: int, accumulation: int, global_batch_size: int) -> None:
    run = ragged(global_batch_size=global_batch_size, gradient_accumulation=accumulation)
    single, ddp = prove(run, procs, ["single", "ddp"], runner=on({2: pool2, 4: pool4}[procs]))
    assert failed(single) == {}
    assert failed(ddp) == {}


@pytest.mark.parametrize("procs", [2, 4])
def test_bdh_under_ddp_equals_one_device(pool2: Pool, pool4: Pool, tmp_path: Path, procs: int) -> None:
    run = bdh(tmp_path, global_batch_size=11, gradient_accumulation=3)
    (ddp,) = prove(run, procs, ["ddp"], runner=on({2: pool2, 4: pool4}[procs]))
    assert failed(ddp) == {}


@pytest.mark.slow
@pytest.mark.parametrize("procs", [2, 4])
def test_compiled_ddp_equals_one_device(pool2: Pool, pool4: Pool, tmp_path: Path, procs: int) -> None:
    run = bdh(tmp_path, global_batch_size=12, gradient_accumulation=3, compile=True)
    (ddp,) = prove(run, procs, ["ddp"], runner=on({2: pool2, 4: pool4}[procs]))
    assert failed(ddp) == {}


@pytest.mark.parametrize(
    ("bug", "check", "words"),
    [
        ("forgotten 1/accumulation", "gradients", "a factor was forgotten"),
        ("missing all-reduce", "ranks agree", "replicas drifted apart"),
        ("wrong rank's data", "ranks agree", "took sample"),
        ("gathers everything", "matmul FLOPs", "1.00 of one device's on a rank, promised 0.5"),
    ],
)
def test_planted_bugs_are_caught_by_name(pool2: Pool, bug: str, check: str, words: str) -> None:
    run = ragged(global_batch_size=12, gradient_accumulation=3)
    (verdict,) = prove(run, 2, ["ddp"], runner=on(pool2, partial(trace_with, bug)))
    assert words in failed(verdict)[check]


def test_gathering_everything_is_wrong_in_nothing_but_the_work(pool2: Pool) -> None:
    """Equal numbers are not enough."""
    run = ragged(global_batch_size=12, gradient_accumulation=3)
    (verdict,) = prove(run, 2, ["ddp"], runner=on(pool2, partial(trace_with, "gathers everything")))
    assert {"matmul FLOPs", "collectives"} <= failed(verdict).keys()
    assert not {"loss", "gradients"} & {name for name in failed(verdict) if "0.0e" in failed(verdict)[name]}
    by_name = {check.name: check for check in verdict.checks}
    assert by_name["gradients"].passed
    assert by_name["first weights"].passed


def test_modules_that_mix_samples_are_named(pool2: Pool) -> None:
    (verdict,) = prove(ragged("Normed", global_batch_size=12), 2, ["ddp"], runner=on(pool2))
    assert not verdict.passed
    assert verdict.mixing == ["2"]


def test_a_layout_joins_by_a_row() -> None:
    run = ragged(global_batch_size=12)
    for layout in LAYOUTS.values():
        procs = 4 if layout.several else 1
        case = layout_case(layout_run(run, layout, 4), layout, procs, {"weight": (8, 4)}, {"weight"})
        assert isinstance(layout.promise(case), Promise)
        assert layout.about


def test_the_command(toy: ToyRun) -> None:
    result = toy.shoal("verify", "run.yaml", "--strategies", "ddp", "--json", "--steps", "2")
    assert result.returncode == 0, result.stderr
    (verdict,) = json.loads(result.stdout)
    assert verdict["layout"] == "ddp"
    assert verdict["passed"]
    wrong = toy.shoal("verify", "run.yaml", "--strategies", "fsdq")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "fsdq" in wrong.stderr
    with pytest.raises(UserError, match="at least two"):
        prove(ragged(global_batch_size=8), 1)


def test_the_command_says_no(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("nn.Tanh()", "nn.BatchNorm1d(hidden)")
    result = toy.shoal("verify", "run.yaml", "--strategies", "ddp", "--steps", "2")
    assert result.returncode == 1
    assert "FAILED" in result.stdout
    assert "mix samples" in result.stdout
