"""A block with adapters beside a base in 4 bits keeps little for its backward, and computes no product in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from shoal.config.schema import ActivationCheckpointingConfig
from shoal.lora import LoraConfig, dropout
from shoal.lora.adapters import add_adapters
from shoal.quantised import FourBit, QuantisedLinear, quantise_layers
from shoal.transform.activation_checkpointing import apply_activation_checkpointing
from shoal.transform.compile import CompiledModules
from shoal.transform.kernels import apply_kernels
from shoal.types import ParallelPlan
from shoal.verify.draws import turn_off_dropout

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

ROWS, TIME, WIDTH, INNER = 2, 128, 128, 344
"""In the proportions of a Llama of 7 billion parameters with 8,192 tokens."""
UNIT = ROWS * TIME * WIDTH * 2
"""The bytes of one activation (rows, time, width) in bf16."""
BLOCK = "model.layers.0"


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles without generating code; what is kept for the backward is decided before that."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    yield
    torch._dynamo.reset()


def llama(mode: str, compiled: bool, dropout: float = 0.05) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    quantise_layers(model, FourBit(double=True), {"lm_head"}, "model.load_in_4bit")
    lora = LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    add_adapters(model, lora)
    plan = ParallelPlan(blocks=(BLOCK,), head="lm_head")
    if dropout:
        assert len(apply_kernels(model, "fused", torch.device("cpu"))) == 7
    modules = CompiledModules(model, plan) if compiled else None
    apply_activation_checkpointing(model, plan, ActivationCheckpointingConfig(mode=mode))
    if modules:
        modules.compile(torch.device("cpu"))
    return model.train()


def run_block(model: Any) -> tuple[Tensor, Tensor]:
    """Returns the input and the output of the block."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, TIME, WIDTH).bfloat16().requires_grad_()
    positions = model.model.rotary_emb(x, torch.arange(TIME)[None])
    with torch.autocast("cpu", torch.bfloat16):
        return x, model.get_submodule(BLOCK)(x, position_embeddings=positions)


