"""Layers around a forward, and views of parameters: what a module computes changes, and what it is stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.config.schema import ActivationCheckpointingConfig
from shoal.errors import UserError
from shoal.forward import add_layer, view_parameters
from shoal.lora import LoraConfig
from shoal.lora.adapters import add_adapters
from shoal.torch_private import compile_counts
from shoal.transform.activation_checkpointing import apply_activation_checkpointing, num_recomputed
from shoal.transform.compile import CompiledModules
from shoal.types import ParallelPlan


class Noting(nn.Module):
    """Writes down who is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls.append("forward")
        return x * scale

    def layer(self, name: str) -> Callable[..., Tensor]:
        def noting(forward: Any, *args: Any, **kwargs: Any) -> Tensor:
            self.calls.append(f"into {name}")
            output = forward(*args, **kwargs)
            self.calls.append(f"out of {name}")
            return output + 1

        return noting


def test_layers_stack_in_order() -> None:
    """The one that was added last is the outermost, and hooks stay outside of all."""
    module = Noting()
    before = signature(module.forward)
    module.register_forward_pre_hook(lambda *_: module.calls.append("pre-hook"))
    for name in ("first", "second"):
        add_layer(module, module.layer(name))
    module.register_forward_hook(lambda *_: module.calls.append("hook"))
    assert module(torch.ones(()), scale=3.0) == 5
    inside = ["into second", "into first", "forward", "out of first", "out of second"]
    assert module.calls == ["pre-hook", *inside, "hook"]
    assert signature(module.forward) == before


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputing_calls_what_was_there_before(mode: str) -> None:
    """A function that replaced `forward`, and the layers around it, run in both passes; later layers in the first."""
    module = Noting()
    own = module.forward
    module.forward = lambda x: own(2 * x).exp()  # type: ignore[method-assign]
    add_layer(module, module.layer("inner"))
    model = nn.Sequential(module)
    config = ActivationCheckpointingConfig(mode=mode)
    assert apply_activation_checkpointing(model, ParallelPlan(blocks=("0",)), config) == ["0"]
    add_layer(module, module.layer("outer"))
    x, before = torch.zeros((), requires_grad=True), num_recomputed()
    output = model(x)
    inner = ["into inner", "forward", "out of inner"]
    assert module.calls == ["into outer", *inner, "out of outer"]
    assert output == 3  # exp(2 × 0), and one of each layer
    output.backward()
    assert x.grad == 2
    assert num_recomputed() == before + 1
    assert module.calls[5:] == inner[:-1]  # torch stops recomputing when it has the output of exp


class Layer(nn.Linear):
    """Remembers which parameters its forward saw."""

    def forward(self, input: Tensor) -> Tensor:
        self.saw = [self.weight, self.bias]
        if len(input) == 1:
            self(torch.cat([input, input]))  # a module that calls itself has its views all the while
            self.saw = [self.weight, self.bias]
        if len(input) == 3:
            raise ValueError("three rows")
        return nn.functional.linear(input, self.weight, self.bias)


def test_views_are_there_in_the_forward_alone() -> None:
    layer = Layer(4, 2)
    weight, bias = layer.weight, layer.bias
    names, state = [name for name, _ in layer.named_parameters()], [*layer.state_dict()]
    view_parameters(layer, lambda parameter: 2 * parameter, hidden=("bias",))

    def assert_plain() -> None:
        assert layer.weight is weight
        assert layer.bias is bias
        assert [*layer.parameters()] == [weight, bias]
        assert [name for name, _ in layer.named_parameters()] == names
        assert [*layer.state_dict()] == state

    assert_plain()
    assert isinstance(layer, Layer)
    assert type(layer).__name__ == "Layer"
    for count in (2, 1):
        x = torch.ones(count, 4)
        torch.testing.assert_close(layer(x), 2 * x @ weight.T)
        assert torch.equal(layer.saw[0], 2 * weight)
        assert layer.saw[1] is None
        assert_plain()
    with pytest.raises(ValueError, match="three rows"):
        layer(torch.ones(3, 4))
    assert_plain()
    layer(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 4.0))
    assert bias.grad is None


def test_views_are_there_where_a_user_compiles() -> None:
    """Nobody has made them before the graph begins, as `CompiledModules` does."""
    torch.compiler.reset()
    layer = Layer(4, 2)
    view_parameters(layer, lambda parameter: 2 * parameter)
    expected = layer(torch.ones(3, 4)[:2])
    compiled = torch.compile(lambda x: layer(x) + 0, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 4)), expected)


def test_a_parameter_that_is_replaced_is_viewed() -> None:
    """As fully_shard replaces them while it gathers."""
    layer = Layer(4, 2)
    view_parameters(layer, lambda parameter: 2 * parameter)
    layer.weight = nn.Parameter(torch.ones(2, 4))
    layer.bias = nn.Parameter(torch.zeros(2))
    assert torch.equal(layer(torch.ones(2, 4)), torch.full((2, 2), 8.0))


