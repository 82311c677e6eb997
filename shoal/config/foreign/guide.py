"""Config files in Hugging Face's words, with sections as guides have them, which are trained as they are.

    model: {name_or_path: meta-llama/Llama-2-7b-hf, load_in_4bit: true}
    lora: {r: 64, lora_alpha: 16}
    fsdp: {enabled: true, sharding_strategy: FULL_SHARD}
    training: {num_train_epochs: 3, per_device_train_batch_size: 4, learning_rate: 2e-4}
    dataset: {train_file: data.jsonl, max_seq_length: 2048}
    hardware: {num_gpus: 4}

Words of the section `training` may also stand at the top of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from shoal.config.foreign.conversions import DTYPES, PRECISIONS, by_name, only, recompute, strategy_with
from shoal.config.foreign.rules import Idle, Refused, Remark, Rule, Rules, idle, translate
from shoal.config.foreign.words import WORDS
from shoal.config.schema import Config, TrainingConfig
from shoal.config.yaml import Sources, Tree, find_leaves, is_section
from shoal.errors import UserError

Section = Mapping[str, Any]

_NAMES = ("name_or_path", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id", "base_model")


def _fsdp_policy(value: Any, section: Section) -> Any:
    """Returns the units of fully_shard by the names of guides, of accelerate and of torch."""
    names = {
        "transformer_based": ("transformer_based", "transformer_based_wrap", "transformer_auto_wrap_policy"),
        "size_based": ("size_based", "size_based_wrap", "size_based_auto_wrap_policy"),
    }
    if isinstance(value, str) and value.lower() in ("no_wrap", "none"):
        return Refused("without units the whole model is gathered at once; use transformer_based")
    if section.get("transformer_layer_cls_to_wrap"):
        return None  # the classes are the units
    return by_name({theirs: ours for ours, all_names in names.items() for theirs in all_names})(value, section)


def _upper(value: Any, section: Section) -> Any:
    return value.upper() if isinstance(value, str) else value


def _classes(value: Any, section: Section) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _sharding(value: Any, section: Section) -> Any:
    """Returns the sharding strategy by its name, or by the number that accelerate gives it."""
    numbers = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD"}
    return numbers.get(value, value) if type(value) is int else _upper(value, section)


def _enabled(strategy: str) -> Rule:
    def convert(value: Any, section: Section) -> Any:
        return Idle("another strategy is used") if value is False else strategy if value is True else value

    return Rule("distributed.strategy", convert)


def _fsdp(key: str, convert: Any = None) -> Rule:
    return strategy_with("fsdp", f"distributed.fsdp.{key}", convert)


FSDP: Rules = {
    "enabled": _enabled("fsdp"),
    "sharding_strategy": _fsdp("sharding_strategy", _sharding),
    "cpu_offload": _fsdp("cpu_offload"),
    "offload_params": _fsdp("cpu_offload"),
    "mixed_precision": strategy_with("fsdp", "training.mixed_precision", by_name(PRECISIONS)),
    "auto_wrap_policy": _fsdp("auto_wrap_policy", _fsdp_policy),
    "min_num_params": _fsdp("min_num_params"),
    "transformer_layer_cls_to_wrap": _fsdp("wrap_classes", _classes),
    "backward_prefetch": _fsdp("backward_prefetch", _upper),
    "forward_prefetch": _fsdp("forward_prefetch"),
    "limit_all_gathers": _fsdp("limit_all_gathers"),
    "activation_checkpointing": strategy_with("fsdp", "training.activation_checkpointing", recompute),
    "use_orig_params": idle("parameters always keep their names and shapes"),
    "sync_module_states": idle("every rank draws or reads the same weights"),
    "cpu_ram_efficient_loading": idle("every rank reads its own shards alone"),
    "state_dict_type": idle("checkpoints open in every layout"),
}
"""Rules by the keys of the section `fsdp`."""

_DEEPSPEED_FILE = strategy_with("deepspeed", "distributed.deepspeed.config_file")
DEEPSPEED: Rules = {
    "enabled": _enabled("deepspeed"),
    **dict.fromkeys(("config_file", "config", "config_path", "deepspeed_config_file"), _DEEPSPEED_FILE),
    **dict.fromkeys(("zero_stage", "stage"), strategy_with("deepspeed", "distributed.deepspeed.zero_stage")),
}
"""Rules by the keys of the section `deepspeed`."""

HARDWARE: Rules = {
    **dict.fromkeys(("num_gpus", "gpus", "gpus_per_node", "num_gpus_per_node", "nproc_per_node"), WORDS["num_gpus"]),
    **dict.fromkeys(("num_nodes", "nnodes", "num_machines"), Rule("launch.nodes")),
    "master_addr": Rule("launch.master_addr"),
    "master_port": Rule("launch.master_port"),
    **dict.fromkeys(("node_rank", "machine_rank"), Rule("launch.node_rank")),
}
"""Rules by the keys of the section `hardware`."""


def _attention(value: Any, section: Section) -> Any:
    return "sdpa" if isinstance(value, str) and value.startswith("flash_attention") else value


QUANTISATION_SECTIONS = ("quantization", "quantization_config", "bnb_config")
"""The names of the section in `model` that has bitsandbytes' keys."""
_QUANTISATION = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    **{f"bnb_4bit_{key}": f"bnb_4bit_{key}" for key in ("quant_type", "use_double_quant", "quant_storage")},
    **{"quant_type": "bnb_4bit_quant_type", "use_double_quant": "bnb_4bit_use_double_quant"},
}
_TORCH_DTYPES = by_name(
    {**{theirs: {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[ours] for theirs, ours in DTYPES.items()}}
)
_COMPUTE_DTYPE = Rule("model.bnb_4bit_compute_dtype", _TORCH_DTYPES)
MODEL: Rules = {
    **dict.fromkeys(_NAMES, Rule("model.name")),
    **dict.fromkeys(
        ("torch_dtype", "dtype"),
        Rule(
            "model.dtype", by_name({**DTYPES, "auto": Idle("the weights of a model are fp32 unless they are frozen")})
        ),
    ),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "compute_dtype"), _COMPUTE_DTYPE),
    "attn_implementation": Rule(
        "model.attn_implementation", _attention, "torch's attention has the flash kernels, too."
    ),
    **{
        f"{section}.{theirs}": Rule(f"model.{ours}")
        for section in QUANTISATION_SECTIONS
        for theirs, ours in _QUANTISATION.items()
    },
    **{
        f"{section}.{key}": _COMPUTE_DTYPE
        for section in QUANTISATION_SECTIONS
        for key in ("bnb_4bit_compute_dtype", "compute_dtype")
    },
    **{f"{section}.*": Rule(why="it is not a key of bitsandbytes that shoal has") for section in QUANTISATION_SECTIONS},
    "device_map": idle("the strategy places the model"),
    "use_cache": idle("training uses no cache"),
    "low_cpu_mem_usage": idle("every rank reads its own shards alone"),
}
"""Rules by the keys of the section `model`."""

