from __future__ import annotations

from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoal.observe.flops import copy_on_meta, count_forward_flops, flop_counter, peak_flops
from shoal.observe.memory import memory_gib
from shoal.tensors import map_tensors

BATCH, WIDTH, HIDDEN = 3, 8, 16


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.again = self.down  # tied
        self.register_buffer("scale", torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * self.scale
        return self.down(hidden) + self.again(hidden)


def count(model: nn.Module, *inputs: Tensor) -> int | None:
    copy = copy_on_meta(model)
    assert copy is not None
    return count_forward_flops(lambda: copy(*inputs))


EXPECTED = 3 * 2 * BATCH * WIDTH * HIDDEN


def test_flops_of_linears_equal_the_formula_and_the_model_is_unchanged() -> None:
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert count(model, torch.zeros(BATCH, WIDTH, device="meta")) == EXPECTED
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_flops_with_parameters_on_meta_and_buffers_real() -> None:
    model = Stack()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    assert model.scale.device.type == "cpu"
    assert count(model, torch.zeros(BATCH, WIDTH, device="meta")) == EXPECTED


def test_the_copy_on_meta_never_copies_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor, memo: object) -> None:
        pytest.fail("a tensor with values was copied")

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)
    monkeypatch.setattr(Tensor, "__deepcopy__", refuse)
    assert count(Stack(), torch.zeros(BATCH, WIDTH, device="meta")) == EXPECTED


def test_attention_is_counted_on_meta() -> None:
    heads, time, size = 4, 16, 8
    attention = nn.functional.scaled_dot_product_attention
    q = torch.zeros(BATCH, heads, time, size, device="meta")
    assert count_forward_flops(lambda: attention(q, q, q)) == 4 * BATCH * heads * time**2 * size


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_fewer_key_heads_than_queries_are_counted(device: str) -> None:
    heads, time, size = 4, 16, 8
    q, k, v = (torch.zeros(BATCH, n, time, size, device=device, requires_grad=True) for n in (heads, 2, 2))
    with flop_counter() as counter:
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == 4 * BATCH * heads * time**2 * size
    assert 2 * forward <= counter.get_total_flops() - forward <= 2.5 * forward


def test_control_flow_that_depends_on_values_gives_none() -> None:
    class BranchesOnValues(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    assert count(BranchesOnValues(WIDTH, WIDTH), torch.zeros(BATCH, WIDTH, device="meta")) is None


def test_mapping_tensors_keeps_the_nesting() -> None:
    class Pair(NamedTuple):
        left: Tensor
        right: int

    tree = {"a": [torch.zeros(2), (torch.ones(3, dtype=torch.int64), "text")], "b": Pair(torch.zeros(1), 7)}
    meta = map_tensors(lambda tensor: tensor.to("meta"), tree)
    assert meta["a"][0].device.type == meta["a"][1][0].device.type == meta["b"].left.device.type == "meta"
    assert (meta["a"][1][0].shape, meta["a"][1][0].dtype) == ((3,), torch.int64)
    assert (meta["a"][1][1], meta["b"].right, type(meta["b"])) == ("text", 7, Pair)
    batch = UserDict(x=torch.zeros(2))  # collators of Hugging Face return such batches
    meta_batch = map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert isinstance(meta_batch, UserDict)
    assert (meta_batch["x"].device.type, batch["x"].device.type) == ("meta", "cpu")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "fp16", None),
        ("NVIDIA GeForce RTX 3090", "tf32", 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", "tf32", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "int3", None),
    ],
)
def test_peak_by_device_name(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tflops: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = peak_flops("cuda:0", precision)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_no_peak_for_a_cpu() -> None:
    assert peak_flops("cpu", "fp32") is None


def test_memory_rises_and_falls_with_the_process() -> None:
    before = memory_gib("cpu")
    held = torch.ones(2**26)  # a quarter of a GiB
    grown = memory_gib("cpu")
    assert 0.2 < grown - before < 0.5
    del held
    assert memory_gib("cpu") < grown - 0.2
