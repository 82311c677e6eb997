"""Weights and optimizer state in bf16: unbiased rounding, equal replicas, exact resuming, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from verify.runs import bdh, failed, llama, ragged, runner_on

from shoal.checkpoint import open_checkpoint
from shoal.config import check_run, load_run
from shoal.config.layout import check_layout, layout_of
from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.strategies import from_config
from shoal.tensors import local_part
from shoal.torch_private import compile_counts
from shoal.training import rounded_adamw, train
from shoal.training.optimizers import build_optimizer
from shoal.training.rounded_adamw import RoundedAdamW, random_bits, round_to_bf16, rows_of_part
from shoal.training.session import assemble
from shoal.verify import prove
from shoal.verify.gradients import set_gradients
from shoal.verify.trace import Trace, trace
from shoal.verify.updates import whole

BF16 = ("training.weights_dtype=bf16", "training.mixed_precision=bf16")
FSDP = ("distributed.strategy=fsdp",)


def seed(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


def test_rounding_is_unbiased() -> None:
    draws, values = 1 << 14, torch.tensor([1.001, -3.1415927, 0.3, 1e-30, -1e30, 65537.0, 1.0, 0.0])
    bits = random_bits(torch.arange(draws * len(values), dtype=torch.int32), seed(7)) & 0xFFFF
    rounded = round_to_bf16(values.repeat(draws), bits).view(draws, -1).double()
    steps = 2.0 ** (values.abs().clamp(min=1e-38).log2().floor() - 7)
    assert ((rounded.mean(0) - values).abs() / steps < 4 * 0.5 / draws**0.5).all()  # four standard deviations
    assert ((rounded - values).abs() < steps).all()
    assert [rounded[:, column].unique().numel() for column in range(len(values))] == [2, 2, 2, 2, 2, 2, 1, 1]


def test_infinities_and_nan_stay() -> None:
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for bits in (0, 1, 0xFFFF):
        assert round_to_bf16(nan, seed(bits)).isnan().all()
        assert round_to_bf16(torch.tensor([torch.inf, -torch.inf]), seed(bits)).tolist() == [torch.inf, -torch.inf]


def config(**training: Any) -> TrainingConfig:
    keys = {"max_steps": 1, "weights_dtype": "bf16", "mixed_precision": "bf16", **training}
    return TrainingConfig(**keys)


def step_all(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def test_updates_are_adamws_and_small_ones_are_not_lost() -> None:
    """1 is 256 steps of bf16 and an update about a twentieth of one, which rounding to the nearest number drops."""
    start, options = torch.ones(64, 64), {"learning_rate": 1e-4, "weight_decay": 0.5}
    ours, theirs, nearest = (nn.Parameter(start.to(d)) for d in (torch.bfloat16, torch.float32, torch.bfloat16))
    optimizer = build_optimizer(
        config(**options, optimizer={"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-3}), [{"params": [ours]}]
    )
    assert isinstance(optimizer, RoundedAdamW)
    for other in (theirs, nearest):
        plain = torch.optim.AdamW([other], lr=1e-4, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-3)
        step_all(plain, [other], 40)
    step_all(optimizer, [ours], 40)
    moved = (theirs - 1).mean().item()
    assert moved == pytest.approx((ours.float() - 1).mean().item(), rel=0.1)
    assert nearest.eq(1).all()
    for slot in ("exp_avg", "exp_avg_sq"):
        kept, expected = optimizer.state[ours][slot].float(), plain.state[nearest][slot].float()
        assert (kept - expected).norm() < 0.02 * expected.norm()


def bits_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def updated(path: Path, overrides: list[str]) -> dict[str, tuple[torch.dtype, bytes]]:
    """Returns whole weights and averages after three updates with the same gradients in every layout."""
    run = load_run(path, overrides)
    strategy = from_config(run.config)
    with strategy:
        session = assemble(run.make_recipe(), strategy, run.config.training, 0)
        shapes = {name: p.shape for name, p in session.model.named_parameters()}
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            set_gradients(strategy, session.model, gradients, 1.0)
            strategy.step(session.optimizer)
        state = session.state()
        slots = {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
        return bits_of(whole({**state.model, **slots}))


def test_every_layout_rounds_an_element_in_the_same_way(toy: ToyRun, pool2: Pool) -> None:
    """Replicas, rows by fully_shard, columns and rows by tensor parallelism."""
    keys = [*BF16, "recipe=toy_recipe:Divisible", "model.hidden=48"]
    on_one_device = updated(toy.config, keys)
    assert {dtype for name, (dtype, _) in on_one_device.items() if "step/" not in name} == {torch.bfloat16}
    tensor_parallel = ["distributed.strategy=mesh", "distributed.mesh.tp=2", "distributed.mesh.dp_shard=1"]
    for layout in ([], FSDP, tensor_parallel):
        for rank in pool2.run(updated, toy.config, [*keys, *layout], init=False):
            assert rank == on_one_device, layout
    assert updated(toy.config, [*keys, "experiment.seed=1"]) != on_one_device


@pytest.mark.parametrize(
    ("split", "slices"),
    [
        ("rows", [slice(2, 5), slice(0, 6), slice(0, 4)]),
        ("columns", [slice(0, 7), slice(3, 6), slice(0, 4)]),
        ("both", [slice(2, 5), slice(0, 6), slice(1, 3)]),
        ("rows and columns", [slice(2, 5), slice(3, 6), slice(0, 4)]),
    ],
)
def test_elements_of_a_part_are_numbered_as_in_the_whole_tensor(split: str, slices: list[slice]) -> None:
    width, first, distance = rows_of_part((7, 6, 4), slices)
    numbers = torch.arange(7 * 6 * 4).view(7, 6, 4)[tuple(slices)].reshape(-1, width)
    rows, columns = (torch.arange(size) for size in numbers.shape)
    assert torch.equal(first + rows[:, None] * distance + columns, numbers)


def train_here(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains, and returns the bytes a parameter of weights, gradients and both averages on this rank."""
    seen: dict[str, int] = {}

    def note_gradients(optimizer: Any, *arguments: Any) -> None:
        seen["gradients"] = sum(p.grad.nbytes for group in optimizer.param_groups for p in group["params"])

    handle = register_optimizer_step_pre_hook(note_gradients)
    try:
        model = train(load_run(path, overrides)).model
    finally:
        handle.remove()
    parts = [local_part(p) for p in model.parameters()]
    seen["weights"], numel = sum(p.nbytes for p in parts), sum(p.numel() for p in parts)
    return {name: nbytes / numel for name, nbytes in seen.items()}