LORA: Rules = {
    "enabled": only(True, "the section itself turns it on", "leave the section lora out to train all weights"),
    **{
        f"lora_{key}": Rule(f"lora.{ours}")
        for key, ours in {"r": "r", "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}.items()
    },
    "rank": Rule("lora.r"),
    "alpha": Rule("lora.lora_alpha"),
    "dropout": Rule("lora.lora_dropout"),
}
"""Rules by the keys of the section `lora`, whose other keys are PEFT's own."""

DATASET: Rules = {
    **dict.fromkeys(("dataset_name", "train_path", "data_path"), Rule("dataset.train_file")),
    **dict.fromkeys(("validation_file", "eval_path", "val_file"), Rule("dataset.eval_file")),
    **dict.fromkeys(("max_length", "model_max_length", "max_seq_len"), Rule("dataset.max_seq_length")),
}
"""Rules by the keys of the section `dataset`, whose other keys are those of the recipe text_lora."""

SECTIONS = {"fsdp": FSDP, "deepspeed": DEEPSPEED, "hardware": HARDWARE}
"""The sections that a guide has and our own configs do not."""
_OURS = {"fsdp": "distributed.fsdp", "deepspeed": "distributed.deepspeed", "hardware": "launch"}
_IMAGES = ("pretrained_vae_model_name_or_path", "validation_prompts", "resolution", "vae", "unet", "train_unet")
"""Words by which a file is known to train a model of images."""

RULES: Rules = {
    **{key: rule for key, rule in WORDS.items() if key not in SECTIONS},
    **{key: MODEL[key] for key in _NAMES},
    **{f"training.{key}": rule for key, rule in WORDS.items()},
    **{
        f"{name}.{key}": rule
        for name, rules in {**SECTIONS, "model": MODEL, "lora": LORA, "dataset": DATASET}.items()
        for key, rule in rules.items()
    },
    **{f"{theirs}.*": Rule(f"{ours}.*") for theirs, ours in _OURS.items()},
}
"""Rules by the dotted keys of a guide."""

DEFAULTS: Tree = {
    "num_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler": "linear",
    "optimizer": {"name": "adamw", "betas": [0.9, 0.999]},
}
"""The keys of `training` for which Hugging Face has other defaults than shoal: a guide that leaves them out means
these."""
DEFAULT_SOURCE = "Hugging Face's default"

_OUR_SECTIONS = {*Config.model_fields} - {"training", "dataset"}
_FOREIGN_WORDS = {*WORDS} - {*TrainingConfig.model_fields}


def is_guide(tree: Tree) -> bool:
    """Returns whether a file is in Hugging Face's words.

    It has one of their sections, or it has one of their words and no section that shoal alone has: in a config of ours
    such a word is a mistake.
    """
    if any(is_section(tree.get(name)) for name in SECTIONS):
        return True
    training, model = (_section(tree, name) for name in ("training", "model"))
    words = {*tree, *training} & _FOREIGN_WORDS or {*tree, *model} & {*_NAMES}
    return bool(words) and not _OUR_SECTIONS & {*tree}


def has_our_sections(tree: Tree) -> bool:
    """Returns whether a file has a section that shoal alone has."""
    return bool(_OUR_SECTIONS & {*tree})


_ADAM = {"adam_beta1", "adam_beta2", "adam_epsilon"}
_COMBINED = (
    *({word, *_ADAM} for word in ("optim", "use_8bit_adam")),
    *({word, "lr_scheduler_kwargs"} for word in ("lr_scheduler_type", "lr_scheduler")),
    *({word, "eval_steps"} for word in ("eval_strategy", "evaluation_strategy")),
    *({"save_strategy", "load_best_model_at_end", word} for word in ("save_steps", "checkpointing_steps")),
    {"metric_for_best_model", "greater_is_better"},
)
"""Words that set a key of ours together."""
_SAME_CHOICE = {"training.num_epochs": "training.max_steps", "training.warmup_ratio": "training.warmup_steps"}


def without_replaced(tree: Tree, later: Tree) -> Tree:
    """Returns a guide without the words that a later file replaces by other words for the same key of ours.

    What the later file turns off, as `bf16: false` does, replaces no other word: `fp16: true` of the base stays.
    """
    words = _words(later)
    new = {key: value for key, value in words.items() if _turns_on(value)}
    targets = {key: _targets(key) for key in new}
    strategies: set[str] = {
        name for name in ("fsdp", "deepspeed") if name in later and _section(later, name).get("enabled", True)
    }
    if _section(later, "distributed").get("strategy") is not None:
        strategies.add("distributed")

    def is_replaced(dotted: str) -> bool:
        section, _, word = dotted.rpartition(".")
        if section in ("fsdp", "deepspeed") and strategies - {section}:
            return True
        if (section == "training" and word in words) or (not section and f"training.{word}" in words):
            return True  # the same word, at the other of the two places that it may have
        return any(
            dotted != key
            and _targets(dotted) & targets[key]
            and not any(word != key.rpartition(".")[2] and {word, key.rpartition(".")[2]} <= both for both in _COMBINED)
            for key in new
        )

    def kept(section: Tree, prefix: str) -> Tree:
        inner = {
            key: kept(value, f"{prefix}{key}.") if is_section(value) and value else value
            for key, value in section.items()
            if (is_section(value) and f"{prefix}{key}" not in RULES) or not is_replaced(f"{prefix}{key}")
        }
        return {key: value for key, value in inner.items() if value != {} or section[key] == {}}

    return kept(tree, "")


def _words(tree: Tree, prefix: str = "") -> Tree:
    """Returns the values of a guide by dotted key; options such as `lr_scheduler_kwargs` are one value."""
    words: Tree = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        words |= _words(value, f"{dotted}.") if is_section(value) and dotted not in RULES else {dotted: value}
    return words


def _turns_on(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, int | float) and value < 0)


