"""Everything shoal uses of torch that torch does not document, with the reason. Nothing private elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

# The bases of all batch norms and of all dropouts, each kind by one name.
from torch.nn.modules.batchnorm import _BatchNorm as BATCH_NORM
from torch.nn.modules.dropout import _DropoutNd as DROPOUT

# The extension point behind FlopCounterMode and CommDebugMode; documented by example, kept under an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BATCH_NORM", "DROPOUT", "TorchDispatchMode", "compiled_graphs", "storage_key", "uncompiled"]


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory. On the meta device data_ptr() is 0 for all of them."""
    return tensor.untyped_storage()._cdata


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that was given to torch.compile, whose wrapper puts `_orig_mod.` before every name."""
    return getattr(module, "_orig_mod", module)


def compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process: proof that it engaged."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
