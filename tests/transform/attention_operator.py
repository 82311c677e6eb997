"""An operator for tests, in a module that is imported once.

Test modules may be imported under two names, and an operator that is registered again leaves the first one without its
schema.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("shoal_tests::attention", mutates_args=())
def attention(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Stands for the kernels of GPUs, which draw the random numbers of their dropout themselves."""
    mask = torch.rand_like(x) >= dropout_p if dropout_p else torch.ones_like(x, dtype=torch.bool)
    return x * mask, mask


attention.register_autograd(
    lambda context, grad, _: (grad * context.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)
