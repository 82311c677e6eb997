"""Quantised layers compute what bitsandbytes' own do, to the bit, and their tensors are plain."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.quantised import EightBit, FourBit, QuantisedLinear, dequantise, quantise_layers, quantised_layers
from shoal.quantised.layers import check_gathered
from shoal.quantised.schemes import Scheme

bitsandbytes = pytest.importorskip("bitsandbytes")

SHAPES = [(128, 192), (48, 36), (96, 64), (3, 2)]
"""Whole blocks, blocks across rows, a last block that is shorter, and a single block."""


def linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)


def by_bitsandbytes(layer: nn.Linear, scheme: Scheme) -> nn.Module:
    rows, columns = layer.weight.shape
    if isinstance(scheme, FourBit):
        quantised = bitsandbytes.nn.Linear4bit(
            columns,
            rows,
            compute_dtype=layer.weight.dtype,
            compress_statistics=scheme.double,
            quant_type=scheme.quant_type,
            quant_storage=getattr(torch, scheme.storage),
        )
    else:
        quantised = bitsandbytes.nn.Linear8bitLt(columns, rows, has_fp16_weights=False, threshold=6.0)
    quantised.load_state_dict(layer.state_dict())
    return quantised.to("cpu")


def output_and_gradient(layer: nn.Module, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(4, 5, columns, dtype=dtype, requires_grad=True)
    output = layer(inputs)
    output.backward(torch.randn_like(output))
    assert inputs.grad is not None
    return output.detach(), inputs.grad


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bits_are_those_of_bitsandbytes(quant_type: str, double: bool, storage: str) -> None:
    scheme = FourBit(quant_type, double, storage)  # type: ignore[arg-type]
    for rows, columns in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            if rows * columns // 2 % scheme.dtypes["weight"].itemsize:
                continue  # bitsandbytes refuses it
            layer = linear(rows, columns, dtype)
            ours, theirs = QuantisedLinear(layer, scheme), by_bitsandbytes(layer, scheme)
            assert torch.equal(ours.weight.view(torch.uint8), theirs.weight.data.view(torch.uint8))
            for mine, other in zip(*(output_and_gradient(one, columns, dtype) for one in (ours, theirs)), strict=True):
                assert torch.equal(mine, other)


def test_8_bits_are_those_of_bitsandbytes() -> None:
    layer = linear(96, 64)
    ours, theirs = QuantisedLinear(layer, EightBit()), by_bitsandbytes(layer, EightBit())
    for mine, other in zip(*(output_and_gradient(one, 64, torch.float32) for one in (ours, theirs)), strict=True):
        assert torch.equal(mine, other)


def test_8_bit_layers_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    """bitsandbytes warns in every call that bf16 is cast, which floods a run's console."""
    model = nn.Sequential(nn.Linear(64, 32))
    quantise_layers(model, EightBit(), set(), "model.load_in_8bit")
    for _ in range(3):
        model(torch.randn(2, 64).bfloat16())
    assert len([record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]) <= 1


def test_numbers_do_not_depend_on_threads() -> None:
    matrix, scheme = torch.randn(512, 5120), FourBit(double=True)
    threads = torch.get_num_threads()
    statistics = []
    for number in (1, 4):
        torch.set_num_threads(number)
        statistics.append(scheme.quantise("statistics", matrix))
    torch.set_num_threads(threads)
    assert torch.equal(*statistics)


def test_autocast_and_the_compute_dtype() -> None:
    inputs, layer = torch.randn(3, 64), linear(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert QuantisedLinear(layer, FourBit())(inputs).dtype == torch.bfloat16
        in_fp32 = QuantisedLinear(layer, FourBit(compute="float32"))(inputs)
    assert torch.equal(in_fp32, QuantisedLinear(layer, FourBit())(inputs).bfloat16())
    in_bf16 = QuantisedLinear(layer, FourBit(compute="bfloat16"))
    assert torch.equal(in_bf16(inputs), in_bf16(inputs.bfloat16()).float())


def test_a_model_is_quantised_and_dequantised() -> None:
    model = nn.Sequential(linear(64, 32), nn.ReLU(), nn.Sequential(linear(8, 64)), linear(5, 8))
    quantise_layers(model, FourBit(), {"3"}, "model.load_in_4bit")
    assert [*quantised_layers(model)] == ["0", "2.0"]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    inputs = torch.randn(2, 32)
    plain = dequantise(copy.deepcopy(model))
    assert not quantised_layers(plain)
    torch.testing.assert_close(plain(inputs), model(inputs))


class Router(nn.Linear):
    """Computes something else than a linear layer, as routers of experts in transformers."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input).topk(2)


def test_shared_layers_stay_one_and_other_linear_layers_are_left() -> None:
    model = nn.ModuleDict({"first": linear(64, 32), "router": Router(32, 4)})
    model["second"] = model["first"]
    quantise_layers(model, FourBit(), set(), "model.load_in_4bit")
    assert isinstance(model["first"], QuantisedLinear)
    assert model["second"] is model["first"]
    assert type(model["router"]) is Router


@pytest.mark.parametrize("shape", [(64, 96), (96, 100), (5, 7)])
def test_rows_need_not_be_whole_blocks(shape: tuple[int, int]) -> None:
    """bitsandbytes 0.50 gives wrong numbers for the first shape on a CPU."""
    layer = linear(*shape)
    error = (QuantisedLinear(layer, FourBit()).dequantise() - layer.weight).abs().max()
    assert error < 0.16 * layer.weight.abs().max()  # half of the largest distance between two of the 16 values


@pytest.mark.slow
def test_it_compiles_as_one_graph() -> None:
    model = nn.Sequential(linear(64, 32), nn.ReLU(), linear(8, 64))
    quantise_layers(model, FourBit(double=True), (), "model.load_in_4bit")
    inputs = torch.randn(2, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(model(inputs).sum(), inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(inputs).sum(), inputs)
    assert torch.equal(gradient, expected)


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model.load_in_4bit: the model has no linear layers"):
        quantise_layers(nn.Sequential(nn.Conv1d(2, 2, 1)), FourBit(), (), "model.load_in_4bit")
    model = nn.Sequential(linear(64, 32))
    quantise_layers(model, FourBit(storage="float32"), (), "model.load_in_4bit")
    with pytest.raises(UserError, match=r"kept as float32; set model.bnb_4bit_quant_storage to uint8 or bfloat16"):
        check_gathered(model, torch.bfloat16, "distributed.fsdp.param_dtype = bf16")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"the package bitsandbytes is missing; run `pip install shoal\[quant\]`"):
        quantise_layers(nn.Sequential(linear(64, 32)), FourBit(), (), "model.load_in_4bit")
