"""Optimizers by name and of the user's own, in every layout, and what is found out about them by trying."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from strategies.nets import Points, make, micro_batch, rows, whole
from torch import Tensor, nn
from training import own_optimizers
from training.test_moves import bits, train_on

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.parallel.sharding.trial import try_out
from shoal.training.muon import Muon, mark_matrices
from shoal.training.optimizers import build_optimizer
from shoal.training.session import assemble

OWN = "training.own_optimizers:"
CONSTANT = {"max_steps": 4, "lr_scheduler": "constant", "learning_rate": 0.05, "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"amsgrad": True},
    "adamw": {"betas": [0.8, 0.9], "eps": 1e-6},
    "sgd": {"momentum": 0.9, "dampening": 0.5},
    "rmsprop": {"alpha": 0.9, "momentum": 0.5, "centered": True},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "adadelta": {"rho": 0.8},
    "adamax": {"betas": [0.8, 0.9]},
    "radam": {"betas": [0.8, 0.9]},
    "nadam": {"momentum_decay": 0.01},
    "asgd": {"lambd": 0.01, "alpha": 0.5, "t0": 1.0},
    "rprop": {"etas": [0.4, 1.3], "step_sizes": [1e-5, 10.0]},
    "adafactor": {"beta2_decay": -0.7, "d": 2.0},
}
"""torch's optimizers, with options that are not their defaults."""
NAMES = {name.lower(): name for name in dir(torch.optim)}


