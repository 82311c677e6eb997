"""`prove` confirms that layouts compute the same training, and notices if one does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import nn

from shoal.config import Run, derive_batches, load_run
from shoal.config.mesh import data_size
from shoal.errors import UserError
from shoal.strategies import DistributedStrategy
from shoal.verify import Table, Verdict, exit_code, print_verdict, prove
from shoal.verify.compare import Check, CheckKind, compare
from shoal.verify.draws import WatchDraws
from shoal.verify.expected_work import Case, ExpectedWork, expected_work
from shoal.verify.layouts import LAYOUTS, OWN, Candidate, candidate_run, layout_on, own_candidate, reference_run
from shoal.verify.trace import Trace, norm, trace
from shoal.verify.verdicts import Waiting
from verify.planted import trace_with
from verify.runs import bdh, failed, ragged, runner_on, with_adamw


@with_adamw
@pytest.mark.parametrize("procs", [2, 4])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("global_batch_size", [pytest.param(12, marks=pytest.mark.slow), 11])
def test_ddp_equals_one_device(
    pool2: Pool, pool4: Pool, procs: int, accumulation: int, global_batch_size: int, adamw: bool
) -> None:
    run = ragged(global_batch_size=global_batch_size, gradient_accumulation=accumulation)
    single, ddp = prove(run, procs, ["single", "ddp"], runner=runner_on({2: pool2, 4: pool4}[procs], adamw=adamw))
    assert failed(single) == {}
    assert failed(ddp) == {}


@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bdh_under_ddp_equals_one_device(pool2: Pool, pool4: Pool, tmp_path: Path, procs: int) -> None:
    run = bdh(tmp_path, global_batch_size=11, gradient_accumulation=3)
    (ddp,) = prove(run, procs, ["ddp"], runner=runner_on({2: pool2, 4: pool4}[procs]))
    assert failed(ddp) == {}


@pytest.mark.slow
@pytest.mark.parametrize("procs", [2, 4])
def test_compiled_ddp_equals_one_device(pool2: Pool, pool4: Pool, tmp_path: Path, procs: int) -> None:
    run = bdh(tmp_path, global_batch_size=12, gradient_accumulation=3, compile=True)
    (ddp,) = prove(run, procs, ["ddp"], runner=runner_on({2: pool2, 4: pool4}[procs]))
    assert failed(ddp) == {}
    assert "compiled blocks" in {check.name for check in ddp.checks}


@pytest.mark.parametrize(
    "planted", ["nothing", "torch compiles nothing", "blocks are disabled", "no block is compiled"]
)
def test_blocks_that_are_not_compiled_are_no_proof(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """Steps in which operations are counted are not compiled, and the others must be all the same."""
    compile, compiles = torch.compile, planted != "torch compiles nothing"
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager") if compiles else f)
    if planted == "blocks are disabled":
        monkeypatch.setattr(nn.Sequential, "forward", torch.compiler.disable(nn.Sequential.forward))
    if planted == "no block is compiled":
        monkeypatch.setattr(DistributedStrategy, "_transform", lambda *arguments: None)
    torch.compiler.reset()
    seen = trace(ragged(global_batch_size=12, compile=True), 3, adamw=False)
    checks = {check.name: check for check in compare(seen, [seen], ExpectedWork(1, None, {}), "fp32")}
    assert checks["compiled blocks"].passed == (planted == "nothing")
    assert seen.flops > 0


@pytest.mark.parametrize(
    ("bug", "check", "words"),
    [
        ("forgotten 1/accumulation", "gradients", "a constant factor is missing"),
        ("missing all-reduce", "ranks agree", "replicas drifted apart"),
        ("wrong rank's data", "ranks agree", "took sample"),
        ("data ranks draw the same", "random numbers", "ranks 0 and 1 have other samples or layers and one seed"),
        ("steps draw the same", "random numbers", "one seed for several micro-batches"),
        ("micro-batches draw the same", "random numbers", "one seed for several micro-batches"),
        ("evaluation forgets a micro-batch", "evaluation", "on one device"),
        pytest.param(  # found by a test of its own, below
            "gathers everything",
            "matmul FLOPs",
            "1.00 of one device on the rank with the most, expected at most 0.5",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_bugs_are_caught_by_name(pool2: Pool, bug: str, check: str, words: str) -> None:
    run = ragged(global_batch_size=12, gradient_accumulation=3)
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, partial(trace_with, bug), adamw=False))
    assert words in failed(verdict)[check]


def test_a_layout_that_does_not_clip_is_found_also_if_gradients_are_small(pool2: Pool) -> None:
    run = ragged("Quiet", global_batch_size=12)
    correct = runner_on(pool2, adamw=False)
    (verdict,) = prove(run, 2, ["ddp"], runner=correct)
    assert failed(verdict) == {}
    assert "is clipped to" in {check.name: check.detail for check in verdict.checks}["clipping"]
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, partial(trace_with, "no clipping"), adamw=False))
    assert "weights, SGD" in failed(verdict)


def test_large_gradients_do_not_make_large_updates() -> None:
    """Rounding errors grow in a training that is not stable, and look like a layout that differs."""
    seen = trace(reference_run(ragged("Loud", global_batch_size=12), 2), 2, adamw=False)
    assert seen.max_norm > 10
    moved = norm({name: seen.sgd_weights[name] - seen.start[name] for name in seen.gradients})
    assert moved <= 0.1 + 0.19 + 1e-6  # two updates of length 0.1, the second with momentum


def test_a_model_without_gradients_is_the_same() -> None:
    seen = trace(reference_run(ragged("Silent", global_batch_size=12), 2), 2, adamw=False)
    checks = {check.name: check for check in compare(seen, [seen], ExpectedWork(1, None, {}), "fp32")}
    assert seen.max_norm == 0
    assert checks["clipping"].passed


def test_clipping_that_was_not_in_force_is_no_proof() -> None:
    ones = {"a": torch.ones(2)}
    trace = Trace(grad_norms=[1.0], max_norm=1.0, start=ones, gradients=ones, sgd_weights=ones)
    checks = {check.name: check for check in compare(trace, [trace], ExpectedWork(1, None, {}), "fp32")}
    assert not checks["clipping"].passed


def test_more_work_than_promised_is_another_verdict_than_other_numbers(
    pool2: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = runner_on(pool2, partial(trace_with, "computes twice"), adamw=False)
    (verdict,) = prove(ragged(global_batch_size=12), 2, ["ddp"], runner=runner)
    assert failed(verdict).keys() == {"matmul FLOPs"}
    assert (verdict.outcome, verdict.passed) == ("other work", False)
    print_verdict(verdict)
    said = capsys.readouterr().out
    assert "ddp on 2 processes: same training as on one device, but more or other work than promised" in said
    assert "NOT" not in said


@pytest.mark.parametrize(
    ("recipe", "refuses", "words"),
    [
        ("Scaled", "fsdp", "factor is a single number"),
        pytest.param("Unused", "ddp", "took no part in the loss", marks=pytest.mark.slow),
    ],
)
def test_a_layout_that_refuses_the_model_does_not_keep_the_others_from_their_proof(
    pool2: Pool, recipe: str, refuses: str, words: str
) -> None:
    run = ragged(recipe, global_batch_size=12)
    refused, proved = prove(run, 2, [refuses, "single"], runner=runner_on(pool2, adamw=False))
    assert refused.outcome == "left out"
    assert words in refused.left_out
    assert proved.passed


def test_exit_codes() -> None:
    def verdict(*failed: CheckKind, **fields: Any) -> Verdict:
        checks = [Check(kind, False, "", kind) for kind in failed]
        return Verdict("ddp", 2, checks, **{"mixing": [], **fields})

    same, refused = verdict(), verdict(left_out="it refuses")
    assert exit_code([same, refused], asked_by_name=False) == 0
    assert exit_code([same, refused], asked_by_name=True) == 2
    assert exit_code([same, verdict("work")], asked_by_name=False) == 3
    assert exit_code([same, verdict("values", mixing=["norm"])], asked_by_name=False) == 3
    assert exit_code([verdict("work"), verdict("values", "work")], asked_by_name=False) == 1
    assert exit_code([refused], asked_by_name=False) == 3  # nothing was proved
    assert verdict("exact", mixing=["norm"]).outcome == "different"


@pytest.mark.slow  # the rows of a fused bias, below, are judged by the same rule
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_keys_part_of_a_fused_bias_is_rounding_and_not_judged_by_its_steps(pool2: Pool, precision: str) -> None:
    run = ragged("Fused", global_batch_size=11, gradient_accumulation=2, mixed_precision=precision)
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2))
    assert failed(verdict) == {}
    runner = runner_on(pool2, partial(trace_with, "learning rate 1% too high"))
    (verdict,) = prove(run, 2, ["ddp"], runner=runner)
    assert {"update alone"} <= failed(verdict).keys()
    assert ("weights, AdamW" in failed(verdict)) == (precision == "fp32")


def test_rows_whose_gradient_is_more_than_rounding_are_judged() -> None:
    """Of a fused bias, the first and last thirds have gradients; the middle third has rounding errors alone."""
    rounding = torch.tensor([0.0, 0, 0, 0, 1, -1, 1, -1, 0, 0, 0, 0]) * 1e-8
    gradient = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0, 4, 3, 2, 1])
    start, steps = {"bias": torch.zeros(12)}, {"bias": torch.cat([torch.ones(5), -torch.ones(3), torch.ones(4)])}
    reference = Trace(
        start=start, gradients={"bias": gradient + rounding}, sgd_weights=steps, adamw_weights=steps, max_norm=1.0
    )

    def adamw_check(**changed_rows: float) -> Check:
        weights = steps["bias"].clone()
        for row, value in changed_rows.items():
            weights[int(row.removeprefix("row"))] = value
        layout = replace(reference, gradients={"bias": gradient - rounding}, adamw_weights={"bias": weights})
        checks = compare(reference, [layout], ExpectedWork(1, None, {}), "fp32")
        return next(check for check in checks if check.name == "weights, AdamW")

    assert adamw_check(row4=-1.0, row7=1.0).passed
    assert "4 rows left out" in adamw_check().detail
    assert not adamw_check(row0=1.1).passed
    assert not adamw_check(row11=-1.0).passed


def test_a_buffer_that_depends_on_the_layout_is_found_and_so_is_the_evaluation_that_uses_it(pool2: Pool) -> None:
    (ddp,) = prove(ragged("Tracking", global_batch_size=12), 2, ["ddp"], runner=runner_on(pool2, adamw=False))
    assert failed(ddp).keys() == {"buffers", "evaluation"}
    assert "worst tensor 1.mean" in failed(ddp)["buffers"]
    assert ddp.outcome == "different"


def test_frozen_parameters_that_change_are_found() -> None:
    ones = {"frozen": torch.ones(2), "weight": torch.ones(2)}
    reference = Trace(start=ones, gradients={"weight": torch.ones(2)}, sgd_weights=ones)
    changed = replace(reference, sgd_weights={**ones, "frozen": torch.tensor([1.0, 1.0000001])})
    for layout, passes in ((reference, True), (changed, False)):
        checks = {check.name: check for check in compare(reference, [layout], ExpectedWork(1, None, {}), "bf16")}
        assert checks["buffers"].passed is passes


def test_a_module_that_draws_is_named_instead_of_a_layout_that_differs(
    pool2: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    (verdict,) = prove(ragged("Dropping", global_batch_size=12), 2, ["ddp"], runner=runner_on(pool2, adamw=False))
    assert "gradients" in failed(verdict)
    assert verdict.outcome == "not comparable"
    assert verdict.draws == ["2.0 (Draw)", "2.1 (Drop)"]
    print_verdict(verdict)
    said = capsys.readouterr().out
    assert "2.0 (Draw) and 1 more draw random numbers in the forward" in said
    assert "NOT" not in said


def test_dropout_in_functions_is_turned_off_and_draws_without_effect_do_not_matter(pool2: Pool) -> None:
    (verdict,) = prove(ragged("Encoder", global_batch_size=12), 2, ["ddp"], runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    assert verdict.draws == []


def test_a_loss_that_draws_is_named() -> None:
    model, device = nn.Sequential(nn.Linear(2, 2)), torch.device("cpu")
    with WatchDraws(model, device) as watch:
        model(torch.ones(1, 2))
        torch.rand(())
    assert watch.draws == ["the recipe's loss"]
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(
    ("bug", "check"), [("forgotten 1/accumulation", "gradients"), ("missing all-reduce", "ranks agree")]
)
def test_planted_bugs_are_caught_in_fp16(pool2: Pool, bug: str, check: str) -> None:
    run = ragged(global_batch_size=12, gradient_accumulation=3, mixed_precision="fp16")
    runner = runner_on(pool2, partial(trace_with, bug), adamw=False)
    (verdict,) = prove(run, 2, ["ddp"], steps=2, runner=runner)
    assert check in failed(verdict)


def test_gathering_everything_is_wrong_in_nothing_but_the_work(pool2: Pool) -> None:
    """Equal results are not enough: the ranks must share the work."""
    run = ragged(global_batch_size=12, gradient_accumulation=3)
    runner = runner_on(pool2, partial(trace_with, "gathers everything"), adamw=False)
    (verdict,) = prove(run, 2, ["ddp"], runner=runner)
    assert {"matmul FLOPs", "collectives"} <= failed(verdict).keys()
    by_name = {check.name: check for check in verdict.checks}
    assert by_name["gradients"].passed
    assert by_name["initial weights"].passed


def test_a_gradient_that_is_no_number_fails_wherever_it_stands() -> None:
    ones = {name: torch.ones(2) for name in ("a", "b", "c")}
    good = Trace(start=ones, gradients=ones, sgd_weights=ones, adamw_weights=ones)
    for name in good.gradients:
        bad = replace(good, gradients={**good.gradients, name: torch.tensor([1.0, float("nan")])})
        (check,) = (
            check for check in compare(good, [bad], ExpectedWork(1, None, {}), "fp32") if check.name == "gradients"
        )
        assert not check.passed
        assert name in check.detail


def test_modules_that_mix_samples_are_named(pool2: Pool) -> None:
    run = ragged("Mixing", global_batch_size=12)
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, adamw=False))
    assert verdict.outcome == "not comparable"
    assert verdict.mixing == ["2"]
    assert verdict.frozen_statistics == []


def test_batch_statistics_are_frozen_for_the_proof(pool2: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    run = ragged("Normed", global_batch_size=12)
    trained: list[str] = []
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, adamw=False), on_start=trained.append)
    assert verdict.passed, failed(verdict)
    assert (verdict.mixing, verdict.frozen_statistics) == ([], ["2"])
    assert trained == ["one device", "ddp, layout 1 of 1"]
    Table().add(verdict)
    assert "batch norms use frozen statistics for the proof (2)" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    good, bad = Check("loss", True, ""), Check("gradients", False, "worst tensor a")
    for name, fields in {
        "ddp": {"checks": [good]},
        "fsdp": {"checks": [good, bad]},
        "tp": {"checks": [good, Check("matmul FLOPs", False, "twice", "work")]},
        "pp": {"checks": [], "left_out": "no plan"},
    }.items():
        table.add(Verdict(name, 2, mixing=[], **fields))  # type: ignore[arg-type]
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["layout", "processes", "same training", "does its work"],
        ["ddp", "2", "yes", "yes"],
        ["fsdp", "2", "NO", "yes", "gradients: worst tensor a; -v shows all checks"],
        ["tp", "2", "yes", "NO", "matmul FLOPs: twice; -v shows all checks"],
        ["pp", "2", "cannot", "-", "no plan"],
    ]
    table.explain()
    explained = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert explained == rows[0][2:]


def test_a_terminal_shows_what_is_trained_until_something_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Waiting().show("ddp")
    assert not capsys.readouterr().err  # of a file
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    waiting = Waiting()
    waiting.show("ddp")
    waiting.hide()
    _, shown, end = capsys.readouterr().err.rsplit("\r", 2)
    assert "training: ddp" in shown
    assert end == "\x1b[2K"


def case_of(run: Run, layout: Candidate, procs: int) -> Case:
    its_run = candidate_run(run, layout, procs)
    spread = layout_on(its_run, procs)
    batches = derive_batches(its_run.config.training, data_size(spread.mesh))[0]
    return Case(spread, batches, {"weight": (8, 4)}, {"weight"})


def test_a_layout_joins_by_a_row() -> None:
    run = ragged(global_batch_size=12)
    for layout in LAYOUTS.values():
        assert isinstance(expected_work(case_of(run, layout, 4)), ExpectedWork)
        assert layout.description


ZERO_JSON = '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7}}'


@pytest.mark.parametrize(
    ("distributed", "procs", "name", "words"),
    [
        ({}, 2, "ddp", "ddp"),
        ({"strategy": "single"}, 2, "single", "single"),
        ({"strategy": "fsdp"}, 2, "fsdp", "fsdp FULL_SHARD"),
        ({"strategy": "fsdp", "fsdp": {"sharding_strategy": "NO_SHARD"}}, 2, "fsdp_no_shard", "fsdp NO_SHARD"),
        ({"strategy": "mesh", "mesh": {"tp": 2}}, 2, "tp", "mesh, tp 2"),
        ({"strategy": "mesh", "mesh": {"tp": 2}}, 4, "tp_fsdp", "mesh, dp_shard 2 × tp 2"),
        ({"strategy": "mesh", "mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}, 2, "pp_zbv", "mesh, pp 2, zbv"),
        (
            {"strategy": "mesh", "mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}},
            4,
            OWN,
            "mesh, pp 2 × dp_shard 2, zbv",
        ),
        ({"strategy": "mesh", "mesh": {"cp": 2, "tp": -1, "dp_shard": 1}}, 8, OWN, "mesh, cp 2 × tp 4"),
        ({"strategy": "deepspeed", "offload": "optimizer"}, 2, OWN, "deepspeed ZeRO-2"),
        ({"strategy": "deepspeed", "zero_stage": 3}, 2, "zero_3", "deepspeed ZeRO-3"),
        ({"strategy": "deepspeed", "deepspeed": {"config_file": "zero.json"}}, 2, OWN, "deepspeed ZeRO-3"),
        (
            {"strategy": "fsdp", "fsdp": {"sharding_strategy": "HYBRID_SHARD"}, "mesh": {"dp_replicate": 4}},
            8,
            OWN,
            "fsdp HYBRID_SHARD, dp_replicate 4 × dp_shard 2",
        ),
    ],
)
def test_the_layout_that_a_config_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distributed: dict[str, Any], procs: int, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.json").write_text(ZERO_JSON)
    run = ragged(distributed=distributed, launch={"procs_per_node": procs}, global_batch_size=16)
    layout = own_candidate(run, procs)
    assert (layout.name, layout.description) == (name, words)
    case = case_of(run, layout, procs)
    threshold = case.layout.zero.stage3_param_persistence_threshold
    assert threshold == (7 if "config_file" in str(distributed) else 100_000)
    assert isinstance(expected_work(case), ExpectedWork)


def test_a_layout_that_is_no_row_is_proved_too(toy: ToyRun, pool4: Pool) -> None:
    sharding = "distributed.fsdp.sharding_strategy=SHARD_GRAD_OP"
    mesh = [
        "recipe=toy_recipe:Divisible",
        "distributed.strategy=mesh",
        "distributed.mesh={tp: 2, dp_shard: 2}",
        sharding,
    ]
    run = load_run(toy.config, [*mesh, "model.hidden=64", "launch.procs_per_node=4"])
    (verdict,) = prove(run, 4, [OWN], runner=runner_on(pool4))
    assert failed(verdict) == {}
    assert (verdict.layout, verdict.own_layout) == (OWN, "mesh, dp_shard 2 × tp 2, SHARD_GRAD_OP")
    said: list[str] = []
    with pytest.raises(RuntimeError, match="nothing else"):
        prove(run, 2, runner=Mock(side_effect=RuntimeError("nothing else")), on_warning=said.append)
    (line,) = said
    assert line.startswith("this config's own layout is not proved: distributed.mesh: ")
    assert " = 4, but there are 2 processes; " in line
    assert line.endswith("; try --procs 4")


@pytest.fixture
def command_on_pool(pool2: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `shoal verify` use the processes of the pool; tests/test_docs.py tests it with new processes."""
    monkeypatch.setattr("shoal.verify.prove", partial(prove, runner=runner_on(pool2)))


@pytest.mark.usefixtures("command_on_pool")
def test_the_command(toy: ToyRun) -> None:
    result = toy.call("verify", "run.yaml", "--strategies", "ddp", "--json", "--steps", "2", "launch.procs_per_node=2")
    assert result.returncode == 0, result.stderr
    (verdict,) = json.loads(result.stdout)
    assert verdict["layout"] == "ddp"
    assert verdict["passed"]
    assert verdict["own"]
    wrong = toy.call("verify", "run.yaml", "--strategies", "fsdq")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "fsdq" in wrong.stderr
    with pytest.raises(UserError, match="both must be at least 2"):
        prove(ragged(global_batch_size=8), 1)


@pytest.mark.usefixtures("command_on_pool")
def test_the_command_says_what_it_cannot_compare(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("nn.Tanh()", "nn.BatchNorm1d(hidden, track_running_stats=False)")
    result = toy.call("verify", "run.yaml", "--strategies", "ddp", "--steps", "2", "distributed.strategy=ddp", "-v")
    assert result.returncode == 3
    assert "FAILED" in result.stdout
    assert "mix the samples" in result.stdout
    assert "ddp on 2 processes: cannot be compared with one device (this config's own layout: ddp)" in result.stdout