def stored(folder: Path, step: int = 10) -> dict[str, Tensor]:
    read = open_checkpoint(folder / "checkpoints" / f"step_{step:08d}").read()
    return {
        **read.model,
        **{f"{slot}/{name}": t for name, slots in read.optimizer.items() for slot, t in slots.items()},
    }


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp"])
def test_a_run_has_8_bytes_a_parameter_and_resumes_to_the_bit(toy: ToyRun, pool2: Pool, layout: str) -> None:
    keys = [
        *BF16,
        "training.lr_scheduler=constant",
        "training.global_batch_size=8",
        *(FSDP if layout == "fsdp" else ()),
    ]

    def run(*more: str) -> list[dict[str, Any]]:
        return (
            [train_here(toy.config, [*keys, *more])]
            if layout == "single"
            else pool2.run(train_here, toy.config, [*keys, *more], init=False)
        )

    undisturbed = toy.folder / "undisturbed"
    assert run(f"experiment.output_dir={undisturbed}") == [{"gradients": 2, "weights": 2}] * (1 + (layout != "single"))
    run("training.max_steps=4")
    run()
    tensors = stored(toy.output)
    assert bits_of(tensors) == bits_of(stored(undisturbed))
    sizes = {name: tensor.nbytes for name, tensor in tensors.items() if not name.startswith("step/")}
    assert sum(sizes.values()) == 6 * 49  # weights and two averages of 49 parameters
    report = (undisturbed / "report.txt").read_text()
    assert "states " in report
    assert "weights, gradients and both averages of AdamW in bf16, rounded stochastically  (command line)" in report
    assert toy.metrics()[10] < toy.metrics()[1]


