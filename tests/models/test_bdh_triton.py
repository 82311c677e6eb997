"""The function around the Triton kernels of BDH, on the CPU: plain PyTorch stands in for each of its kernels.

`tests/gpu` compares the kernels themselves with float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models.bdh_levels import SEED, errors_beside_plain, inputs_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.models.bdh import BDH, BDHConfig, fused, gluon_heads, triton_heads
from shoal.models.bdh.gluon_heads import interleaved
from shoal.models.bdh.model import Heads, rotate
from shoal.models.bdh.triton_heads import TritonHeads, dropout_mask, why_not
from shoal.transform.kernels import apply_kernels


def encode(x: Tensor, encoder: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    neurons = torch.einsum("btd,hdn->hbtn", x.float(), encoder.float()).relu().to(x.dtype)
    return neurons, rotate(neurons.float(), cos.float(), sin.float()).to(x.dtype)


def gate(normed: Tensor, encoder_v: Tensor, neurons: Tensor, dropout: float, seed: Tensor) -> Tensor:
    gates = torch.einsum("hbtd,hdn->hbtn", normed.float(), encoder_v.float()).relu()
    kept = dropout_mask(int(seed), neurons.shape, dropout) / (1 - dropout)
    return (neurons.float() * gates * kept).to(neurons.dtype)


def gate_backward(
    x: Tensor, to_y: Tensor, encoder: Tensor, decoder: Tensor, gated: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    active = torch.einsum("btd,hdn->hbtn", x.float(), encoder.float()).relu().to(x.dtype).float()
    to_gated = torch.einsum("btd,hnd->hbtn", to_y.float(), decoder.float()).where(gated > 0, 0)
    to_neurons = (to_gated * gated.float() / active.where(active > 0, 1) + 0.0).where(active > 0, -0.0)
    return (to_gated * active * scale).to(gated.dtype), to_neurons.to(gated.dtype)


def keys_backward(scores: Tensor, keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return neurons_backward((scores.float() @ keys.float()).to(keys.dtype), to_neurons, cos, sin)


def neurons_backward(to_keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    total = rotate(to_keys.float(), cos.float(), -sin.float()) + to_neurons.float()
    inactive = (to_neurons == 0) & to_neurons.signbit()
    return total.masked_fill(inactive, 0).to(to_keys.dtype)


@pytest.fixture(autouse=True)
def on_cpus() -> Iterator[None]:
    """The operators compute on the CPU by the functions above. oneDNN is off, as in test_bdh_fused.py."""
    for function in (encode, gate, gate_backward, keys_backward, neurons_backward):
        getattr(triton_heads, function.__name__).register_kernel("cpu")(function)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [(2, 3, 40, 16, 128), (1, 2, 64, 32, 192), (3, 2, 37, 64, 64), (2, 1, 2060, 16, 64)])
def test_outputs_and_gradients_are_as_near_to_float64_as_those_of_plain_bf16(
    sizes: tuple[int, int, int, int, int], dropout: float
) -> None:
    """Also with an odd number of heads, which the backward halves, and in chunks of a long sequence."""
    for name, (error, of_plain) in errors_beside_plain(*sizes, dropout, torch.device("cpu")).items():
        assert error < 1.6 * of_plain + 0.002, name


def test_a_frozen_weight_gets_no_gradient_and_products_are_counted() -> None:
    heads, batch, time, embd, neurons = sizes = (2, 3, 8, 16, 64)
    exact, cos, sin = inputs_of(*sizes, torch.device("cpu"))
    inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    with_weights, tokens = 2 * heads * batch * time * embd * neurons, heads * batch * time
    for frozen in range(4):
        for i, tensor in enumerate(inputs):
            tensor.grad = None
            tensor.requires_grad_(frozen == 0 or i != frozen)
        with FlopCounterMode(display=False) as counter:
            y = TritonHeads.apply(*inputs, cos, sin, 0.1, torch.tensor([SEED]))
            assert isinstance(y, Tensor)
            y.sum().backward()
        assert [tensor.grad is None for tensor in inputs] == [i == frozen > 0 for i in range(4)]
        between_tokens, of_values = 2 * tokens * time * neurons, 2 * tokens * time * embd
        products = 10 - (frozen > 0)  # neurons are computed twice
        assert counter.get_total_flops() == products * with_weights + 2 * between_tokens + 3 * of_values


def test_weights_are_prepared_once_for_all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of levels that prepare them, each for itself."""
    model = BDH(BDHConfig(n_layer=3, n_embd=16, n_head=2, mlp_internal_dim_multiplier=16, vocab_size=11))
    apply_kernels(model, "fused", torch.device("cpu"))
    monkeypatch.setattr(fused, "why_not", lambda *args: None)
    calls: list[int] = []
    arrange = triton_heads._arranged
    monkeypatch.setattr(triton_heads, "_arranged", lambda weight: (calls.append(1), arrange(weight))[1])
    tokens, results = torch.arange(24).view(2, 12) % 11, []
    for prepared in (True, False):
        if not prepared:
            monkeypatch.setattr(fused.FusedHeads, "prepare", Heads.prepare)
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(tokens, tokens)
        assert loss is not None
        loss.backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
        assert len(calls) == (2 if prepared else 2 + 2 * 3)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("time", [5, 256, 300, 700, 2048])
