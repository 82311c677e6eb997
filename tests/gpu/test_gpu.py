"""What only a GPU can show. `make test-gpu` runs it and writes docs/gpu.md."""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from models.bdh_levels import errors_beside_plain
from pool import Pool
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from verify.runs import runner_on

import shoal
from shoal.config import check_run, load_run
from shoal.config.schema import ActivationCheckpointingConfig, TrainingConfig
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.lora import LoraConfig, dropout
from shoal.lora.adapters import add_adapters
from shoal.models.bdh.triton_heads import why_not
from shoal.quantised import FourBit, QuantisedLinear, schemes
from shoal.quantised.layers import PARTS
from shoal.recipes import Recipe
from shoal.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleStrategy
from shoal.strategies.recorded import Recorded
from shoal.torch_private import compile_counts
from shoal.training import train
from shoal.training.optimizers import build_optimizer
from shoal.training.trainer import RecipeBody
from shoal.transform.activation_checkpointing import apply_activation_checkpointing
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import CompiledModules, GraphChoice
from shoal.transform.host_inputs import keep_inputs_on_host
from shoal.types import IGNORED_LABEL, MicroBatch, ParallelPlan
from shoal.verify import prove
from shoal.weights import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def note() -> Callable[[str, str], None]:
    """Writes a row of the result table; those of tests that do not run this time stay, with their date."""
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, shoal {shoal.__version__}"

    def write(what: str, result: str) -> None:
        with PAGE.open("a+") as page:
            fcntl.flock(page, fcntl.LOCK_EX)  # tests may run in several processes
            page.seek(0)
            lines = page.read().splitlines()
            rows = {cells[0]: cells[1:] for line in lines if len(cells := line.strip("| ").split(" | ")) == 3}
            kept = {key: cells for key, cells in rows.items() if key not in ("what", "---") and about in "".join(lines)}
            kept[what] = [result, date.today().isoformat()]
            page.truncate(0)
            page.write(f"# On a GPU\n\nWritten by `make test-gpu`: {about}.\n\n")
            page.write("| what | result | on |\n| --- | --- | --- |\n")
            page.writelines(f"| {what} | {' | '.join(cells)} |\n" for what, cells in sorted(kept.items()))

    return write


