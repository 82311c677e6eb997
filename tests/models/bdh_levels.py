"""The heads of a BDH level by the Triton kernels and by plain PyTorch in bf16, both beside float64."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.bdh.model import Rotary, norm, rotate
from shoal.models.bdh.triton_heads import TritonHeads, dropout_mask

SEED = 1234567
NAMES = ("y", "x", "encoder", "encoder_v", "decoder")


def inputs_of(
    heads: int, batch: int, time: int, embd: int, neurons: int, device: torch.device
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns x and the weights as numbers of bf16 in float64, and cos and sin."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, time, embd), (heads, embd, neurons), (heads, embd, neurons), (heads, neurons, embd))
    drawn = [torch.randn(shape, generator=generator) * (1.0 if i == 0 else 0.1) for i, shape in enumerate(shapes)]
    cos, sin = (table.to(device) for table in Rotary(neurons)(0, time))
    return [tensor.bfloat16().to(device).double().requires_grad_() for tensor in drawn], cos, sin


def errors_beside_plain(
    heads: int, batch: int, time: int, embd: int, neurons: int, dropout: float, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Returns how far the output and each gradient are from float64, by the kernels and by plain PyTorch in bf16."""
    exact, cos, sin = inputs_of(heads, batch, time, embd, neurons, device)
    kept = dropout_mask(SEED, (heads, batch, time, neurons), dropout).to(device) / (1 - dropout)
    to_y = torch.randn((batch, time, embd), generator=torch.Generator().manual_seed(1)).to(device)

    def plain(x: Tensor, encoder: Tensor, encoder_v: Tensor, decoder: Tensor) -> Tensor:
        active = torch.einsum("btd,hdn->hbtn", x, encoder).relu()
        keys = rotate(active, cos.to(x.dtype), sin.to(x.dtype))
        gates = torch.einsum("hbtd,hdn->hbtn", norm((keys @ keys.mT).tril(-1) @ x), encoder_v).relu()
        return torch.einsum("hbtn,hnd->hbtd", active * gates * kept.to(x.dtype), decoder).sum(0)

    def by_kernels(*inputs: Tensor) -> Tensor:
        y = TritonHeads.apply(*inputs, cos, sin, dropout, torch.tensor([SEED], device=device))
        assert isinstance(y, Tensor)
        return y

    results = []
    for compute in (plain, plain, by_kernels):
        inputs = exact if not results else [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        y = compute(*inputs)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, to_y.to(y.dtype))])
    right, of_plain, of_kernels = results
    return {
        name: tuple(float((found[i].double() - right[i]).norm() / right[i].norm()) for found in (of_kernels, of_plain))
        for i, name in enumerate(NAMES)
    }
