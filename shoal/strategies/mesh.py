"""Any product of layouts: stages × replicas × shards × parts of a sequence × parts of a layer, on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.config.mesh import DIMENSIONS, fill_mesh, micro_batches_needed, say_mesh
from shoal.errors import UserError
from shoal.parallel.context.ulysses import HeadExchange, apply_context_parallel
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.parallel.pipeline.stages import count_stages, cut, stages_of, take_stages
from shoal.parallel.tensor.tensor_parallel import TensorParallel
from shoal.strategies.base import Objective, not_a_number
from shoal.strategies.fsdp import CPU, FSDPStrategy
from shoal.transform.chunked_loss import ChunkedHead
from shoal.types import MicroBatch, ParallelPlan


class MeshStrategy(FSDPStrategy):
    """Tensor parallelism inside, then parts of a sequence, then fully_shard over the data-parallel sides, and stages
    outermost, as the mesh says; a side of length 1 costs nothing."""

    name = "mesh"

    def __init__(
        self,
        *,
        mesh: Mapping[str, int],
        sequence_parallel: bool = False,
        schedule: str = "1f1b",
        sharding_strategy: str = "FULL_SHARD",
        **options: Any,
    ):
        if sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise UserError(
                f"distributed.fsdp.sharding_strategy = {sharding_strategy}, but under strategy mesh the mesh says who "
                "shards and who replicates; set dp_replicate and dp_shard, and leave it out"
            )
        self.sequence_parallel, self.schedule = sequence_parallel, schedule
        super().__init__(mesh=mesh, sharding_strategy=sharding_strategy, **options)
        self.tensor: TensorParallel | None = None
        self.exchange: HeadExchange | None = None
        self.stages: list[nn.Module] = []
        self.pipeline: Pipeline | None = None
        sizes, place = self.mesh_sizes(), self.place_on_mesh
        self.sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
        if place["pp"] or place["cp"]:  # other tokens, or other layers
            self.draws_as = (self.data_rank, place["pp"], place["cp"])
        at_once = {
            "training.compile = true": self.compile,
            f"training.loss_chunks = {self.loss_chunks}": self.loss_chunks > 1,
            f"distributed.mesh.tp = {self.sizes['tp']}": self.sizes["tp"] > 1,
        }
        for what, given in at_once.items():
            if given and schedule == "zbv" and self.sizes["pp"] > 1:
                raise UserError(
                    f"distributed.pipeline.schedule = zbv takes a backward in two halves, but {what} makes all "
                    "gradients at once; use interleaved"
                )
        if self.sizes["pp"] > 1 and self.reduce_every_micro_batch:
            raise UserError(
                "distributed.fsdp.reduce_every_micro_batch = true, but a pipeline sums gradients over ranks after its "
                "last micro-batch; leave it out"
            )
        if self.sizes["pp"] == 1 and schedule != "1f1b":
            self.idle = {"distributed.pipeline.schedule": "distributed.mesh.pp is 1"}
        if sequence_parallel and self.sizes["tp"] == 1:
            raise UserError(
                "distributed.tensor.sequence_parallel = true is a way of tensor parallelism, but distributed.mesh.tp "
                "= 1; leave it out"
            )

    def mesh_sizes(self) -> dict[str, int]:
        return fill_mesh(self._wanted_mesh or {}, self.world.size)

    def setup(self) -> None:
        super().setup()
        assert self.mesh is not None
        # Parts of a sequence add up their gradients as slices of a batch do, so parameters are sharded over both.
        merged = {**self.sizes, "dp_shard": self.sizes["dp_shard"] * self.sizes["cp"], "cp": 1}
        self.weights_mesh = self._build_mesh(merged) if self.sizes["cp"] > 1 else self.mesh
        sides = [name for name in ("dp_shard", "dp_replicate") if self.weights_mesh[name].size() > 1]
        self.data_groups = [self.weights_mesh.get_group(name) for name in sides]

    def about(self) -> str:
        about = f"mesh, {say_mesh(self.sizes)}"
        if self.pipeline is not None:
            about += f"; {self.pipeline.num_stages} stages, {self.schedule}"
        if self.tensor is not None:
            about += f"; {len(self.tensor.cut_parameters)} parameters cut by tp"
            about += ", tokens between them too" if self.sequence_parallel else ""
        return about

    def wrap_model(self, model: nn.Module) -> nn.Module:
        if self.sizes["pp"] > 1:
            raise UserError("distributed.mesh.pp > 1: a pipeline runs a whole step; use prepare and forward_backward")
        return super().wrap_model(model)

    def divide(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        assert self.mesh is not None
        self.stages, self._entry = [], plan.entry
        if self.sizes["pp"] > 1:
            plan = self._take_stages(model, plan)
        if self.sizes["tp"] > 1:
            self.tensor = TensorParallel(self.weights_mesh["tp"], self.sequence_parallel)
            self.tensor.apply(model, plan)
        if self.sizes["cp"] > 1:
            self.exchange = apply_context_parallel(model, self.mesh.get_group("cp"))
        return plan

    def _take_stages(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Leaves this rank's stages in the model; the plan is that of what they have."""
        pp, rank = self.sizes["pp"], self.place_on_mesh["pp"]
        cuts = cut(model, plan, count_stages(pp, self.schedule))
        mine = stages_of(rank, pp, self.schedule)
        self.stages = take_stages(model, plan, cuts, mine)
        own = {name for stage in mine for name in cuts[stage]}
        embed, head = (name if name in own else None for name in (plan.embed, plan.head))
        return replace(plan, blocks=tuple(name for name in plan.blocks if name in own), embed=embed, head=head)

    def roots(self, model: nn.Module) -> list[nn.Module]:
        return self.stages or [model]

    def prepare(self, *args: Any, **options: Any) -> tuple[nn.Module, Optimizer]:
        model, optimizer = super().prepare(*args, **options)
        if self.stages:
            assert self.mesh is not None
            group = self.mesh.get_group("pp")
            self.pipeline = Pipeline(self.stages, self.schedule, group, self.device, self._entry)
        return model, optimizer

    def chunk_head(self, model: nn.Module, plan: ParallelPlan) -> ChunkedHead | None:
        """Where ranks share the head they also share the loss, in one chunk if no more are asked for."""
        if self.stages and plan.head is None:
            return None  # it is another rank's
        shared = self.tensor is not None and plan.head is not None and plan.tensor.get(plan.head) == "vocabulary"
        if not shared:
            return super().chunk_head(model, plan)
        return ChunkedHead(model, plan, self.loss_chunks, compiled=self.compile, tensor=self.tensor)

    def _data_mesh(self) -> DeviceMesh:
        mesh = self.weights_mesh
        return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]

    def ready(self, micro: MicroBatch, recipe: Objective) -> Any:
        batch = super().ready(micro, recipe)
        if self.sizes["cp"] > 1 or self.sequence_parallel:
            batch = recipe.split_sequence(batch, self.place_on_mesh["cp"], self.sizes["cp"])
            tokens = batch["input_ids"].shape[1] if "input_ids" in batch else 0
            # Where the embedding is in another stage nobody else looks.
            if self.sequence_parallel and tokens % self.sizes["tp"]:
                raise UserError(
                    f"distributed.tensor.sequence_parallel = true, but tp {self.sizes['tp']} does not divide the "
                    f"{tokens} tokens that a rank has of a sequence; choose another dataset.seq_length"
                )
        return batch

    def run_micro_batches(
        self,
        batches: Sequence[Any],
        micro_batches: Sequence[MicroBatch],
        per_count: Tensor,
        recipe: Objective,
        step: int,
    ) -> list[Tensor]:
        if self.pipeline is None:
            return super().run_micro_batches(batches, micro_batches, per_count, recipe, step)
        # A short window at the end of the data is filled up with what counts for nothing.
        missing = max(0, micro_batches_needed(self.schedule, self.pipeline.num_stages) - len(batches))
        filled = [*batches, *[batches[0]] * missing]
        scales = [per_count * weight for weight in (*(micro.weight for micro in micro_batches), *[0] * missing)]
        losses = [torch.zeros((), device=self.device) for _ in filled]

        def score(output: Any, index: int) -> Tensor:
            loss = recipe.loss(output, filled[index])
            if loss.ndim:
                raise not_a_number(loss)
            losses[index] = loss.detach().float()
            return loss * scales[index]

        around = self._around(filled, (step,), scales)
        self.pipeline.step([recipe.inputs(batch) for batch in filled], score, around)
        return self._from_last_stage(losses[: len(batches)])

    def score_micro_batches(self, model: nn.Module, batches: Sequence[Any], recipe: Objective) -> list[Tensor]:
        if self.pipeline is None:
            return super().score_micro_batches(model, batches, recipe)
        score = lambda output, index: recipe.loss(output, batches[index]).float()  # noqa: E731
        inputs, around = [recipe.inputs(batch) for batch in batches], self._around(batches, ("eval",))
        losses = self.pipeline.evaluate(inputs, score, around)
        return self._from_last_stage(losses or [torch.zeros((), device=self.device) for _ in batches])

    def _around(
        self, batches: Sequence[Any], place: tuple[int | str, ...], scales: Sequence[Tensor] | None = None
    ) -> Callable[[int], AbstractContextManager[None]]:
        @contextmanager
        def around(index: int) -> Iterator[None]:
            self._seed_generators(*place, index)
            with self.autocast(), self.scoring(batches[index], scales[index] if scales else None):
                yield

        return around

    def _from_last_stage(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """What the last stage has, on all of them."""
        assert self.mesh is not None
        told = torch.stack([*losses])
        dist.all_reduce(told, group=self.mesh.get_group("pp"))
        return list(told.unbind())

    def whole_norm(self, norm: Tensor) -> Tensor:
        if self.pipeline is None:
            return norm
        square = norm.to(CPU if self.cpu_offload else self.device).square()
        dist.all_reduce(square, group=self.pipeline.group)
        return square.sqrt()

    def over_stages(self, number: int) -> int:
        if self.pipeline is None:
            return number
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.pipeline.group)
        return int(total)

    def shapes(self, named: Mapping[str, Tensor]) -> dict[str, list[int]]:
        own = super().shapes(named)
        if self.pipeline is None:
            return own
        told: list[dict[str, list[int]]] = [{} for _ in range(self.pipeline.size)]
        dist.all_gather_object(told, own, group=self.pipeline.group)
        return {name: shape for stage in told for name, shape in stage.items()}

    @property
    def calls_plainly(self) -> bool:
        return self.pipeline is None

    def preview(self, model: nn.Module, recipe: Any) -> str | None:
        if not self.calls_plainly:
            return None  # nobody has the whole model
        if self.exchange is None:
            return super().preview(model, recipe)
        self.exchange.paused = True  # a preview is not split
        try:
            return super().preview(model, recipe)
        finally:
            self.exchange.paused = False


def ThreeDParallelism(
    data_parallel_size: int = -1, pipeline_parallel_size: int = 1, tensor_parallel_size: int = 1, **options: Any
) -> MeshStrategy:
    """3D parallelism: `mesh` by the three sizes that people know it by; data parallelism shards, as FSDP does."""
    mesh = {"pp": pipeline_parallel_size, "dp_shard": data_parallel_size, "tp": tensor_parallel_size}
    return MeshStrategy(mesh=mesh, **options)
