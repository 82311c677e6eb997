"""Strategies by name and options; and how large the contract is that they keep."""

from __future__ import annotations

import os
from abc import ABC
from dataclasses import replace
from typing import Any

import pytest
import torch
from strategies.nets import PLAN, Points, build, make, micro_batch, rows, sgd

from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    DistributedStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleStrategy,
)
from shoal.strategies.deepspeed import ZeroStrategy
from shoal.strategies.native import NativeStrategy
from shoal.types import Weights


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        (SingleStrategy, {"devise": "cpu"}, "SingleStrategy has no option 'devise'; did you mean 'device'?"),
        (SingleStrategy, {"precision": "bf16"}, "'precision'; did you mean 'mixed_precision'?"),
        (DDPStrategy, {"static_grph": True}, "DDPStrategy has no option 'static_grph'; did you mean 'static_graph'?"),
        (FSDPStrategy, {"shard_strategy": "NO_SHARD"}, "'shard_strategy'; did you mean 'sharding_strategy'?"),
        (FSDPStrategy, {"cpu_ofload": True}, "FSDPStrategy has no option 'cpu_ofload'; did you mean 'cpu_offload'?"),
        (MeshStrategy, {"mesh": {"tp": 1}, "sequence_paralel": True}, "did you mean 'sequence_parallel'?"),
        (MeshStrategy, {"mesh": {"tp": 1}, "shedule": "gpipe"}, "did you mean 'schedule'?"),
        (MeshStrategy, {"mesh": {"tp": 1}, "forward_prefech": True}, "did you mean 'forward_prefetch'?"),
        (DeepSpeedStrategy, {"offload_optimiser": "cpu"}, "did you mean 'offload_optimizer'?"),
        (DeepSpeedStrategy, {"stages": 2}, "DeepSpeedStrategy has no option 'stages'; did you mean 'stage'?"),
        (DDPStrategy, {"cpu_offload": True}, "DDPStrategy has no option 'cpu_offload'"),
        (SingleStrategy, {"qwertz": 1}, "SingleStrategy has no option 'qwertz'"),
    ],
)
def test_an_option_that_is_not_there_is_a_type_error(preset: Any, options: dict[str, Any], words: str) -> None:
    """It names the nearest option that this preset has."""
    with pytest.raises(TypeError) as error:
        preset(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    if options.keys() & {"cpu_offload", "qwertz"}:
        assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        (SingleStrategy, {"mixed_precision": "half"}, "SingleStrategy(mixed_precision='half'): "),
        (SingleStrategy, {"loss_chunks": 0}, "SingleStrategy(loss_chunks=0): "),
        (DDPStrategy, {"bucket_cap_mb": "large"}, "DDPStrategy(bucket_cap_mb='large'): "),
        (FSDPStrategy, {"mesh": {"dp": 2}}, "FSDPStrategy(mesh.dp=2): "),
        (SingleStrategy, {"world": World(0, 2)}, "distributed.strategy = single: 2 processes were started"),
    ],
)
def test_a_value_that_is_not_allowed_is_said_in_terms_of_the_option(
    preset: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        preset(**options)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_presets_make_the_layouts_that_they_say() -> None:
    world = World(3, 4, 3, 4)
    layouts = {
        "ddp": DDPStrategy(device="cpu", world=world),
        "fsdp": FSDPStrategy(device="cpu", world=world),
        "no_shard": FSDPStrategy(device="cpu", world=world, sharding_strategy="NO_SHARD"),
        "mesh": MeshStrategy(mesh={"tp": 2}, device="cpu", world=world),
        "3d": MeshStrategy(mesh={"pp": 2, "tp": 2}, device="cpu", world=world),
    }
    sides = {name: {side: n for side, n in s.layout.mesh.items() if n > 1} for name, s in layouts.items()}
    assert sides == {
        "ddp": {"dp_replicate": 4},
        "fsdp": {"dp_shard": 4},
        "no_shard": {"dp_replicate": 4},
        "mesh": {"dp_shard": 2, "tp": 2},
        "3d": {"pp": 2, "tp": 2},
    }
    assert [s.layout.engine for s in layouts.values()] == ["ddp", *["fully_shard"] * 3, "plain"]
    assert [(s.data_rank, s.data_size, s.is_data_leader) for s in layouts.values()] == [
        *[(3, 4, True)] * 3,
        (1, 2, False),
        (0, 1, False),
    ]
    assert all(isinstance(strategy, DistributedStrategy) for strategy in layouts.values())


CONTRACT = 37
"""So many names may a strategy have. Who adds one has to take one away, or to say why here.

`from_config`, `save_checkpoint` and `load_checkpoint` are where people look for them, by the names that other code has
for them; they call what `Loop` calls.

`local_weights` is where callbacks that average weights find the part that a rank updates, and its layout. `average` is
what an evaluation computes with where replicas differ between averages of their weights.
"""


def public_names(strategy: DistributedStrategy) -> set[str]:
    return {name for name in dir(strategy) if not name.startswith("_")}


@pytest.mark.parametrize("kind", ["single", "fsdp", "zero_2"])
def test_the_contract_stays_small(kind: str) -> None:
    if kind == "zero_2":
        pytest.importorskip("deepspeed")
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        strategy.forward_backward(model, [micro_batch(*rows(2, 0))], Points(), 0)
        strategy.step(optimizer)
        names = public_names(strategy)
        # What DeepSpeed's users look into; nothing in shoal asks for it.
        names -= {"ds_config", "model_engine"}
        assert len(names) <= CONTRACT, sorted(names)
        # What a strategy has beyond the others, whoever uses it would have to ask first which one it is.
        assert names - public_names(SingleStrategy(device="cpu")) <= {"engaged"}
    assert not torch.distributed.is_initialized()


def test_no_tower_of_classes() -> None:
    for kind in (NativeStrategy, ZeroStrategy):
        assert kind.__mro__ == (kind, DistributedStrategy, ABC, object)


def settings() -> tuple[Any, ...]:
    """The settings of the process that a strategy may change."""
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_leaving_a_strategy_restores_the_settings_that_it_found(
    monkeypatch: pytest.MonkeyPatch, workspace: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = settings()
        strategy = SingleStrategy(device="cpu", deterministic=True)
        strategy.layout = replace(strategy.layout, tf32=True)  # which needs a GPU, but can be set without
        for _ in range(2):
            with strategy:
                assert settings() == ("high", True, False, False, workspace or ":4096:8")
            assert settings() == before == ("medium", True, True, True, workspace)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


def test_keywords_that_are_given_win_over_a_config_also_if_they_are_the_usual_value() -> None:
    config = {"distributed": {"compression": "powersgd"}}
    two = World(rank=0, size=2, local_rank=0, local_size=2)
    assert DDPStrategy(config, device="cpu", world=two).layout.compression.method == "powersgd"
    assert DDPStrategy(config, compression="none", device="cpu", world=two).layout.compression.method == "none"
    config = {"distributed": {"local_sgd": {"sync_every": 4}}}
    assert DDPStrategy(config, device="cpu", world=two).layout.local_sgd is not None
    assert DDPStrategy(config, local_sgd=None, device="cpu", world=two).layout.local_sgd is None
    config = {"distributed": {"fsdp": {"sharding_strategy": "HYBRID_SHARD"}, "mesh": {"dp_replicate": 2}}}
    whole = {"sharding_strategy": "FULL_SHARD", "device": "cpu", "world": two}
    assert FSDPStrategy(config, mesh=None, **whole).layout.mesh["dp_shard"] == 2