def test_a_run_may_change_the_type_of_its_weights(toy: ToyRun) -> None:
    """fp32 to bf16 and back, with all of the optimizer's state."""
    constant = "training.lr_scheduler=constant"
    for steps, keys in ((4, ()), (8, BF16), (10, ())):
        toy.train(constant, f"training.max_steps={steps}", *keys)
        dtypes = {t.dtype for name, t in stored(toy.output, steps).items() if not name.startswith("step/")}
        assert dtypes == {torch.bfloat16 if keys else torch.float32}
        assert {t.item() for name, t in stored(toy.output, steps).items() if name.startswith("step/")} == {steps}


def test_first_weights_are_those_of_fp32_rounded_once(toy: ToyRun) -> None:
    names = []
    for keys in ((), BF16):
        run = load_run(toy.config, keys)
        with from_config(run.config) as strategy:
            session = assemble(run.make_recipe(), strategy, run.config.training, 0)
            names.append({name: p.detach() for name, p in session.model.named_parameters()})
    assert all(torch.equal(names[0][name].bfloat16(), tensor) for name, tensor in names[1].items())


def test_an_update_is_divided_and_skipped_on_the_device() -> None:
    ours, divided = (nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16)) for _ in range(2))
    optimizers: list[Any] = [RoundedAdamW([parameter], lr=0.1) for parameter in (ours, divided)]
    for optimizer, parameter, scale in zip(optimizers, (ours, divided), (1.0, 8.0), strict=True):
        parameter.grad = (scale * torch.arange(1.0, 7.0).view(3, 2)).bfloat16()
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(scale)
        optimizer.step()
    assert torch.equal(ours, divided)
    before = [ours.detach().clone(), *(value.clone() for value in optimizers[0].state[ours].values())]
    ours.grad = torch.full_like(ours, float("nan"))
    optimizers[0].found_inf, optimizers[0].grad_scale = torch.ones(()), None
    optimizers[0].step()
    assert all(map(torch.equal, [ours, *optimizers[0].state[ours].values()], before))


