"""torch's fully_shard (FSDP2): every rank holds a part of each parameter, and gathers a unit while it computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shoal.config.layout import Layout
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.sharding.frozen import FrozenWatch
from shoal.strategies.engines.plain import PlainEngine, Reduction
from shoal.tensors import DTYPES, local_part, module_state_kept


class FSDPEngine(PlainEngine):
    """Shards the model over the mesh dimension `dp_shard`, replicated over `dp_replicate`."""

    waits_in = "forward"

    def __init__(self, layout: Layout, device: torch.device, mesh: DeviceMesh | None, reduction: Reduction):
        super().__init__(layout, device, mesh, reduction)
        if layout.fsdp.cpu_offload:
            self.parameter_device = torch.device("cpu")
        self.units: Sequence[str] = ()
        self._sharded: list[FSDPModule] = []
        self._frozen: FrozenWatch | None = None

    def shard(self, model: nn.Module, roots: Sequence[nn.Module], units: Sequence[str]) -> None:
        assert self.mesh is not None
        fsdp, self.units = self.layout.fsdp, units
        compression = self.layout.compression
        if compression.method != "none":
            # fully_shard exchanges gradients between shards alone, and `exchange` between replicas.
            group = self.mesh.get_group("dp_replicate")
            self.compressed = CompressedExchange(compression, group, self.layout.mesh)
        replicated = self.mesh["dp_replicate"].size() > 1 or fsdp.sharding_strategy == "NO_SHARD"
        replicated = replicated and self.compressed is None
        options: dict[str, Any] = {
            "mesh": self.mesh["dp_replicate", "dp_shard"] if replicated else self.mesh["dp_shard"],
            "offload_policy": CPUOffloadPolicy(pin_memory=True) if fsdp.cpu_offload else OffloadPolicy(),
            # None: free all units but the root, whose parameters its backward would gather again right away.
            "reshard_after_forward": None if fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") else False,
        }
        # Without a type of its own every parameter is gathered in the type it has: a frozen bf16 base in bf16.
        gathers_as_stored = fsdp.param_dtype is None and self.layout.precision != "pure_bf16"
        param_dtype = None if gathers_as_stored else DTYPES[self.layout.param_dtype]

        def dtypes(module: nn.Module) -> tuple[torch.dtype | None, torch.dtype]:
            is_double = any(p.dtype == torch.float64 for p in module.parameters())
            default = torch.float64 if is_double else torch.float32
            return param_dtype, DTYPES[fsdp.reduce_dtype] if fsdp.reduce_dtype else default

        for name in reversed(units):  # children before parents
            unit = model.get_submodule(name)
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(*dtypes(unit), cast_forward_inputs=False), **options)
        # Only the model's own inputs are cast, and only if autocast does not see to types.
        casts_inputs = self.layout.precision == "pure_bf16"
        for root in roots:
            fully_shard(
                root, mp_policy=MixedPrecisionPolicy(*dtypes(root), cast_forward_inputs=casts_inputs), **options
            )
        modules = {id(module): module for root in (model, *roots) for module in root.modules()}
        self._sharded = [module for module in modules.values() if isinstance(module, FSDPModule)]
        units_and_roots = {name: module for name, module in model.named_modules() if module in set(self._sharded)}
        self._frozen = FrozenWatch(units_and_roots)
        for root in roots if fsdp.forward_prefetch else ():
            inside = set(root.modules())
            inner = [unit for unit in map(model.get_submodule, units) if unit in inside]
            for before, following in pairwise([root, *inner]):
                before.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        for module in self._sharded:
            module.register_forward_hook(_reshard_without_backward)  # type: ignore[attr-defined]
            if self.reduction == "sum":
                # Both are needed, because gloo has no PREMUL_SUM.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def warm_up(self, loss_of_batch: Callable[[], Tensor]) -> None:
        """Runs one backward with a gradient of zero, while all trained parameters require gradients.

        fully_shard decides in its first forward in which dtype a unit's gradients are exchanged, from the parameters
        that require one. With several objectives some of them do not in the first forward of a step.
        """
        self.is_warm = True
        with module_state_kept([self.module]):
            loss = loss_of_batch()
            loss.backward(torch.zeros_like(loss))
        self.module.zero_grad()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        self.check_frozen()  # what earlier forwards have done
        root: Any = self.module
        root.set_requires_gradient_sync(last or self.layout.fsdp.reduce_every_micro_batch)
        root.set_requires_all_reduce(last)  # over replicas; shards of the sum can wait for it
        return nullcontext()

    def exchange(self, step: int) -> None:
        if self.compressed is not None:
            used = [(n, p.grad) for n, p in self.module.named_parameters() if p.requires_grad and p.grad is not None]
            self.compressed.sum_over_ranks({name: local_part(gradient) for name, gradient in used}, step)

    def check_frozen(self) -> None:
        if self._frozen is not None:
            self._frozen.check()

    def reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    def describe(self) -> str:
        sides = self.layout.mesh
        replicas, shards = sides["dp_replicate"], sides["dp_shard"]
        spread = f"{replicas} replicas × {shards} shards" if replicas > 1 else f"{shards} shards"
        units = f"{len(self.units)} units and the rest" if self.units else "the whole model at once"
        offload = ", parameters in the host's memory" if self.layout.fsdp.cpu_offload else ""
        return f"fsdp {self.layout.fsdp.sharding_strategy}, {spread}, {units}{offload}"


def _reshard_without_backward(module: Any, inputs: Any, output: Any) -> None:
    """Frees what no backward will use; `named_parameters` would otherwise give the gathered parameters."""
    if not torch.is_grad_enabled():
        module.reshard()