def _targets(dotted: str) -> set[str]:
    """Returns our keys that a word of a guide decides on, without the strategy that sections of options imply."""
    rule = RULES.get(dotted)
    keys = {dotted} if rule is None else {*rule.keys}
    return {_SAME_CHOICE.get(key, key) for key in keys} - {"distributed.strategy"}


def from_guide(tree: Tree, sources: Sources) -> tuple[Tree, Sources, tuple[Remark, ...]]:
    """Returns a guide in our words, and its keys that change nothing. Raises UserError for the first that shoal cannot
    follow."""
    as_they_are = {f"{key}.*": Rule(f"{key}.*") for key in tree if key not in RULES}
    words: dict[str, Rule] = {
        name: WORDS[name] for name in ("fsdp", "deepspeed") if name in tree and not is_section(tree[name])
    }
    tree = {
        **_with_no_clipping(tree),
        **{name: _with_no_clipping(tree[name]) for name in ("training",) if name in tree},
    }
    together = {**tree, **_section(tree, "training")}
    result = translate(tree, sources, {**as_they_are, **RULES, **words}, dict.fromkeys(("", "training."), together))
    if result.refused:
        first = result.refused[0]
        raise UserError(
            str(first) + _near(first.key) + (f" (and {len(more)} more)" if (more := result.refused[1:]) else "")
        )
    return result.tree, result.sources, result.idle


