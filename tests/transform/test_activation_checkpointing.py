"""Recomputing changes no gradient, keeps less, and computes more: each is counted."""

from __future__ import annotations

import importlib
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode
from transform.attention_operator import attention

from shoal.config.schema import ActivationCheckpointingConfig
from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.torch_private import TorchDispatchMode, compile_counts
from shoal.transform.activation_checkpointing import _kind, apply_activation_checkpointing, num_recomputed
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import CompiledModules
from shoal.types import ParallelPlan

WIDTH = 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Random in its attention and after it."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.dropout = MLP(), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + gain * self.dropout(self.mlp(x))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 4, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(attention_dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, gain=self.gain)
        return self.head(x)


def stack(**options: Any) -> tuple[nn.Module, ParallelPlan, Tensor]:
    torch.manual_seed(0)
    model = Stack(**options)
    plan = ParallelPlan(blocks=tuple(f"blocks.{i}" for i in range(len(model.blocks))), head="head")
    return model, plan, torch.randn(2, 8, WIDTH, requires_grad=True)


def bdh() -> tuple[nn.Module, ParallelPlan, Tensor]:
    torch.manual_seed(0)
    model = BDH(BDHConfig(n_layer=4, n_embd=8, dropout=0.3, n_head=2, mlp_internal_dim_multiplier=4, vocab_size=11))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    return model, ParallelPlan(blocks=tuple(f"levels.{i}" for i in range(4)), head="head"), torch.arange(10).view(2, 5)


MODELS = [stack, lambda: stack(attention_dropout=0.3), bdh]


def settings(mode: str, **options: Any) -> ActivationCheckpointingConfig:
    return ActivationCheckpointingConfig(mode=mode, **options)


def run(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The output and all gradients; dropout draws the same numbers in every run."""
    torch.manual_seed(1)
    output = model(inputs)
    output = output if isinstance(output, Tensor) else output[0]
    output.square().sum().backward()
    found = [output.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("options", [{}, {"every": 2}])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_and_names_stay(build: Any, mode: str, options: dict[str, Any]) -> None:
    model, plan, inputs = build()
    expected, names = run(model, inputs), [*model.state_dict(), *dict(model.named_modules())]
    before = num_recomputed()
    applied = apply_activation_checkpointing(model, plan, settings(mode, **options))
    assert applied == [*plan.blocks][:: options.get("every", 1)]
    for value, wanted in zip(run(model, inputs), expected, strict=True):
        assert torch.equal(value, wanted)
    assert num_recomputed() - before == len(applied)
    assert [*model.state_dict(), *dict(model.named_modules())] == names


class DropsLayers(nn.Module):
    """Decides by the generators of Python and NumPy what it computes, in different ways."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.draw, self.first, self.second = draw, MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        number = random.random() if self.draw == "python" else np.random.randn()  # which numpy draws in pairs
        x = x + self.first(x) if number > 0.4 else x + self.second(self.first(x))
        return x * (random.random() + np.random.rand())


@pytest.mark.parametrize("draw", ["python", "numpy"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_were_dropped_are_dropped_again(mode: str, draw: str) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(DropsLayers(draw) for _ in range(8))), torch.randn(2, 8, WIDTH)

    def run(seed: int) -> tuple[list[Tensor | None], float]:
        random.seed(seed), np.random.seed(seed)
        model(inputs).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return gradients, random.random() + np.random.rand()

    expected = [run(seed) for seed in range(4)]
    apply_activation_checkpointing(model, ParallelPlan(blocks=tuple(map(str, range(8)))), settings(mode))
    for seed, (gradients, next_number) in enumerate(expected):
        found, number = run(seed)
        assert number == next_number  # the backward has not disturbed what comes after it
        for value, wanted in zip(found, gradients, strict=True):
            assert (value is None) == (wanted is None)
            assert value is None or wanted is None or torch.equal(value, wanted)


@pytest.mark.parametrize("build", MODELS)
def test_the_more_is_recomputed_the_less_is_kept(build: Any) -> None:
    def cost(mode: str, **options: Any) -> tuple[int, int]:
        """FLOPs of a step, and the bytes that live on between the forward and the backward."""
        model, plan, inputs = build()
        apply_activation_checkpointing(model, plan, settings(mode, **options))
        with FlopCounterMode(display=False) as flops:
            with Made() as made:
                output = model(inputs)
                output = output if isinstance(output, Tensor) else output[0]
            kept = made.alive_bytes()
            output.sum().backward()
        return flops.get_total_flops(), kept

    none, full, selective = cost("none"), cost("full"), cost("selective")
    assert none[0] < selective[0] < full[0] <= none[0] * 4 / 3
    assert none[1] > selective[1] > full[1]
    for mode in (full, selective):
        sparse = cost("full" if mode is full else "selective", every=2)
        assert none[0] < sparse[0] < mode[0]
        assert none[1] > sparse[1] > mode[1]


def test_selective_keeps_attention_and_every_second_product() -> None:
    model, plan, inputs = stack(num_blocks=1)
    apply_activation_checkpointing(model, plan, settings("selective"))
    output = model(inputs)
    with Made() as again:
        output.sum().backward()
    # In the forward: qkv, out, up, down, of which the first and the third are kept. The backward's own are mm.
    assert again.names.count("addmm") == 2
    assert not [name for name in again.names if "attention" in name and "backward" not in name]

    model, plan, inputs = stack(num_blocks=1)
    apply_activation_checkpointing(model, plan, settings("full"))
    output = model(inputs)
    with Made() as again:
        output.sum().backward()
    assert again.names.count("addmm") == 4
    assert [name for name in again.names if "attention" in name and "backward" not in name]


class Attending(nn.Module):
    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p, self.linear = dropout_p, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(attention(self.linear(x).tanh(), self.dropout_p)[0], 0.5).square()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_random_attention_is_not_kept_because_what_follows_draws_after_it(dropout_p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attending(dropout_p), Attending(dropout_p))
    inputs = torch.randn(8, WIDTH)
    expected = run(model, inputs)
    apply_activation_checkpointing(model, ParallelPlan(blocks=("0", "1")), settings("selective"))
    with Made() as made:
        found = run(model, inputs)
    assert made.names.count("attention") == (4 if dropout_p else 2)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_classes_instead_of_blocks() -> None:
    model, _, inputs = stack()
    expected = run(model, inputs)
    applied = apply_activation_checkpointing(model, ParallelPlan(), settings("full", classes=["MLP"], every=3))
    assert applied == ["blocks.0.mlp", "blocks.3.mlp"]
    before = num_recomputed()
    for value, wanted in zip(run(model, inputs), expected, strict=True):
        assert torch.equal(value, wanted)
    assert num_recomputed() == before + 2


def test_of_modules_inside_their_like_the_outermost_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))
    assert apply_activation_checkpointing(model, ParallelPlan(), settings("full", classes=["Sequential"])) == ["0", "1"]


