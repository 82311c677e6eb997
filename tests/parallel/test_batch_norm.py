"""BatchNorm: synced over ranks it computes what one device does, and fillers never reach its statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import PLAN, Net, Points, adamw, make, micro_batch, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from verify.runs import failed, ragged, runner_on

from shoal.errors import UserError
from shoal.parallel.batch_norm import SyncedBatchNorms
from shoal.types import Weights
from shoal.verify import prove

BUILT = Weights("built")


def synced(kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], counted: int) -> list[float]:
    """Returns how far a synced BatchNorm is from one device with the first `counted` of eight samples.

    Two ranks have the samples 0:5 and 5:8; four have one to three, on two sides of a mesh. Compares outputs, gradients
    and running statistics of two batches, and the output of an evaluation after them.
    """
    torch.manual_seed(0)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if size == 4 else None
    whole, mine = kind(3, **options).double(), kind(3, **options).double()
    sync = SyncedBatchNorms(mine, mesh.get_all_groups() if mesh else [None])
    differences = []
    for _ in range(2):
        values, upstream = torch.randn(2, 8, 3, *shape, dtype=torch.float64)
        upstream[counted:] = 0
        ends = [0, 1, 3, 5, 8] if mesh else [0, 5, 8]
        place = slice(ends[rank], ends[rank + 1])
        one = values[:counted].clone().requires_grad_()
        output = whole(one)
        output.backward(upstream[:counted])
        part = values[place].clone().requires_grad_()
        is_filler = place.stop > counted
        with sync.without_samples() if is_filler else torch.enable_grad():
            synced_output = mine(part)
            synced_output.backward(upstream[place])
        assert part.grad is not None
        assert one.grad is not None
        if is_filler:
            differences.append(part.grad.abs().max())
        else:
            differences += [(synced_output - output[place]).abs().max(), (part.grad - one.grad[place]).abs().max()]
    for ours, theirs in zip(mine.parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        torch.distributed.all_reduce(ours.grad)
        differences.append((ours.grad - theirs.grad).abs().max())
    differences += [(ours - theirs).abs().max() for ours, theirs in zip(mine.buffers(), whole.buffers(), strict=True)]
    differences.append((mine.eval()(values) - whole.eval()(values)).abs().max())
    return [float(difference) for difference in differences]


@pytest.mark.parametrize("counted", [8, 5], ids=["ragged", "filler"])
@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (nn.BatchNorm1d, (), {}),
        (nn.BatchNorm2d, (2, 3), {"affine": False, "momentum": None}),
        (nn.BatchNorm1d, (4,), {"track_running_stats": False}),
        (nn.BatchNorm1d, (2,), {"momentum": 0.3, "eps": 0.1}),
    ],
)
def test_synced_statistics_are_those_of_one_device(
    pool2: Pool, kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], counted: int
) -> None:
    for differences in pool2.run(synced, kind, shape, options, counted):
        assert max(differences) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("counted", [8, 5])
def test_statistics_are_synced_over_two_sides_of_a_mesh(pool4: Pool, counted: int) -> None:
    for differences in pool4.run(synced, nn.BatchNorm2d, (2, 3), {}, counted):
        assert max(differences) < 1e-12


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_model_with_synced_batch_norms_is_proved(pool2: Pool, layout: str) -> None:
    run = ragged("Normed", global_batch_size=11, gradient_accumulation=2, sync_batch_norm=True)
    (verdict,) = prove(run, 2, [layout], runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    assert verdict.outcome == "same"


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_what_cannot_be_synced_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="0 is a OwnNorm with a forward of its own"):
        SyncedBatchNorms(nn.Sequential(OwnNorm(3)), [])
    with pytest.raises(UserError, match=r"sync_batch_norm = true is not for strategy deepspeed"):
        make("zero_1", sync_batch_norm=True)
    strategy = make("single", sync_batch_norm=True)
    assert strategy.layout.not_in_force == {"training.sync_batch_norm": "there is one data-parallel rank"}


class NormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh())


def statistics(kind: str, weights: list[list[int]], options: dict[str, Any]) -> list[tuple[list[float], int]]:
    """Trains a step whose micro-batches have these weights, by data-parallel rank.

    Returns the running mean and the number of batches of each BatchNorm that this rank has.
    """
    with make(kind, **options) as strategy:
        torch.manual_seed(0)
        model, _ = strategy.prepare(NormedNet(), adamw, PLAN, BUILT)
        mine = weights[strategy.data_rank]
        batches = [replace(micro_batch(*rows(4, seed)), weight=weight) for seed, weight in enumerate(mine)]
        strategy.forward_backward(model, batches, Points(), 0)
        norms: list[Any] = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
        return [(norm.running_mean.tolist(), int(norm.num_batches_tracked)) for norm in norms]


def test_fillers_do_not_move_running_statistics(pool2: Pool) -> None:
    ((alone, _),) = statistics("single", [[1]], {})
    assert statistics("single", [[1, 0]], {}) == [(alone, 1)]
    assert statistics("single", [[1, 1]], {}) != [(alone, 1)]
    for kind in ("ddp", "fsdp"):
        first, second = pool2.run(statistics, kind, [[0], [1]], {}, init=False)
        assert first == [([0.0] * 6, 0)]
        assert second == [(pytest.approx(alone), 1)]
    by_stage = pool2.run(statistics, "pp", [[1, 0]], {}, init=False)
    assert [norm for stage in by_stage for norm in stage] == [(pytest.approx(alone), 1)]


def test_synced_statistics_move_on_the_rank_of_a_filler_too(pool2: Pool) -> None:
    ((alone, _),) = statistics("single", [[1]], {})
    for norms in pool2.run(statistics, "ddp", [[0], [1]], {"sync_batch_norm": True}, init=False):
        assert norms == [(pytest.approx(alone), 1)]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_moves_running_statistics_once(mode: str) -> None:
    again = {"activation_checkpointing": {"mode": mode, "classes": ["Sequential"]}}
    assert statistics("single", [[1, 1]], again) == statistics("single", [[1, 1]], {})
