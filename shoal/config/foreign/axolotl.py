"""The words of axolotl's training files: those of Hugging Face's TrainingArguments, many under other names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shoal.config.foreign.accelerate import above_one, fsdp_rules, needs_mesh
from shoal.config.foreign.conversions import epochs, half, only
from shoal.config.foreign.llama_factory import FSDP, OPTIMIZER, attention, refuse_preferences, share, template
from shoal.config.foreign.names import SCHEDULES, optimizer, schedule
from shoal.config.foreign.project import Placeholder, Project, columns
from shoal.config.foreign.rules import Convert, Idle, Noted, Refused, Rule, Rules, idle
from shoal.config.foreign.words import WORDS
from shoal.config.yaml import Tree, is_section

Section = Mapping[str, Any]

FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "chat_template": "auto",
}
"""Our names of the shapes of records. Names such as `alpaca:chat` begin with one of these."""
SIDES = {
    "dp_shard_size": "dp_shard",
    "dp_replicate_size": "dp_replicate",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
}
_OFF = "it is off anyway"
_LISTS = ("datasets", "test_datasets", "pretraining_dataset")
_COLUMNS = "rename the columns; docs/finetune.md has the keys that records need"
_KERNELS = "it is faster and computes the same; use training.compile"


def _prepare(tree: Tree) -> Tree:
    """Writes lists of sections as sections of lists: `datasets: [{path: a}]` as `datasets[]: {path: [a]}`."""
    prepared: Tree = {}
    for key, value in tree.items():
        entries = [{"path": value}] if key in _LISTS and isinstance(value, str) else value
        is_list = isinstance(entries, list) and entries and all(is_section(entry) for entry in entries)
        prepared |= {f"{key}[]": columns(entries)} if is_list else {key: value}
    return prepared


# The model, and the adapters


def _is_adapted(tree: Section) -> bool:
    return tree.get("adapter") in ("lora", "qlora", "dora")


def _targets(value: Any, tree: Section) -> Any:
    if not _is_adapted(tree):
        return Idle("adapter is not set")
    if tree.get("lora_target_linear") is True:
        return "all-linear"
    return tree.get("lora_target_modules", Idle("PEFT's choice for the kind of model is used"))


def _adapter(value: Any, tree: Section) -> Any:
    if value not in ("lora", "qlora", "dora"):
        return Refused("shoal has adapters of LoRA, QLoRA and DoRA")
    made = _targets(value, tree)
    ours = {} if isinstance(made, Idle) else {"lora.target_modules": made}
    ours |= {"lora.r": tree["lora_r"]} if "lora_r" in tree else {}
    ours |= {"lora.use_dora": True} if value == "dora" else {}
    return ours or {"lora.r": 8}


def _lora(key: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        return value if _is_adapted(tree) else Idle("adapter is not set")

    return Rule(f"lora.{key}", convert)


def _half(name: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        value = True if value == "auto" else value
        made = half(name)(value, tree)
        if isinstance(made, Idle):
            return made
        if value == "full":
            return Noted({"training.mixed_precision": name}, "axolotl keeps all weights in it; here they are fp32.")
        dtype = {"model.dtype": name} if value is True and _is_adapted(tree) else {}
        return {"training.mixed_precision": made, **dtype}

    return Rule(("training.mixed_precision", "model.dtype"), convert)


# Data


def _entries(section: Section) -> Any:
    """Returns the entries of a list of datasets as `train_file` has them."""
    entries = []
    for index, path in enumerate(section.get("path", [])):
        given = {key: section[key][index] for key in ("split", "name", "data_files") if key in section}
        files = given.get("data_files")
        if path in ("json", "csv", "parquet", "text") and files:
            path = files
        options = {"split": given.get("split"), "config": given.get("name")}
        changed = {key: value for key, value in options.items() if value not in (None, "train")}
        for file in path if isinstance(path, list) else [path]:
            entries.append({"file": file, **changed} if changed else file)
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries


def _read(ours: str) -> Rule:
    return Rule(f"dataset.{ours}", lambda value, section: _entries(section))


def _shapes(values: Any) -> list[str | None]:
    texts = values if isinstance(values, list) else [values]
    return [FORMATS.get(str(value).partition(".")[0].partition(":")[0]) for value in texts if value is not None]


def _type(value: Any, section: Section) -> Any:
    shapes = {*_shapes(value)}
    if None in shapes:
        return Refused(f"shoal reads {', '.join(FORMATS)}; docs/finetune.md has the keys that records need")
    if shapes == {"alpaca"}:
        return Noted(
            {"dataset.format": "alpaca", "dataset.chat_template": "alpaca"},
            "axolotl renders alpaca records as plain text of the Alpaca project, as this template does.",
        )
    return {"dataset.format": shapes.pop() if len(shapes) == 1 else "auto"}


def _pretraining(value: Any, section: Section) -> Any:
    return Noted(
        {"dataset.format": "text", "dataset.too_long": "split"},
        "axolotl streams these texts; here they are tokenised before the first step.",
    )


def _field(known: Mapping[str, Any], why: str) -> Rule:
    def convert(value: Any, section: Section) -> Any:
        values = value if isinstance(value, list) else [value]
        return Idle("records of this shape have it") if all(one in (None, *known) for one in values) else Refused(why)

    return Rule((), convert)


def _mapping(value: Any, section: Section) -> Any:
    pairs = [one for one in value if one is not None] if isinstance(value, list) else [value]
    known = ({"role": "from", "content": "value"}, {"role": "role", "content": "content"})
    return Idle("records of this shape have it") if all(pair in known for pair in pairs) else Refused(_COLUMNS)


def _eval_packing(value: Any, tree: Section) -> Any:
    if value == tree.get("sample_packing", False):
        return Idle("evaluation data is packed as training data is")
    return Refused("evaluation data is packed as training data is")


def _pad(value: Any, tree: Section) -> Any:
    return Idle("packs always have dataset.max_seq_length tokens") if tree.get("sample_packing") else value


# The run


def _per_epoch(ours: str, verb: str, off: Mapping[str, Any]) -> Convert:
    def convert(value: Any, tree: Section) -> Any:
        if value == 0:
            return dict(off) or Idle("the run is evaluated at its end alone")
        if verb == "evaluates" and not tree.get("val_set_size") and "test_datasets[]" not in tree:
            return Idle("there is no evaluation data")
        made = {**off, ours: 1}
        return made if value == 1 else Noted(made, f"axolotl {verb} {value} times in an epoch; here it is once.")

    return convert


def _schedule(value: Any, tree: Section) -> Any:
    if str(tree.get("lr_scheduler", "cosine")) not in SCHEDULES:
        return Refused("shoal has no such schedule; training.lr_scheduler names those that it has")
    made = schedule({"lr_scheduler": "cosine", **tree})
    ratio = tree.get("cosine_min_lr_ratio")
    if ratio is None:
        return made
    name = made.get("name") if isinstance(made, dict) else made
    return {"name": "cosine", "min_ratio": ratio} if name == "cosine" else Refused("it is for the schedule cosine")


def _optimizer(value: Any, tree: Section) -> Any:
    if value == "muon":
        return {"name": "muon", "adjust_lr_fn": "match_rms_adamw"}
    return optimizer({**tree, "optim": value})


def _adam_option(value: Any, tree: Section) -> Any:
    made = optimizer({**tree, "optim": tree.get("optimizer", "adamw_torch_fused")})
    return made if isinstance(made, Refused) or "betas" in made else Idle("the optimizer is not a kind of Adam")


def _recompute(value: Any, tree: Section) -> Any:
    given, offload = tree.get("gradient_checkpointing"), tree.get("activation_offloading")
    is_offloaded = given in ("offload", "offload_disk") or bool(offload)
    if not given:
        return Refused("only activations of recomputed blocks are offloaded") if offload else "none"
    return {"mode": "full", "offload": True} if is_offloaded else "full" if given is True else given


def _sizes(tree: Section) -> dict[str, Any]:
    return {ours: tree[key] for key, ours in SIDES.items() if key in tree}


def _side(side: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        sizes = _sizes(tree)
        if not needs_mesh(sizes):
            return Idle("weights are sharded over all processes")
        why = "The mesh needs so many processes; on several machines give launch.nodes, too."
        processes = Noted(prod(above_one(sizes).values()), why)
        mesh = {"distributed.strategy": "mesh", f"distributed.mesh.{side}": value}
        return {**mesh, "launch.procs_per_node": processes}

    return Rule(("distributed.strategy", f"distributed.mesh.{side}", "launch.procs_per_node"), convert)


def _fsdp(value: Any, tree: Section) -> Any:
    made = FSDP.convert(value, tree) if FSDP.convert else value
    return {**made, "distributed.strategy": "mesh"} if isinstance(made, dict) and needs_mesh(_sizes(tree)) else made


def _wandb(key: str) -> Convert:
    def convert(value: Any, tree: Section) -> Any:
        names = {"wandb_project": "project", "wandb_entity": "entity", "wandb_mode": "mode"}
        if tree.get("wandb_mode") == "disabled" or "wandb_project" not in tree:
            return Idle("Weights & Biases is off without wandb_project")
        return {ours: tree[theirs] for theirs, ours in names.items() if tree.get(theirs) is not None}

    return convert


def _watch(value: Any, tree: Section) -> Any:
    is_off = value in (False, "false")
    return Idle(_OFF) if is_off or "wandb_project" not in tree else Refused("the log has losses and metrics alone")


def _chunks(value: Any, tree: Section) -> Any:
    if value is not True:
        return Idle(_OFF)
    chunks = tree.get("chunked_cross_entropy_num_chunks", 8)
    return Noted(chunks, "The loss in chunks saves the memory of the logits, as this loss of axolotl does.")


_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_modules_to_save": "modules_to_save",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_init_lora_weights": "init_lora_weights",
    "loraplus_lr_ratio": "lora_plus_ratio",
}
_FIELDS: Rules = {
    "type": Rule(("dataset.format", "dataset.chat_template"), _type),
    "ds_type": idle("the end of a file's name says it"),
    "field_messages": _field({"messages": 0, "conversations": 0}, _COLUMNS),
    "message_field_role": _field({"from": 0, "role": 0}, _COLUMNS),
    "message_field_content": _field({"value": 0, "content": 0}, _COLUMNS),
    "message_property_mappings": Rule((), _mapping),
    "field": _field({"text": 0}, _COLUMNS),
    "roles_to_train": Rule(why="all answers of the assistant count, and nothing else"),
    "train_on_eos": Rule(why="the token that ends an answer counts"),
    "chat_template": Rule(why="one template renders all records: dataset.chat_template"),
    "revision": Rule(why="give the folder of a downloaded dataset"),
    "*": Rule(why="shoal reads a dataset by its name, split and configuration"),
}
_PATHS = ("path", "split", "name", "data_files")
RULES: Rules = {
    **{key: rule for key, rule in WORDS.items() if key not in ("fsdp", "fsdp_config")},
    "base_model": Rule("model.name"),
    "revision_of_model": Rule("model.revision"),
    "trust_remote_code": Rule("model.trust_remote_code"),
    "tokenizer_config": Rule("dataset.tokenizer"),
    **{
        key: idle("config.json of the model says it")
        for key in ("model_type", "tokenizer_type", "base_model_config", "is_llama_derived_model", "tokenizer_use_fast")
    },
    "load_in_4bit": Rule("model.load_in_4bit"),
    "load_in_8bit": Rule("model.load_in_8bit"),
    "bnb_config_kwargs.*": Rule("model.*"),
    "reinit_weights": only(False, _OFF, "give model.config in the place of model.name to start from scratch"),
    "attn_implementation": Rule("model.attn_implementation", attention),
    **{
        f"{key}_attention": Rule(
            "model.attn_implementation", lambda value, tree: "sdpa" if value is True else Idle("another one is used")
        )
        for key in ("flash", "sdp", "xformers", "flex", "sage")
    },
    "eager_attention": Rule(
        "model.attn_implementation", lambda value, tree: "eager" if value is True else Idle("another one is used")
    ),
    "adapter": Rule(("lora.target_modules", "lora.r", "lora.use_dora"), _adapter),
    **dict.fromkeys(("lora_target_linear", "lora_target_modules"), Rule("lora.target_modules", _targets)),
    **{key: _lora(ours) for key, ours in _LORA.items()},
    "lora_model_dir": Rule("checkpoint.init_from"),
    "lora_fan_in_fan_out": idle("the class of a layer says how its weight is stored"),
    **{key: only(False, _OFF, _KERNELS) for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")},
    **{f"datasets[].{key}": _read("train_file") for key in _PATHS},
    **{f"datasets[].{key}": rule for key, rule in _FIELDS.items()},
    **{f"test_datasets[].{key}": _read("eval_file") for key in _PATHS},
    **{f"test_datasets[].{key}": rule for key, rule in _FIELDS.items() if key != "type"},
    "test_datasets[].type": idle("all records have the shape of dataset.format"),
    **{f"pretraining_dataset[].{key}": _read("train_file") for key in _PATHS},
    "pretraining_dataset[].type": Rule(("dataset.format", "dataset.too_long"), _pretraining),
    "pretraining_dataset[].text_column": _field({"text": 0}, "rename the column to text"),
    "pretraining_dataset[].*": Rule(why="shoal reads a dataset by its name, split and configuration"),
    "chat_template": Rule("dataset.chat_template", template),
    "chat_template_jinja": Rule("dataset.chat_template"),
    "val_set_size": Rule("dataset.eval_fraction", share),
    "sequence_len": Rule("dataset.max_seq_length"),
    "excess_length_strategy": Rule("dataset.too_long", lambda value, tree: "truncate" if value == "raise" else value),
    "sample_packing": Rule("dataset.packing"),
    "eval_sample_packing": Rule((), _eval_packing),
    "pad_to_sequence_len": Rule("dataset.pad_to_max", _pad),
    "pretrain_multipack_attn": idle("packed samples never attend to each other"),
    "train_on_inputs": Rule("dataset.loss_on", lambda value, tree: "all" if value is True else "answers"),
    "dataset_prepared_path": Rule("dataset.cache_dir"),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc"), Rule("dataset.preprocessing_num_workers")),
    "shuffle_merged_datasets": only(True, "samples are always shuffled", "samples are always shuffled"),
    "streaming": only(False, _OFF, "records are prepared before the first step"),
    "special_tokens.pad_token": idle("padding is never counted, and any token serves"),
    "special_tokens.*": Rule(why="the tokenizer's own tokens are used; save a changed one, and give dataset.tokenizer"),
    "tokens": Rule(why="the tokenizer's own tokens are used; save a changed one, and give dataset.tokenizer"),
    "strict": idle("every key is used or refused"),
    "micro_batch_size": Rule("training.batch_size"),
    "batch_size": Rule(why="give training.global_batch_size, which is over all processes"),
    "eval_batch_size": Rule("training.eval_batch_size"),
    "num_epochs": Rule("training.num_epochs", epochs),
    "optimizer": Rule("training.optimizer", _optimizer),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), Rule("training.optimizer", _adam_option)),
    **dict.fromkeys(
        ("lr_scheduler", "lr_scheduler_kwargs", "cosine_min_lr_ratio"), Rule("training.lr_scheduler", _schedule)
    ),
    "bf16": _half("bf16"),
    "bfloat16": _half("bf16"),
    "fp16": _half("fp16"),
    "float16": _half("fp16"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_offloading"), Rule("training.activation_checkpointing", _recompute)
    ),
    "gradient_checkpointing_kwargs.*": idle("blocks are never recomputed in the reentrant way"),
    "evals_per_epoch": Rule(("training.eval_epochs",), _per_epoch("training.eval_epochs", "evaluates", {})),
    "saves_per_epoch": Rule(
        ("checkpoint.every_epochs", "checkpoint.every"),
        _per_epoch("checkpoint.every_epochs", "saves", {"checkpoint.every": None}),
    ),
    "early_stopping_patience": Rule("callbacks.early_stopping.patience"),
    **{key: Rule("logging.wandb", _wandb(key)) for key in ("wandb_project", "wandb_entity", "wandb_mode")},
    **dict.fromkeys(("wandb_name", "wandb_run_id"), Rule("experiment.name", lambda value, tree: str(value))),
    "wandb_watch": Rule((), _watch),
    "wandb_log_model": Rule(
        (), lambda value, tree: Idle(_OFF) if value in (False, "false") else Refused("a run uploads no checkpoints")
    ),
    "use_tensorboard": Rule("logging.tensorboard"),
    "fsdp": Rule(FSDP.ours, _fsdp),
    **fsdp_rules("fsdp_config.fsdp_"),
    **fsdp_rules("fsdp_config."),
    "fsdp_version": idle("shoal uses FSDP2 (fully_shard)"),
    "fsdp_final_state_dict_type": idle("every layout reads every checkpoint"),
    **{key: _side(side) for key, side in SIDES.items()},
    **{key: Rule(why="the heads are exchanged, as Ulysses does it") for key in ("heads_k_stride", "ring_attn_func")},
    "rl": refuse_preferences("rl", ("dpo", "ipo", "orpo", "kto", "simpo", "grpo", "gdpo", "ebft", "kto_pair")),
    "reward_model": refuse_preferences("reward_model", ("true",)),
    "process_reward_model": refuse_preferences("process_reward_model", ("true",)),
    "loss_watchdog_threshold": Rule(why="the callback loss_spike goes back when the loss jumps to a multiple"),
    "loss_watchdog_patience": Rule(why="the callback loss_spike goes back when the loss jumps to a multiple"),
    **dict.fromkeys(
        ("liger_fused_linear_cross_entropy", "chunked_cross_entropy", "cut_cross_entropy"),
        Rule("training.loss_chunks", _chunks),
    ),
    "chunked_cross_entropy_num_chunks": Rule("training.loss_chunks"),
    "plugins": Rule(why="shoal loads no plugins of axolotl; training.compile and training.loss_chunks are near"),
    **{
        key: only(False, _OFF, _KERNELS)
        for key in (
            "liger_rope",
            "liger_rms_norm",
            "liger_layer_norm",
            "liger_glu_activation",
            "liger_swiglu",
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
            "flash_attn_fuse_mlp",
            "flash_attn_fuse_qkv",
        )
    },
    "auto_resume_from_checkpoints": idle("a run resumes from its last checkpoint by itself; start anew with --fresh"),
    "device_map": idle("the strategy places the model"),
    **{key: idle("shoal finds it out") for key in ("world_size", "local_rank", "ddp", "device")},
    "gc_steps": Rule("training.gc_steps", lambda value, tree: Idle("it is the default") if value == -1 else value),
}


def _defaults(tree: Tree) -> dict[str, Any]:
    quantised = tree.get("load_in_4bit") is True
    return {
        **({} if "max_steps" in tree else {"num_epochs": 1.0}),
        "micro_batch_size": 1,
        "weight_decay": 0.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "seed": 42,
        **({} if "pretraining_dataset[]" in tree else {"excess_length_strategy": "drop"}),
        **({"bnb_config_kwargs.bnb_4bit_use_double_quant": True} if quantised else {}),
        **({"fsdp": ["full_shard"]} if "fsdp_config" in tree else {}),
    }


AXOLOTL = Project(
    name="axolotl",
    title="axolotl",
    rules=RULES,
    recipe="text_lora",
    prepare=_prepare,
    defaults=_defaults,
    missing=lambda ours: {
        "model.name": Placeholder("Qwen/Qwen3-0.6B", "base_model is missing"),
        "dataset.train_file": Placeholder("train.jsonl", "the file names no dataset"),
        "training.optimizer": OPTIMIZER,
        "training.num_epochs": Placeholder(1, "the file does not say for how long", ("training.max_steps",)),
    },
)