def test_a_module_without_parameters_stays_as_it_is() -> None:
    module = nn.ReLU()
    view_parameters(module, lambda parameter: 2 * parameter)
    assert type(module) is nn.ReLU
    assert "forward" not in vars(module)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def blocks() -> nn.Sequential:
    """Twelve blocks that are cut as tensor parallelism cuts them, except that all of it is on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(12)))

    def view(parameter: Tensor) -> Tensor:
        return 0.5 * parameter

    def enter(forward: Any, x: Tensor) -> Tensor:
        return forward(x * 2)

    def leave(forward: Any, x: Tensor) -> Tensor:
        return forward(x) / 2

    for block in model:
        for linear in (block.up, block.down):  # type: ignore[union-attr]
            view_parameters(linear, view)  # type: ignore[arg-type]
        add_layer(block.up, enter)  # type: ignore[union-attr,arg-type]
        add_layer(block.down, leave)  # type: ignore[union-attr,arg-type]
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model(torch.ones(3, 8, requires_grad=True)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ["none", "full", pytest.param("selective", marks=pytest.mark.slow)])
def test_blocks_with_views_share_one_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed or not: a write to an attribute inside of the graph would break it, or leave no graph at all."""
    from torch._dynamo.utils import counters

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager"))
    torch.compiler.reset()
    expected, model = gradients(blocks()), blocks()
    names = [*model.state_dict()]
    plan = ParallelPlan(blocks=tuple(map(str, range(12))))
    compiled = CompiledModules(model, plan)
    apply_activation_checkpointing(model, plan, ActivationCheckpointingConfig(mode=mode))
    compiled.compile(torch.device("cpu"))
    graphs, breaks = compile_counts().graphs, counters["graph_break"].total()
    for _ in range(2):
        model.zero_grad()
        found = gradients(model)
    assert (compile_counts().graphs - graphs, counters["graph_break"].total() - breaks) == (1, 0)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    assert [*model.state_dict()] == names
    assert isinstance(model[0].up.weight, nn.Parameter)


def test_blocks_with_views_are_recomputed_where_operations_are_counted() -> None:
    """Nothing is compiled there, and what is recomputed must be the same operations."""
    expected, model = gradients(blocks()), blocks()
    plan = ParallelPlan(blocks=tuple(map(str, range(12))))
    compiled = CompiledModules(model, plan)
    apply_activation_checkpointing(model, plan, ActivationCheckpointingConfig(mode="selective"))
    compiled.compile(torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False):
        found = gradients(model)
    assert compiled.eager_calls
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted)


def test_graphs_of_a_model_are_not_made_for_the_sizes_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, in which a small model comes before a large one."""
    sizes = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append([value for value in inputs if isinstance(value, int | torch.SymInt)])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=note))
    torch.compiler.reset()
    for width in (4, 6, 8):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        CompiledModules(model, ParallelPlan(blocks=("0", "1"))).compile(torch.device("cpu"))
        model(torch.ones(width + 1, width))
    assert sizes == [[]] * 6  # of each model two, because the first input needs no gradient


@pytest.mark.parametrize(
    ("device", "adapted", "together"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_kernels_of_adapters_are_launched_together_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, adapted: bool, together: bool
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options) or function)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if adapted:
        add_adapters(model, LoraConfig(r=2, target_modules=["0"]))
    CompiledModules(model, ParallelPlan()).compile(torch.device(device))
    options = given.get("options") or {}
    assert options.get("combo_kernels", False) == together
    assert {*options} <= {*torch._inductor.list_options()}


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    """As the teacher or the average of a hook; a layer would call the forward of the original."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 8)
    expected = model(x).detach()
    apply_activation_checkpointing(model, ParallelPlan(blocks=("0", "1")), ActivationCheckpointingConfig(mode="full"))
    for module in model:
        add_layer(module, lambda forward, x: forward(x))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), expected)
    assert copy.deepcopy(copied)[0].up is not copied[0].up  # type: ignore[union-attr]
    assert {*vars(copied[0])} == {*vars(Block())}


def test_a_deep_copy_keeps_a_forward_of_its_own() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x + 1  # type: ignore[method-assign]
    add_layer(module, lambda forward, x: 2 * forward(x))
    assert module(1) == 4
    assert copy.deepcopy(module)(1) == 2


def test_a_deep_copy_of_a_module_with_views_refuses_to_compute() -> None:
    layer = nn.Linear(4, 2)
    view_parameters(layer, lambda parameter: 2 * parameter)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.state_dict()["weight"], layer.state_dict()["weight"])
    with pytest.raises(UserError, match="this copy of a module has its weights, and cannot compute"):
        copied(torch.ones(1, 4))


def test_the_tenth_model_in_a_process_is_still_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps eight graphs for one code object, and the code of all layers is the same."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager"))
    torch.compiler.reset()
    graphs = compile_counts().graphs
    for number in range(10):
        compiled = CompiledModules(nn.Linear(2, number + 1), ParallelPlan())
        compiled.compile(torch.device("cpu"))
        compiled.modules[0](torch.ones(1, 2))
        assert compiled.eager_calls == 0
    assert compile_counts().graphs - graphs == 10
