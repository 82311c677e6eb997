"""Draws in several threads give the bits, and leave the generator in the state, of draws one after another."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.recipes.causal_lm.transformers_private import initialise
from shoal.tensors import local_part
from shoal.weights import parallel_draws
from shoal.weights.by_name import Reset, draw

LARGE = (40, 30)
"""The shape of a large tensor here."""
SMALL = (5, 3)


class Threads:
    """Sets the number of torch's threads, and counts the batches of draws that were given to them."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch
        self.num_batches = 0
        start, run = parallel_draws._Batch.start, parallel_draws._Batch._run

        slow_batches: list[Any] = []

        def count(batch: Any, pool: Any) -> None:
            self.num_batches += 1
            if self.num_batches % 2 == 0:
                slow_batches.append(batch)
            start(batch, pool)

        def run_slowly(batch: Any) -> None:
            if batch in slow_batches:  # so that what does not wait for it gets other values
                time.sleep(0.005)
            run(batch)

        patch.setattr(parallel_draws._Batch, "start", count)
        patch.setattr(parallel_draws._Batch, "_run", run_slowly)
        patch.setattr(parallel_draws, "MIN_ELEMENTS", 1000)
        self.set(4)

    def set(self, number: int) -> None:
        self._patch.setattr(torch, "get_num_threads", lambda: number)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    yield Threads(monkeypatch)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("draw_weights")]


