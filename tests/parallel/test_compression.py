"""Methods of gradient compression: sums, residuals, what is sent, and mistakes that must be found."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from shoal.config.schema_distributed import CompressionConfig
from shoal.parallel.compression import cast, powersgd, topk
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.method import Exchanged

SHAPES = {"matrix": (48, 40), "vector": (37,), "image": (8, 6, 3, 3), "odd": (3, 5)}
LOSSLESS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "topk": {"ratio": 1.0, "min_compression": 0.0, "start_step": 0},
    "powersgd": {"rank": 48, "min_compression": 0.0, "start_step": 0},
}
LOSSY: dict[str, dict[str, Any]] = {
    **LOSSLESS,
    "topk": {"ratio": 0.05, "start_step": 0},
    "powersgd": {"rank": 2, "start_step": 0},
}
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2 / 127, "topk": 1e-6, "powersgd": 1e-5}
"""How far a sum may be from the exact one with these options, relative to the largest element of any rank."""


def draw(step: int, rank: int, simple: bool = False) -> dict[str, Tensor]:
    """Returns the gradients of one rank. The simple ones are small integers, which fp16 and bf16 hold exactly."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if simple:
        return {n: torch.randint(-8, 9, shape, generator=generator).float() for n, shape in SHAPES.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def exchange_steps(method: str, options: dict[str, Any], steps: int, simple: bool = False) -> dict[str, Any]:
    """Exchanges drawn gradients; returns the worst errors of sums and of conservation, and a print of the results."""
    config = CompressionConfig(method=method, **options)
    exchange = CompressedExchange(config, None, {"dp_replicate": dist.get_world_size()})
    ranks, worst = range(dist.get_world_size()), {"sum": 0.0, "conservation": 0.0}
    results, sent = [], []
    for step in range(steps):
        gradients = draw(step, dist.get_rank(), simple)
        before = dict(exchange.residuals)
        exchange.sum_over_ranks(gradients, step)
        for name, total in gradients.items():
            by_rank = [draw(step, rank, simple)[name] for rank in ranks]
            exact = sum(by_rank)
            change = exchange.residuals.get(name, torch.zeros(())) - before.get(name, torch.zeros(()))
            change = change.expand(total.shape).double().contiguous()
            dist.all_reduce(change)
            size = max(gradient.abs().max().item() for gradient in by_rank)
            worst["sum"] = max(worst["sum"], ((total - exact).abs().max() / size).item())
            lost = (total + change - exact).abs().max() / size
            worst["conservation"] = max(worst["conservation"], lost.item())
        results.append(torch.cat([gradient.reshape(-1) for gradient in gradients.values()]))
        sent.append(exchange.wire.bytes_sent)
    return {**worst, "totals": torch.stack(results), "sent": sent, "plain": exchange.wire.bytes_uncompressed}


@pytest.mark.parametrize("method", LOSSLESS)
def test_nothing_is_lost_where_a_method_can_be_exact(pool2: Pool, method: str) -> None:
    results = pool2.run(exchange_steps, method, LOSSLESS[method], 2)
    assert all(result["sum"] <= ROUNDING[method] * 2 for result in results)
    assert torch.equal(results[0]["totals"], results[1]["totals"])
    if method in ("fp16", "bf16", "topk"):
        assert all(result["sum"] == 0 for result in pool2.run(exchange_steps, method, LOSSLESS[method], 1, simple=True))


@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_what_is_not_sent_is_kept(pool2: Pool, method: str) -> None:
    results = pool2.run(exchange_steps, method, LOSSY[method], 4)
    assert all(result["conservation"] < 1e-4 for result in results)
    assert all(result["sum"] > 1e-3 for result in results)  # these settings do lose something


@pytest.mark.parametrize("method", ["fp16", "int8", "topk", "powersgd"])
def test_four_ranks_have_the_same_sum(pool4: Pool, method: str) -> None:
    results = pool4.run(exchange_steps, method, LOSSY[method], 2)
    assert all(torch.equal(result["totals"], results[0]["totals"]) for result in results)
    assert all(result["conservation"] < (1e-4 if method != "fp16" else 3e-3) for result in results)
    assert all(number < results[0]["plain"] for number in results[0]["sent"])
