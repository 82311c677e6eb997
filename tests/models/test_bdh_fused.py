"""Compares the fused heads of BDH with the plain ones: values, gradients, dropout, products, and memory kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shoal.config.schema import ActivationCheckpointingConfig
from shoal.models.bdh import BDH, BDHConfig
from shoal.models.bdh.fused import FusedHeads
from shoal.models.bdh.model import Heads, State
from shoal.torch_private import compile_counts
from shoal.transform.activation_checkpointing import apply_activation_checkpointing
from shoal.transform.kernels import apply_kernels
from shoal.types import ParallelPlan

VOCAB = 11
NAMES = ("x", "encoder", "encoder_v", "decoder")


def pair(heads: int = 2, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[BDH, BDH]:
    """Returns a plain and a fused model with the same weights, large enough that all levels matter."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "mlp_internal_dim_multiplier": 4, **sizes}
    plain = BDH(BDHConfig(n_head=heads, dropout=dropout, vocab_size=VOCAB, **sizes)).to(dtype)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(20)
    fused = copy.deepcopy(plain)
    apply_kernels(fused, "fused", torch.device("cpu"))
    return plain, fused


def text(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def trained(
    model: BDH, tokens: Tensor, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, Tensor]:
    """Returns logits and gradients, with the random numbers of one seed."""
    torch.manual_seed(7)
    model.zero_grad()
    with around():
        logits, loss = model(tokens, tokens.roll(-1, 1))
    assert loss is not None
    loss.backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def distance(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach(), expected.detach()
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def check_near(value: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert value.keys() == expected.keys()
    assert {name: far for name in value if (far := distance(value[name], expected[name])) > relative} == {}


@pytest.fixture
def portable_bf16() -> Iterator[None]:
    """Turns oneDNN off: some virtual machines claim to support AMX, and the process crashes when oneDNN uses it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("heads", "shape"), [(2, (2, 7)), (1, (3, 13)), (4, (1, 1)), (1, (1, 2))])
def test_values_and_gradients_are_those_of_the_plain_heads(
    dtype: torch.dtype, relative: float, dropout: float, heads: int, shape: tuple[int, int]
) -> None:
    plain, fused = pair(heads, dropout, dtype)
    assert type(fused.levels[1].heads) is FusedHeads
    check_near(trained(fused, text(*shape)), trained(plain, text(*shape)), relative)


def heads_gradients(heads: Heads, inputs: dict[str, Tensor], tables: tuple[Tensor, Tensor]) -> Any:
    torch.manual_seed(7)
    y = heads(*inputs.values(), *tables)
    to_y = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(8))
    for tensor in inputs.values():
        tensor.grad = None
    y.backward(to_y)
    return y.detach(), [tensor.grad for tensor in inputs.values()]


def inputs_of(model: BDH, batch: int, time: int) -> dict[str, Tensor]:
    x = torch.randn(batch, time, model.config.n_embd, dtype=model.encoder.dtype, requires_grad=True)
    return dict(zip(NAMES, (x, model.encoder, model.encoder_v, model.decoder), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_all_four_gradients_of_one_level(dropout: float) -> None:
    """The gradient of x, too, which a model's parameters show only through the embedding."""
    plain, fused = pair(2, dropout)
    inputs, tables = inputs_of(plain, 3, 17), plain.attn(0, 17)
    expected_y, expected = heads_gradients(plain.levels[0].heads, inputs, tables)
    y, gradients = heads_gradients(fused.levels[0].heads, inputs, tables)
    assert distance(y, expected_y) < 1e-14
    for name, value, right in zip(NAMES, gradients, expected, strict=True):
        assert value.shape == inputs[name].shape
        assert distance(value, right) < 1e-14, name


def test_dropout_drops_the_same_and_not_in_evaluation() -> None:
    plain, fused = pair(2, 0.5)
    with_dropout = trained(fused, text(2, 9))
    for model in (plain, fused):
        model.eval()
    without = trained(fused, text(2, 9))
    assert distance(with_dropout["logits"], without["logits"]) > 0.01
    assert torch.equal(without["logits"], trained(plain, text(2, 9))["logits"])


@pytest.mark.usefixtures("portable_bf16")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bf16_is_as_near_to_float64_as_the_plain_heads_are(dropout: float) -> None:
    sizes = {"n_embd": 32, "mlp_internal_dim_multiplier": 8}
    exact, _ = pair(2, dropout, **sizes)
    plain, fused = pair(2, dropout, torch.float32, **sizes)
    for model in (exact, plain, fused):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(20)
    pure_plain, pure_fused = (copy.deepcopy(model).bfloat16() for model in (plain, fused))

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    # The mean over several texts: the factor of dropout is rounded in other places, so single errors differ.
    errors: dict[str, list[tuple[float, float, float, float]]] = {}
    for seed in range(6):
        tokens = text(2, 64, seed=seed)
        truth = trained(exact, tokens)  # on the CPU all dtypes draw the same random numbers
        results = [trained(model, tokens, autocast) for model in (plain, fused)]
        assert results[0]["logits"].dtype == results[1]["logits"].dtype
        results += [trained(model, tokens) for model in (pure_plain, pure_fused)]
        assert results[3]["encoder"].dtype == torch.bfloat16
        for name, value in truth.items():
            errors.setdefault(name, []).append(tuple(distance(result[name], value) for result in results))
    for name, rows in errors.items():
        of_plain, of_fused, of_pure_plain, of_pure_fused = torch.tensor(rows).mean(0).tolist()
        assert of_fused < min(1.2 * of_plain, 0.1), name
        assert of_pure_fused < min(1.2 * of_pure_plain, 0.1), name
    assert max(row[1] for row in errors["logits"]) < 0.05


def test_the_backward_works_twice_and_has_no_second_derivative() -> None:
    """The backward works in place on its own tensors alone. A second derivative is an error, and not a wrong number."""
    _, fused = pair(2, 0.3)
    heads, inputs, tables = fused.levels[0].heads, inputs_of(fused, 2, 5), fused.attn(0, 5)
    y = heads(*inputs.values(), *tables)
    first, second = (torch.autograd.grad(y.sum(), [*inputs.values()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    gradient = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_heads_of_two_ranks_add_up() -> None:
    """Tensor parallelism gives each rank some heads of each weight, and sums outputs and gradients of x."""
    plain, fused = pair(heads=4)
    inputs, tables = inputs_of(plain, 2, 6), plain.attn(0, 6)
    expected_y, (to_x, *to_weights) = heads_gradients(plain.levels[0].heads, inputs, tables)
    parts = []
    for rank in range(2):
        own = {name: tensor.detach().chunk(2)[rank].requires_grad_() for name, tensor in [*inputs.items()][1:]}
        parts.append(heads_gradients(fused.levels[0].heads, {"x": inputs["x"], **own}, tables))
    assert distance(sum(y for y, _ in parts), expected_y) < 1e-14
    assert distance(sum(gradients[0] for _, gradients in parts), to_x) < 1e-14
    for index, expected in enumerate(to_weights, 1):
        assert distance(torch.cat([gradients[index] for _, gradients in parts]), expected) < 1e-14


@pytest.mark.parametrize("frozen", NAMES[1:])
def test_a_frozen_weight_gets_no_gradient_and_costs_no_product(frozen: str) -> None:
    plain, fused = pair()
    flops = {}
    for kind, model in (("plain", plain), ("fused", fused), ("frozen", fused)):
        if kind == "frozen":
            for one in (plain, fused):
                one.get_parameter(frozen).requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            trained(model, text(2, 7))
        flops[kind] = counter.get_total_flops()
    check_near(trained(fused, text(2, 7)), trained(plain, text(2, 7)), 1e-14)
    # 2 levels, 2 × 7 tokens, 8 · 4 neurons in all heads, 8 channels
    assert flops["fused"] - flops["frozen"] == 2 * (2 * 14 * 32 * 8)


def kept_bytes(model: BDH, level: Callable[..., Tensor], batch: int, time: int) -> tuple[int, Tensor]:
    """Returns the bytes that a level keeps for its backward, other than weights and tables, and its output."""
    x, tables = inputs_of(model, batch, time)["x"], model.attn(0, time)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = level(x, model.encoder, model.encoder_v, model.decoder, *tables)
    free = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *tables)}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in free), y


def test_the_backward_has_one_product_fewer_over_neurons() -> None:
    heads, embd, batch, time = 4, 16, 2, 24
    plain, fused = pair(heads, 0.1, n_layer=1, n_embd=embd, mlp_internal_dim_multiplier=32)
    neurons, tokens = plain.config.neurons_per_head, heads * batch * time  # tokens of each head
    with_weights, between_tokens, of_values = (
        2 * tokens * embd * neurons,
        2 * tokens * time * neurons,
        2 * tokens * time * embd,
    )
    flops = []
    for model in (plain, fused):
        inputs, tables = inputs_of(model, batch, time), model.attn(0, time)
        with FlopCounterMode(display=False) as counter:
            heads_gradients(model.levels[0].heads, inputs, tables)
        flops.append(counter.get_total_flops())
    assert flops[0] == 9 * with_weights + 3 * between_tokens + 3 * of_values
    assert flops[1] == 9 * with_weights + 2 * between_tokens + 3 * of_values


@pytest.mark.parametrize(("dropout", "fraction"), [(0.0, 0.52), (0.1, 0.42)])
def test_two_tensors_over_neurons_are_kept(dropout: float, fraction: float) -> None:
    heads, embd, batch, time = 4, 16, 2, 24
    sizes = {"n_layer": 1, "n_embd": embd, "mlp_internal_dim_multiplier": 128}
    plain, fused = pair(heads, dropout, torch.float32, **sizes)
    of_plain, of_fused = (kept_bytes(model, model.levels[0].heads, batch, time)[0] for model in (plain, fused))
    per_token = 2 * plain.config.neurons_per_head + time + embd  # neurons and gates, scores, attended
    assert of_fused == 4 * (heads * batch * time * per_token + batch * time * embd)
    assert of_fused < fraction * of_plain


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputed_blocks_have_the_same_gradients(mode: Any, dropout: float) -> None:
    """To the bit: the recomputation drops the same. Selective checkpointing keeps outputs of products, which must not
    be changed in place."""
    _, fused = pair(2, dropout, torch.float32)
    recomputed = copy.deepcopy(fused)
    plan = ParallelPlan(blocks=("levels.0", "levels.1"))
    apply_activation_checkpointing(recomputed, plan, ActivationCheckpointingConfig(mode=mode))
    expected, value = trained(fused, text(2, 9)), trained(recomputed, text(2, 9))
    assert [name for name in expected if not torch.equal(value[name], expected[name])] == []


def test_generation_is_the_plain_one() -> None:
    plain, fused = pair(2, 0.3)
    assert torch.equal(*(model.generate(text(2, 4), 12, temperature=0) for model in (plain, fused)))
    plain.eval(), fused.eval()
    logits = []
    for model in (plain, fused):
        state = State(2)
        with torch.no_grad():
            logits.append(torch.cat([model(part, state=state)[0] for part in text(2, 9).split([5, 1, 3], 1)], 1))
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], fused(text(2, 9))[0])


def test_state_dicts_are_the_same() -> None:
    plain, fused = pair()
    fused.load_state_dict(plain.state_dict(), strict=True)
    assert [*plain.state_dict()] == [*fused.state_dict()]


@pytest.mark.slow
@pytest.mark.usefixtures("portable_bf16")
@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled(precision: str, dropout: float) -> None:
    """One graph without breaks; the same numbers, and also random numbers, as the plain level compiled; and what is
    kept for the backward is what the fused one keeps, although torch.compile decides that by itself."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    plain, fused = pair(2, dropout, dtype, n_embd=32, mlp_internal_dim_multiplier=64)
    results, kept = [], []

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")

    for model in (plain, fused):
        torch.compiler.reset()
        before = compile_counts()
        for level in model.levels:
            level.compile(fullgraph=True)
        results.append(trained(model, text(4, 64), autocast))
        assert compile_counts().breaks == before.breaks
        with autocast():
            kept.append(kept_bytes(model, model.levels[0], 4, 64)[0])
    check_near(results[1], results[0], 1e-12 if precision == "float64" else 0.1)
    assert kept[1] < 0.6 * kept[0]
