"""The words of Lightning CLI files: the keys of its Trainer, its callbacks and loggers, and classes by their path.

The arguments of the user's own module and data module become keys of `model:` and `dataset:` if the command line names
a recipe, because it is the recipe that has these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.conversions import by_name, is_number, only
from shoal.config.foreign.lightning_classes import CALLBACKS, CLASS, LOGGERS, SCHEDULE, minutes, no_logger
from shoal.config.foreign.project import Placeholder, Project, section_of
from shoal.config.foreign.rules import Idle, Noted, Refused, Rule, Rules, idle
from shoal.config.foreign.torch_names import optimizer_defaults, optimizer_rules
from shoal.config.yaml import Tree, is_section

Section = Mapping[str, Any]

PRECISIONS: Mapping[str, Any] = {
    **dict.fromkeys(("32", "32-true"), "fp32"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    "bf16-true": "pure_bf16",
    **dict.fromkeys(("64", "64-true"), Refused("shoal has no fp64; use fp32")),
    "16-true": Refused("weights are never fp16; use fp16 or pure_bf16"),
    **dict.fromkeys(("transformer-engine", "transformer-engine-float16"), Refused("use fp8, which is torchao's")),
}


def _strategies() -> dict[str, Any]:
    """Returns what the names of Lightning's strategies mean in shoal."""
    ddp, fsdp, zero = ({"distributed.strategy": name} for name in ("ddp", "fsdp", "deepspeed"))
    unused = {**ddp, "distributed.ddp.find_unused_parameters": True}
    spawn = {"distributed.strategy": "ddp_spawn"}
    offloads = {2: "optimizer", 3: "all"}
    return {
        "auto": Idle("one process trains alone, and several are ddp"),
        **{"ddp": ddp, "ddp_find_unused_parameters_false": ddp, "ddp_find_unused_parameters_true": unused},
        **{"ddp_spawn": spawn, "ddp_fork": spawn, "ddp_notebook": spawn},
        **{"fsdp": fsdp, "fsdp_cpu_offload": {**fsdp, "distributed.fsdp.cpu_offload": True}},
        "deepspeed": {**zero, "distributed.zero_stage": 2},
        **{f"deepspeed_stage_{stage}": {**zero, "distributed.zero_stage": stage} for stage in (1, 2, 3)},
        **{
            f"deepspeed_stage_{stage}_offload": {
                **zero,
                "distributed.zero_stage": stage,
                "distributed.offload": offload,
            }
            for stage, offload in offloads.items()
        },
    }


STRATEGIES = _strategies()
_OURS = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch.")
_OFF, _ANYWAY = "it is off anyway", "shoal does so anyway"
_BY_YOUR_MODULE = "an argument of your class: a key of your recipe; give recipe=… on the command line to take it over"


def _short(path: Any) -> str:
    """Returns the name of a class of Lightning's or torch's, and the whole path of any other."""
    text = str(path)
    return text.rpartition(".")[2] if text.startswith(_OURS) else text


def _flat(section: Any) -> Any:
    """Returns `{class_path: …, init_args: {a: 1}}` as `{class_path: …, a: 1}`, and any other value as it is."""
    if not is_section(section) or not {CLASS, "init_args", "dict_kwargs"} & {*section}:
        return section
    rest = {key: value for key, value in section.items() if key not in ("init_args", "dict_kwargs")}
    for key in ("init_args", "dict_kwargs"):
        arguments = section.get(key)
        rest |= arguments if is_section(arguments) else {key: arguments} if key in section else {}
    return rest


def _by_class(value: Any) -> Any:
    """Returns a list of classes, or one, as a section by the names of the classes."""
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(is_section(entry) and CLASS in entry for entry in entries):
        return value
    named: Tree = {}
    for entry in entries:
        name = _short(entry[CLASS]).replace(".", ":")
        number = sum(other.partition(" ")[0] == name for other in named)
        named[name if not number else f"{name} ({number + 1})"] = _flat(entry)
    return named


