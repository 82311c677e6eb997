"""`shoal verify` proves what can be proved of compression and local_sgd, and finds planted faults in them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import Tensor

from shoal.config import Run, check_run
from shoal.errors import UserError
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.local_sgd import LocalSGD
from shoal.parallel.compression.wire import Wire
from shoal.verify import exit_code, prove
from shoal.verify.trace import Trace, trace
from verify.runs import failed, ragged, runner_on

CONFIGS: dict[str, dict[str, Any]] = {
    "fp16": {"compression": {"method": "fp16"}},
    "bf16": {"compression": {"method": "bf16"}},
    "int8": {"compression": {"method": "int8"}},
    "topk": {"compression": {"method": "topk", "ratio": 0.1}},
    "powersgd": {"compression": {"method": "powersgd", "rank": 1}},
    "local_sgd": {"local_sgd": {"sync_every": 16}},
}


def with_exchange(**distributed: Any) -> Run:
    run = ragged(global_batch_size=11)
    tree = run.tree()
    tree["distributed"] |= {"strategy": "ddp", **distributed}
    return check_run(tree, recipe=run.recipe_type)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("int8", "local_sgd"))) for name in CONFIGS]
)
def test_an_exchange_has_a_row_of_its_own(pool2: Pool, name: str) -> None:
    (verdict,) = prove(with_exchange(**CONFIGS[name]), 2, ["exchange"], runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    assert (verdict.outcome, verdict.lossy) == ("lossy", name)
    assert exit_code([verdict], asked_by_name=True) == 0
    names = {check.name for check in verdict.checks}
    expected = {"fp16": "rounding", "bf16": "rounding", "local_sgd": "averages"}.get(name, "conservation")
    assert expected in names
    assert ("gradients" in names) is (name != "local_sgd")


@pytest.mark.slow
def test_other_rows_are_proved_without_it(pool2: Pool) -> None:
    ddp, exchange = prove(
        with_exchange(**CONFIGS["topk"]), 2, ["ddp", "exchange"], runner=runner_on(pool2, adamw=False)
    )
    assert (ddp.outcome, exchange.outcome) == ("same", "lossy")


def test_a_config_without_it_has_no_such_row() -> None:
    with pytest.raises(UserError, match="sets neither distributed"):
        prove(with_exchange(), 2, ["exchange"])


def trace_without_residuals(*args: Any) -> Trace:
    with patch.object(CompressedExchange, "_with_residual", lambda self, name, gradient, scale: gradient.float()):
        return trace(*args)


def trace_averaging_twice(*args: Any) -> Trace:
    gather = Wire.all_gather

    def halved(self: Wire, tensor: Tensor) -> Tensor:
        gathered = gather(self, tensor)
        size = 4 * (gathered.shape[1] // 8)  # values come before indices
        gathered[:, :size] = (gathered[:, :size].clone().view(torch.float32) / self.ranks).view(torch.uint8)
        return gathered

    with patch.object(Wire, "all_gather", halved):
        return trace(*args)


def trace_with_wrong_average(*args: Any) -> Trace:
    mean = LocalSGD._mean
    with patch.object(LocalSGD, "_mean", lambda self, wire=None: {name: 2 * t for name, t in mean(self).items()}):
        return trace(*args)


@pytest.mark.parametrize(
    ("name", "fault", "check"),
    [
        ("topk", trace_without_residuals, "conservation"),
        pytest.param("powersgd", trace_without_residuals, "conservation", marks=pytest.mark.slow),
        pytest.param("topk", trace_averaging_twice, "gradients", marks=pytest.mark.slow),
        pytest.param("local_sgd", trace_with_wrong_average, "averages", marks=pytest.mark.slow),
    ],
)
def test_planted_faults_are_found(pool2: Pool, name: str, fault: Any, check: str) -> None:
    run = with_exchange(**CONFIGS[name])
    (verdict,) = prove(run, 2, ["exchange"], runner=runner_on(pool2, fault, adamw=False))
    assert check in failed(verdict)
    assert verdict.outcome == "different"