def test_a_chunked_head_keeps_its_forward() -> None:
    """It could not be computed again in the backward, when nobody is scoring any more."""
    model, plan, inputs = stack(num_blocks=2)
    head = ChunkedHead(model, plan, 3)
    applied = apply_activation_checkpointing(model, plan, settings("full", classes=["Linear"]))
    assert "blocks.0.qkv" in applied
    assert "head" not in applied
    with head.scoring(torch.zeros(2, 8, dtype=torch.long)):
        loss = model(inputs)
    loss.backward()
    assert head.num_scored == 1


def test_a_second_backward_recomputes_again() -> None:
    model, plan, inputs = stack()
    apply_activation_checkpointing(model, plan, settings("full"))
    loss = model(inputs).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    loss.backward()
    for parameter, expected in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("name", ["multiply_4bit", "dropped_product"])
def test_operators_of_graphs_count_as_what_they_stand_for(name: str) -> None:
    """Compiled blocks may be inside of a module that is recomputed."""
    importlib.import_module("shoal.quantised.layers")  # defines them
    importlib.import_module("shoal.lora.dropout")
    kinds = [_kind(getattr(torch.ops.shoal, name + end).default) for end in ("", "_in_graph")]
    assert kinds == [{"multiply_4bit": "product", "dropped_product": "small"}[name]] * 2


def test_evaluation_recomputes_nothing() -> None:
    model, plan, inputs = bdh()
    apply_activation_checkpointing(model, plan, settings("selective"))
    before = num_recomputed()
    assert isinstance(model, BDH)
    model.generate(inputs, 3)
    assert num_recomputed() == before