def _prepare(tree: Tree) -> Tree:
    """Names loggers and callbacks by their class, and puts the arguments of classes beside their path."""
    if is_section(tree.get("fit")) and "trainer" not in tree:
        tree = {**{key: value for key, value in tree.items() if key != "fit"}, **tree["fit"]}
    trainer = _flat(tree.get("trainer"))
    if is_section(trainer):
        named = {key: _by_class(trainer[key]) for key in ("callbacks", "logger") if key in trainer}
        flat = {key: _flat(trainer[key]) for key in ("strategy", "profiler") if key in trainer}
        trainer = {**trainer, **named, **flat}
    parts: Tree = {key: _flat(tree[key]) for key in ("optimizer", "lr_scheduler") if key in tree}
    return {**tree, **({"trainer": trainer} if "trainer" in tree else {}), **parts}


# How long, and on what


def _devices(value: Any, section: Section) -> Any:
    if value in ("auto", -1, "-1"):
        return {"launch.procs_per_node": "auto"}
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return {
            "launch.procs_per_node": len(value),
            "launch.env": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, value))},
        }
    return {"launch.procs_per_node": int(value) if isinstance(value, str) and value.isdecimal() else value}


def _end(value: Any, section: Section) -> Any:
    return Idle("the run ends otherwise") if value == -1 else value


def _epochs(value: Any, section: Section) -> Any:
    if value == -1:
        return Idle("the run ends otherwise")
    steps: Any = section.get("max_steps")
    if is_number(steps) and steps > 0:
        return Refused("the run ends after training.max_steps; Lightning would end it at the first of both")
    return value


def _validation(value: Any, section: Section) -> Any:
    if value == 1.0:
        return Idle("training.eval_epochs says when to evaluate")
    return value if isinstance(value, int) else Refused("it is a share of an epoch; give training.eval_steps")


def _eval_batches(value: Any, section: Section) -> Any:
    if value == 1.0 and isinstance(value, float):
        return Idle("all evaluation data is used")
    if value == 0:
        return Refused("a recipe without eval_data is not evaluated")
    return value if isinstance(value, int) else Refused("it is a share of the data; give a number of batches")


def _clip(value: Any, section: Section) -> Any:
    if section.get("gradient_clip_algorithm") == "value":
        return Refused("gradients are clipped by their norm, not one by one")
    return Noted(None, "Gradients are not clipped there; shoal's default is a norm of 1.") if value == 0 else value


def _fast(value: Any, section: Section) -> Any:
    return Idle(_OFF) if value is False else {"training.max_steps": 1 if value is True else value}


def _strategy(value: Any, section: Section) -> Any:
    return by_name(STRATEGIES, lambda name, section: Refused("shoal has no such strategy"))(value, section)


def _strategy_class(value: Any, section: Section) -> Any:
    name = _short(value)
    known = {"DDPStrategy": "ddp", "FSDPStrategy": "fsdp", "DeepSpeedStrategy": "deepspeed"}
    mesh = {"ModelParallelStrategy": "mesh"}
    return {**known, **mesh}.get(name, Refused("shoal has no such strategy"))


def _stage(value: Any, section: Section) -> Any:
    return Refused("stage 0 shards nothing; use distributed.strategy: ddp") if value == 0 else value


def _policy(value: Any, section: Section) -> Any:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        return Refused("name the classes of the units: distributed.fsdp.wrap_classes")
    if any("policy" in name.lower() for name in names):
        return Refused("the recipe's blocks are the units; name others in distributed.fsdp.wrap_classes")
    return [name.rpartition(".")[2] for name in names]


def _checkpointed(value: Any, section: Section) -> Any:
    names = _policy(value, section)
    return names if isinstance(names, Refused) else {"mode": "full", "classes": names}


def _seconds(value: Any, section: Section) -> Any:
    if isinstance(value, str) and value.count(":") == 2 and value.replace(":", "").isdecimal():
        hours, minutes, seconds = map(int, value.split(":"))
        return hours * 3600 + minutes * 60 + seconds
    return value