def bdh(tmp_path: Path, **training: Any) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(4000)))
    return {
        "recipe": "bdh",
        "experiment": {"output_dir": str(tmp_path / "out"), "deterministic": training.pop("deterministic", False)},
        "model": {"n_layer": 3, "n_embd": 64, "n_head": 4, "mlp_internal_dim_multiplier": 16, "dropout": 0.0},
        "dataset": {"name": "text", "files": str(tmp_path / "text.txt"), "seq_length": 128, "cache_dir": str(tmp_path)},
        "training": {"max_steps": 30, "batch_size": 16, "learning_rate": 3e-3, "device": "cuda", **training},
        "logging": {"every": 10, "console": "off", "tensorboard": False},
        "checkpoint": {"every": 10},
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions(tmp_path: Path, note: Callable[[str, str], None], precision: str, compiled: bool) -> None:
    outcome = train(check_run(bdh(tmp_path, mixed_precision=precision, compile=compiled)))
    assert outcome.metrics["train/loss"] < 3.0  # from 5.6
    assert outcome.metrics["train/skipped_steps"] <= (3 if precision == "fp16" else 0)
    name = f"BDH, {precision}{', compiled' if compiled else ''}, 30 steps"
    note(name, f"loss 5.6 → {outcome.metrics['train/loss']:.3f}")


def llama(tmp_path: Path, **training: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"config": {"model_type": "llama", **sizes, **heads}}
    return bdh(tmp_path, **training) | {"recipe": "causal_lm", "model": model}


LEAN = {"activation_checkpointing": "full", "loss_chunks": 3}
TWO = {"batch_size": 8, "gradient_accumulation": 2}


@pytest.mark.parametrize(
    ("model", "precision", "layouts", "options"),
    [
        (bdh, "fp32", ["ddp", "fsdp", "fsdp_shard_grad_op", "fsdp_no_shard"], {}),
        (bdh, "fp16", ["fsdp"], {}),
        (bdh, "fp32", ["single", "fsdp", "tp"], {"kernels": "fused"}),
        (bdh, "bf16", ["single", "fsdp"], {"kernels": "fused", "compile": True}),
        (llama, "fp32", ["ddp", "fsdp"], LEAN),
        (llama, "bf16", ["ddp", "fsdp"], LEAN),
        (llama, "pure_bf16", ["fsdp"], {"activation_checkpointing": "selective"}),
        (llama, "fp8", ["ddp", "fsdp"], {}),
        (llama, "fp8", ["ddp", "fsdp"], {"loss_chunks": 3, "fp8_head": True}),
        (llama, "bf16", ["fsdp"], {**LEAN, "compile": True}),
        (llama, "fp32", ["tp", "tp_sp", "cp"], {}),
        pytest.param(bdh, "fp32", ["zero_1", "zero_2", "zero_3"], {}, marks=needs_deepspeed),
        pytest.param(llama, "bf16", ["zero_2", "zero_3"], LEAN, marks=needs_deepspeed),
        pytest.param(llama, "fp16", ["zero_3"], {}, marks=needs_deepspeed),
        (llama, "bf16", ["tp_sp"], LEAN),  # not compiled: gloo crashes with compiled collectives on CUDA tensors
        (llama, "bf16", ["ddp", "fsdp", "tp"], {"weights_dtype": "bf16"}),
    ],
)
def test_two_ranks_on_one_gpu_equal_one(
    tmp_path: Path,
    pool2: Pool,
    note: Callable[[str, str], None],
    model: Callable[..., dict[str, Any]],
    precision: str,
    layouts: list[str],
    options: dict[str, Any],
) -> None:
    tree = model(tmp_path, mixed_precision=precision, gradient_accumulation=2, **options)
    tree["training"] |= {"batch_size": None, "global_batch_size": 22}
    tree["distributed"] = {"backend": "gloo"}
    for verdict in prove(check_run(tree), procs=2, layouts=layouts, steps=2, runner=runner_on(pool2)):
        failed = {check.name: check.detail for check in verdict.checks if not check.passed}
        assert failed == {}, verdict.layout
        gradients = {check.name: check.detail for check in verdict.checks}["gradients"]
        how = ", ".join(
            [model.__name__, verdict.layout, precision, *(f"{key} {value}" for key, value in options.items())]
        )
        note(f"`shoal verify` on {verdict.procs} over gloo: {how}", f"same; gradients {gradients}")


WIDTH, BLOCKS = 2048, 16


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Large(Recipe):
    """128 million parameters: 512 MiB of weights, 2 GiB with gradients and moments."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Wide() for _ in range(BLOCKS)))

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()


def train_under_a_cap(name: str, cap_gib: float, options: dict[str, Any]) -> tuple[float, float]:
    """(loss after two updates, peak GiB), with no more than so much of the GPU for this process."""
    whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(cap_gib / whole, 0)
    recipe, training = Large(), TrainingConfig(max_steps=1)
    kinds = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "deepspeed": DeepSpeedStrategy}
    with kinds[name](device="cuda", backend="gloo", **options) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        plan = recipe.parallel_plan(model)
        model, optimizer = strategy.prepare(
            model, lambda m: build_optimizer(training, recipe.param_groups(m)), plan, weights
        )
        for step in range(3):
            torch.manual_seed(strategy.rank)
            batch = MicroBatch({"x": torch.randn(2, WIDTH)}, [0, 0], [0, 1])
            loss = strategy.forward_backward(model, [batch], recipe, step).loss.item()
            strategy.step(optimizer, 1.0)
        return loss, torch.cuda.max_memory_allocated() / 2**30


CAP = 1.6


@pytest.fixture(scope="module")
def sharded() -> tuple[float, float]:
    """The loss and the peak of FULL_SHARD on two ranks, where DDP is out of memory."""
    with pytest.raises(RuntimeError, match="out of memory"):
        run_function(train_under_a_cap, ("ddp", CAP, {}), 2, "spawn")
    return run_function(train_under_a_cap, ("fsdp", CAP, {}), 2, "spawn")[0]


def test_a_model_that_ddp_cannot_train(sharded: tuple[float, float], note: Callable[[str, str], None]) -> None:
    whole, peak = sharded
    note(f"DDP on 2, 128 million parameters, {CAP} GiB each", "out of memory")
    note("FULL_SHARD on 2, the same", f"trains, peak {peak:.2f} GiB")
    for procs, room in {2: 1e-3, 1: 0.2}.items():  # alone it has half the samples
        (loss, peak), *_ = run_function(train_under_a_cap, ("fsdp", CAP, {"cpu_offload": True}), procs, "spawn")
        assert peak < CAP
        assert loss == pytest.approx(whole, rel=room)
        note(f"FULL_SHARD on {procs}, cpu_offload, the same", f"trains, peak {peak:.2f} GiB")


@needs_deepspeed
@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("optimizer offloaded", {"offload_optimizer": "cpu"}),
        ("all offloaded", {"offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    ],
)
def test_zero_3_trains_a_model_that_ddp_cannot(
    sharded: tuple[float, float], note: Callable[[str, str], None], answer: str, options: dict[str, Any]
) -> None:
    (loss, peak), _ = run_function(train_under_a_cap, ("deepspeed", CAP, {"stage": 3, **options}), 2, "spawn")
    assert peak < CAP
    assert loss == pytest.approx(sharded[0], rel=1e-3)
    print(f"{CAP} GiB: DDP is out of memory, ZeRO-3 with {answer} peaks at {peak:.2f} GiB")
    note(f"ZeRO-3 on 2, {answer}, 128 million parameters, {CAP} GiB each", f"trains, peak {peak:.2f} GiB")


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputed_blocks_are_one_compiled_graph(tmp_path: Path, note: Callable[[str, str], None], mode: str) -> None:
    train(check_run(llama(tmp_path, mixed_precision="bf16", compile=True, activation_checkpointing=mode)))
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "4 modules, 1 graph, no breaks" in report
    note(f"Llama, bf16, compiled, activation_checkpointing {mode}", "4 modules, 1 graph, no breaks")


@pytest.mark.parametrize("head", [False, True])
def test_fp8_trains(tmp_path: Path, note: Callable[[str, str], None], head: bool) -> None:
    keys = {"fp8_head": True, "loss_chunks": 3} if head else {}
    outcome = train(check_run(llama(tmp_path, mixed_precision="fp8", compile=True, **keys)))
    assert outcome.metrics["train/loss"] < 4.0  # from 6.2
    report = (tmp_path / "out" / "report.txt").read_text()
    assert f"28 linear layers{' and the head' * head}" in report
    loss = f"loss 6.2 → {outcome.metrics['train/loss']:.3f}"
    note(f"Llama, fp8{', also the head' * head}, compiled, 30 steps", loss)


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_of_blocks_in_host_memory_change_nothing(
    tmp_path: Path, note: Callable[[str, str], None], compiled: bool
) -> None:
    models = []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        recompute = {"mode": "full", "offload": offload}
        keys = {"mixed_precision": "bf16", "compile": compiled, "max_steps": 5, "activation_checkpointing": recompute}
        models.append(train(check_run(llama(folder, **keys, deterministic=True))).model)
        assert ("inputs in host memory" in (folder / "out" / "report.txt").read_text()) == offload
    for plain, moved in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(moved, plain)
    note(f"inputs of recomputed blocks in host memory{', compiled' * compiled}, 5 steps", "the same weights")


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_of_blocks_in_host_memory_take_no_memory_of_the_device(
    note: Callable[[str, str], None], compiled: bool
) -> None:
    """What a forward keeps, of 16 blocks with inputs of 64 MiB, whose weights take nearly nothing."""

    def kept(offload: bool) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16))).cuda()
        plan = ParallelPlan(blocks=tuple(map(str, range(16))))
        modules = CompiledModules(model, plan) if compiled else None
        apply_activation_checkpointing(model, plan, ActivationCheckpointingConfig(mode="full"))
        if modules:
            modules.compile(torch.device("cuda"))
        if offload:
            keep_inputs_on_host([*model], torch.device("cuda"))
        x = torch.randn(2**18, 64, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        loss = model(x).square().sum()
        torch.cuda.synchronize()
        memory = (torch.cuda.memory_allocated() - before) / 2**20
        loss.backward()
        assert x.grad is not None
        return memory, x.grad

    (plain, expected), (moved, found) = kept(False), kept(True)
    assert torch.equal(found, expected)
    assert plain > 15 * 64
    assert moved < 3 * 64
    note(
        f"what 16 recomputed blocks{', compiled' * compiled} keep of inputs of 64 MiB",
        f"{plain:.0f} MiB, and {moved:.0f} MiB with inputs in host memory",
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_head_in_fp8_is_near_one_in_float64(note: Callable[[str, str], None], bias: bool, compiled: bool) -> None:
    """Its loss and all gradients; two products of three are in fp8, and their FLOPs are counted."""
    torch.manual_seed(0)
    head = nn.Linear(256, 4096, bias, device="cuda")
    x = torch.randn(2, 500, 256, device="cuda", requires_grad=True)
    labels = torch.randint(4096, (2, 500), device="cuda")
    labels[0, :9] = IGNORED_LABEL
    chunks = ChunkedHead(
        nn.Sequential(head), ParallelPlan(head="0"), 3, GraphChoice() if compiled else None, float8=True
    )
    scale = torch.tensor(1 / 300, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), chunks.scoring(labels, scale), FlopCounterMode(display=False) as flops:
        loss = head(x)
    found = [loss.detach(), *torch.autograd.grad(loss, (x, *head.parameters()), scale)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *head.parameters())]
    logits = nn.functional.linear(exact[0], *exact[1:])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    right = [expected.detach(), *torch.autograd.grad(expected, exact, scale.double())]
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]
    assert errors[0] < 1e-3
    assert max(errors) < 0.06
    assert flops.get_total_flops() == 3 * 2 * 1000 * 256 * 4096
    note(f"head in fp8{', compiled' * compiled}{', with a bias' * bias}", f"errors up to {max(errors):.1e}")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_weights_in_bf16_train(tmp_path: Path, note: Callable[[str, str], None], precision: str) -> None:
    before = compile_counts().graphs
    outcome = train(check_run(llama(tmp_path, mixed_precision=precision, weights_dtype="bf16")))
    assert outcome.metrics["train/loss"] < 4.0  # from 6.2
    graphs = compile_counts().graphs - before
    assert graphs <= 6  # the update is compiled for a few kinds of shapes, and not again in every step
    note(f"Llama, {precision}, weights in bf16, 30 steps", f"loss 6.2 → {outcome.metrics['train/loss']:.3f}")


@pytest.mark.parametrize("weights_dtype", ["fp32", "bf16"])
def test_a_resumed_run_repeats_to_the_bit(tmp_path: Path, note: Callable[[str, str], None], weights_dtype: str) -> None:
    tree = bdh(tmp_path, deterministic=True, mixed_precision="bf16", weights_dtype=weights_dtype)
    train(check_run(tree))
    out = Path(tree["experiment"]["output_dir"])
    whole = json.loads((out / "checkpoints" / "step_00000030" / "manifest.json").read_text())["tensors"]
    for step in (20, 30):
        (out / "checkpoints" / f"step_{step:08d}").rename(tmp_path / f"gone_{step}")
    train(check_run(tree))
    again = json.loads((out / "checkpoints" / "step_00000030" / "manifest.json").read_text())["tensors"]
    digests = [{name: about["pieces"][0]["sha256"] for name, about in part.items()} for part in (whole, again)]
    assert digests[0] == digests[1]
    weights = ", weights in bf16" * (weights_dtype == "bf16")
    note(f"deterministic bf16{weights}, resumed at step 10 of 30", f"bit-equal in {len(digests[0])} tensors")


def test_a_compiled_run_with_sequences_of_several_lengths_resumes_to_the_bit(
    tmp_path: Path, note: Callable[[str, str], None]
) -> None:
    """A QLoRA with dropout: the resumed process sees other lengths first."""
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "blue", "fish", "swam", "in", "deep", "cold", "water"]
    records = [
        {"prompt": " ".join(words[: 1 + i % 5]), "completion": " ".join(words[i % 3 :][: 1 + i % 11])}
        for i in range(200)
    ]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, records)))
    tree = llama(tmp_path, mixed_precision="bf16", compile=True, deterministic=True, max_steps=12, batch_size=4)
    tree["training"] |= {"global_batch_size": 14, "lr_scheduler": "constant"}
    tree["recipe"] = "text_lora"
    tree["dataset"] = {
        "train_file": str(tmp_path / "facts.jsonl"),
        "tokenizer": "bytes",
        "max_seq_length": 96,
        "cache_dir": str(tmp_path),
    }
    tree["model"]["config"]["max_position_embeddings"] = 128
    tree["model"] |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "dtype": "bf16"}
    tree["lora"] = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
    digests = {}
    for output, stops in (("whole", [12]), ("resumed", [7, 12])):
        for steps in stops:
            tree["training"]["max_steps"] = steps
            tree["experiment"]["output_dir"] = str(tmp_path / output)
            train(check_run(tree))
        manifest = json.loads((tmp_path / output / "checkpoints" / "step_00000012" / "manifest.json").read_text())
        digests[output] = {name: about["pieces"][0]["sha256"] for name, about in manifest["tensors"].items()}
    assert digests["resumed"] == digests["whole"]
    note("compiled QLoRA, sequences of several lengths, resumed", f"bit-equal in {len(digests['whole'])} tensors")


def test_no_step_waits_for_the_device(
    toy: ToyRun,
    note: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    change_recipe: Callable[[str, str], None],
) -> None:
    """Between two lines of the log nothing may synchronise: torch raises if something does."""
    metrics = (
        '    def metrics(self, output, batch):\n        return {"mean": output.mean(), "sum": (output.sum(), 4)}\n\n'
    )
    change_recipe("    def inputs(", f"{metrics}    def inputs(")
    take_step, first_steps = RecipeBody.take_step, dict[RecipeBody, int]()

    def watched(self: RecipeBody, micro_batches: Any, step: int) -> Any:
        torch.cuda.set_sync_debug_mode("error" if step > first_steps.setdefault(self, step) else "default")
        try:
            return take_step(self, micro_batches, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(RecipeBody, "take_step", watched)
    for precision in ("fp32", "bf16", "fp16"):
        toy.train(f"training.mixed_precision={precision}", f"experiment.output_dir={toy.folder}/{precision}")
    for optimizer in ("lion", "muon"):
        keys = ["recipe=toy_recipe:Divisible", f"training.optimizer={optimizer}"]
        toy.train(*keys, f"experiment.output_dir={toy.folder}/{optimizer}")
    for mode in ("full", "selective"):
        options = {"loss_chunks": 4, "activation_checkpointing": mode, "mixed_precision": "bf16"}
        folder = toy.folder / mode
        folder.mkdir()
        train(check_run(llama(folder, **options)))
    train(check_run(llama(toy.folder, mixed_precision="pure_bf16") | {"distributed": {"strategy": "fsdp"}}))
    rounded = toy.folder / "rounded"
    rounded.mkdir()
    train(check_run(llama(rounded, mixed_precision="bf16", weights_dtype="bf16")))
    kinds = "with metrics in fp32, bf16 and fp16; recomputed, chunked, fsdp on one process, weights in bf16"
    note(f"host synchronisations in a step, {kinds}", "none (torch.cuda.set_sync_debug_mode)")


def test_no_step_of_a_loop_of_ones_own_waits_for_the_device(toy: ToyRun, note: Callable[[str, str], None]) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        options = {"training.mixed_precision": precision, "experiment.output_dir": toy.folder / precision}
        with shoal.Run(toy.config, **{**options, "training.gradient_accumulation": 2, "logging.every": 1}) as run:
            for step in run.steps():
                torch.cuda.set_sync_debug_mode("error" if step.number > 1 else "default")
                for batch in step.batches:
                    with step.accumulate(), run.autocast():
                        loss = torch.nn.functional.mse_loss(run.model(batch["x"]), batch["y"])
                        run.backward(loss)
                        step.log(inside=loss)
                run.step()
                step.log(last=loss)
                torch.cuda.set_sync_debug_mode("default")
        assert run.outcome is not None
        assert run.outcome.step == 10
    note("host synchronisations in the body of a loop of one's own", "none (torch.cuda.set_sync_debug_mode)")


@pytest.mark.parametrize(
    ("heads", "batch", "time", "embd", "neurons", "dropout"),
    [
        (4, 3, 512, 256, 8192, 0.1),
        (2, 3, 40, 16, 128, 0.0),
        (1, 2, 100, 32, 192, 0.25),
        (3, 5, 37, 64, 64, 0.1),
        (2, 2, 2600, 256, 1024, 0.1),  # in chunks
    ],
)
def test_the_kernels_of_bdh_are_as_near_to_float64_as_plain_bf16(
    note: Callable[[str, str], None], heads: int, batch: int, time: int, embd: int, neurons: int, dropout: float
) -> None:
    """Values and all gradients, on odd sizes, and with dropout: its mask is computed again by plain PyTorch."""
    device = torch.device("cuda")
    assert why_not(device, torch.bfloat16, embd, neurons) is None
    errors = errors_beside_plain(heads, batch, time, embd, neurons, dropout, device)
    # A few gates near 0 decide how far a bf16 result is off: another order of sums opens others.
    assert {name: pair for name, pair in errors.items() if pair[0] > 3 * pair[1] + 0.002} == {}
    size = f"{heads} heads, {batch} × {time} tokens, {embd} channels, {neurons} neurons, dropout {dropout}"
    note(
        f"BDH in Triton beside float64: {size}",
        f"{max(a / b for a, b in errors.values()):.2f} times the error of plain bf16",
    )


@pytest.mark.parametrize(
    ("tokens", "width", "rank", "p", "dtype"),
    [(2048, 4096, 64, 0.05, "bfloat16"), (300, 1000, 8, 0.3, "bfloat16"), (77, 264, 100, 0.1, "float16")],
)
def test_the_kernels_of_adapters_drop_what_plain_code_drops(
    note: Callable[[str, str], None], tokens: int, width: int, rank: int, p: float, dtype: str
) -> None:
    """Values and gradients beside float64, with the mask that PyTorch computes."""
    kind, device = getattr(torch, dtype), torch.device("cuda")
    assert dropout.why_not(device, kind, rank) is None
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device, dtype=kind, requires_grad=True)
    weight = torch.randn(rank, width, device=device, dtype=kind, requires_grad=True)
    seed = torch.tensor(777123, device=device)
    mask = dropout.kept_places(x.shape, seed, p).double() / (1 - p)
    y = dropout.dropped_product(x, weight, weight.detach().to(x.dtype), seed, p, 0.25)
    to_y = torch.randn(tokens, rank, device=device, dtype=kind)
    found = [y, *torch.autograd.grad(y, (x, weight), to_y), dropout.drop(x, seed, p)]
    dropped, gradient = x.double().detach() * mask, to_y.double()
    right = [0.25 * dropped @ weight.double().mT, 0.25 * gradient @ weight.double() * mask]
    right += [0.25 * gradient.mT @ dropped, dropped]
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]
    assert max(errors) < (0.003 if kind == torch.bfloat16 else 0.0004)
    assert torch.equal(found[3] == 0, right[3].detach() == 0)
    note(f"dropout of adapters in Triton: {tokens} × {width}, rank {rank}, {dtype}", f"errors up to {max(errors):.1e}")


@needs_bitsandbytes
@pytest.mark.parametrize(("tokens", "sizes", "rank"), [(512, (256, 192), 64), (100, (96, 160), 5), (3, (64, 64), 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_4_bit_layer_with_an_adapter_is_exact_to_rounding(
    note: Callable[[str, str], None], tokens: int, sizes: tuple[int, int], rank: int, dtype: str
) -> None:
    """The output and all gradients, beside those in float64."""
    torch.manual_seed(0)
    kind, (width, outputs) = getattr(torch, dtype), sizes
    layer = QuantisedLinear(nn.Linear(width, outputs, device="cuda").requires_grad_(False), FourBit(double=True))
    shapes = (2, tokens, width), (2, tokens, rank), (outputs, rank)
    inputs = [torch.randn(shape, device="cuda", dtype=kind, requires_grad=True) for shape in shapes]
    layer.bias = nn.Parameter(torch.randn(outputs, device="cuda", dtype=kind))
    inputs.append(layer.bias)
    y = layer(inputs[0], (inputs[1], inputs[2]))
    to_y = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, inputs, to_y)]
    x, left, right, bias = exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = x @ layer.dequantise().double().mT + left @ right.mT + bias
    right_ones = [expected, *torch.autograd.grad(expected, exact, to_y.double())]
    pairs = zip(found, right_ones, strict=True)
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
    assert max(errors) < {"bfloat16": 0.005, "float16": 0.0006, "float32": 1e-5}[dtype]
    note(
        f"4-bit layer with an adapter: {tokens} × {width} × {outputs}, rank {rank}, {dtype}",
        f"errors up to {max(errors):.1e}",
    )


@needs_bitsandbytes
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_kernel_of_4_bit_weights_gives_the_numbers_of_bitsandbytes(
    note: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, quant_type: Any, double: bool
) -> None:
    scheme = FourBit(quant_type, double)
    for shape in ((1024, 512), (1000, 100), (33, 7)):
        matrix = torch.randn(shape, device="cuda")
        weight, statistics = (scheme.quantise(part, matrix) for part in PARTS)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            by_kernel = scheme.dequantise(weight, statistics, shape, dtype)
            with monkeypatch.context() as patched:
                patched.setattr(schemes, "has_kernel", lambda weight: False)
                assert torch.equal(by_kernel, scheme.dequantise(weight, statistics, shape, dtype)), (shape, dtype)
    note(f"4-bit weights in Triton: {quant_type}{', quantised scales' * double}", "the bits of bitsandbytes")


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("name", "model_keys", "training"),
    [
        ("4 bits, compiled", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"compile": True}),
        ("4 bits, paged", {"load_in_4bit": True}, {"optimizer": "paged_adamw_32bit", **LEAN}),
        ("8 bits, adamw_8bit", {"load_in_8bit": True}, {"optimizer": "adamw_8bit"}),
    ],
)
def test_qlora_trains(
    tmp_path: Path,
    note: Callable[[str, str], None],
    name: str,
    model_keys: dict[str, Any],
    training: dict[str, Any],
) -> None:
    tree = llama(tmp_path, mixed_precision="bf16", **training)
    tree["model"] |= {**model_keys, "dtype": "bf16"}
    tree["lora"] = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.05}
    outcome = train(check_run(tree))
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "dropout" in report
    assert "in Triton" in report
    assert outcome.metrics["train/loss"] < 6.1  # from 6.24 = ln 512; the base is random and frozen
    note(f"QLoRA, {name}, 30 steps", f"loss 6.24 → {outcome.metrics['train/loss']:.3f}")


def test_small_kernels_of_adapters_are_launched_together(note: Callable[[str, str], None]) -> None:
    """Each of the 14 matrices is cast; apart, that would be 14 kernels."""

    def launches(device: torch.device) -> int:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(7)))
        add_adapters(model, LoraConfig(r=8, target_modules=[str(i) for i in range(7)]))
        model.cuda()
        CompiledModules(model, ParallelPlan()).compile(device)
        x = torch.randn(16, 64, device="cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            model(x)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                model(x)
                torch.cuda.synchronize()
        names = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
        return sum(name.startswith("triton_") for name in names)

    apart, together = (launches(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert apart >= 14
    assert together <= apart - 10
    note("kernels that torch.compile makes for 7 adapters", f"{together}, and {apart} if they are not joined")


QLORA = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("name", "model", "model_keys", "training"),
    [
        ("BDH with dropout, 2 micro-batches, compiled", bdh, {"dropout": 0.1}, {"compile": True, **TWO}),
        ("BDH in fp16, fsdp on one process", bdh, {"dropout": 0.1}, {"mixed_precision": "fp16"}),
        pytest.param("QLoRA, compiled, recomputed", llama, QLORA, {**LEAN, "compile": True}, marks=needs_bitsandbytes),
    ],
)
def test_recorded_steps_have_the_bits_of_others(
    tmp_path: Path,
    note: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    model: Callable[..., dict[str, Any]],
    model_keys: dict[str, Any],
    training: dict[str, Any],
) -> None:
    digests, replayed, replay = [], [0], Recorded._replay

    def counted(*args: Any) -> Tensor:
        replayed[0] += 1
        return replay(*args)

    monkeypatch.setattr(Recorded, "_replay", counted)
    for recorded in (False, True):
        folder = tmp_path / str(recorded)
        folder.mkdir()
        tree = model(folder, **{"mixed_precision": "bf16", "max_steps": 8, **training}, deterministic=True)
        tree["training"]["cuda_graphs"] = recorded
        tree["model"] |= model_keys
        if "load_in_4bit" in model_keys:
            tree["lora"] = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.05}
        if "fsdp" in name:
            tree["distributed"] = {"strategy": "fsdp"}
        train(check_run(tree))
        manifest = json.loads((folder / "out" / "checkpoints" / "step_00000008" / "manifest.json").read_text())
        digests.append({key: about["pieces"][0]["sha256"] for key, about in manifest["tensors"].items()})
        assert ("recorded for 1 kind" in (folder / "out" / "report.txt").read_text()) == recorded
    assert digests[0] == digests[1]
    assert replayed[0] == 8 * training.get("gradient_accumulation", 1)
    note(f"recorded in CUDA graphs: {name}, 8 steps", f"bit-equal in {len(digests[0])} tensors")


class Small(Large):
    """A model that does what a recording cannot repeat."""

    does = ""

    def build_model(self) -> nn.Module:
        return _Small(self.does)


class _Small(nn.Module):
    def __init__(self, does: str) -> None:
        super().__init__()
        self.linear, self.norm, self.does, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), does, 0

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.linear(input) + self.norm(input)
        if self.does == "waits":
            return output * output.mean().item()
        if self.does == "changes":
            self.calls += 1
            return output * self.calls
        if self.does == "drops":  # and again while it is recomputed
            output = checkpoint(lambda x: nn.functional.dropout(x, 0.5), output, use_reentrant=False)
        if self.does == "draws":
            return output * random.random()
        return output * float(self.training)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("waits", "waits for the GPU or moves to the host"),
        ("draws", "random numbers on the host"),
        ("changes", "computes otherwise"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(does: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        _steps_of_small(does, lambda model, step: None)


def test_a_recording_is_not_used_for_a_model_that_has_changed() -> None:
    """Frozen parameters, other modes and other memory: gradients are those of steps without recordings."""

    def change(model: nn.Module, step: int) -> None:
        model.linear.bias.requires_grad_(step != 1)  # type: ignore[union-attr]
        model.train(step != 2)
        if step == 3:
            model.linear.weight.data = model.linear.weight.data.clone() * 2  # type: ignore[union-attr, operator]

    recorded, plain = (_steps_of_small("drops", change, cuda_graphs=graphs) for graphs in (True, False))
    assert recorded == plain
    assert recorded[1][1] is None
    assert recorded[2][0] == 0.0


def _steps_of_small(does: str, change: Callable[[nn.Module, int], None], cuda_graphs: bool = True) -> list[Any]:
    """Returns for five steps the sums of the gradients of all parameters, and of the buffers."""
    recipe, training, found = Small(), TrainingConfig(max_steps=1), list[Any]()
    recipe.does = does
    with SingleStrategy(device="cuda", cuda_graphs=cuda_graphs) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        plan = recipe.parallel_plan(model)
        model, optimizer = strategy.prepare(
            model, lambda m: build_optimizer(training, recipe.param_groups(m)), plan, weights
        )
        for step in range(5):
            change(model, step)
            batch = MicroBatch({"x": torch.arange(16.0).view(2, 8) * (step + 1)}, [0, 0], [0, 1])
            strategy.forward_backward(model, [batch], recipe, step)
            gradients = [None if p.grad is None else p.grad.sum().item() for p in model.parameters()]
            found.append([*gradients, *(buffer.sum().item() for buffer in model.buffers())])
            strategy.step(optimizer, 1.0)
    return found


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_the_published_bdh_is_quick(tmp_path: Path, note: Callable[[str, str], None], kernels: str) -> None:
    # In a process of its own: the shapes of the other tests would make torch.compile go for dynamic ones.
    (metrics,) = run_function(_train_published_bdh, (str(tmp_path), kernels), 1, "spawn")
    assert metrics["train/mfu"] > 0
    speed = f"{metrics['train/tokens_per_second']:,.0f} tokens/s, MFU {metrics['train/mfu']:.1%}"
    how = ", fused kernels" if kernels == "fused" else ""
    note(f"published BDH, 32 × 512 tokens, bf16, compiled{how}", f"{speed}, {metrics['train/memory_gib']:.1f} GiB")


def _train_published_bdh(folder: str, kernels: str) -> dict[str, float]:
    config = Path(__file__).parents[2] / "shoal" / "configs" / "bdh_stdlib.yaml"
    keys = ["training.max_steps=150", "training.eval_steps=null", "training.eval_batches=1"]
    keys += ["logging.every=50", "logging.console=off", f"experiment.output_dir={folder}/out"]
    keys += [f"training.kernels={kernels}"]
    return train(load_run(config, keys)).metrics


def _train_bdh(folder: str) -> None:
    tree = bdh(Path(folder), mixed_precision="bf16")
    tree["distributed"] = {"backend": "gloo"}
    train(check_run(tree))


def test_ddp_trains_on_a_shared_gpu(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    run_function(_train_bdh, (str(tmp_path),), 2, "spawn")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 3.0
    note("DDP, two ranks on one GPU over gloo, bf16, 30 steps", f"loss 5.6 → {losses[-1]:.3f}")
