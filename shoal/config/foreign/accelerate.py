"""The words of Hugging Face accelerate's config file: where and how a script runs, and not what it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.conversions import PRECISIONS, by_name, only
from shoal.config.foreign.project import Placeholder, Project, section_of
from shoal.config.foreign.rules import Idle, Refused, Rule, Rules, idle
from shoal.config.yaml import Tree

Section = Mapping[str, Any]

STRATEGIES: Mapping[str, Any] = {
    "no": "single",
    **dict.fromkeys(
        ("multi_gpu", "multi_cpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_musa", "multi_hpu"), "ddp"
    ),
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "tp": "mesh",
    "megatron_lm": Refused("use distributed.strategy: mesh with distributed.mesh"),
    **dict.fromkeys(("tpu", "xla"), Refused("shoal has no TPUs")),
}
"""Our strategies by the values of `distributed_type`."""
_NOT_WITHIN_GROUPS = Refused("within a group shoal has FULL_SHARD alone; use HYBRID_SHARD")
SHARDING: Mapping[str, Any] = {
    **{name.lower(): name for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")},
    **{"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"},
    **dict.fromkeys(("hybrid_shard_zero2", "_hybrid_shard_zero2", "5"), _NOT_WITHIN_GROUPS),
}
SIDES = ("dp_replicate", "dp_shard", "cp", "tp")


def above_one(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sides of a mesh that have more than one rank."""
    return {side: size for side, size in sizes.items() if type(size) is int and size > 1}


def needs_mesh(sizes: Mapping[str, Any]) -> bool:
    """Returns whether these sides are more than shards over all processes, which are the strategy fsdp."""
    return bool({*above_one(sizes)} - {"dp_shard"})


def _sides(parallelism: Section) -> dict[str, Any]:
    """Returns the sides of the mesh in the section `parallelism_config`."""
    return {side: parallelism.get(f"parallelism_config_{side}_size") for side in SIDES}


def _strategy(value: Any, tree: Section) -> Any:
    strategy = by_name(STRATEGIES)(value, tree)
    sizes = _sides(section_of(tree, "parallelism_config"))
    return "mesh" if strategy == "fsdp" and needs_mesh(sizes) else strategy


def _processes(value: Any, tree: Section) -> Any:
    machines = tree.get("num_machines", 1)
    if not isinstance(value, int) or not isinstance(machines, int) or machines < 1 or value % machines:
        return Refused(f"it is the number on all machines, and does not divide by num_machines = {machines!r:.50}")
    return value // machines


def _side(side: str) -> Rule:
    def convert(value: Any, section: Section) -> Any:
        return value if needs_mesh(_sides(section)) else Idle("distributed.fsdp shards over all processes")

    return Rule(f"distributed.mesh.{side}", convert)


def _sharding(value: Any, section: Section) -> Any:
    return by_name(SHARDING)(str(value) if type(value) is int else value, section)


def _reshard(value: Any, section: Section) -> Any:
    if isinstance(value, bool):
        return "FULL_SHARD" if value else "SHARD_GRAD_OP"
    return _sharding(value, section)


def _policy(value: Any, section: Section) -> Any:
    if any(section.get(f"{prefix}transformer_layer_cls_to_wrap") for prefix in ("", "fsdp_")):
        return Idle("distributed.fsdp.wrap_classes names the units")
    whole = Refused("without units the whole model is gathered at once; use transformer_based")
    return by_name({"transformer_based_wrap": "transformer_based", "size_based_wrap": "size_based", "no_wrap": whole})(
        value, section
    )


def _classes(value: Any, section: Section) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _prefetch(value: Any, section: Section) -> Any:
    other = Refused("torch's fully_shard always gathers the next unit before a unit's backward")
    return by_name({"backward_pre": "BACKWARD_PRE", "backward_post": other, "no_prefetch": other})(value, section)


def _activation_checkpointing(value: Any, section: Section) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def fsdp_rules(prefix: str) -> Rules:
    """Returns the rules of FSDP's options, whose names have a prefix in some files: `fsdp_sharding_strategy`."""
    ours = "distributed.fsdp"
    return {
        f"{prefix}{key}": rule
        for key, rule in {
            "sharding_strategy": Rule(f"{ours}.sharding_strategy", _sharding),
            "reshard_after_forward": Rule(f"{ours}.sharding_strategy", _reshard),
            "auto_wrap_policy": Rule(f"{ours}.auto_wrap_policy", _policy),
            "transformer_layer_cls_to_wrap": Rule(f"{ours}.wrap_classes", _classes),
            "min_num_params": Rule(
                f"{ours}.min_num_params", lambda value, section: value if value else Idle("it is not set")
            ),
            "backward_prefetch": Rule(f"{ours}.backward_prefetch", _prefetch),
            "forward_prefetch": Rule(f"{ours}.forward_prefetch"),
            "limit_all_gathers": Rule(f"{ours}.limit_all_gathers"),
            "offload_params": Rule(f"{ours}.cpu_offload"),
            "activation_checkpointing": Rule("training.activation_checkpointing", _activation_checkpointing),
            "cpu_ram_efficient_loading": idle("each rank reads its own shards from the files"),
            "sync_module_states": idle("all ranks start from the same weights"),
            "use_orig_params": idle("fully_shard keeps the parameters as they are"),
            "state_dict_type": idle("every layout reads every checkpoint, and an export gathers the weights"),
            "version": idle("shoal uses FSDP2 (fully_shard)"),
            "ignored_modules": Rule(why="all parameters are sharded"),
        }.items()
    }


def _offload(device: str, path: str) -> Rule:
    def convert(value: Any, section: Section) -> Any:
        if str(value).lower() == "nvme":
            return section.get(path) or Refused(f"{path} is missing")
        return value

    return Rule(f"distributed.deepspeed.{device}", convert)