_LOADER = {
    **dict.fromkeys(("batch_size", "train_batch_size"), Rule("training.batch_size")),
    **dict.fromkeys(("val_batch_size", "eval_batch_size"), Rule("training.eval_batch_size")),
    "num_workers": Rule("dataset.num_workers"),
    "pin_memory": Rule("dataset.pin_memory"),
    "persistent_workers": Rule("dataset.persistent_workers"),
    "prefetch_factor": Rule("dataset.prefetch"),
    "drop_last": Rule("dataset.drop_last"),
}
TRAINER: Rules = {
    "accelerator": Rule(
        "training.device",
        by_name(
            {
                "gpu": "cuda",
                "auto": Idle("a GPU is used if there is one"),
                **dict.fromkeys(("tpu", "hpu"), Refused("shoal trains on cuda, mps and cpu")),
            }
        ),
    ),
    **dict.fromkeys(("devices", "gpus"), Rule(("launch.procs_per_node", "launch.env"), _devices)),
    "num_nodes": Rule("launch.nodes"),
    "precision": Rule(
        "training.mixed_precision",
        lambda value, section: by_name(PRECISIONS)(str(value) if type(value) is int else value, section),
    ),
    "max_epochs": Rule("training.num_epochs", _epochs),
    "max_steps": Rule("training.max_steps", _end),
    "max_time": Rule("callbacks.time_limit.minutes", minutes),
    **{
        key: Rule((), lambda value, section: Idle(_ANYWAY) if value in (0, 1, -1) else Refused("only the end is set"))
        for key in ("min_epochs", "min_steps")
    },
    "fast_dev_run": Rule(("training.max_steps",), _fast),
    "limit_val_batches": Rule("training.eval_batches", _eval_batches),
    "limit_train_batches": only(1.0, "all of the data is used", "give training.max_steps"),
    "limit_test_batches": idle("a run trains and evaluates"),
    "limit_predict_batches": idle("a run trains and evaluates"),
    "overfit_batches": only(0.0, _OFF, "give a recipe with less data"),
    "val_check_interval": Rule("training.eval_steps", _validation),
    "check_val_every_n_epoch": Rule("training.eval_epochs"),
    "num_sanity_val_steps": idle("configs are checked before the first step; there is no trial evaluation"),
    "log_every_n_steps": Rule("logging.every"),
    "accumulate_grad_batches": Rule("training.gradient_accumulation"),
    "gradient_clip_val": Rule("training.max_grad_norm", _clip),
    "gradient_clip_algorithm": only(
        "norm", "gradients are clipped by their norm", "gradients are clipped by their norm"
    ),
    "deterministic": Rule("experiment.deterministic", by_name({"warn": True})),
    "benchmark": Rule(why="cuDNN's search for the fastest kernel is left as torch has it"),
    "sync_batchnorm": Rule("training.sync_batch_norm"),
    "default_root_dir": Rule("experiment.output_dir"),
    "enable_checkpointing": only(True, "a run always saves checkpoints", "a run always saves checkpoints"),
    "enable_progress_bar": Rule("logging.console", by_name({"no": "plain"}, lambda value, section: Idle(_ANYWAY))),
    "enable_model_summary": idle("the report at step 1 shows the model"),
    "detect_anomaly": only(False, _OFF, "use torch.autograd.set_detect_anomaly in your recipe"),
    "use_distributed_sampler": only(True, _ANYWAY, "samples are always distributed over ranks"),
    "replace_sampler_ddp": only(True, _ANYWAY, "samples are always distributed over ranks"),
    "inference_mode": idle("evaluations compute no gradients"),
    "barebones": only(False, _OFF, "use logging.console: off"),
    "reload_dataloaders_every_n_epochs": only(0, _OFF, "data is read once"),
    "resume_from_checkpoint": Rule(
        why="a .ckpt of Lightning is a pickle; save its state_dict as safetensors, and give checkpoint.init_from"
    ),
    CLASS: idle("a run has shoal's own loop"),
    "strategy": Rule(
        ("distributed.strategy", "distributed.zero_stage", "distributed.offload"),
        _strategy,
    ),
    f"strategy.{CLASS}": Rule("distributed.strategy", _strategy_class),
    **{
        f"strategy.{key}": Rule(f"distributed.ddp.{key}")
        for key in (
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "bucket_cap_mb",
            "broadcast_buffers",
        )
    },
    "strategy.sharding_strategy": Rule("distributed.fsdp.sharding_strategy"),
    "strategy.auto_wrap_policy": Rule("distributed.fsdp.wrap_classes", _policy),
    "strategy.activation_checkpointing_policy": Rule("training.activation_checkpointing", _checkpointed),
    "strategy.cpu_offload": Rule("distributed.fsdp.cpu_offload"),
    "strategy.state_dict_type": idle("every layout reads every checkpoint"),
    "strategy.limit_all_gathers": Rule("distributed.fsdp.limit_all_gathers"),
    "strategy.use_orig_params": idle("fully_shard keeps the parameters as they are"),
    "strategy.stage": Rule("distributed.deepspeed.zero_stage", _stage),
    "strategy.offload_optimizer": Rule("distributed.deepspeed.offload_optimizer", by_name({"no": "none"})),
    "strategy.offload_parameters": Rule("distributed.deepspeed.offload_parameters", by_name({"no": "none"})),
    "strategy.config": Rule("distributed.deepspeed.config_file"),
    "strategy.data_parallel_size": Rule("distributed.mesh.dp_shard", by_name({"auto": -1})),
    "strategy.tensor_parallel_size": Rule("distributed.mesh.tp"),
    "strategy.process_group_backend": Rule("distributed.backend"),
    "strategy.timeout": Rule("distributed.timeout", _seconds),
    "strategy.*": Rule(why="shoal's strategies have no such option"),
    "logger": Rule(("logging.tensorboard",), no_logger),
    **{f"logger.{key}": rule for key, rule in LOGGERS.items()},
    **{f"callbacks.{key}": rule for key, rule in CALLBACKS.items()},
    "profiler": Rule(why="give logging.profile: {start: …, steps: …}, which records with torch.profiler"),
    "profiler.*": Rule(why="give logging.profile: {start: …, steps: …}, which records with torch.profiler"),
}
RULES: Rules = {
    "seed_everything": Rule(
        "experiment.seed",
        lambda value, tree: Idle("experiment.seed is the seed of everything") if isinstance(value, bool) else value,
    ),
    "ckpt_path": Rule(
        why="a .ckpt of Lightning is a pickle; save its state_dict as safetensors, and give checkpoint.init_from"
    ),
    **{f"trainer.{key}": rule for key, rule in TRAINER.items()},
    **optimizer_rules("optimizer.", CLASS),
    **{f"lr_scheduler.{key}": rule for key, rule in SCHEDULE.items()},
    **{f"data.{prefix}{key}": rule for prefix in ("", "init_args.") for key, rule in _LOADER.items()},
    f"model.{CLASS}": Rule(why="write a recipe around your module: its model, its data and its loss; docs/recipes.md"),
    f"data.{CLASS}": Rule(why="train_data and eval_data of a recipe return datasets; docs/recipes.md"),
    "model.*": Rule(why=_BY_YOUR_MODULE),
    "data.*": Rule(why=_BY_YOUR_MODULE),
}


