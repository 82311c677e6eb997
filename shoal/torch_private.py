"""Everything that shoal uses of torch and torch does not document, with the reason. No other file does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Many tensors in one kernel, as torch's own optimizers compute; see training/lion.py.
from torch import _foreach_add_ as foreach_add_
from torch import _foreach_div as foreach_div
from torch import _foreach_lerp as foreach_lerp
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch import _foreach_sign_ as foreach_sign_
from torch import _foreach_zero_ as foreach_zero_
from torch._guards import CompileContext  # in which torch.compile makes a graph; see replace_in_graphs
from torch._subclasses.fake_tensor import FakeTensor  # what a planner computes with; see is_fake

# What torch.compile traces with, and triton_op replaces an operator in; see replace_in_graphs.
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# What a DTensor's constructor takes; see as_shard.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# What fully_shard makes of a dimension that was split before; see shape_and_offset.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.library import register_torch_dispatch

# The bases of all batch norms and of all dropouts, each kind by one name.
from torch.nn.modules.batchnorm import _BatchNorm as BATCH_NORM
from torch.nn.modules.dropout import _DropoutNd as DROPOUT
from torch.optim import Optimizer

# The extension point behind FlopCounterMode and CommDebugMode; documented by example, kept under an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "BATCH_NORM",
    "DROPOUT",
    "StridedShard",
    "TorchDispatchMode",
    "agree_on_static_shapes",
    "as_rows",
    "as_shard",
    "break_graph",
    "call_without_hooks",
    "compile_cache_folders",
    "compile_counts",
    "declare_skips_on_device",
    "default_store",
    "dump_flight_recorders",
    "foreach_add_",
    "foreach_div",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sign_",
    "foreach_zero_",
    "gradient_hooks",
    "has_dispatch_mode",
    "hide_warning_about_contexts",
    "is_fake",
    "keep_hooks_out_of_graphs",
    "move_towards",
    "num_graphs",
    "post_accumulate_hooks",
    "prepare_for_many_sizes",
    "replace_in_graphs",
    "scaled_product",
    "set_group_timeout",
    "shape_and_offset",
    "skip_greeting_itself",
    "skips_on_device",
    "storage_key",
    "uncompiled",
    "version_of",
]


def dump_flight_recorders() -> list[bytes]:
    """Returns what torch has recorded of the last collectives, as JSON: of NCCL, where it was built in, and of gloo.

    The documented way is files that torch writes at its own timeout, and they are pickles.
    """
    c10d: Any = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return [getattr(c10d, name)() for name in names if hasattr(c10d, name)]


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Returns the functions that `register_hook` was given. torch has no public list of them."""
    return [*(parameter._backward_hooks or {}).values()]


def post_accumulate_hooks(parameter: Tensor) -> list[Any]:
    """Returns the functions that `register_post_accumulate_grad_hook` was given."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(hooks or {}).values()]


def as_shard(local: Tensor, parameter: DTensor) -> DTensor:
    """Returns `local` as this rank's part of a DTensor with the layout of `parameter`.

    Not by DTensor.from_local, which moves it to the mesh's device: what is offloaded to the CPU has to stay there.
    """
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def as_rows(local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    """Returns `local` as this rank's rows of a DTensor of this shape, without from_local for the same reason."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets the timeout of a group: init_device_mesh does not ask for one. torch 2.15 has a public function for it."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=seconds), group)