def _nvme(device: str, path: str) -> Rule:
    def convert(value: Any, section: Section) -> Any:
        return value if str(section.get(device)).lower() == "nvme" else Idle(f"{device} is not nvme")

    return Rule(path, convert)


def _unless_auto(value: Any, section: Section) -> Any:
    return Idle("the run's own value is used") if value == "auto" else value


def _stage(value: Any, section: Section) -> Any:
    return Refused("stage 0 shards nothing; use distributed.strategy: ddp") if value == 0 else value


def _on_several_machines(value: Any, tree: Section) -> Any:
    machines = tree.get("num_machines", 1)
    return value if isinstance(machines, int) and machines > 1 else Idle("there is one machine")


def _gpus(value: Any, tree: Section) -> Any:
    return Idle("every process takes the next GPU") if str(value).lower() == "all" else str(value)


_DEEPSPEED = "distributed.deepspeed"
_NO_LAUNCHER = "shoal starts the processes itself, or joins those of a cluster; see docs/launch.md"
_FP8 = "fp8 is torchao's, with scales computed anew in every step; it has no such option"
_TPU = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "downcast_bf16")

RULES: Rules = {
    "distributed_type": Rule("distributed.strategy", _strategy),
    "mixed_precision": Rule("training.mixed_precision", by_name({**PRECISIONS, "fp8": "fp8"})),
    "num_processes": Rule("launch.procs_per_node", _processes),
    "num_machines": Rule("launch.nodes"),
    "machine_rank": Rule("launch.node_rank", _on_several_machines),
    "main_process_ip": Rule("launch.master_addr", _on_several_machines),
    "main_process_port": Rule("launch.master_port", _on_several_machines),
    "gpu_ids": Rule("launch.env.CUDA_VISIBLE_DEVICES", _gpus),
    "use_cpu": Rule("training.device", lambda value, tree: "cpu" if value else Idle("a GPU is used if there is one")),
    **fsdp_rules("fsdp_config.fsdp_"),
    **{f"parallelism_config.parallelism_config_{side}_size": _side(side) for side in SIDES},
    "parallelism_config.*": Rule(why="the sizes of the mesh are all that can be chosen"),
    "deepspeed_config.deepspeed_config_file": Rule(f"{_DEEPSPEED}.config_file"),
    "deepspeed_config.zero_stage": Rule(f"{_DEEPSPEED}.zero_stage", _stage),
    "deepspeed_config.offload_optimizer_device": _offload("offload_optimizer", "offload_optimizer_nvme_path"),
    "deepspeed_config.offload_param_device": _offload("offload_parameters", "offload_param_nvme_path"),
    "deepspeed_config.offload_optimizer_nvme_path": _nvme(
        "offload_optimizer_device", f"{_DEEPSPEED}.offload_optimizer"
    ),
    "deepspeed_config.offload_param_nvme_path": _nvme("offload_param_device", f"{_DEEPSPEED}.offload_parameters"),
    "deepspeed_config.gradient_accumulation_steps": Rule("training.gradient_accumulation", _unless_auto),
    "deepspeed_config.gradient_clipping": Rule("training.max_grad_norm", _unless_auto),
    "deepspeed_config.zero3_init_flag": idle("a model is built without memory, and each rank reads its own shards"),
    "deepspeed_config.zero3_save_16bit_model": idle("shoal checkpoint export gathers the weights"),
    "deepspeed_config.*": Rule(why=_NO_LAUNCHER),
    "dynamo_config.dynamo_backend": Rule(
        "training.compile",
        by_name(
            {"inductor": True, "no": False},
            lambda value, section: Refused("blocks are compiled by inductor; use training.compile: true"),
        ),
    ),
    "dynamo_config.dynamo_mode": only(
        "default", "it is torch.compile's default", "torch.compile's default mode is used"
    ),
    "dynamo_config.*": only(False, "it is off", "each block is compiled with torch.compile's defaults"),
    "compute_environment": only("LOCAL_MACHINE", "a run starts where you start it", "see docs/launch.md for clusters"),
    "debug": only(False, "it is off", "ranks are compared every distributed.desync_steps steps"),
    "enable_cpu_affinity": only(False, "it is off", "shoal leaves the cores to the system"),
    "main_training_function": idle("it is for notebooks and TPUs"),
    "rdzv_backend": idle("the launcher of the first machine keeps the addresses"),
    "same_network": idle("launch.master_addr has to be an address that all machines reach"),
    **{key: only("no" if key == "downcast_bf16" else False, "it is for TPUs", "shoal has no TPUs") for key in _TPU},
    "fp8_config.*": Rule(why=_FP8),
    "mpirun_config.*": Rule(why=_NO_LAUNCHER),
    "megatron_lm_config.*": Rule(why="use distributed.strategy: mesh with distributed.mesh"),
    "commands": Rule(why="start the run with shoal launch"),
    "command_file": Rule(why="start the run with shoal launch"),
    "rdzv_conf": Rule(why=_NO_LAUNCHER),
}


_LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 4}


def _missing(ours: Tree) -> Mapping[str, Placeholder]:
    why = "an accelerate file does not say what is trained"
    end = {"training.max_steps": Placeholder(1, "nor for how long", ("training.num_epochs",))}
    if not {"cp", "pp"} & {*section_of(section_of(ours, "distributed"), "mesh")}:
        return {"recipe": Placeholder("bdh", why), **end}
    return {"recipe": Placeholder("causal_lm", why), "model.config": Placeholder(_LLAMA, why, ("model.name",)), **end}


ACCELERATE = Project(
    name="accelerate",
    title="accelerate",
    rules=RULES,
    missing=_missing,
)
