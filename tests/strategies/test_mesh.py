"""What ranks of a mesh agree on: sums over stages and parts of sequences, and stages with nothing to train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verify.planted import Ragged

from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies import DistributedStrategy, Loop, MeshStrategy, SingleStrategy
from shoal.training.diagnose import first_bad_module
from shoal.training.optimizers import build_optimizer
from shoal.types import ParallelPlan
from shoal.weights import build


class Staged(Ragged):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.frozen = frozen

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for layer in model[: self.frozen]:
            layer.requires_grad_(False)
        return model

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return ParallelPlan(blocks=("1", "3"), order=("0", "1", "2", "3", "4"), entry="input")


def prepared(
    strategy: DistributedStrategy, recipe: Any, builder: Any = None
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, weights = build(recipe.build_model, recipe.weights(), seed=0)
    training = TrainingConfig(max_steps=1, learning_rate=1e-2)
    builder = builder or (lambda m: build_optimizer(training, recipe.param_groups(m)))
    model, optimizer = strategy.prepare(model.eval(), builder, recipe.parallel_plan(model), weights)
    batches = BatchSchedule.constant(8, 2)
    rank, size = strategy.data_rank, strategy.data_size
    loader = Loader(recipe.train_data(), recipe.collate, batches, seed=0, data_rank=rank, data_size=size)
    return model, optimizer, iter(loader)


def pipeline(**options: Any) -> DistributedStrategy:
    return MeshStrategy(mesh={"pp": 2, "dp_shard": 1}, device="cpu", **options)


def take_steps(strategy: DistributedStrategy, recipe: Any) -> dict[str, Any]:
    norms = []
    with strategy:
        model, optimizer, loader = prepared(strategy, recipe)
        for step in range(3):
            strategy.forward_backward(model, next(loader), recipe, step)
            norms.append(strategy.step(optimizer, 0.1).grad_norm.item())
        state = strategy.state(model, optimizer).model
        weights = {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}
    return {"norms": norms, "weights": weights, "groups": len(optimizer.param_groups)}


def steps_in_stages(frozen: int) -> dict[str, Any]:
    return take_steps(pipeline(), Staged(frozen))


@pytest.mark.parametrize("frozen", [0, 3])
def test_stages_with_nothing_to_train(pool2: Pool, frozen: int) -> None:
    """With the embedding and the first block frozen the first stage has no parameter for its optimizer."""
    alone = take_steps(SingleStrategy(device="cpu"), Staged(frozen))
    result = pool2.run(steps_in_stages, frozen, init=False)
    together: dict[str, Any] = {}
    for rank in result:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert rank["groups"] == alone["groups"]
        together |= rank["weights"]
    assert len(result[0]["weights"]) < len(together)
    torch.testing.assert_close(together, alone["weights"], rtol=1e-4, atol=1e-6)


def clip() -> tuple[float, dict[str, Tensor]]:
    """Returns the norm before clipping, and how far each parameter moved."""
    with pipeline(reduce_dtype="bf16", forward_prefetch=True) as strategy:
        recipe = Staged()
        model, optimizer, loader = prepared(strategy, recipe, lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
        keys = ("distributed.fsdp.reduce_dtype", "distributed.fsdp.forward_prefetch")
        assert strategy.engaged.not_in_force == dict.fromkeys(keys, "nothing is sharded on pp 2")
        strategy.forward_backward(model, next(loader), recipe, 0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norm = strategy.step(optimizer, 0.1).grad_norm.item()
        return norm, {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_clipping_goes_by_the_norm_of_all_stages(pool2: Pool) -> None:
    (first, moved), (second, moved_too) = pool2.run(clip, init=False)
    assert first == second > 0.1
    assert not moved.keys() & moved_too.keys()
    by_both = torch.nn.utils.get_total_norm([*moved.values(), *moved_too.values()])
    assert by_both.item() == pytest.approx(0.1, rel=1e-4)


def skip_together() -> list[float]:
    """In the second step a gradient of the first stage alone is infinite."""
    with pipeline() as strategy:
        recipe, skipped = Staged(), []
        model, optimizer, loader = prepared(strategy, recipe)
        for step in range(3):
            strategy.forward_backward(model, next(loader), recipe, step)
            if step == 1 and strategy.rank == 0:
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient.fill_(torch.inf)
            skipped.append(strategy.step(optimizer, 0.1).skipped.item())
        return skipped


def test_all_stages_skip_together(pool2: Pool) -> None:
    assert pool2.run(skip_together, init=False) == [[0.0, 1.0, 0.0]] * 2


def mean_over_parts() -> float:
    with MeshStrategy(mesh={"cp": 2, "dp_shard": 1}, device="cpu") as strategy:
        return Loop(strategy).reduce(torch.tensor(3.0), "mean").item()


def test_a_mean_over_parts_of_a_sequence(pool2: Pool) -> None:
    assert pool2.run(mean_over_parts, init=False) == [3.0, 3.0]


def find_bad(where: str, packed: str) -> str:
    with pipeline() as strategy:
        recipe = Staged()
        model, _, loader = prepared(strategy, recipe)
        for name, parameter in model.named_parameters():
            if name in (where, packed):
                parameter.data.fill_(torch.nan)
            if name == packed:  # bytes of quantised weights may be the bits of a NaN
                parameter.logical_numel = 1
        micro = next(loader)[0]
        return first_bad_module(strategy, model, micro, recipe)


def test_a_bad_parameter_of_one_stage_is_named(pool2: Pool) -> None:
    first, second = pool2.run(find_bad, "4.bias", "4.weight", init=False)
    assert second == "parameter 4.bias is already not finite"
    assert "another rank" in first


def test_a_pipeline_whose_plan_names_no_head_computes_no_loss_in_chunks(pool2: Pool) -> None:
    assert all("names no head to make logits" in said for said in pool2.run(chunks_without_head, init=False))


def chunks_without_head() -> str:
    try:
        with pipeline(loss_chunks=2) as strategy:
            prepared(strategy, Staged())
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zbv", "compile": True}, "zbv runs a backward in two halves, but training.compile = true"),
        ({"schedule": "zbv", "loss_chunks": 2}, "but training.loss_chunks = 2"),
        ({"reduce_every_micro_batch": True}, "a pipeline sums gradients over ranks after its last micro-batch"),
        ({"sharding_strategy": "NO_SHARD"}, "under strategy mesh the mesh says which ranks shard"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pipeline(world=World(0, 2), **options)
