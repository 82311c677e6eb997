"""The words of torchtune's recipe configs. `_component_` is the path of a class or function; its arguments are beside
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.accelerate import needs_mesh
from shoal.config.foreign.conversions import only
from shoal.config.foreign.project import Placeholder, Project, section_of
from shoal.config.foreign.rules import Idle, Noted, Refused, Rule, Rules, idle
from shoal.config.foreign.torch_names import optimizer_defaults, optimizer_rules
from shoal.config.yaml import Tree

Section = Mapping[str, Any]

COMPONENT = "_component_"
DATASETS: Mapping[str, tuple[str | None, str, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": (None, "auto", False),
    "instruct_dataset": (None, "auto", False),
    "text_completion_dataset": (None, "text", True),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text", True),
}
"""By the name of a dataset: what it reads, our name for the shape of its records, and whether the prompt counts."""
STYLES = {"sharegpt": "sharegpt", "openai": "messages"}
MODULES = {"q_proj": ["q_proj"], "k_proj": ["k_proj"], "v_proj": ["v_proj"], "output_proj": ["o_proj"]}
MLP = ["gate_proj", "up_proj", "down_proj"]
SIDES = {
    "tensor_parallel_dim": "tp",
    "context_parallel_dim": "cp",
    "data_parallel_shard_dim": "dp_shard",
    "data_parallel_replicate_dim": "dp_replicate",
}
_NO_STATE = "weights are read from the folder; shoal resumes from checkpoints of its own"
_OFF = "it is off anyway"


def _name(value: Any) -> str:
    """Returns the last part of the path of a component."""
    return str(value).rpartition(".")[2]


# The model, and the adapters


def _model(value: Any, section: Section) -> Any:
    if _name(value).startswith("qlora_"):
        return {"model.load_in_4bit": True, "model.bnb_4bit_use_double_quant": True}
    return Idle("the folder in model.name says what kind of model it is")


def _targets(value: Any, section: Section) -> Any:
    """Returns the modules with adapters, by the names that transformers has for them."""
    attention = section.get("lora_attn_modules", [])
    if not isinstance(attention, list) or not all(isinstance(name, str) for name in attention):
        return Refused("should be a list of names")
    names = [ours for name in attention for ours in MODULES.get(name, [name])]
    names += MLP if section.get("apply_lora_to_mlp") else []
    names += ["lm_head"] if section.get("apply_lora_to_output") else []
    if "phi" not in str(section.get(COMPONENT)):
        return names
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(MLP[:2], "gate_up_proj")
    return Noted(
        [*dict.fromkeys(fused.get(name, name) for name in names)],
        "Phi in transformers has one layer for queries, keys and values, and one for gate and up.",
    )


def _checkpointer(value: Any, section: Section) -> Any:
    if _name(value) == "FullModelHFCheckpointer":
        return Idle("model.name is a folder that transformers can open")
    return Refused("model.name needs a folder that transformers can open, with config.json and safetensors")


# Data


def _entry(section: Section) -> Any:
    """Returns what a section `dataset` reads, as an entry of `train_file`."""
    component = _name(section.get(COMPONENT))
    source = section.get("source", DATASETS.get(component, (None,))[0])
    files = section.get("data_files")
    if source in ("json", "csv", "parquet", "text") and files is not None:
        source = files
    if not isinstance(source, str):
        return source
    options = {"split": section.get("split", "train"), "config": section.get("name")}
    changed = {key: value for key, value in options.items() if value not in (None, "train")}
    return [{"file": source, **changed}] if changed else source


def _dataset(value: Any, section: Section) -> Any:
    if _name(section.get(COMPONENT)) not in DATASETS and "source" not in section:
        return Refused("shoal does not know these records; give dataset.train_file, and see docs/finetune.md")
    return _entry(section)


def _component(value: Any, section: Section) -> Any:
    entry = _dataset(value, section)
    if isinstance(entry, Refused):
        return entry
    _, shape, counts = DATASETS.get(_name(value), (None, "auto", False))
    counts = section.get("train_on_input", counts)
    shape = STYLES.get(str(section.get("conversation_style")), shape)
    ours = {"dataset.train_file": entry, "dataset.format": shape}
    if counts and shape != "text":
        ours["dataset.loss_on"] = "all"
    return Noted(ours, "The tokenizer's chat template renders the records; torchtune's is in its tokenizer.")


def _length(value: Any, section: Section) -> Any:
    if value != "none":
        return value
    return Noted(2048, "torchtune has no limit here, and shoal needs one: shoal data shows the lengths of all samples.")


# The run


def _max_steps(value: Any, tree: Section) -> Any:
    epochs = tree.get("epochs", 1)
    if not isinstance(value, int) or not isinstance(epochs, int):
        return value
    why = "Every epoch ended after max_steps_per_epoch steps there; here the run goes on in the same epoch."
    return value if epochs == 1 else Noted(value * epochs, why)


def _epochs(value: Any, tree: Section) -> Any:
    return Idle("training.max_steps ends the run") if tree.get("max_steps_per_epoch") else value


def _precision(value: Any, tree: Section) -> Any:
    if value != "bf16":
        return {"training.mixed_precision": value}
    ours = {"training.mixed_precision": "bf16"}
    if "lora_" in _name(section_of(tree, "model").get(COMPONENT)):
        return Noted({**ours, "model.dtype": "bf16"}, "The base is kept in bf16, as there; adapters are fp32 here.")
    return Noted(ours, "torchtune keeps weights and optimizer state in bf16; here they are fp32, and need more memory.")


def _activation_checkpointing(value: Any, tree: Section) -> Any:
    on, offload = (tree.get(f"enable_activation_{kind}") for kind in ("checkpointing", "offloading"))
    if not on:
        return (
            Refused("only activations of recomputed blocks are offloaded") if offload and value is offload else "none"
        )
    return {"mode": "full", "offload": True} if offload else "full"


def _on_mesh(tree: Section) -> bool:
    return needs_mesh({side: tree.get(key) for key, side in SIDES.items()})


def _side(side: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        if not _on_mesh(tree):
            return Idle("weights are sharded over all processes")
        return {"distributed.strategy": "mesh", f"distributed.mesh.{side}": value}

    return Rule(("distributed.strategy", f"distributed.mesh.{side}"), convert)


def _sharded(key: str, root: bool) -> Rule:
    """Returns the rule of an option of FSDP. Where the file has tensor parallelism, too, the strategy is a mesh."""

    def convert(value: Any, tree: Section) -> Any:
        strategy = {} if root and _on_mesh(tree) else {"distributed.strategy": "fsdp"}
        made = {True: "FULL_SHARD", False: "SHARD_GRAD_OP"}.get(value, value) if key == "sharding_strategy" else value
        return {**strategy, f"distributed.fsdp.{key}": made}

    return Rule(("distributed.strategy", f"distributed.fsdp.{key}"), convert)


def _loss(value: Any, section: Section) -> Any:
    name = _name(value)
    if name in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss"):
        return section.get("num_output_chunks", 8)
    if name == "CrossEntropyLoss":
        return Idle("the loss is the cross-entropy")
    return Refused("a recipe of your own can have another loss; see docs/recipes.md")


def _schedule(value: Any, section: Section) -> Any:
    if _name(value) == "get_cosine_schedule_with_warmup":
        return "cosine" if section.get("num_cycles", 0.5) == 0.5 else Refused("the cosine falls once, to 0")
    if value == "none":
        return "constant"
    return Refused("shoal has cosine, linear and others; see training.lr_scheduler")


def _logger(value: Any, section: Section) -> Any:
    known = {
        "WandBLogger": {
            "logging.wandb": {key: section[key] for key in ("project", "entity") if key in section} or True
        },
        "TensorBoardLogger": {"logging.tensorboard": True},
        "MLFlowLogger": {
            "logging.mlflow": {
                ours: section[key]
                for key, ours in {"experiment_name": "experiment", "tracking_uri": "tracking_uri"}.items()
                if key in section
            }
            or True
        },
    }
    files = ("DiskLogger", "StdoutLogger")
    idle_why = Idle("metrics are in metrics.jsonl, and the console shows them")
    return known.get(_name(value)) or (idle_why if _name(value) in files else Refused("shoal has no such logger"))


def _logger_option(value: Any, section: Section) -> Any:
    made = _logger(section.get(COMPONENT), section)
    return made if isinstance(made, dict) and "logging.tensorboard" not in made else Refused("shoal has no such option")


def _profile(key: str, why: str = "") -> Rule:
    """Returns the rule of a key of `profiler`. The profiler is off unless `enabled` is true."""

    def convert(value: Any, section: Section) -> Any:
        if section.get("enabled") is not True:
            return Idle("the profiler is off")
        if why:
            return Idle(why) if value in (True, 1) else Refused("torch.profiler records what docs/config.md says")
        if key == "active_steps":
            return {"logging.profile.steps": value}
        waits = [section.get("wait_steps", 0), section.get("warmup_steps", 0)]
        return (
            {"logging.profile.start": sum(waits) + 1} if all(type(one) is int for one in waits) else Refused("number")
        )

    return Rule(("logging.profile.start", "logging.profile.steps"), convert)


def _off(why: str) -> Rule:
    return only(False, _OFF, why)


_PROFILER = {
    "wait_steps": _profile("wait_steps"),
    "warmup_steps": _profile("warmup_steps"),
    "active_steps": _profile("active_steps"),
    "enabled": _profile("enabled"),
    **{key: _profile(key, "it is recorded") for key in ("cpu", "cuda", "xpu", "record_shapes", "num_cycles")},
}


def _extra(value: Any, section: Section) -> Any:
    if section.get("enabled") is not True or value is False:
        return Idle("the profiler is off" if section.get("enabled") is not True else _OFF)
    return Refused("the profiler of shoal records times and shapes")


_LORA = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_dora": "use_dora"}
RULES: Rules = {
    "output_dir": Rule("experiment.output_dir"),
    "seed": Rule("experiment.seed"),
    f"model.{COMPONENT}": Rule(("model.load_in_4bit", "model.bnb_4bit_use_double_quant"), _model),
    **{f"model.{key}": Rule(f"lora.{ours}") for key, ours in _LORA.items()},
    **{
        f"model.{key}": Rule("lora.target_modules", _targets)
        for key in ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
    },
    "model.quantize_base": Rule("model.load_in_4bit"),
    "model.*": Rule(why="the folder in model.name says what kind of model it is"),
    "checkpointer.checkpoint_dir": Rule("model.name", lambda value, section: str(value).rstrip("/") or value),
    f"checkpointer.{COMPONENT}": Rule((), _checkpointer),
    "checkpointer.checkpoint_files": idle("the index in the folder names the files"),
    "checkpointer.checkpoint_files.*": idle("the index in the folder names the files"),
    "checkpointer.model_type": idle("config.json in the folder says it"),
    "checkpointer.output_dir": idle("checkpoints are in experiment.output_dir"),
    "checkpointer.recipe_checkpoint": Rule(why=_NO_STATE),
    "checkpointer.adapter_checkpoint": Rule(why="write it as a PEFT adapter, and give checkpoint.init_from"),
    "checkpointer.safe_serialization": idle("checkpoints are safetensors"),
    "checkpointer.*": Rule(why=_NO_STATE),
    "resume_from_checkpoint": idle("a run resumes from its last checkpoint by itself; start anew with --fresh"),
    "save_adapter_weights_only": idle("a checkpoint has the adapters, and names the files of the base"),
    "tokenizer.max_seq_len": Rule("dataset.max_seq_length", _length),
    **{
        f"tokenizer.{key}": idle("the tokenizer is that of model.name")
        for key in (COMPONENT, "path", "merges_file", "special_tokens_path")
    },
    "tokenizer.prompt_template": Rule(why="give dataset.chat_template: a name, a Jinja file or the text of one"),
    f"dataset.{COMPONENT}": Rule(("dataset.train_file", "dataset.format", "dataset.loss_on"), _component),
    **{f"dataset.{key}": Rule("dataset.train_file", _dataset) for key in ("source", "split", "data_files", "name")},
    "dataset.packed": Rule("dataset.packing"),
    "dataset.train_on_input": Rule(
        "dataset.loss_on",
        lambda value, section: {True: "all", False: "answers"}[value] if type(value) is bool else value,
    ),
    "dataset.conversation_style": Rule(
        "dataset.format", lambda value, section: STYLES.get(str(value), Refused("shoal reads sharegpt and openai"))
    ),
    "dataset.conversation_column": only(
        "conversations", "records of sharegpt have it", "rename the column to messages or conversations"
    ),
    "dataset.column": only("text", "records of format text have it", "rename the column to text"),
    "dataset.column_map.*": Rule(why="rename the columns; docs/finetune.md has the keys that records need"),
    "dataset.new_system_prompt": Rule(why="write it into the records, as a message of the role system"),
    "dataset.add_eos": only(True, "the end-of-text token is added", "the end-of-text token is always added"),
    "dataset.split_across_pack": Rule(why="dataset.too_long says what happens to long samples"),
    **{
        f"dataset_val.{key}": Rule("dataset.eval_file", _dataset)
        for key in (COMPONENT, "source", "split", "data_files", "name")
    },
    "dataset_val.packed": idle("evaluation data is packed as training data is"),
    "run_val_every_n_steps": Rule("training.eval_steps"),
    "batch_size_val": Rule("training.eval_batch_size"),
    "shuffle": only(True, "samples are shuffled anew in every epoch", "samples are always shuffled"),
    "batch_size": Rule("training.batch_size"),
    "gradient_accumulation_steps": Rule("training.gradient_accumulation"),
    "epochs": Rule("training.num_epochs", _epochs),
    "max_steps_per_epoch": Rule("training.max_steps", _max_steps),
    **optimizer_rules("optimizer.", COMPONENT),
    f"lr_scheduler.{COMPONENT}": Rule("training.lr_scheduler", _schedule),
    "lr_scheduler.num_warmup_steps": Rule("training.warmup_steps"),
    "lr_scheduler.num_cycles": only(0.5, "the cosine falls once", "the cosine falls once, to 0"),
    f"loss.{COMPONENT}": Rule("training.loss_chunks", _loss),
    "loss.num_output_chunks": Rule("training.loss_chunks"),
    "loss.ignore_index": only(-100, "uncounted tokens are left out", "uncounted tokens are marked by -100"),
    "clip_grad_norm": Rule("training.max_grad_norm", lambda value, tree: None if value == "none" else value),
    "compile": Rule("training.compile"),
    "optimizer_in_bwd": _off("gradients are kept until the step, which clips and checks them"),
    "device": Rule("training.device"),
    "dtype": Rule(("training.mixed_precision", "model.dtype"), _precision),
    **{
        f"enable_activation_{kind}": Rule("training.activation_checkpointing", _activation_checkpointing)
        for kind in ("checkpointing", "offloading")
    },
    **{key: _side(side) for key, side in SIDES.items()},
    "tensor_parallel_plan.*": idle("the recipe's plan says how layers are split"),
    "fsdp_cpu_offload": _sharded("cpu_offload", root=True),
    "fsdp_reshard_after_forward": _sharded("sharding_strategy", root=True),
    "fsdp.cpu_offload": _sharded("cpu_offload", root=False),
    "custom_sharded_layers": Rule(why="blocks are units of FSDP, and the rest is one; it changes memory alone"),
    f"metric_logger.{COMPONENT}": Rule(("logging.wandb", "logging.tensorboard", "logging.mlflow"), _logger),
    **{
        f"metric_logger.{key}": Rule(("logging.wandb", "logging.mlflow"), _logger_option)
        for key in ("project", "entity", "experiment_name", "tracking_uri")
    },
    "metric_logger.log_dir": idle("logs are in experiment.output_dir"),
    "metric_logger.filename": idle("logs are in experiment.output_dir"),
    "metric_logger.*": Rule(why="shoal's loggers have no such option"),
    "log_every_n_steps": Rule("logging.every"),
    "log_peak_memory_stats": idle("the log has the peak of memory"),
    "log_level": only("INFO", "it is the level of the console", "logging.console chooses what is shown"),
    "save_every_n_steps": Rule("checkpoint.every"),
    **{f"profiler.{key}": rule for key, rule in _PROFILER.items()},
    **{f"profiler.{key}": Rule((), _extra) for key in ("profile_memory", "with_stack", "with_flops")},
    "profiler.output_dir": idle("traces are in profile/ of experiment.output_dir"),
    f"profiler.{COMPONENT}": idle("it is torch.profiler"),
    "low_cpu_ram": idle("each rank reads its own shards"),
    "quantizer.*": Rule(why="shoal does not train for a quantisation that comes later"),
}


def _prepare(tree: Tree) -> Tree:
    """Writes nulls that mean something as a text."""
    tokenizer = section_of(tree, "tokenizer")
    changed: Tree = {"clip_grad_norm": "none"} if tree.get("clip_grad_norm", 0) is None else {}
    if tokenizer.get("max_seq_len") is None and tokenizer:
        changed["tokenizer"] = {**tokenizer, "max_seq_len": "none"}
    return {**tree, **changed}


def _defaults(tree: Tree) -> dict[str, Any]:
    return {
        **optimizer_defaults(section_of(tree, "optimizer"), "optimizer.", COMPONENT),
        "clip_grad_norm": "none",
        f"lr_scheduler.{COMPONENT}": "none",
    }


TORCHTUNE = Project(
    name="torchtune",
    title="torchtune",
    rules=RULES,
    recipe="text_lora",
    prepare=_prepare,
    defaults=_defaults,
    missing=lambda ours: {
        "model.name": Placeholder("folder/of/the/model", "checkpointer.checkpoint_dir is missing"),
        "dataset.train_file": Placeholder("train.jsonl", "the file names no dataset that shoal knows"),
        "training.lr_scheduler": Placeholder("constant", "shoal does not have the schedule of the file"),
        "training.num_epochs": Placeholder(1, "the file does not say for how long", ("training.max_steps",)),
    },
)