def units_kept(model: Any) -> float:
    """Returns what the block keeps besides parameters and its inputs, as a multiple of one activation."""
    run_block(model)[1].sum().backward()  # compiles
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        x, output = run_block(model)
    for tensor in (x, *model.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    positions = 2 * TIME * WIDTH // 2 * 2  # cosines and sines of one head
    output.sum().backward()
    return (sum(kept.values()) - positions) / UNIT


def test_a_compiled_and_recomputed_block_keeps_its_input_alone(quick_compile: None) -> None:
    """torch 2.11 kept what a torch.autograd.Function computed: 15 activations."""
    rng_states = 8 * torch.get_rng_state().nbytes / UNIT  # on a GPU, inductor draws from seeds of 8 bytes
    assert units_kept(llama("full", compiled=True)) <= rng_states


def test_a_compiled_block_keeps_neither_matrices_nor_masks(quick_compile: None) -> None:
    """Kept are the inputs of the layers, queries, keys, values, the middle of the block, gate and up."""
    activations = 7 + 3 * INNER / WIDTH
    rng_states = 7 * torch.get_rng_state().nbytes / UNIT
    assert units_kept(llama("none", compiled=True)) < activations + rng_states + 0.7  # adapters in bf16, statistics


@pytest.mark.parametrize("compiled", [False, True])
def test_the_last_product_is_not_repeated(quick_compile: None, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    model = llama("full", compiled)
    run_block(model)[1].sum().backward()
    times, dequantise = [0], FourBit.dequantise

    def counted(*args: Any) -> Tensor:
        times[0] += 1
        return dequantise(*args)

    monkeypatch.setattr(FourBit, "dequantise", counted)
    run_block(model)[1].sum().backward()
    assert times == [7 + 6 + 7]  # forward, recomputation, gradients of inputs


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_keeps_every_second_product_with_the_base(
    quick_compile: None, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """And the first product of each adapter, which does not count, or every second one would always be of that kind."""
    model = llama("selective", compiled)
    run_block(model)[1].sum().backward()
    output, times, dequantise = run_block(model)[1], [0], FourBit.dequantise

    def counted(*args: Any) -> Tensor:
        times[0] += 1
        return dequantise(*args)

    monkeypatch.setattr(FourBit, "dequantise", counted)
    output.sum().backward()
    assert times == [7 + 3]  # gradients of inputs, and every second product again


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiling_changes_no_gradient(quick_compile: None, mode: str) -> None:
    results = []
    for compiled in (False, True):
        model = llama(mode if compiled else "none", compiled, dropout=0)
        x, output = run_block(model)
        output.float().square().sum().backward()
        assert x.grad is not None
        results.append([output, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == 2 + 14
    for expected, found in zip(*results, strict=True):
        assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()  # bf16 has 8 bits


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_are_drawn_again_as_they_were(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The output is linear in each factor, so each factor times its gradient sums to it, if all masks agree.

    It also proves the scaling: inductor leaves out the alpha of torch.add beside a product of two dimensions.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 24, bias=False), nn.Linear(24, 8, bias=False)))
    add_adapters(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["0.0", "0.1"], init_lora_weights=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in model[0]:
        nn.init.zeros_(layer.weight)
    apply_kernels(model, "fused", torch.device("cpu"))
    modules = CompiledModules(model, ParallelPlan(blocks=("0",)))
    modules.compile(torch.device("cpu"))
    x, outputs = torch.randn(64, 32, requires_grad=True), []
    for _ in range(2):
        x.grad = None
        model.zero_grad()
        output = model(x).square().sum() / 2
        output.backward()
        outputs.append(output.detach())
        for factor in (x, *trained):
            assert factor.grad is not None
            torch.testing.assert_close((factor * factor.grad).sum() / 2, output)
    assert len(trained) == 4
    assert not torch.equal(*outputs)
    assert modules.eager_calls == 0
    torch._dynamo.reset()


def test_the_operator_is_registered_as_torch_wants() -> None:
    torch.manual_seed(0)
    layer = QuantisedLinear(nn.Linear(64, 32).requires_grad_(False), FourBit(double=True))
    tensors = torch.randn(3, 5, 64, requires_grad=True), layer.weight, layer.statistics, layer.bias
    options = layer.scheme.quant_type, layer.scheme.double, layer.shape, False
    factors = torch.randn(3, 5, 4, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    for added in ((None, None), factors):
        torch.library.opcheck(torch.ops.shoal.multiply_4bit.default, (*tensors, *added, *options))


def test_second_derivatives_of_a_4_bit_layer() -> None:
    torch.manual_seed(0)
    layer = QuantisedLinear(nn.Linear(128, 96).requires_grad_(False), FourBit(double=True))
    inputs = [torch.randn(size, requires_grad=True) for size in ((2, 5, 128), (2, 5, 8), (96, 8))]
    square = layer(inputs[0], (inputs[1], inputs[2])).square().sum()
    (first,) = torch.autograd.grad(square, inputs[0], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), inputs[0])
    matrix = layer.dequantise()
    torch.testing.assert_close(second, (2 * matrix.mT @ matrix).sum(1).expand_as(second))


@pytest.mark.parametrize("alpha", [4, 12])
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_an_adapter_that_a_4_bit_layer_cannot_add_is_added_beside_it(alpha: int, compute: str | None) -> None:
    """The bias of B is scaled and trained, and an adapter keeps its dtype if the matrix is multiplied in another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False).requires_grad_(False))
    quantise_layers(model, FourBit(double=True, compute=compute), (), "model.load_in_4bit")
    bias = compute is None
    lora = {"r": 4, "lora_alpha": alpha, "lora_dropout": 0.5, "init_lora_weights": False, "lora_bias": bias}
    add_adapters(model, LoraConfig(**lora, target_modules=["0"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 3 if bias else 2
    x, results = torch.randn(5, 64), []
    for fused in (False, True):
        if fused:
            apply_kernels(model.train(), "fused", torch.device("cpu"))
            turn_off_dropout(model)
        else:
            model.eval()
        y = model(x)
        results.append([y, *torch.autograd.grad(y, trained, 1e-8 * torch.ones_like(y))])
    for plain, fused_one in zip(*results, strict=True):
        assert (plain - fused_one).norm() <= 1e-5 * plain.norm()


def test_a_matrix_that_changes_between_forward_and_backward_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(64, 48, bias=False).requires_grad_(False))
    quantise_layers(model, FourBit(), (), "model.load_in_4bit")
    add_adapters(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["0"]))
    apply_kernels(model.train(), "fused", torch.device("cpu"))
    y = model(torch.randn(5, 64)).sum()
    with torch.no_grad():
        model.get_parameter("0.lora_B.default.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("bias", [False, True])
def test_a_4_bit_layer_adds_its_adapter_where_its_output_is(bias: bool) -> None:
    """By its large product, without a sum of two outputs. Values and gradients are those of both apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=bias).requires_grad_(False))
    quantise_layers(model, FourBit(double=True), (), "model.load_in_4bit")
    add_adapters(model, LoraConfig(r=4, lora_alpha=12, lora_dropout=0.5, init_lora_weights=False, target_modules=["0"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    apply_kernels(model.train(), "fused", torch.device("cpu"))
    turn_off_dropout(model)
    x = torch.randn(2, 5, 64, requires_grad=True)
    first, second = trained
    expected = F.linear(x, model[0].dequantise(), model[0].bias) + 3 * F.linear(F.linear(x, first), second)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:  # it looks into operators
        found = model(x)
    shapes = [[10, 48]], [[2, 5, 48]]  # of the layer's output
    on_output = Counter(event.name for event in profiled.events() if event.input_shapes[:1] in shapes)
    assert on_output["aten::addmm_"] == 1
    assert on_output["aten::add"] == on_output["aten::add_"] == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(found)
    for one, other in zip(
        *(torch.autograd.grad(y, (x, first, second), gradient) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_compiled_block_computes_the_first_products_of_adapters_once(
    quick_compile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are small, so a recomputed block keeps them. Each adapter drops in that product and in its two gradients."""
    model = llama("full", compiled=True)
    run_block(model)[1].sum().backward()
    times, kept_places = [0], dropout.kept_places

    def counted(*args: Any) -> Tensor:
        times[0] += 1
        return kept_places(*args)

    monkeypatch.setattr(dropout, "kept_places", counted)
    run_block(model)[1].sum().backward()
    assert times[0] == 3 * 7