def training(name: str, **options: Any) -> TrainingConfig:
    return TrainingConfig(**CONSTANT, optimizer={"name": name, **options})


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
def test_names_are_torchs_optimizers(name: str) -> None:
    options = OPTIONS[name]
    ours, theirs, plain = ([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))] for _ in range(3))
    take_steps(build_optimizer(training(name, **options), [{"params": ours}]), ours)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    decay = {} if name == "rprop" else {"weight_decay": 0.1}
    take_steps(getattr(torch.optim, NAMES[name])(theirs, lr=0.05, **decay, **given), theirs)
    take_steps(build_optimizer(training(name), [{"params": plain}]), plain)
    for a, b, c in zip(ours, theirs, plain, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.equal(a, c)


def test_lion_is_the_papers() -> None:
    ours, theirs = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    take_steps(build_optimizer(training("lion", betas=[0.8, 0.9]), [{"params": [ours]}]), [ours])
    generator, average = torch.Generator().manual_seed(1), torch.zeros(3, 2)
    with torch.no_grad():
        for _ in range(4):
            gradient = torch.randn(3, 2, generator=generator)
            theirs.sub_(0.05 * ((0.8 * average + 0.2 * gradient).sign() + 0.1 * theirs))
            average = 0.9 * average + 0.1 * gradient
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(nesterov: bool) -> None:
    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 4))]

    options = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = parameters(), parameters()
    config = training("muon", **options, adamw_learning_rate=0.3, betas=[0.8, 0.9], eps=1e-6)
    take_steps(build_optimizer(config, mark_matrices([{"params": ours}], {id(ours[0])})), ours)
    generator = torch.Generator().manual_seed(1)
    pair = [
        torch.optim.Muon(theirs[:1], lr=0.05, weight_decay=0.1, **options),
        torch.optim.AdamW(theirs[1:], lr=0.3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    ]
    for _ in range(4):
        for parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_updates_are_divided_and_skipped_on_the_device(name: str) -> None:
    ours, divided = ([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))] for _ in range(2))
    optimizers: list[Any] = [
        build_optimizer(training(name), mark_matrices([{"params": p}], {id(p[0])})) for p in (ours, divided)
    ]
    for optimizer, parameters, scale in zip(optimizers, (ours, divided), (1.0, 8.0), strict=True):
        for parameter in parameters:
            parameter.grad = scale * torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(scale)
        optimizer.step()
    for a, b in zip(ours, divided, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.equal(a, torch.ones_like(a))
    weights = [parameter.clone() for parameter in ours]
    state = [{key: value.clone() for key, value in optimizers[0].state[p].items()} for p in ours]
    for parameter in ours:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizers[0].found_inf, optimizers[0].grad_scale = torch.ones(()), None
    optimizers[0].step()
    assert all(map(torch.equal, ours, weights))
    for parameter, slots in zip(ours, state, strict=True):
        assert all(torch.equal(optimizers[0].state[parameter][slot], value) for slot, value in slots.items())


# What is found out by trying


def trial(kind: type[Any], **options: Any) -> Any:
    return try_out(kind([nn.Parameter(torch.ones(2))], **options))


def test_elementwise_optimizers_are_found_by_trying() -> None:
    counting, momentum = trial(own_optimizers.Counting, lr=1e-9), trial(own_optimizers.Momentum, lr=1e-9)
    assert (counting.elementwise, counting.all_tensors, counting.problem) == (True, False, "")
    assert (momentum.elementwise, momentum.all_tensors, momentum.problem) == (True, True, "")
    for kind in (own_optimizers.Lars, own_optimizers.Factored, torch.optim.Adafactor):
        found = trial(kind, lr=1e-9)
        assert not found.elementwise
        assert not found.problem


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Rprop", "ASGD"])
def test_the_list_of_torchs_elementwise_optimizers_is_right(name: str) -> None:
    assert trial(getattr(torch.optim, name), lr=0.01).elementwise


def test_optimizers_that_do_not_resume_are_found_by_trying() -> None:
    for kind in (own_optimizers.Hidden, own_optimizers.InGroups, own_optimizers.EveryTenth):
        assert "does not resume exactly" in trial(kind).problem
    assert not trial(own_optimizers.Watching).problem
    assert "keeps a list as 'history'" in trial(own_optimizers.Listing).problem
    assert "fails on a small tensor" in trial(torch.optim.LBFGS).problem
    assert "does not support dense gradients" in trial(torch.optim.SparseAdam).problem


def test_trying_leaves_the_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trial(own_optimizers.Counting)
    assert torch.equal(torch.rand(3), expected)


# Layouts


def train_points(kind: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """Returns the weights after three steps with each optimizer, or why it was refused."""
    results: dict[str, Any] = {}
    for name in names:
        with make(kind) as strategy:
            recipe = Points()
            try:
                session = assemble(recipe, strategy, training(name), 0)
            except UserError as error:
                results[name] = str(error)
                continue
            for step in range(3):
                batches = [rows(4, 10 * step + data_rank) for data_rank in range(2)]
                if strategy.data_size == 2:
                    batches = [batches[strategy.data_rank]]
                taken = [micro_batch(*batch) for batch in batches]
                strategy.forward_backward(session.model, taken, recipe, step)
                strategy.step(session.optimizer, 1.0)
            results[name] = whole(session.state().model)
    return results


ALL = [*OPTIONS, "lion", "muon", f"{OWN}Counting", f"{OWN}Momentum", f"{OWN}Lars"]
ALL.remove("rprop")  # whose steps depend on the signs of the smallest rounding errors
REFUSED = {
    "fsdp": {"adafactor", f"{OWN}Lars"},
    "tp": {"adafactor", f"{OWN}Lars"},
    "zero_1": {"adafactor", "adagrad", "muon", f"{OWN}Lars", f"{OWN}Counting"},
}
REFUSED["zero_3"] = REFUSED["zero_2"] = REFUSED["zero_1"]
QUICK = ["lion", "muon", "adagrad", "adafactor", f"{OWN}Counting", f"{OWN}Lars"]
CASES = [("fsdp", QUICK), ("tp", QUICK), ("zero_1", ["lion", "muon", f"{OWN}Counting"])]
SLOW = [(kind, ALL) for kind in ("ddp", "fsdp", "fsdp_no_shard", "tp", "zero_1", "zero_2", "zero_3")]


@pytest.mark.parametrize(("kind", "names"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_layouts_train_alike_or_refuse(pool2: Pool, kind: str, names: list[str]) -> None:
    if kind.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("the package deepspeed is not installed")
    expected = train_points("single", names)
    for results in pool2.run(train_points, kind, names, init=False):
        for name in names:
            got = results[name]
            if name in REFUSED.get(kind, ()):
                assert isinstance(got, str), name
                assert "\n" not in got
                continue
            assert not isinstance(got, str), got
            for key, tensor in expected[name].items():
                # Muon multiplies in bf16, whose rounding depends on the last bits.
                tolerance = 2e-2 if name == "muon" else 1e-4
                torch.testing.assert_close(got[key], tensor, rtol=tolerance, atol=tolerance / 10, msg=f"{name} {key}")


MOVES = [
    (f"{OWN}Counting", "fsdp2", "single"),
    ("muon", "single", "fsdp2"),
    *(
        pytest.param(name, first, second, marks=pytest.mark.slow)
        for name in ("lion", "muon", "adagrad", "rmsprop", f"{OWN}Counting")
        for first, second in (("fsdp2", "single"), ("ddp2", "fsdp2"), ("tp2_fsdp2", "pp2"), ("pp2", "tp2"))
    ),
    *(
        pytest.param("lion", *pair, marks=pytest.mark.slow)
        for pair in (("zero2_on2", "single"), ("fsdp2", "zero3_on2"))
    ),
]


@pytest.mark.parametrize(("name", "first", "second"), MOVES)
def test_state_moves_between_layouts(toy: ToyRun, pool2: Pool, pool4: Pool, name: str, first: str, second: str) -> None:
    pools = {2: pool2, 4: pool4}
    keys = ["training.lr_scheduler=constant", f"training.optimizer={name}"]
    train_on(first, toy, pools, *keys, "training.max_steps=4")
    train_on(second, toy, pools, *keys, "training.max_steps=6")
    train_on("single", toy, pools, *keys, "training.max_steps=6", f"experiment.output_dir={toy.folder}/whole")
    tolerance = 2e-2 if name == "muon" else 1e-4
    assert toy.metrics() == pytest.approx(toy.metrics(output=toy.folder / "whole"), rel=tolerance)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("muon", "fsdp2"),
        (f"{OWN}Counting", "single"),
        *(pytest.param(name, "fsdp2", marks=pytest.mark.slow) for name in ALL if name not in REFUSED["fsdp"]),
        *(pytest.param(name, "single", marks=pytest.mark.slow) for name in ALL),
        *(pytest.param(name, "tp2_fsdp2", marks=pytest.mark.slow) for name in ("muon", "lion")),
    ],
)
def test_runs_go_on_as_if_they_had_not_stopped(toy: ToyRun, pool2: Pool, pool4: Pool, name: str, layout: str) -> None:
    pools, keys = {2: pool2, 4: pool4}, ["training.lr_scheduler=constant", f"training.optimizer={name}"]
    train_on(layout, toy, pools, *keys, "training.max_steps=3")
    train_on(layout, toy, pools, *keys, "training.max_steps=6")
    train_on(layout, toy, pools, *keys, "training.max_steps=6", f"experiment.output_dir={toy.folder}/undisturbed")
    folders = (toy.output, toy.folder / "undisturbed")
    resumed, undisturbed = (open_checkpoint(f / "checkpoints" / "step_00000006").read() for f in folders)
    assert bits(resumed) == bits(undisturbed)


# What users write


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("adamv", "is not one of 'adamw', 'adam', .*; did you mean 'adam"),
        ("no_such:Class", "no module 'no_such'"),
        (f"{OWN}Countin", "has no 'Countin'; did you mean 'Counting'"),
        (f"{OWN}not_a_class", "is not an optimizer; make it a subclass of torch.optim.Optimizer"),
        (f"{{name: {OWN}Counting, strenght: 2.0}}", "Counting has no such argument; did you mean 'strength'"),
        (f"{{name: {OWN}Counting, lr: 2.0}}", "optimizer.lr = 2.0: set training.learning_rate instead"),
        (f"{{name: {OWN}Picky, strength: 2.0}}", "its constructor refuses these options: too strong"),
        (f"{OWN}NoRate", "its parameter groups have no `lr`"),
        (f"{OWN}Hidden", "own_optimizers:Hidden: it does not resume exactly"),
        ("torch.optim:LBFGS", "LBFGS doesn't support per-parameter options"),
        ("torch.optim:SparseAdam", "SparseAdam: it fails on a small tensor"),
        ("{name: sgd, nesterov: true}", "nesterov .*= true needs a momentum"),
        ("{name: rprop}", "set lr_scheduler to constant"),
        ("{name: muon, ns_steps: 0}", "ns_steps"),
        ("muon", "muon: the blocks of the recipe's parallel_plan have no trained 2-D weights"),
    ],
)
def test_wrong_optimizers_are_one_line(toy: ToyRun, optimizer: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        toy.train(f"training.optimizer={optimizer}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("adafactor", ["distributed.strategy=fsdp"]),
        ("adafactor", ["distributed.strategy=mesh", "distributed.mesh={tp: 2}"]),
        ("adafactor", ["distributed.strategy=deepspeed"]),
        ("adagrad", ["distributed.strategy=deepspeed"]),
        ("muon", ["distributed.strategy=deepspeed"]),
    ],
)
def test_layouts_refuse_optimizers_before_a_process_starts(toy: ToyRun, name: str, keys: list[str]) -> None:
    keys = ["recipe=toy_recipe:Divisible", "launch.procs_per_node=2", *keys]
    result = toy.call("train", "run.yaml", f"training.optimizer={name}", *keys)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"training.optimizer = {name} is not for distributed.strategy = {keys[2].split('=')[1]}" in result.stderr