def drawn(model: nn.Module, reset: Reset | None = None, **options: Any) -> dict[str, Tensor]:
    """Draws all parameters of a model and returns copies of them, and the state of torch's generator after it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    draw(model, 0, reset, set(model.parameters()), **options)
    return {name: local_part(p).clone() for name, p in model.named_parameters()} | {"state": torch.get_rng_state()}


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name  # NaN too


def check(threads: Threads, build: Callable[[], nn.Module], reset: Reset | None = None, **options: Any) -> None:
    threads.set(1)
    expected = drawn(build(), reset, **options)
    assert threads.num_batches == 0
    threads.set(4)
    assert_equal_bits(expected, drawn(build(), reset, **options))


class Weights(nn.Module):
    """A module with two large tensors and a small one, and a reset that is given as a function."""

    def __init__(self, reset: Callable[[Any], Any], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.first, self.second, self.small = (
            nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in (LARGE, LARGE, SMALL)
        )
        self._reset = reset

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self._reset(self)


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=3)
        self.attention = nn.MultiheadAttention(32, 4)
        self.norm = nn.LayerNorm(32)
        self.convolution = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(32, 50)


def test_modules_of_torch(threads: Threads) -> None:
    check(threads, Torch)
    assert threads.num_batches >= 4  # attention, its projection, the convolution and the head


def test_draws_are_put_off_until_later_modules(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that all modules begin before the first draw ends."""
    may_draw, num_begun = threading.Event(), 0
    run = parallel_draws._Batch._run

    def reset(model: nn.Module, module: nn.Module) -> None:
        nonlocal num_begun
        if isinstance(module, nn.Linear):
            num_begun += 1
            module.reset_parameters()
            if num_begun == 6:
                may_draw.set()

    def wait_and_run(batch: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_draw.wait(60)
        run(batch)

    monkeypatch.setattr(parallel_draws._Batch, "_run", wait_and_run)
    values = drawn(nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))), reset)
    assert threads.num_batches == 6
    assert not any(value.isnan().any() for value in values.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_two_large_tensors_and_a_small_one(threads: Threads, dtype: torch.dtype) -> None:
    def reset(module: Any) -> None:
        nn.init.normal_(module.first, std=0.02)
        nn.init.uniform_(module.small)
        nn.init.kaiming_uniform_(module.second)

    check(threads, lambda: nn.Sequential(Weights(reset, dtype), Weights(reset, dtype)))
    assert threads.num_batches == 2  # one for each module, with all that it draws


def _scale(module: Any) -> None:
    with torch.no_grad():
        module.first.normal_().mul_(3)
        module.second.uniform_()
        module.first += module.second


def _draw_by_other_functions(module: Any) -> None:
    nn.init.trunc_normal_(module.first)
    nn.init.orthogonal_(module.second)
    with torch.no_grad():
        module.small.copy_(torch.randn(SMALL))


def _draw_parts(module: Any) -> None:
    module.first.data[:25].normal_()
    module.first.data[25:].uniform_()
    module.second.data.t().normal_()
    module.first.data[30:].normal_()


def _seed_in_between(module: Any) -> None:
    nn.init.normal_(module.first)
    torch.manual_seed(3)
    nn.init.normal_(module.second)
    nn.init.normal_(module.small)


def _set_states(module: Any) -> None:
    nn.init.normal_(module.first)
    state = torch.get_rng_state()
    nn.init.normal_(module.second)
    torch.set_rng_state(state)
    nn.init.normal_(module.small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        nn.init.uniform_(module.first)
    nn.init.normal_(module.second[:10])


def _copy_generator(module: Any) -> None:
    nn.init.normal_(module.first, std=0.1)
    nn.init.normal_(module.small, std=torch.initial_seed() % 1000)
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    nn.init.normal_(module.second, generator=generator)
    nn.init.normal_(module.first, generator=torch.default_generator)


def _read_memory(module: Any) -> None:
    before = module.second.detach().numpy()
    with torch.no_grad():
        module.small.copy_(torch.from_numpy(np.linalg.svd(module.first.normal_().numpy())[2][:5, :3].copy()))
        module.second.normal_()
        before *= 2
        ctypes.memset(module.first.normal_().data_ptr(), 0, 4)


def _catch_errors(module: Any) -> None:
    nn.init.normal_(module.first)
    for std in (-1.0, 0.5):
        try:
            module.second.data.normal_(0, std)
        except RuntimeError:
            nn.init.ones_(module.small)


def _compute_gradients(module: Any) -> None:
    nn.init.normal_(module.first)
    nn.init.normal_(module.second)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((module.first * module.second).square().sum(), module.first)
    module.second.data += gradient


@torch.library.custom_op("test_parallel_draws::draw", mutates_args=())
def draw_in_an_operator(like: Tensor) -> Tensor:
    return torch.randn_like(like) + seen_by_the_operator[-1][5, 5]


seen_by_the_operator: list[Tensor] = []


def _call_operator(module: Any) -> None:
    seen_by_the_operator.append(module.first.detach())
    nn.init.normal_(module.first)
    torch.manual_seed(3)
    module.small.data += draw_in_an_operator(torch.empty(SMALL))
    nn.init.normal_(module.second)


def _draw_again(module: Any) -> None:
    nn.init.normal_(module.first)
    torch.manual_seed(3)
    nn.init.normal_(module.second)
    nn.init.normal_(module.first)
    torch.manual_seed(4)
    nn.init.normal_(module.second)
    time.sleep(0.01)  # the slow thread of the first draw may not overwrite the second


RESETS = [
    *(_scale, _draw_by_other_functions, _draw_parts, _seed_in_between, _set_states, _copy_generator, _read_memory),
    *(_catch_errors, _compute_gradients, _call_operator, _draw_again),
]


@pytest.mark.parametrize("reset", RESETS)
def test_resets_that_do_more_than_draw(threads: Threads, reset: Callable[[Any], None]) -> None:
    check(threads, lambda: nn.Sequential(nn.Linear(40, 40), Weights(reset), nn.Linear(40, 40)))
    assert threads.num_batches >= 2


STEPS: list[Callable[[Any, dict[str, Any]], Any]] = [
    lambda m, memory: m.first.normal_(),
    lambda m, memory: m.first[3:38].uniform_(-1, 1),
    lambda m, memory: m.second.uniform_(),
    lambda m, memory: m.second.normal_(1, 2),
    lambda m, memory: m.small.normal_(),
    lambda m, memory: m.second.mul_(0.5),
    lambda m, memory: m.first.copy_(m.second),
    lambda m, memory: torch._foreach_add_([m.first, m.second], 1),
    lambda m, memory: m.small.add_(torch.rand(SMALL)),
    lambda m, memory: m.small.fill_(m.first.tolist()[3][3]),
    lambda m, memory: torch.manual_seed(5),
    lambda m, memory: memory.update(state=torch.get_rng_state()),
    lambda m, memory: torch.set_rng_state(memory.get("state", torch.get_rng_state())),
    lambda m, memory: memory.update(array=m.first.detach().numpy()),
    lambda m, memory: m.small.fill_(float(memory.get("array", np.ones(1)).flat[0])),
    lambda m, memory: m.second.copy_(memory["module"].first) if "module" in memory else None,
    lambda m, memory: memory["module"].second.normal_() if "module" in memory else None,
    lambda m, memory: memory.update(module=m),
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, len(STEPS) - 1), max_size=8), min_size=1, max_size=4))
def test_any_steps_in_any_order(threads: Threads, programs: Sequence[Sequence[int]]) -> None:
    def build() -> nn.Module:
        memory: dict[str, Any] = {}  # what a reset leaves behind for those of other modules
        return nn.Sequential(
            *(Weights(lambda m, steps=steps: [STEPS[i](m, memory) for i in steps]) for steps in programs)
        )

    threads.num_batches = 0
    check(threads, build)


