"""Methods of gradient compression: sums, residuals, what is sent, and mistakes that must be found."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal import GradientCompressor, UserError
from shoal.config.schema_distributed import CompressionConfig
from shoal.parallel.compression import cast, powersgd, topk
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.method import Exchanged
from shoal.parallel.compression.payoff import bytes_per_step, would_pay
from shoal.parallel.compression.wire import Wire
from shoal.tensors import local_part
from shoal.types import Weights

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


def in_slow_tier(value: Any) -> Any:
    """Returns a parameter of a test that only the slow tier takes."""
    return pytest.param(value, marks=pytest.mark.slow)


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


@pytest.mark.parametrize("method", [*map(in_slow_tier, ("fp16", "powersgd")), "int8", "topk"])
def test_four_ranks_have_the_same_sum(pool4: Pool, method: str) -> None:
    results = pool4.run(exchange_steps, method, LOSSY[method], 2)
    assert all(torch.equal(result["totals"], results[0]["totals"]) for result in results)
    assert all(result["conservation"] < (1e-4 if method != "fp16" else 3e-3) for result in results)
    assert all(number < results[0]["plain"] for number in results[0]["sent"])


def drop_residual(method: str) -> dict[str, Any]:
    with patch.object(CompressedExchange, "_with_residual", lambda self, name, gradient, scale: gradient.float()):
        return exchange_steps(method, LOSSY[method], 3)


def forget_residual(method: str) -> dict[str, Any]:
    """Answers that everything was sent."""
    kinds = {"topk": topk.TopK, "int8": cast.Cast, "powersgd": powersgd.PowerSGD}
    exchange = kinds[method].exchange

    def planted(self: Any, *args: Any) -> dict[str, Exchanged]:
        outcomes = exchange(self, *args)
        return {name: Exchanged(total, torch.zeros_like(rest)) for name, (total, rest) in outcomes.items()}

    with patch.object(kinds[method], "exchange", planted):
        return exchange_steps(method, LOSSY[method], 3)


def take_indices_of_another_rank(method: str) -> dict[str, Any]:
    gather = Wire.all_gather

    def planted(self: Wire, tensor: Tensor) -> Tensor:
        gathered = gather(self, tensor)
        half = gathered.shape[1] // 2  # values come first, and are as long as indices
        gathered[:, half:] = gathered.flip(0)[:, half:]
        return gathered

    with patch.object(Wire, "all_gather", planted):
        return exchange_steps("topk", LOSSLESS["topk"] if method == "exact" else LOSSY["topk"], 3)


def average_as_well(method: str) -> dict[str, Any]:
    reduce = Wire.all_reduce
    with patch.object(Wire, "all_reduce", lambda self, tensor: reduce(self, tensor).div_(self.ranks)):
        return exchange_steps(method, LOSSY[method], 3)


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        (drop_residual, "topk"),
        pytest.param(drop_residual, "powersgd", marks=pytest.mark.slow),
        pytest.param(drop_residual, "int8", marks=pytest.mark.slow),
        pytest.param(forget_residual, "topk", marks=pytest.mark.slow),
        (forget_residual, "int8"),
        (take_indices_of_another_rank, "topk"),
        (average_as_well, "powersgd"),
    ],
)
def test_planted_faults_break_conservation(pool2: Pool, fault: Any, method: str) -> None:
    results = pool2.run(fault, method)
    assert all(result["conservation"] > 1e-3 for result in results)


def exchange_not_finite(method: str, bad: float) -> tuple[bool, bool]:
    """Exchanges a gradient with one bad element on rank 1 between two good ones."""
    exchange = CompressedExchange(CompressionConfig(method=method, **LOSSY[method]), None, {"dp_replicate": 2})
    exchange.sum_over_ranks(draw(0, dist.get_rank()), 0)
    before = {name: tensor.clone() for name, tensor in exchange.state().items()}
    gradients = draw(1, dist.get_rank())
    if dist.get_rank() == 1:
        gradients["matrix"][3, 4] = bad
    exchange.sum_over_ranks(gradients, 1)
    after = exchange.state()
    kept = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return bool(gradients["matrix"].isfinite().all()), kept


@pytest.mark.parametrize("bad", [math.nan, in_slow_tier(math.inf)])
@pytest.mark.parametrize("method", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_what_is_not_finite_reaches_all_ranks_and_no_state(pool2: Pool, method: str, bad: float) -> None:
    assert pool2.run(exchange_not_finite, method, bad) == [(False, True)] * 2


def exchange_scaled(scales: list[float]) -> Tensor:
    """Returns the unscaled sums of steps whose gradients carry a loss scale."""
    exchange = CompressedExchange(CompressionConfig(method="topk", **LOSSY["topk"]), None, {"dp_replicate": 2})
    results = []
    for step, scale in enumerate(scales):
        exchange.loss_scale = lambda scale=scale: torch.tensor(scale)
        gradients = {name: gradient * scale for name, gradient in draw(step, dist.get_rank()).items()}
        exchange.sum_over_ranks(gradients, step)
        results.append(gradients["matrix"] / scale)
    return torch.stack(results)


def test_residuals_follow_the_loss_scale(pool2: Pool) -> None:
    plain, _ = pool2.run(exchange_scaled, [1.0, 1.0, 1.0])
    scaled, _ = pool2.run(exchange_scaled, [1024.0, 512.0, 2048.0])
    assert torch.equal(plain, scaled)


def test_fp16_scales_cannot_overflow() -> None:
    codec = cast.Float16()
    for factor in (1e-40, 1e-30, 1.0, 1e30, 3e38):
        row = torch.linspace(-1, 1, cast.BLOCK).view(1, -1) * factor
        decoded = codec.decode(codec.encode(row))
        assert (decoded - row).abs().max() <= 2.0**-11 * factor
    integers = torch.randint(-1000, 1000, (1, 4 * cast.BLOCK)).float()
    assert torch.equal(codec.decode(codec.encode(integers)), integers)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(1, cast.BLOCK))), torch.zeros(1, cast.BLOCK))


def test_the_largest_elements_are_found() -> None:
    torch.manual_seed(0)
    for flat in (torch.randn(300_000), torch.zeros(70_000), torch.randn(100), torch.arange(200_000.0)):
        for count in (1, 7, len(flat) // 100 or 1):
            indices = topk.largest(flat, count)
            assert len(set(indices.tolist())) == count
            assert torch.equal(flat.abs()[indices].sort().values, flat.abs().topk(count).values.flip(0))


def test_a_compressor_of_single_tensors() -> None:
    tensor = torch.tensor([[0.1, -5.0, 2.0], [0.0, 3.0, -0.2]], dtype=torch.bfloat16)
    compressor = GradientCompressor(compression_ratio=0.5, method="topk")
    compressed = compressor.compress(tensor)
    assert sorted(compressed["values"].tolist()) == [-5.0, 2.0, 3.0]
    assert sorted(compressed["indices"].tolist()) == [1, 2, 4]
    assert compressed["shape"] == tensor.shape
    dense = compressor.decompress(compressed)
    assert dense.dtype == torch.bfloat16
    assert dense.tolist() == [[0.0, -5.0, 2.0], [0.0, 3.0, 0.0]]
    assert len(GradientCompressor(0.001).compress(torch.randn(9))["values"]) == 1  # at least one
    for method in ("fp16", "bf16", "int8"):
        coded = GradientCompressor(method=method)
        exact = torch.randn(5, 70)
        assert (coded.decompress(coded.compress(exact)) - exact).abs().max() < ROUNDING[method] * 5
    for options in ({"compression_ratio": 0.0}, {"compression_ratio": 1.5}, {"rank": 0}, {"method": "zip"}):
        with pytest.raises(UserError, match=next(iter(options)).removeprefix("compression_")):
            GradientCompressor(**options)
    with pytest.raises(UserError, match="use attach"):
        GradientCompressor(method="powersgd").compress(tensor)


def train_by_hand(method: str | None, ratio: float, steps: int, resume: bool = False) -> tuple[Tensor, int]:
    """Trains by torch's DDP with many buckets, and returns its weights and the bytes of the last bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    compressor = None
    if method:
        compressor = GradientCompressor(ratio, method, rank=30, min_compression=0)
        compressor.attach(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if resume and step == 2 and compressor:
            state = compressor.state_dict()
            compressor._exchange.residuals.clear()  # type: ignore[union-attr]
            compressor.load_state_dict(state)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return weights, compressor.bytes_sent if compressor else 0


@pytest.mark.parametrize("method", ["topk", in_slow_tier("powersgd"), in_slow_tier("fp16")])
def test_the_hook_averages_as_plain_ddp_does(pool2: Pool, method: str) -> None:
    (plain, _), _ = pool2.run(train_by_hand, None, 1.0, 4)
    (weights, sent), (others, _) = pool2.run(train_by_hand, method, 1.0, 4)
    assert torch.equal(weights, others)
    assert sent > 0
    torch.testing.assert_close(weights, plain, rtol=0, atol=2e-4 if method == "fp16" else 1e-6)


def test_the_hook_keeps_what_it_does_not_send(pool2: Pool) -> None:
    (weights, _), (others, _) = pool2.run(train_by_hand, "topk", 0.1, 6)
    assert torch.equal(weights, others)
    (resumed, _), _ = pool2.run(train_by_hand, "topk", 0.1, 6, resume=True)
    assert torch.equal(weights, resumed)


def test_whether_compression_pays() -> None:
    slow = would_pay(8e6, 0.16e6, 12.5e6, compute_seconds=0.1, coding_seconds=0.02)
    assert slow.pays
    assert slow.plain_seconds == pytest.approx(0.64 + 0.1 / 3)
    assert slow.compressed_seconds == pytest.approx(0.12 + 0.0128)
    assert "5.1 times as fast" in slow.sentence
    fast = would_pay(8e6, 0.16e6, 12.5e9, compute_seconds=0.1, coding_seconds=0.02)
    assert not fast.pays
    assert "not faster" in fast.sentence
    at_limit = would_pay(8e6, 0.16e6, slow.pays_below, 0.1, 0.02)
    assert at_limit.plain_seconds == pytest.approx(at_limit.compressed_seconds)
    assert not would_pay(8e6, 9e6, 1e6, 0.1, 0.0).pays


@pytest.mark.parametrize("ranks", [2, in_slow_tier(4)])
@pytest.mark.parametrize("method", [in_slow_tier("fp16"), in_slow_tier("bf16"), "int8", "topk", "powersgd"])
def test_bytes_are_known_before_anything_is_sent(pool2: Pool, pool4: Pool, method: str, ranks: int) -> None:
    pool = pool2 if ranks == 2 else pool4
    config = CompressionConfig(method=method, **LOSSY[method])
    plain, compressed = bytes_per_step(config, map(torch.Size, SHAPES.values()), ranks)
    result = pool.run(exchange_steps, method, LOSSY[method], 1)[0]
    assert plain == pytest.approx(result["plain"], abs=8)
    # Whether all is finite is one number more; rows of blocks are as long on every rank.
    assert compressed - 8 <= result["sent"][0] <= compressed + 8 + 3 * ranks * cast.BLOCK


def train_sharded(compression: dict[str, Any] | str, kind: str) -> dict[str, Any]:
    """Takes three steps of SGD, and returns the whole weights and what was sent."""
    from strategies.nets import PLAN, Points, build, make, micro_batch, rows, sgd

    with make(kind, compression=compression) as strategy:
        model, optimizer = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        for step in range(3):
            x, y = rows(8, step)
            part = slice(2 * strategy.data_rank, 2 * strategy.data_rank + 2)
            strategy.forward_backward(model, [micro_batch(x[part], y[part])], Points(), step)
            strategy.step(optimizer, 0.5)
        exchange = strategy.engaged.exchange
        parts = {name: local_part(p).detach().numpy().copy() for name, p in model.named_parameters()}
        return {"parts": parts, "sent": exchange.wire.bytes_sent if exchange else None}


def test_replicas_of_shards_exchange_compressed_gradients(pool4: Pool) -> None:
    whole = {"method": "topk", "ratio": 1.0, "min_compression": 0.0, "start_step": 0}
    plain = pool4.run(train_sharded, "none", "hybrid")
    compressed = pool4.run(train_sharded, whole, "hybrid")
    lossy = pool4.run(
        train_sharded, {"method": "topk", "ratio": 0.2, "start_step": 0, "min_compression": 0.0}, "hybrid"
    )
    for one, other, third in zip(plain, compressed, lossy, strict=True):
        assert one["sent"] is None
        assert 0 < third["sent"] < other["sent"]
        for name, part in one["parts"].items():
            assert abs(part - other["parts"][name]).max(initial=0) < 1e-6
    assert any(abs(lossy[0]["parts"][n] - plain[0]["parts"][n]).max(initial=0) > 1e-4 for n in plain[0]["parts"])


def follow(warm_start: bool) -> tuple[list[float], int]:
    """Compresses the same matrix in every step; returns how much of it is missing, and the number of factors kept."""
    config = CompressionConfig(
        method="powersgd", rank=1, start_step=0, error_feedback=False, warm_start=warm_start, seed=7
    )
    exchange = CompressedExchange(config, None, {"dp_replicate": 2})
    matrix, missing = torch.diag(torch.linspace(1, 2, 40)), []
    for step in range(12):
        gradients = {"matrix": matrix.clone()}
        exchange.sum_over_ranks(gradients, step)
        missing.append((gradients["matrix"] - 2 * matrix).norm().item())
    return missing, len(exchange.method.state())


def test_a_warm_start_follows_the_largest_directions(pool2: Pool) -> None:
    (warm, kept), _ = pool2.run(follow, True)
    (cold, none), _ = pool2.run(follow, False)
    assert (kept, none) == (1, 0)
    assert all(later <= earlier + 1e-4 for earlier, later in pairwise(warm))
    assert warm[-1] < min(cold)


def refuse_without_effect(method: Any) -> str:
    try:
        CompressedExchange(CompressionConfig(method=method), None, {}).check()
    except UserError as error:
        return str(error)
    return ""


def test_compression_without_effect_names_the_keys_of_its_method(pool2: Pool) -> None:
    for method, key in (("topk", "ratio"), ("powersgd", "rank")):
        assert f"lower it or {key}, or leave compression out" in pool2.run(refuse_without_effect, method)[0]
