"""The words of LLaMA-Factory's training files: those of Hugging Face's TrainingArguments, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.conversions import by_name, half, is_number, only
from shoal.config.foreign.project import Placeholder, Project
from shoal.config.foreign.rules import Idle, Noted, Refused, Rule, Rules, idle
from shoal.config.foreign.words import WORDS
from shoal.config.yaml import Tree
from shoal.errors import UserError

Section = Mapping[str, Any]

TEMPLATES = ("chatml", "llama3", "gemma", "mistral", "alpaca")
"""Names of chat templates that shoal has, too."""
_OFF = "it is off anyway"
_HUGGING_FACE = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "seed": 42,
}
"""Defaults of TrainingArguments that shoal does not have."""


def refuse_preferences(key: str, kinds: tuple[str, ...]) -> Rule:
    """Returns the rule of a key that chooses a kind of training which shoal does not have: the file is not translated,
    because what is left would train something else."""

    def convert(value: Any, section: Section) -> Any:
        if str(value).lower() in kinds:
            raise UserError(f"{key} = {value!r:.100}: shoal trains on texts and on prompts with answers, and not so")
        return Idle("the recipe text_lora does so")

    return Rule((), convert)


def names(value: Any, section: Section) -> Any:
    """Returns names that are separated by commas as a list."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def template(value: Any, section: Section) -> Any:
    """Returns our name of a chat template, or leaves it to the tokenizer."""
    if not isinstance(value, str):
        return value
    return value if value in TEMPLATES else Idle("the tokenizer's own chat template is used; shoal data shows it")


def share(value: Any, section: Section) -> Any:
    """Returns the fraction of the records that is held out."""
    if is_number(value) and value > 1:
        return Refused("it is a number of records; give dataset.eval_fraction, or dataset.eval_file")
    return float(value) if is_number(value) else value


def attention(value: Any, section: Section) -> Any:
    """Returns the attention: torch's has the flash kernels, too."""
    flash = ("fa2", "fa3", "flash_attention_2", "flash_attention_3", "xformers", "flex_attention", "sdpa")
    return by_name({**dict.fromkeys(flash, "sdpa"), "disabled": "eager", "auto": Idle("transformers chooses")})(
        value, section
    )


def is_lora(tree: Section) -> bool:
    return tree.get("finetuning_type", "lora") == "lora"


# Adapters


def _targets(value: Any, tree: Section) -> Any:
    kind = tree.get("finetuning_type", "lora")
    if kind == "full":
        return Idle("without lora: all weights are trained")
    if kind != "lora":
        raise UserError(
            f"finetuning_type = {kind!r:.100}: shoal trains all weights, or adapters of LoRA; use one of them"
        )
    target = tree.get("lora_target", "all")
    return "all-linear" if target == "all" else names(target, tree)