def test_an_optimizer_of_the_users_own_is_reported(toy: ToyRun) -> None:
    toy.train(
        "training.max_steps=2", f"training.optimizer={{name: {OWN}Picky, strength: 0.5}}", "training.weight_decay=0.3"
    )
    report = (toy.output / "report.txt").read_text()
    row = next(line for line in report.splitlines() if line.startswith("optimizer"))
    for words in (
        f"{OWN}Picky (the host waits each step), learning rate 0.01, cosine (min_ratio 0.0) to step 2",
        "no weight decay, clipped to 1",
    ):
        assert words in row
    assert "training.weight_decay: training.own_optimizers:Picky takes none" in report


def test_the_report_says_which_optimizers_need_no_waiting(toy: ToyRun) -> None:
    toy.train("training.max_steps=1", "training.optimizer=lion", "training.max_grad_norm=null")
    row = next(line for line in (toy.output / "report.txt").read_text().splitlines() if line[:9] == "optimizer")
    assert "lion (shoal.training.lion.Lion), learning rate 0.01" in row
    assert "weight decay 0.1 and 0, not clipped" in row


BUILD = """
    def param_groups(self, model):
        first, *rest = model.parameters()
        return [{"params": [first], "lr": 0.5}, {"params": rest}]

    def build_optimizer(self, groups):
        assert [group["lr"] for group in groups] == [0.5, 0.01] and groups[0]["weight_decay"] == 0.1
        return torch.optim.SGD(groups, momentum=MOMENTUM)

    def inputs"""