def default_store() -> dist.Store:  # type: ignore[name-defined]
    """The store of the default process group, through which ranks can leave word for each other, whoever made it."""
    return distributed_c10d._get_default_store()


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors that share memory. On meta, data_ptr() is 0 for all tensors."""
    return tensor.untyped_storage()._cdata


def shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part, and its offset in the whole tensor.

    Where FSDP shards what tensor parallelism has split along the same dimension, its placement is a strided one: the
    split comes first, although its dimension of the mesh is the inner one.
    """
    shape, offset = [*tensor.shape], [0] * tensor.ndim
    sides = [side for side in enumerate(tensor.placements) if not side[1].is_replicate()]
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    for side, placement in sorted(sides, key=lambda side: isinstance(side[1], StridedShard)):
        assert isinstance(placement, Shard | StridedShard)
        dimension = placement.dim
        chunk = -(-shape[dimension] // tensor.device_mesh.size(side))
        start = min(chunk * place[side], shape[dimension])
        shape[dimension] = min(chunk, shape[dimension] - start)
        offset[dimension] += start
    return tuple(shape), tuple(offset)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Returns whether `step` divides gradients by the tensor `grad_scale`, and does nothing if `found_inf` is 1; either
    may be None.

    torch's GradScaler asks for the same attribute. Fused optimizers have it, and so may a user's own.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def declare_skips_on_device(optimizer: Optimizer) -> None:
    """Says so of an optimizer."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape and no memory, under FakeTensorMode."""
    return isinstance(tensor, FakeTensor)


def replace_in_graphs(name: str, function: Callable[..., Any]) -> None:
    """Makes graphs of torch.compile call a function in the place of an operator, below the operator's derivative.

    As torch.library.triton_op does it, for which torch has no public way. Not those of torch.export, which may be
    differentiated.
    """

    def call(mode: Any, operator: Any, types: Sequence[type], args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        if CompileContext.current_compile_id() is None:
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        if any(kind not in (Tensor, FunctionalTensor) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        with mode:
            return function(*args, **(kwargs or {}))

    register_torch_dispatch(name, FunctionalTensorMode, call)


def move_towards(values: list[Tensor], targets: list[Tensor], weight: Tensor) -> None:
    """Moves tensors towards others of the same shapes by a fraction that is a number on the device.

    By torch's functions for lists of tensors, which launch few kernels; torch.optim uses the same.
    """
    changes = torch._foreach_sub(targets, values)
    torch._foreach_mul_(changes, weight)
    torch._foreach_add_(values, changes)


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place, which autograd counts."""
    return tensor._version


def has_dispatch_mode() -> bool:
    """Returns whether a TorchDispatchMode sees the operations of this thread, such as FakeTensorMode."""
    return torch._C._len_torch_dispatch_stack() > 0


def keep_hooks_out_of_graphs(model: nn.Module) -> None:
    """Makes torch.compile run the forward hooks of modules as they are, instead of compiling them for each module."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = torch.compiler.disable(hook)


@contextmanager
def call_without_hooks(module: nn.Module) -> Iterator[None]:
    """Makes `module(...)` call the forward alone, without hooks."""
    before = module._compiled_call_impl
    module._compiled_call_impl = module.forward
    try:
        yield
    finally:
        module._compiled_call_impl = before


def skip_greeting_itself(stage: PipelineStage) -> None:
    """Stops torch 2.11 from sending a first message between two stages of the same rank, which gloo cannot do. torch
    2.15 has no such messages."""
    if hasattr(stage, "_get_init_p2p_neighbors_ops"):
        greet = stage._get_init_p2p_neighbors_ops
        stage._get_init_p2p_neighbors_ops = lambda: [op for op in greet() if op.peer != dist.get_rank()]  # type: ignore[method-assign]


def agree_on_static_shapes(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    """Answers in place of the other ranks, which an imagined world does not have: torch 2.13 lets all stages vote
    whether their shapes are known, and reads the result."""
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining._utils import InferenceMode

        def vote(*arguments: Any) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = vote


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module inside of torch.compile's wrapper, which puts `_orig_mod.` before every name."""
    return getattr(module, "_orig_mod", module)


class CompileCounts(NamedTuple):
    """What torch.compile has done in this process."""

    graphs: int
    breaks: int
    reason: str
    """Why the last graph was broken off, in torch's words."""


def scaled_product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    quick_sums: bool = False,
) -> Tensor:
    """Multiplies two matrices in fp8, and the result by both scales. `quick_sums` are less exact over many columns.

    torch.nn.functional.scaled_mm does the same and is documented, but torch (2.11 to 2.13) does not count its FLOPs.
    """
    product: Tensor = torch._scaled_mm(
        left, right, left_scale, right_scale, bias=bias, out_dtype=dtype, use_fast_accum=quick_sums
    )
    return product


def hide_warning_about_contexts() -> None:
    """Hides torch's warning that a compiled block is recomputed with a policy, which must not keep the outputs of
    operations in place. The policies of activation_checkpointing.py do not."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_of_contexts)


def _not_of_contexts(record: logging.LogRecord) -> bool:
    return "context_fn is passed" not in record.getMessage()


def break_graph() -> None:
    """Makes torch.compile end a graph here, and run what follows eagerly; an error where a graph may have no break."""
    torch._dynamo.graph_break()


def prepare_for_many_sizes() -> None:
    """Lets torch.compile keep 64 graphs of a function instead of 8, so that blocks of one class that differ in a
    number, such as their place, are compiled for several sizes each; what is beyond the limit runs uncompiled.

    Sizes that are equal by chance, such as 64 samples of 64 tokens, are taken for different ones: a graph for all sizes
    fits all sizes only then. torch's own messages advise this setting.
    """
    from torch._dynamo import config as dynamo
    from torch.fx.experimental import _config

    dynamo.recompile_limit = max(64, dynamo.recompile_limit)
    _config.use_duck_shape = False


def compile_cache_folders() -> tuple[Path, Path]:
    """Returns where torch.compile keeps what it has compiled, and the locks on what is being written."""
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()), Path(get_lock_dir())


@cache
def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


def num_graphs() -> int:
    """Returns how many graphs torch.compile has captured in this process. Cheap enough for every call of a block."""
    return int(_counters()["stats"]["unique_graphs"])


def compile_counts() -> CompileCounts:
    """Returns how many graphs torch.compile has captured in this process, and how often it had to break one off."""
    from torch._dynamo.utils import counters

    reasons = counters["graph_break"]
    reason = [*reasons][-1].partition("\n")[0] if reasons else ""
    return CompileCounts(counters["stats"]["unique_graphs"], reasons.total(), reason)