def test_mistakes_are_told_in_one_line() -> None:
    model, plan, _ = stack()
    with pytest.raises(UserError, match=r"classes names 'Blok', but the model has no module of that class; it has Bl"):
        apply_activation_checkpointing(model, plan, settings("full", classes=["Blok"]))
    with pytest.raises(UserError, match=r"mode = full, but the recipe's plan names no blocks"):
        apply_activation_checkpointing(model, ParallelPlan(), settings("full"))
    with pytest.raises(UserError, match=r"both Block and MLP, but 'blocks.0.mlp' is inside of 'blocks.0'"):
        apply_activation_checkpointing(model, plan, settings("full", classes=["MLP", "Block"]))
    assert apply_activation_checkpointing(model, ParallelPlan(), settings("none")) == []


def compile_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and differentiated as ever, but run without generated code, which takes long to build."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager"))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_like_blocks_share_one_graph(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_light(monkeypatch)
    torch.compiler.reset()
    model, plan, inputs = stack(num_blocks=12)
    apply_activation_checkpointing(model, plan, settings(mode))
    compiled = CompiledModules(model, plan)
    compiled.compile(torch.device("cpu"))
    assert len(compiled.modules) == 12
    before = compile_counts().graphs
    for _ in range(2):
        run(model, inputs)
    assert compile_counts().graphs - before == 1
    assert "context_fn" not in caplog.text  # torch's warning of what nobody does here


def test_hooks_stay_outside_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_light(monkeypatch)
    model, plan, inputs = stack(num_blocks=2)
    apply_activation_checkpointing(model, plan, settings("full"))
    CompiledModules(model, plan).compile(torch.device("cpu"))
    compiling = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: compiling.append(torch.compiler.is_compiling()))
    run(model, inputs)
    assert compiling == [False, False]


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        halves = all_gather_tensor_autograd(self.linear(x).tanh(), 0, dist.group.WORLD)
        return halves.square().unflatten(0, (2, -1)).mean(0)


def collectives(mode: str) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Talking(), Talking())
    apply_activation_checkpointing(model, ParallelPlan(blocks=("0", "1")), settings(mode))
    with CommDebugMode() as counter:
        gradients = run(model, torch.randn(4, WIDTH))
    return counter.get_total_counts(), gradients


def test_selective_talks_once(pool2: Pool) -> None:
    none, full, selective = (pool2.run(collectives, mode)[0] for mode in ("none", "full", "selective"))
    assert full[0] == none[0] + 2
    assert selective[0] == none[0]
    for found in (full, selective):
        for value, wanted in zip(found[1], none[1], strict=True):
            assert torch.equal(value, wanted)


def sharded(mode: str, compiled: bool) -> list[Tensor]:
    """A step's full gradients under FSDP, everything applied in the order of a strategy."""
    model, plan, inputs = stack()
    head = ChunkedHead(model, plan, 3)
    apply_activation_checkpointing(model, plan, settings(mode))
    if compiled:
        CompiledModules(model, plan).compile(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    for name in (*plan.blocks, "head"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.eval()  # ranks would draw the same masks, but compiled code others
    with head.scoring(torch.arange(16).view(2, 8) % 11):
        loss = model(inputs)
    loss.backward()
    assert head.num_scored == 1
    return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_inside_of_fsdp_with_a_chunked_head(mode: str, compiled: bool, pool2: Pool) -> None:
    model, _, inputs = stack()
    loss = F.cross_entropy(model.eval()(inputs).flatten(0, 1), torch.arange(16) % 11, reduction="sum")
    loss.backward()
    expected = [loss.detach(), *(p.grad for p in model.parameters())]
    for found in pool2.run(sharded, mode, compiled):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("build", [bdh, stack])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled(build: Any, mode: str) -> None:
    """In double precision: compiled code adds in another order, and in single precision some CPUs differ by 1e-4."""
    torch.compiler.reset()
    model, plan, inputs = build()
    model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    for module in model.modules():  # compiled code draws other numbers
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = run(model, inputs)
    apply_activation_checkpointing(model, plan, settings(mode))
    CompiledModules(model, plan).compile(torch.device("cpu"))
    for value, wanted in zip(run(model, inputs), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-10)


class Made(TorchDispatchMode):
    """Remembers which operations ran, and what they made as far as it still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        made = [tensor for tensor in (out if isinstance(out, tuple) else [out]) if isinstance(tensor, Tensor)]
        self._storages += [weakref.ref(tensor.untyped_storage()) for tensor in made]
        return out

    def alive_bytes(self) -> int:
        alive = {id(storage): storage for ref in self._storages if (storage := ref()) is not None}
        return sum(storage.nbytes() for storage in alive.values())
