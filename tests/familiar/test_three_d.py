"""The three sizes on a real mesh of eight processes, and as rank 0 of 4,096."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal import ColumnParallelLinear, RowParallelLinear, ThreeDParallelism
from shoal.errors import UserError

WIDTH, ROWS = 16, 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(WIDTH, 4 * WIDTH), RowParallelLinear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MLP() for _ in range(depth)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def steps_over(sizes: tuple[int, int, int]) -> dict[str, Any]:
    data, stages, parts = sizes
    parallel = ThreeDParallelism(
        build(4),
        data_parallel_size=data,
        pipeline_parallel_size=stages,
        tensor_parallel_size=parts,
        device="cpu",
    )
    assert (parallel.dp_size, parallel.pp_size, parallel.tp_size) == sizes
    groups = parallel.dp_group, parallel.pp_group, parallel.tp_group
    assert tuple(dist.get_world_size(group) for group in groups) == sizes
    optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
    x, y = (part.tensor_split(data)[parallel.strategy.data_rank] for part in batch())
    losses, norms = [], []
    for _ in range(2):
        losses.append(parallel.forward_backward(x, y, mse_loss, num_microbatches=2))
        norms.append(parallel.step(optimizer).grad_norm)
    parallel.close()
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "data_rank": parallel.strategy.data_rank}


def alone() -> tuple[list[float], Tensor]:
    """Returns the losses of both halves of the batch, step by step, and the norms of the gradients."""
    model, (x, y), losses, norms = build(4), batch(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        halves = [mse_loss(model(a), b) for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True)]
        (sum(halves) / 2).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        losses.append([half.item() for half in halves])
    return losses, torch.stack(norms)


@pytest.mark.slow
def test_two_by_two_by_two_trains_as_one_process(tmp_path: Path) -> None:
    losses, norms = alone()
    with Pool(8, scratch=tmp_path) as pool:
        for result in pool.run(steps_over, (2, 2, 2)):
            torch.testing.assert_close(result["norms"], norms)
            assert result["losses"].tolist() == pytest.approx([step[result["data_rank"]] for step in losses], rel=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 1), pytest.param((2, 1, 1), marks=pytest.mark.slow)])
def test_two_processes_train_as_one(pool2: Pool, sizes: tuple[int, int, int]) -> None:
    losses, norms = alone()
    for result in pool2.run(steps_over, sizes):
        torch.testing.assert_close(result["norms"], norms)
        mine = [sum(step) / 2 if sizes[0] == 1 else step[result["data_rank"]] for step in losses]
        assert result["losses"].tolist() == pytest.approx(mine, rel=1e-5)


@pytest.fixture
def rank_0_of_4096() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_0_of_4096")
def test_rank_0_of_4096_holds_its_part() -> None:
    model = build(8)
    whole = sum(parameter.numel() for parameter in model.parameters())
    parallel = ThreeDParallelism(model, data_parallel_size=64, pipeline_parallel_size=8, tensor_parallel_size=8)
    assert (parallel.dp_size, parallel.pp_size, parallel.tp_size) == (64, 8, 8)
    groups = parallel.dp_group, parallel.pp_group, parallel.tp_group
    assert [dist.get_process_group_ranks(group)[1] for group in groups] == [8, 512, 1]
    assert {name.split(".")[1] for name, _ in parallel.model.named_parameters()} == {"0"}
    held = sum(p.to_local().numel() for p in parallel.model.parameters())
    assert held <= whole / 8 / 8


def step_in(precision: str, sizes: tuple[int, int, int]) -> tuple[float, float, set[torch.dtype]]:
    """Returns the loss, the norm of the gradient, and the types of what layers return."""
    data, stages, parts = sizes
    parallel = ThreeDParallelism(build(4), data, stages, parts, device="cpu", mixed_precision=precision)
    seen = set()
    for layer in parallel.model.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
    x, y = (part.tensor_split(data)[parallel.strategy.data_rank] for part in batch())
    loss = parallel.forward_backward(x, y, mse_loss, num_microbatches=2)
    if precision == "fp16":
        with pytest.raises(UserError, match=r"use step\(optimizer\) of ThreeDParallelism"):
            optimizer.step()
    norm = parallel.step(optimizer).grad_norm
    parallel.close()
    return loss.item(), norm.item(), seen


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)])
def test_mixed_precision_is_in_force(pool2: Pool, sizes: tuple[int, int, int]) -> None:
    exact = pool2.run(step_in, "fp32", sizes, init=False)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for (loss, norm, _), (half, half_norm, seen) in zip(
            exact, pool2.run(step_in, precision, sizes, init=False), strict=True
        ):
            assert seen == {dtype}
            assert (half, half_norm) == pytest.approx((loss, norm), rel=0.02)


def test_mistakes_are_told() -> None:
    with pytest.raises(TypeError, match=r"write ThreeDParallelism\(model, data_parallel_size=\.\.\."):
        ThreeDParallelism(2, 2, 2)
    with pytest.raises(UserError, match="dp_shard 2 × tp 2 = 4, but there are 1 processes"):
        ThreeDParallelism(build(2), data_parallel_size=2, tensor_parallel_size=2)