def _near(dotted: str) -> str:
    """Returns the question whether another key was meant, for an unknown key of bitsandbytes, or an empty text."""
    section, _, key = dotted.rpartition(".")
    if dotted in RULES or section.removeprefix("model.") not in QUANTISATION_SECTIONS:
        return ""
    known = [name.removeprefix(f"{section}.") for name in RULES if name.startswith(f"{section}.")]
    near = get_close_matches(key, known, n=1)
    return f"; did you mean {section}.{near[0]}?" if near else ""


def _with_no_clipping(section: Any) -> Any:
    """Returns a section in which `max_grad_norm: null`, which turns clipping off there, is written as 0."""
    is_null = is_section(section) and section.get("max_grad_norm", 0) is None
    return {**section, "max_grad_norm": 0} if is_null else section


def _is_about_images(tree: Tree) -> bool:
    model, training, dataset = (_section(tree, name) for name in ("model", "training", "dataset"))
    return "diffusion" in str(model.get("name")).lower() or bool({*tree, *model, *training, *dataset} & {*_IMAGES})


def _section(tree: Tree, name: str) -> Tree:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def defaults_for(tree: Tree) -> tuple[Tree, Sources]:
    """Returns the recipe and Hugging Face's defaults for a merged tree of ours, as the first layer of a config."""
    training = _section(tree, "training")
    left_out = {key: value for key, value in DEFAULTS.items() if key not in training}
    if training.get("max_steps") is not None:
        left_out.pop("num_epochs", None)
    recipe = "diffusion_lora" if _is_about_images(tree) else "text_lora"
    ours = {"recipe": recipe, "training": left_out}
    return ours, dict.fromkeys(find_leaves(ours), DEFAULT_SOURCE) | {"recipe": "the file is in Hugging Face's words"}