def with_build(change_recipe: Callable[[str, str], None], momentum: float) -> None:
    change_recipe("\n    def inputs", BUILD.replace("MOMENTUM", str(momentum)))


def test_a_recipe_builds_its_optimizer_with_rates_by_group(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    with_build(change_recipe, 0.9)
    keys = ["training.lr_scheduler=linear", "training.optimizer=adamw"]
    outcome = toy.train(*keys, "training.max_steps=4", f"experiment.output_dir={toy.folder}/short")
    assert outcome.step == 4
    report = (toy.folder / "short" / "report.txt").read_text()
    assert "torch.optim.sgd:SGD (the host waits each step), learning rate 0.5 and 0.01" in report
    assert "training.optimizer: the recipe builds torch.optim.sgd:SGD" in report
    rates = toy.metrics("train/learning_rate", toy.folder / "short")  # of the first group
    assert [*rates.values()] == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_resuming_knows_what_the_recipe_built(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    with_build(change_recipe, 0.9)
    toy.train("training.max_steps=4")
    toy.train("training.max_steps=6")
    change_recipe("momentum=0.9", "momentum=0.0")
    with pytest.raises(UserError, match=r"training.optimizer = 'torch.optim.sgd:SGD', .* 'slots momentum_buffer'"):
        toy.train()
    change_recipe("torch.optim.SGD(groups, momentum=0.0)", "None")
    with pytest.raises(UserError, match=r"training.optimizer.name = 'adamw', .* saved with 'torch.optim.sgd:SGD'"):
        toy.train()
    toy.train("training.max_steps=8", "checkpoint.allow_changed=[training.optimizer]")
    change_recipe("return None", "return 5")
    with pytest.raises(UserError, match="build_optimizer returned int"):
        toy.train()


def test_resuming_refuses_another_optimizer(toy: ToyRun) -> None:
    (toy.folder / "mine.py").write_text("from training.own_optimizers import Counting, Momentum\n")
    toy.train("training.max_steps=4", "training.optimizer=mine:Counting")
    with pytest.raises(UserError, match=r"optimizer.name = 'mine:Momentum', .* saved with 'mine:Counting'"):
        toy.train("training.optimizer=mine:Momentum")
    (toy.folder / "mine.py").unlink()  # nothing that only a checkpoint names is imported
    sys.modules.pop("mine")
    with pytest.raises(UserError, match=r"optimizer.name = 'adam', .* saved with 'mine:Counting'"):
        toy.train("training.optimizer=adam")
    assert "mine" not in sys.modules


def test_state_that_is_made_by_a_constructor_survives_a_fresh_start(toy: ToyRun) -> None:
    toy.train("training.max_steps=4")
    keys = ["training.optimizer=adagrad", "training.max_steps=6"]
    toy.train(*keys, "checkpoint.allow_changed=[training.optimizer]")
    weights = toy.output / "checkpoints" / "step_00000004"
    outcome = toy.train(*keys, f"checkpoint.init_from={weights}", f"experiment.output_dir={toy.folder}/new")
    assert outcome.step == 6


def test_muon_takes_the_matrices_of_blocks(toy: ToyRun) -> None:
    run = load_run(toy.config, ["training.optimizer=muon", "recipe=toy_recipe:Divisible"])
    with make("single") as strategy:
        session = assemble(run.recipe_type(run.recipe_config), strategy, run.config.training, 0)
    assert isinstance(session.optimizer, Muon)
    matrices = [p for group in session.optimizer.param_groups if group["use_muon"] for p in group["params"]]
    assert [tuple(p.shape) for p in matrices] == [(16, 1), (1, 16)]
    assert {group["initial_lr"] for group in session.optimizer.param_groups} == {0.01, 3e-4}
