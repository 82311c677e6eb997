"""Whole runs with what saves memory: they train, evaluate, show a sample, and say what is in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from verify.runs import bdh, llama

from shoal.config import Run, check_run
from shoal.errors import UserError
from shoal.models.bdh.model import Level
from shoal.training import train
from shoal.transform.activation_checkpointing import num_recomputed

LEAN = {"mixed_precision": "bf16", "activation_checkpointing": "full", "loss_chunks": 3, "eval_steps": 2}


def in_folder(run: Run, folder: Path, **distributed: Any) -> Run:
    tree = run.tree()
    tree["experiment"]["output_dir"] = str(folder)
    tree["distributed"] |= distributed
    tree["dataset"]["eval_fraction"] = 0.2
    tree["logging"] |= {"console": "off", "tensorboard": False}
    return check_run(tree)


def finish(run: Run) -> tuple[dict[str, float], str | None]:
    outcome = train(run)
    return outcome.metrics, outcome.preview


def test_a_lean_run_says_what_is_in_force(tmp_path: Path) -> None:
    run = in_folder(bdh(tmp_path, batch_size=2, **LEAN), tmp_path / "out", ddp={"static_graph": True})
    train(check_run(run.tree(), {"distributed.ddp.static_graph": "command line"}))
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "recomputed    2 modules, full" in report
    assert "loss          in 3 chunks" in report
    assert "distributed.ddp: the strategy is single" in report


@pytest.mark.slow  # tests/verify compares the steps, tests/recipes the previews
@pytest.mark.parametrize("model", [bdh, llama])
def test_a_sharded_run_is_the_run_of_one(pool2: Pool, tmp_path: Path, model: Any) -> None:
    keys: dict[str, Any] = {
        "global_batch_size": 6,
        "batch_size": 2,
        "eval_steps": 2,
        "activation_checkpointing": "full",
    }
    run = model(tmp_path, **keys)
    tree = run.tree()
    tree["model"] |= {"dropout": 0.0} if model is bdh else {}
    metrics, preview = finish(in_folder(check_run(tree), tmp_path / "one"))
    ranks = pool2.run(finish, in_folder(check_run(tree), tmp_path / "two", strategy="fsdp"), init=False)
    for result, text in ranks:
        assert result["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-5)
        assert result["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-5)
        assert text == ranks[0][1]
    assert preview
    report = (tmp_path / "two" / "report.txt").read_text()
    units = "the whole model at once" if model is bdh else "6 units and the rest"
    assert f"fsdp FULL_SHARD, 2 shards, {units} on cpu" in report
    assert "FSDP" not in report.split("model  ")[1].splitlines()[0]


def test_where_nothing_is_recomputed_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.training.first_step.num_recomputed", lambda: 0)
    run = in_folder(bdh(tmp_path, batch_size=2, activation_checkpointing="full"), tmp_path / "out")
    with pytest.raises(UserError, match="nothing was computed again in the first step's backward"):
        train(run)


def plant_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Level.forward

    def broken(self: Level, *args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Level, "forward", broken)


@pytest.mark.parametrize(
    ("mode", "breaks"),
    [
        ("none", False),
        ("full", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", True), ("full", False))),
    ],
)
def test_the_report_counts_graphs_and_a_run_that_is_not_compiled_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, breaks: bool
) -> None:
    """torch compiles the rest of a module around a break, but runs all of it eagerly if it is recomputed."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager"))
    torch.compiler.reset()
    if breaks:
        plant_graph_break(monkeypatch)
    keys = {"max_steps": 1, "batch_size": 2, "compile": True, "activation_checkpointing": mode}
    run, report = in_folder(bdh(tmp_path, **keys), tmp_path / "out"), tmp_path / "out" / "report.txt"
    if breaks and mode == "full":
        with pytest.raises(UserError, match=r"blocks ran without being compiled: Call to `torch._dynamo.graph_break"):
            train(run)
        return
    train(run)
    (row,) = [line for line in report.read_text().splitlines() if line.startswith("compile ")]
    assert "2 modules, " in row
    assert ("1 graph, no breaks" in row) is not breaks
    assert ("breaks, the last because of: Call to `torch._dynamo.graph_break()`" in row) is breaks


def test_compiled_blocks_whose_inputs_go_to_the_host_are_recomputed_in_their_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not counted. As a whole, a block would compute its last product twice."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager"))
    torch.compiler.reset()
    keys = {"max_steps": 2, "batch_size": 2, "compile": True}
    recompute = {"activation_checkpointing": {"mode": "full", "offload": True}}
    before = num_recomputed()
    outcome = train(in_folder(bdh(tmp_path, **keys, **recompute), tmp_path / "out"))
    assert num_recomputed() == before
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "2 modules, full" in report
    assert "2 modules, 1 graph, no breaks" in report
    plain = train(in_folder(bdh(tmp_path, **keys), tmp_path / "plain"))
    weights = plain.model.state_dict()
    for name, tensor in outcome.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activation_checkpointing": {"mode": "full", "classes": ["Levle"]}}, "it has Level"),
        (
            {"activation_checkpointing": {"mode": "none", "every": 2}},
            "mode = none: `every`, `classes` and `offload` have no effect",
        ),
        ({"mixed_precision": "fp8"}, "have no nn.Linear whose sides are multiples of 16; use bf16"),
        ({"mixed_precision": "pure_bf16"}, "use distributed.strategy: fsdp"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        train(in_folder(bdh(tmp_path, batch_size=2, **keys), tmp_path / "out"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