def _lora(key: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        return value if is_lora(tree) else Idle("finetuning_type is not lora")

    return Rule(f"lora.{key}", convert)


def _bits(value: Any, tree: Section) -> Any:
    if value in (4, 8) and not isinstance(value, bool):
        return {f"model.load_in_{value}bit": True}
    return Refused("bitsandbytes has 4 and 8 bits")


def _four_bits(key: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        return value if tree.get("quantization_bit") == 4 else Idle("it is for 4 bits")

    return Rule(f"model.{key}", convert)


def _half(name: str) -> Rule:
    def convert(value: Any, tree: Section) -> Any:
        if tree.get("fp8") is True and value is True:
            return Idle("training.mixed_precision: fp8 computes the rest in bf16")
        made = half(name)(value, tree)
        if value is True and is_lora(tree):
            return {"training.mixed_precision": made, "model.dtype": name}
        return made if isinstance(made, Idle) else {"training.mixed_precision": made}

    return Rule(("training.mixed_precision", "model.dtype"), convert)


# Data


def _files(key: str) -> Any:
    def convert(value: Any, tree: Section) -> Any:
        given, folder = names(tree.get(key), tree), tree.get("dataset_dir", "data")
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            return given
        folder = folder if isinstance(folder, str) and not folder.startswith("REMOTE:") else "data"
        files = [f"{folder.rstrip('/')}/{name}.json" for name in given]
        why = "LLaMA-Factory looks these names up in dataset_info.json: check the files."
        return Noted(files[0] if len(files) == 1 else files, why)

    return convert


def _dataset_dir(value: Any, tree: Section) -> Any:
    if not isinstance(value, str) or value.startswith("REMOTE:"):
        return Refused("download the files, or give the name of a dataset on the Hub as dataset.train_file")
    return _files("dataset")(value, tree) if "dataset" in tree else Idle("no dataset is named")


def _stage(value: Any, tree: Section) -> Any:
    if value == "pt":
        return {"dataset.format": "text", "dataset.packing": True, "dataset.too_long": "split"}
    return refuse_preferences("stage", ("rm", "ppo", "dpo", "kto", "orpo")).convert(value, tree)  # type: ignore[misc]


def _packing(value: Any, tree: Section) -> Any:
    if tree.get("stage") == "pt" and value is True:
        return Idle("stage pt packs anyway")
    return Noted(value, "Samples in one sequence do not attend to each other here.") if value is True else value


# Processes


def _fsdp(value: Any, tree: Section) -> Any:
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    kinds = {
        "full_shard": "FULL_SHARD",
        "shard_grad_op": "SHARD_GRAD_OP",
        "no_shard": "NO_SHARD",
        "hybrid_shard": "HYBRID_SHARD",
    }
    ours = {"distributed.strategy": "fsdp"}
    for word in words:
        if word in kinds:
            ours["distributed.fsdp.sharding_strategy"] = kinds[word]
        elif word == "offload":
            ours["distributed.fsdp.cpu_offload"] = True  # type: ignore[assignment]
        elif word != "auto_wrap":
            return Refused(f"{word:.50} is not one of {', '.join(kinds)}, offload and auto_wrap")
    return ours


def _precision(value: Any, tree: Section) -> Any:
    if value is not True:
        return Idle(_OFF) if value is False else value
    return Noted("bf16", "LLaMA-Factory keeps weights and optimizer state in bf16 alone; here they are fp32.")


def _optimizer(value: Any, tree: Section) -> Any:
    return {"name": "muon", "adjust_lr_fn": "match_rms_adamw"} if value is True else Idle(_OFF)


FSDP = Rule(("distributed.strategy", "distributed.fsdp.sharding_strategy", "distributed.fsdp.cpu_offload"), _fsdp)
_NO_OPTIMIZER = "shoal has no such optimizer; training.optimizer names those that it has"
RULES: Rules = {
    **WORDS,
    "model_name_or_path": Rule("model.name"),
    "model_revision": Rule("model.revision", by_name({"main": Idle("it is the default")})),
    "trust_remote_code": Rule("model.trust_remote_code"),
    "flash_attn": Rule("model.attn_implementation", attention),
    "adapter_name_or_path": Rule("checkpoint.init_from"),
    "quantization_bit": Rule(("model.load_in_4bit", "model.load_in_8bit"), _bits),
    "quantization_method": Rule(
        (),
        by_name(
            dict.fromkeys(("bnb", "bitsandbytes"), Idle("shoal quantises with bitsandbytes")),
            lambda value, tree: Refused("shoal quantises with bitsandbytes"),
        ),
    ),
    "quantization_type": _four_bits("bnb_4bit_quant_type"),
    "double_quantization": _four_bits("bnb_4bit_use_double_quant"),
    "stage": Rule(("dataset.format", "dataset.packing", "dataset.too_long"), _stage),
    **dict.fromkeys(("finetuning_type", "lora_target"), Rule("lora.target_modules", _targets)),
    "lora_rank": _lora("r"),
    "lora_alpha": _lora("lora_alpha"),
    "lora_dropout": _lora("lora_dropout"),
    "use_rslora": _lora("use_rslora"),
    "use_dora": _lora("use_dora"),
    "loraplus_lr_ratio": _lora("lora_plus_ratio"),
    "additional_target": Rule("lora.modules_to_save", names),
    "loraplus_lr_embedding": idle("only with an embedding in modules_to_save, which has the learning rate of all"),
    "create_new_adapter": Rule(why="a run has one adapter"),
    **{
        key: only(False, _OFF, "adapters start from their own random numbers")
        for key in ("pissa_init", "pissa_convert")
    },
    "pissa_iter": idle("pissa_init is what turns it on"),
    "dataset": Rule("dataset.train_file", _files("dataset")),
    "eval_dataset": Rule("dataset.eval_file", _files("eval_dataset")),
    "dataset_dir": Rule("dataset.train_file", _dataset_dir),
    "template": Rule("dataset.chat_template", template),
    "cutoff_len": Rule("dataset.max_seq_length"),
    "val_size": Rule("dataset.eval_fraction", share),
    "max_samples": Rule(why="write fewer records into a file of their own"),
    "train_on_prompt": Rule("dataset.loss_on", lambda value, tree: "all" if value is True else "answers"),
    "mask_history": only(False, "every answer counts", "every answer of a conversation counts"),
    **dict.fromkeys(("packing", "neat_packing"), Rule("dataset.packing", _packing)),
    "preprocessing_num_workers": Rule("dataset.preprocessing_num_workers"),
    "tokenized_path": idle("tokens are stored under dataset.cache_dir, and read from there by the next run"),
    "overwrite_cache": idle("tokens are stored under a hash of the records"),
    "preprocessing_batch_size": idle("it does not change the samples"),
    "streaming": only(False, _OFF, "records are prepared before the first step"),
    "mix_strategy": only(
        "concat", "files are read as one set", "give weights: dataset.train_file: [{file: …, weight: …}]"
    ),
    "interleave_probs": Rule(why="give weights: dataset.train_file: [{file: …, weight: …}]"),
    "ignore_pad_token_for_loss": only(True, "padding never counts", "padding never counts"),
    "enable_thinking": idle("the chat template decides"),
    "default_system": Rule(why="write it into the records, as a message of the role system"),
    "tool_format": Rule(why="the chat template says how tools are written"),
    "bf16": _half("bf16"),
    "fp16": _half("fp16"),
    "pure_bf16": Rule("training.mixed_precision", _precision),
    "fp8": Rule("training.mixed_precision", lambda value, tree: "fp8" if value is True else Idle(_OFF)),
    "fp8_backend": only("torchao", "fp8 is torchao's", "fp8 is torchao's"),
    "fp8_enable_fsdp_float8_all_gather": only(False, _OFF, "FSDP gathers weights in distributed.fsdp.param_dtype"),
    "disable_gradient_checkpointing": Rule(
        "training.activation_checkpointing", lambda value, tree: "none" if value is True else "full"
    ),
    "use_reentrant_gc": idle("blocks are never recomputed in the reentrant way"),
    "use_muon": Rule("training.optimizer", _optimizer),
    **{
        f"use_{key}": only(False, _OFF, _NO_OPTIMIZER)
        for key in ("galore", "apollo", "badam", "adam_mini", "llama_pro", "unsloth", "unsloth_gc")
    },
    "enable_liger_kernel": only(False, _OFF, "use training.compile and training.loss_chunks"),
    "use_v1_kernels": only(False, _OFF, "use training.compile"),
    "fsdp": FSDP,
    "fsdp_transformer_layer_cls_to_wrap": Rule("distributed.fsdp.wrap_classes", names),
    "ray_num_workers": Rule(
        ("launch.target", "launch.procs_per_node"),
        lambda value, tree: {"launch.target": "ray", "launch.procs_per_node": value},
    ),
    "master_addr": Rule("launch.master_addr"),
    "master_port": Rule(
        "launch.master_port",
        lambda value, tree: int(value) if isinstance(value, str) and value.isdecimal() else value,
    ),
    "plot_loss": idle("metrics.jsonl and TensorBoard have the curve of the loss"),
    "include_effective_tokens_per_second": idle("the log has it"),
    "early_stopping_steps": Rule("callbacks.early_stopping.patience"),
    "use_fast_tokenizer": idle("tokenizers are the fast ones"),
    "low_cpu_mem_usage": idle("every rank reads its own shards alone"),
    "upcast_layernorm": idle("norms compute in fp32 under autocast"),
    "print_param_status": idle("the report at step 1 shows what is trained"),
    "cache_dir": Rule(why="set the variable HF_HOME"),
    "hf_hub_token": Rule(why="set the variable HF_TOKEN; it does not belong into a file"),
}


def _defaults(tree: Tree) -> dict[str, Any]:
    rank = tree.get("lora_rank", 8)
    lora = {"lora_rank": 8, "lora_alpha": rank * 2 if type(rank) is int else 16, "finetuning_type": "lora"}
    is_packed = "max_steps" in tree
    return {
        **{key: value for key, value in _HUGGING_FACE.items() if not (key == "num_train_epochs" and is_packed)},
        **(lora if is_lora(tree) else {}),
        **({"double_quantization": True} if tree.get("quantization_bit") == 4 else {}),
        "disable_gradient_checkpointing": False,
    }


OPTIMIZER = Placeholder({"name": "adamw", "betas": [0.9, 0.999]}, "shoal does not have the optimizer of the file")
"""What is written in the place of an optimizer of Hugging Face's that shoal does not have."""

LLAMA_FACTORY = Project(
    name="llama_factory",
    title="LLaMA-Factory",
    rules=RULES,
    recipe="text_lora",
    defaults=_defaults,
    missing=lambda ours: {
        "model.name": Placeholder("Qwen/Qwen3-0.6B", "model_name_or_path is missing"),
        "dataset.train_file": Placeholder("train.jsonl", "the file names no dataset"),
        "training.optimizer": OPTIMIZER,
        "training.num_epochs": Placeholder(1, "the file does not say for how long", ("training.max_steps",)),
    },
)