def _defaults(tree: Tree) -> dict[str, Any]:
    trainer = section_of(tree, "trainer")
    ends: list[Any] = [trainer.get(key) for key in ("max_epochs", "max_steps")]
    optimizer = section_of(tree, "optimizer")
    keeps_best = bool(section_of(section_of(trainer, "callbacks"), "ModelCheckpoint").get("monitor"))
    return {
        **({"trainer.callbacks.ModelCheckpoint.save_top_k": 1} if keeps_best else {}),
        **({} if any(is_number(end) and end > 0 for end in ends) else {"trainer.max_epochs": 1000}),
        **optimizer_defaults(optimizer, "optimizer.", CLASS),
        **({f"lr_scheduler.{CLASS}": "none"} if optimizer else {}),
        "trainer.gradient_clip_val": 0,
        "trainer.check_val_every_n_epoch": 1,
    }


LIGHTNING = Project(
    name="lightning",
    title="Lightning",
    rules=RULES,
    prepare=_prepare,
    defaults=_defaults,
    missing=lambda ours: {
        "recipe": Placeholder("bdh", "your module is to be a recipe of shoal"),
        "training.optimizer": Placeholder("adamw", "your module chooses it"),
        "training.learning_rate": Placeholder(3e-4, "your module chooses it"),
        "training.weight_decay": Placeholder(0.0, "your module chooses it"),
        "training.lr_scheduler": Placeholder("constant", "your module chooses it, or it counts epochs"),
    },
    recipe_rules={
        "model.*": Rule("model.*"),
        "model.init_args.*": Rule("model.*"),
        "data.*": Rule("dataset.*"),
        "data.init_args.*": Rule("dataset.*"),
    },
)
