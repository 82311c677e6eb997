"""Strategies"""

# processes: 2

import functools
import json
from pathlib import Path

from familiar.models import Block, Net, adamw, backward
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from shoal import DeepSpeedStrategy, DistributedStrategy, FSDPStrategy, Loop

BLOCKS = ["blocks.0", "blocks.1"]
on_cpu = {"device": "cpu"}


def built(strategy):
    """Trains one step with a strategy, and returns it."""
    with strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(Net(), adamw)
        backward(loop, model)
        loop.step()
    return strategy


def units(strategy):
    return [*built(strategy)._engine.units]


#: The strategy of a config: a dict of sections, a config file, or a checked `Config`. A recipe is not needed.
config = {"training": {"device": "cpu"}, "distributed": {"strategy": "fsdp"}}
strategy = DistributedStrategy.from_config(config)

assert strategy.name == "fsdp"
assert units(strategy) == BLOCKS

#: `offload` is `true`, `optimizer` or `all`; `true` is all that the ZeRO stage can offload.
config = {"distributed": {"strategy": "deepspeed", "zero_stage": 2, "offload": True}}
strategy = DistributedStrategy.from_config(config)

assert (strategy.layout.zero.offload_optimizer, strategy.layout.zero.offload_parameters) == ("cpu", "none")
config["distributed"]["zero_stage"] = 3
assert DistributedStrategy.from_config(config).layout.zero.offload_parameters == "cpu"

#: A config; keywords may follow, and win.
config = {"distributed": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}}
strategy = FSDPStrategy(config, device="cpu")

assert strategy.layout.fsdp.sharding_strategy == "SHARD_GRAD_OP"
assert built(strategy).device.type == "cpu"

#: The units of fully_shard, by their classes.
strategy = FSDPStrategy(auto_wrap_policy={Block}, **on_cpu)

assert units(strategy) == BLOCKS

#: The model's repeated blocks. `limit_all_gathers` is what fully_shard always does; False is refused.
strategy = FSDPStrategy(auto_wrap_policy="transformer_based", limit_all_gathers=True, cpu_offload=None, **on_cpu)

assert units(strategy) == BLOCKS

#: A policy of torch's first FSDP; it is asked as FSDP asks it.
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
strategy = FSDPStrategy(auto_wrap_policy=policy, **on_cpu)

assert units(strategy) == BLOCKS

#: The same, by size.
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
strategy = FSDPStrategy(auto_wrap_policy=policy, **on_cpu)

assert units(strategy) == BLOCKS

#: Modules with at least so many parameters: short for `auto_wrap_policy="size_based"` with this size.
strategy = FSDPStrategy(min_num_params=1e2, **on_cpu)

assert units(strategy)[0] == "blocks.0.up"

#: Recomputes every block in the backward. Also `"full"`, `None`, and classes: `activation_checkpointing={Block}`.
strategy = FSDPStrategy(activation_checkpointing=True, **on_cpu)

assert built(strategy).engaged.checkpointed_modules == BLOCKS
assert built(FSDPStrategy(activation_checkpointing={Block}, **on_cpu)).engaged.checkpointed_modules == BLOCKS
assert built(FSDPStrategy(activation_checkpointing="full", **on_cpu)).engaged.checkpointed_modules == BLOCKS
assert built(FSDPStrategy(activation_checkpointing=None, **on_cpu)).engaged.checkpointed_modules == []

#: The same, by classes.
strategy = FSDPStrategy(activation_checkpointing_policy={Block}, **on_cpu)

assert built(strategy).engaged.checkpointed_modules == BLOCKS

#: A DeepSpeed JSON with options beside it, which may add to the file and not contradict it.
Path("file.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 1000}}))
strategy = DeepSpeedStrategy(
    stage=3, offload_optimizer=True, offload_parameters=True, cpu_checkpointing=True, config="file.json"
)

zero = strategy.ds_config["zero_optimization"]
assert (zero["stage"], zero["sub_group_size"], zero["offload_param"]["device"]) == (3, 1000, "cpu")
assert "reduce_bucket_size" not in zero

#: What DeepSpeed is told, in its own words, and its engine, which is there once the model is wrapped.
with strategy:
    model, optimizer = Loop(strategy).wrap(Net(), adamw)
    settings, engine = strategy.ds_config, strategy.model_engine

assert strategy.engaged.checkpointed_modules == BLOCKS
assert (type(engine).__name__, engine.zero_optimization_stage()) == ("DeepSpeedEngine", 3)
assert settings["zero_optimization"]["reduce_bucket_size"] > 0

#: A config of shoal's works, too.
strategy = DeepSpeedStrategy({"distributed": {"zero_stage": 1}}, device="cpu")

assert strategy.layout.zero.stage == 1