def test_tensors_in_another_order_in_memory_are_updated_in_place() -> None:
    plain = nn.Parameter(torch.randn(2, 3, 4, 5).bfloat16())
    other = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for parameter in (plain, other):
        step_all(RoundedAdamW([parameter], lr=0.1), [parameter], 3)
    assert torch.equal(plain, other)
    assert not other.is_contiguous()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["training.optimizer=lion"], "optimizer = lion does not; use adamw"),
        (["training.mixed_precision=fp32"], "mixed_precision = fp32; set mixed_precision to bf16 or fp8"),
        (["training.mixed_precision=fp16"], "mixed_precision = fp16"),
        (["training.mixed_precision=pure_bf16", *FSDP], "mixed_precision = pure_bf16"),
        (["distributed.strategy=deepspeed"], "not for strategy deepspeed, which keeps fp32 weights; use ddp or fsdp"),
        ([*FSDP, "distributed.fsdp.param_dtype=fp32"], "param_dtype = fp32 would gather them in fp32"),
    ],
)
def test_what_weights_in_bf16_refuse(toy: ToyRun, keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy.train(*BF16, *keys)


@pytest.mark.parametrize("key", ["compression.method=int8", "local_sgd.sync_every=4"])
def test_exchanges_that_round_otherwise_are_refused(toy: ToyRun, key: str) -> None:
    run = load_run(toy.config, [*BF16, f"distributed.{key}", "distributed.strategy=ddp"])
    with pytest.raises(UserError, match=r"weights_dtype = bf16 is not for distributed\.\w+"):
        layout_of(run.config.training, run.config.distributed, 2, 2)


def test_other_optimizers_and_dtypes_are_refused(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "    def inputs",
        "    def build_optimizer(self, groups):\n        return torch.optim.SGD(groups)\n\n    def inputs",
    )
    with pytest.raises(UserError, match="SGD rounds to the nearest number, which drops small updates"):
        toy.train(*BF16)
    change_recipe("nn.Linear(hidden, 1)", "nn.Linear(hidden, 1, dtype=torch.float64)")
    with pytest.raises(UserError, match=r"parameter 3\.weight is float64, and only float32 is cast"):
        toy.train(*BF16)
    change_recipe("nn.Tanh()", "nn.BatchNorm1d(hidden)")
    with pytest.raises(UserError, match="1 is a BatchNorm1d, whose running statistics are fp32"):
        toy.train(*BF16)


def test_adapters_are_refused(tmp_path: Path) -> None:
    tree = llama(tmp_path, mixed_precision="bf16", weights_dtype="bf16").tree() | {
        "lora": {"target_modules": ["q_proj"]}
    }
    run = check_run(tree)
    with pytest.raises(UserError, match=r"lora: trains few; leave it out, and set model\.dtype: bf16"):
        check_layout(run.config, run.make_recipe(), 1, 1)


def test_layouts_are_proved_and_another_rounding_is_found(pool2: Pool) -> None:
    run = ragged(global_batch_size=8, mixed_precision="bf16", weights_dtype="bf16")
    (verdict,) = prove(run, 2, ["fsdp"], runner=runner_on(pool2))
    assert verdict.outcome == "same"
    assert {"update in bf16", "resumed update in bf16", "optimizer state in bf16", "skipping in bf16"} <= {
        check.name for check in verdict.checks
    }
    (verdict,) = prove(run, 2, ["fsdp"], runner=runner_on(pool2, trace_with_local_numbers))
    assert verdict.outcome == "different"
    assert "update in bf16" in failed(verdict)


def trace_with_local_numbers(*arguments: Any) -> Trace:
    """A mistake: every rank numbers the elements of its part from 0."""

    def local_numbers(shape: Any, slices: list[slice]) -> tuple[int, int, int]:
        width, _, distance = rows_of_part(shape, slices)
        return width, 0, distance

    with patch.object(rounded_adamw, "rows_of_part", local_numbers):
        return trace(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bdh, llama])
@pytest.mark.parametrize("training", [{}, {"loss_chunks": 2, "activation_checkpointing": "full"}, {"compile": True}])
def test_models_train_in_all_layouts(pool2: Pool, tmp_path: Path, make: Any, training: dict[str, Any]) -> None:
    run = make(tmp_path, global_batch_size=8, mixed_precision="bf16", weights_dtype="bf16", **training)
    verdicts = prove(run, 2, runner=runner_on(pool2))
    assert {"ddp", "fsdp", "tp"} <= {verdict.layout for verdict in verdicts}
    assert {verdict.layout: failed(verdict) for verdict in verdicts if not verdict.passed} == {}
    folder = tmp_path / "run"
    tree = run.tree()
    tree["experiment"]["output_dir"] = str(folder)
    tree["logging"] |= {"console": "off", "tensorboard": False}
    assert train(check_run(tree)).step == 3


@pytest.mark.slow
def test_a_compiled_update_is_the_plain_one_and_is_compiled_few_times() -> None:
    """As on CUDA devices, by torch's compiler for the CPU."""
    shapes = [(4096,), (64, 64), (77,), (128, 1024), (3, 5), (1024,), (1, 1), (100, 1024), (5, 7, 3)]
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    compiled = [nn.Parameter(parameter.detach().clone()) for parameter in plain]
    optimizers: list[Any] = [RoundedAdamW(parameters, lr=0.1) for parameters in (plain, compiled)]
    before = compile_counts().graphs
    update = torch.compile(rounded_adamw._update, fullgraph=True)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(step == 2))
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        step_all(optimizers[0], plain, 1)
        with patch.object(rounded_adamw, "_update", update):
            step_all(optimizers[1], compiled, 1)
    for a, b in zip(plain, compiled, strict=True):
        assert (a != b).sum() <= 2  # a compiler may compute a product and a sum in one instruction
    assert compile_counts().graphs - before <= 6