class Tied(nn.Module):
    """Its head has a bias, so it is reset too, and draws the weight of the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.other = nn.Embedding(50, 32), nn.Linear(32, 50), nn.Linear(50, 50)
        self.head.weight = self.embed.weight


class Parent(nn.Module):
    """Draws a weight of its child again, and scales another."""

    def __init__(self) -> None:
        super().__init__()
        self.children_of_children = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.children_of_children[0].weight)
        with torch.no_grad():
            self.children_of_children[1].weight.mul_(2)


@pytest.mark.parametrize("build", [Tied, Parent, lambda: nn.Sequential(Parent(), Tied(), Parent())])
def test_weights_that_are_drawn_twice(threads: Threads, build: Callable[[], nn.Module]) -> None:
    check(threads, build)
    assert threads.num_batches >= 2


def test_other_dtypes(threads: Threads) -> None:
    check(threads, lambda: Torch().to(torch.bfloat16), draw_dtypes={torch.bfloat16: torch.float32})


def test_llama_as_transformers_initialises_it(threads: Threads) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=100, pad_token_id=1, **sizes)
    check(threads, lambda: LlamaForCausalLM(config), initialise)
    assert threads.num_batches >= 14


@pytest.fixture
def imagined_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_shards(threads: Threads, imagined_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (4,))

    def shard(model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                part, sizes = parameter.detach().chunk(4)[1], {"shape": parameter.shape, "stride": parameter.stride()}
                module.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], **sizes)))
        return model

    def build() -> nn.Module:
        layers = nn.Linear(40, 40), nn.Linear(40, 42)
        return nn.Sequential(*layers, Weights(lambda m: nn.init.constant_(m.first, use_shard(layers[1].weight))))

    def use_shard(weight: Tensor) -> float:
        return float(local_part(weight * 2)[0, 0]) if isinstance(weight, DTensor) else 0.0

    check(threads, lambda: shard(build()))
    assert threads.num_batches == 2
    whole, sharded = drawn(build()), drawn(shard(build()))
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(sharded[name], whole[name].chunk(4)[1]), name


def test_an_error_of_a_reset_is_raised_after_all_draws(threads: Threads) -> None:
    def fail(module: Any) -> None:
        nn.init.normal_(module.first)
        raise ValueError("the reset fails")

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), Weights(fail), nn.Linear(40, 40))

    results = []
    for number in (1, 4):
        threads.set(number)
        model = build()
        with pytest.raises(ValueError, match="the reset fails"):
            drawn(model)
        results.append(
            {name: p.detach() for name, p in model[:2].named_parameters()} | {"state": torch.get_rng_state()}
        )
    assert_equal_bits(*results)
    assert threads.num_batches == 3


def test_an_error_of_a_thread_is_raised(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_draws, "_is_simple_draw", lambda draw, *arguments: "normal_" in str(draw))
    with pytest.raises(RuntimeError, match="std"):
        drawn(Weights(lambda module: module.first.normal_(0, -1)))
    assert threads.num_batches == 1


def test_memory_of_whole_tensors_is_bounded(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = 4 * (40 * 40 + 40)
    monkeypatch.setattr(parallel_draws, "MAX_WAITING_BYTES", 3 * layer_bytes)
    storages: list[tuple[StorageWeakRef, int]] = []
    live_bytes: list[int] = []
    allocate = parallel_draws.ParallelDraws.allocate

    def record(draws: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = allocate(draws, shape, dtype)
        storages.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        live_bytes.append(sum(size for storage, size in storages if not storage.expired()))
        return tensor

    monkeypatch.setattr(parallel_draws.ParallelDraws, "allocate", record)
    layers = [nn.Linear(40, 40) for _ in range(10)]
    check(threads, lambda: nn.Sequential(*layers))
    assert threads.num_batches == 10
    assert 2 * layer_bytes < max(live_bytes) <= 4 * layer_bytes  # three that wait, and the one that is drawn
    live_bytes.clear()
    threads.num_batches = 0
    check(threads, lambda: nn.Sequential(*layers[:2], nn.Linear(40, 200), *layers[2:4]))
    assert max(live_bytes) == 4 * (40 * 200 + 200)  # beside a larger one, none


def test_nothing_is_put_off_under_fake_tensors_with_small_tensors_or_with_one_thread(threads: Threads) -> None:
    parameter = nn.Parameter(torch.empty(LARGE))
    with FakeTensorMode(), parallel_draws.ParallelDraws([parameter]) as draws:
        whole = draws.allocate(LARGE, torch.float32)
        draws.run(lambda: nn.init.normal_(whole))
        assert isinstance(whole, FakeTensor)
    drawn(nn.Linear(8, 8))
    threads.set(1)
    drawn(Torch())
    assert threads.num_batches == 0