def test_scores_of_later_tokens_are_left_out(time: int) -> None:
    keys = torch.randn(2, 1, time, 4, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        scores = triton_heads.earlier_scores(keys).tril(-1)
    torch.testing.assert_close(scores, (keys @ keys.mT).tril(-1))
    whole = 2 * keys.numel() * time
    assert counter.get_total_flops() == whole if time <= 256 else counter.get_total_flops() < 0.93 * whole


def test_the_dropout_mask_is_fair_and_follows_the_seed() -> None:
    shape = (2, 4, 64, 256)
    masks = [dropout_mask(seed, shape, 0.2).double() for seed in (1, 2)]
    for mask in masks:
        assert abs(mask.mean().item() - 0.8) < 4 * (0.2 * 0.8 / mask.numel()) ** 0.5
        for neighbours in (mask[..., 1:] * mask[..., :-1], mask[:, :, 1:] * mask[:, :, :-1], mask[1] * mask[0]):
            assert abs(neighbours.mean().item() - 0.64) < 0.01
    assert abs((masks[0] * masks[1]).mean().item() - 0.64) < 0.01
    assert dropout_mask(1, shape, 0.0).all()


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.bfloat16, "Triton needs a CUDA device, and this is cpu"), ("mps", torch.float16, "CUDA device")],
)
def test_reasons_against_the_kernels(device: str, dtype: torch.dtype, reason: str) -> None:
    assert reason in str(why_not(torch.device(device), dtype, 256, 8192))


def test_interleaved_columns_come_in_order_from_the_tensor_cores() -> None:
    """A product leaves columns 8j + 2q and 8j + 2q + 1 with thread q of four, for each j."""
    columns = interleaved(torch.arange(64).expand(3, 64)).view(3, 2, 4, 4, 2)
    of_threads = columns.transpose(2, 3).flatten(1)
    assert of_threads.equal(torch.arange(64).expand(3, 64))
    weight = torch.randn(2, 3, 96)
    assert interleaved(interleaved(weight)).equal(weight)


@pytest.mark.parametrize(
    ("found", "embd", "neurons", "reason"),
    [
        ("3.6.0", 256, 8192, None),
        ("3.9.0", 256, 8192, "Triton 3.6; this is 3.9.0"),
        ("3.6.0", 128, 8192, "n_embd = 256"),
        ("3.6.0", 256, 192, "a multiple of 128 neurons"),
    ],
)
def test_reasons_against_gluon(
    monkeypatch: pytest.MonkeyPatch, found: str, embd: int, neurons: int, reason: str | None
) -> None:
    monkeypatch.setattr(gluon_heads, "version", lambda package: found)
    given = gluon_heads.why_not.__wrapped__(embd, neurons)
    assert given is None if reason is None else reason in str(given)
