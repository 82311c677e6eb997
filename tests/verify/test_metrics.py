"""`prove` compares a recipe's metrics between layouts, as it compares the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool

from shoal.config import check_run
from shoal.verify import Verdict, prove
from shoal.verify.compare import BOUNDS, _metrics
from shoal.verify.trace import Trace
from verify.runs import failed, llama, ragged, runner_on

NAMES = {f"metric {kind}/{name}" for kind in ("train", "eval") for name in ("accuracy", "highest")}


def metric_checks(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.name.startswith("metric ")}


def test_metrics_over_two_ranks_are_those_of_one(pool2: Pool) -> None:
    tree = ragged(global_batch_size=11, batch_size=2).tree()
    run = check_run({**tree, "recipe": "verify.measured:MeasuredRagged"})
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    assert metric_checks(verdict) == NAMES


@pytest.mark.slow
def test_metrics_where_ranks_share_sequences_or_layers(tmp_path: Path, pool2: Pool) -> None:
    tree = llama(tmp_path, global_batch_size=12, gradient_accumulation=3).tree()
    run = check_run({**tree, "recipe": "verify.measured:MeasuredLM"})
    cp, pp, tp = prove(run, 2, ["cp", "pp", "tp"], runner=runner_on(pool2, adamw=False))
    for verdict in (cp, pp):
        assert failed(verdict) == {}
        assert metric_checks(verdict) == NAMES
    assert "distributed.mesh.tp = 2: ranks share the vocabulary, so the head 'lm_head' gives the loss" in tp.left_out


@pytest.mark.parametrize(
    ("values", "passed"),
    [([0.5, float("nan")], True), ([0.6, float("nan")], False), ([0.5, 1.0], False), ([0.5], False), (None, False)],
)
def test_a_metric_that_differs_is_found(values: list[float] | None, passed: bool) -> None:
    reference = Trace(metrics={"train/a": [0.5, float("nan")]})
    rank = Trace(metrics={} if values is None else {"train/a": values})
    (check,) = _metrics(reference, [reference, rank], "fp32")
    assert (check.name, check.passed) == ("metric train/a", passed)
    assert BOUNDS.keys() - {"fp32"} == {p for p in BOUNDS if not _metrics(reference, [rank], p)}
