"""What shoal calls the optimizers and learning-rate schedules of Hugging Face's `optim` and `lr_scheduler_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.conversions import is_number
from shoal.config.foreign.rules import Idle, Refused

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw_32bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    **dict.fromkeys(("lion", "lion_32bit"), "lion"),
    "lion_8bit": "lion_8bit",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
}
"""Our names of Hugging Face's optimizers. All kinds of torch's AdamW compute the same."""

_NO_GALORE = "shoal does not project gradients to a low rank; use lora:, or an optimizer with 8-bit state"
_NO_PAGED_LION = "shoal has no paged Lion; use lion_8bit, or paged_adamw_8bit"
_OWN = "name its class as training.optimizer: {name: path.to:Class}"

REFUSED_OPTIMIZERS = {
    "adamw_torch_xla": "it is for XLA devices; use adamw_torch",
    "adamw_torch_npu_fused": "it is for NPUs; use adamw_torch",
    "adafactor": "transformers' Adafactor does not scale updates by the size of a weight as torch's does; for torch's "
    "set training.optimizer: adafactor",
    "adamw_anyprecision": "weights and state are kept in fp32; use adamw_torch, or adamw_8bit for less memory",
    "adamw_torch_4bit": "its state is torchao's; use adamw_8bit, which is bitsandbytes'",
    "adamw_torch_8bit": "its state is torchao's; use adamw_8bit, which is bitsandbytes'",
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        f"shoal has no AdEMAMix; use adamw_torch or adamw_8bit, or {_OWN}",
    ),
    **dict.fromkeys(("paged_lion", "paged_lion_32bit", "paged_lion_8bit"), _NO_PAGED_LION),
    **dict.fromkeys(
        ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "shoal has torch's RMSprop alone; use rmsprop"
    ),
    **dict.fromkeys(
        (
            "galore_adamw",
            "galore_adamw_8bit",
            "galore_adafactor",
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
            "apollo_adamw",
            "apollo_adamw_layerwise",
        ),
        _NO_GALORE,
    ),
    **dict.fromkeys(("lomo", "adalomo"), "it updates within the backward, without a norm to clip by; use adafactor"),
    "grokadamw": f"shoal has no GrokAdamW; use adamw_torch, or {_OWN}",
    **dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        "it has weights for training and others for evaluation; use adamw_torch with a schedule, or the callback ema",
    ),
    "stable_adamw": f"shoal has no StableAdamW; use adamw_torch, or {_OWN}",
}
"""The optimizers of Hugging Face that shoal does not have, each with the reason and what to use."""

WITH_BETAS = ("adamw", "adam", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion", "lion_8bit")
WITH_EPS = tuple(name for name in WITH_BETAS if "lion" not in name)

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",  # of one cycle
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant_with_warmup",
    "inverse_sqrt": "inverse_sqrt",
    "reduce_lr_on_plateau": "plateau",
}
"""Our names of Hugging Face's schedules."""

REFUSED_SCHEDULES = {
    "cosine_warmup_with_min_lr": "its warmup begins at a rate of its own; use cosine_with_min_lr",
    "warmup_stable_decay": "shoal takes the decay as a share of all steps; set training.lr_scheduler: {name: wsd, "
    "decay_ratio: 0.2}",
    "greedy": "it changes the rate by the loss of every step; use reduce_lr_on_plateau",
    "piecewise_constant": "use training.lr_scheduler: {name: multistep, milestones: [...], gamma: ...}",
}
"""The schedules of Hugging Face that shoal does not have, each with the reason and what to use."""


def optimizer(section: Mapping[str, Any]) -> dict[str, Any] | Refused:
    """Returns our section `training.optimizer` for the words of a section: `optim` and `adam_…`."""
    theirs = section.get("optim", "adamw_torch")
    if isinstance(theirs, str) and theirs in REFUSED_OPTIMIZERS:
        return Refused(REFUSED_OPTIMIZERS[theirs])
    ours = OPTIMIZERS.get(theirs, theirs) if isinstance(theirs, str) else theirs
    options: dict[str, Any] = {"name": ours}
    if ours in WITH_BETAS:
        options["betas"] = [_given(section, "adam_beta1", 0.9), _given(section, "adam_beta2", 0.999)]
    if ours in WITH_EPS:
        options["eps"] = _given(section, "adam_epsilon", 1e-8)
    return options


def optimizer_option(value: Any, section: Mapping[str, Any]) -> dict[str, Any] | Idle | Refused:
    """Returns our section for one of `adam_beta1`, `adam_beta2` and `adam_epsilon`, if the optimizer has it."""
    made = optimizer(section)
    if isinstance(made, Refused) or "betas" in made:
        return made
    return Idle(f"{made['name']!r:.100} is not a kind of Adam")


def schedule(section: Mapping[str, Any]) -> Any:
    """Returns our `training.lr_scheduler` for the words `lr_scheduler_type`, `lr_scheduler` and
    `lr_scheduler_kwargs`."""
    given_type, other = section.get("lr_scheduler_type"), section.get("lr_scheduler")
    if given_type and other and given_type != other:
        return Refused(
            f"lr_scheduler_type = {given_type!s:.100} and lr_scheduler = {other!s:.100} contradict; leave one out"
        )
    theirs = given_type or other or "linear"
    if not isinstance(theirs, str):
        return theirs
    if theirs in REFUSED_SCHEDULES:
        return Refused(REFUSED_SCHEDULES[theirs])
    ours, given = SCHEDULES.get(theirs, theirs), section.get("lr_scheduler_kwargs") or {}
    if not isinstance(given, Mapping):
        return Refused("lr_scheduler_kwargs should be a section of `key: value` lines")
    options: dict[str, Any] = {"name": ours}
    for key, value in given.items():
        if key in ("min_lr", "lr_end") and ours in ("cosine", "polynomial"):
            rate = _given(section, "learning_rate", 5e-5)
            if not is_number(value) or not is_number(rate) or not rate:
                return Refused(f"lr_scheduler_kwargs.{key} should be a number, as learning_rate should be")
            options["min_ratio"] = value / rate
        elif key == "min_lr_rate" and ours == "cosine":
            options["min_ratio"] = value
        elif key == "num_cycles" and value == {"cosine": 0.5, "cosine_with_restarts": 1}.get(theirs):
            continue
        elif key in {"polynomial": ("power",), "inverse_sqrt": ("timescale",), "plateau": ("factor", "patience")}.get(
            ours, ()
        ):
            options[key] = value
        else:
            return Refused(f"lr_scheduler_kwargs.{key!s:.100} of {theirs:.100} is nothing that shoal has; leave it out")
    return options if len(options) > 1 else ours


def _given(section: Mapping[str, Any], key: str, default: float) -> Any:
    return default if section.get(key) is None else section[key]
