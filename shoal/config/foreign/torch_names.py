"""Optimizers by the path of their class, as torchtune and Lightning CLI name them, with the defaults of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from shoal.config.foreign.rules import Convert, Idle, Noted, Refused, Rule, Rules, idle
from shoal.config.schema_optimizers import Optimizer
from shoal.config.validation import fields_of

Section = Mapping[str, Any]

OPTIMIZERS = {
    **{f"torch.optim.{name}": name.lower() for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta")},
    **{f"torch.optim.{name}": name.lower() for name in ("Adamax", "RAdam", "NAdam", "ASGD", "Rprop", "Adafactor")},
    "torch.optim.Muon": "muon",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "bitsandbytes.optim.PagedAdamW32bit": "paged_adamw_32bit",
    "bitsandbytes.optim.Lion8bit": "lion_8bit",
    "torchao.optim.AdamW8bit": "adamw_8bit",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw_8bit",
}
"""Our names by the path of a class."""
_SHORT = {path.rpartition(".")[2]: ours for path, ours in OPTIMIZERS.items() if path.startswith("torch.optim")}
DECAYS = {"adamw": 0.01, "adamw_8bit": 0.01, "paged_adamw_8bit": 0.01, "paged_adamw_32bit": 0.01, "muon": 0.1}
"""The weight decay of a class that is built without one. All others have none."""
RATES = {
    "sgd": 1e-3,
    "adagrad": 1e-2,
    "adadelta": 1.0,
    "nadam": 2e-3,
    "adamax": 2e-3,
    "rmsprop": 1e-2,
    "asgd": 1e-2,
    "adafactor": 1e-2,
}
"""The learning rate of a class that is built without one. All others have 1e-3."""
_DECAYED = "Of all parameters there; here of matrices alone, not of norms, biases and embeddings."
_OFF = "it is off anyway"


def _decay(value: Any, section: Section) -> Any:
    return Noted(value, _DECAYED) if value else value


def _options() -> dict[str, set[str]]:
    """Returns the options of each of our optimizers by its name."""
    fields = [fields_of(get_args(member)[0]) or {} for member in get_args(get_args(Optimizer)[0])]
    return {name: {*one} - {"name"} for one in fields for name in get_args(one.get("name")) if isinstance(name, str)}


OPTIONS = _options()


def our_optimizer(path: Any) -> Any:
    """Returns our name for the path of a class; a class that is not known is imported by its path."""
    if not isinstance(path, str):
        return path
    if "." not in path:
        return _SHORT.get(path, path)
    module, _, name = path.rpartition(".")
    return OPTIMIZERS.get(path, f"{module}:{name}")


def optimizer_rules(prefix: str, class_key: str) -> Rules:
    """Returns the rules of a section that has the path of an optimizer's class and its arguments."""

    def whole(section: Section) -> Any:
        name = our_optimizer(section.get(class_key))
        own = OPTIONS.get(name, {*section} - {class_key, "lr", "weight_decay"}) if isinstance(name, str) else set()
        options = {key: value for key, value in section.items() if key in own}
        return {"name": name, **options} if options else name

    def option(key: str) -> Convert:
        def convert(value: Any, section: Section) -> Any:
            name = our_optimizer(section.get(class_key))
            if name is None:
                return Refused("the file does not name the class of the optimizer; give training.optimizer")
            if isinstance(name, str) and ":" not in name and key not in OPTIONS.get(name, {key}):
                return Idle(_OFF) if value is False else Refused(f"{name} has no such option in shoal")
            return whole(section)

        return convert

    def named_class(value: Any, section: Section) -> Any:
        if isinstance(value, str) and value.startswith("torchao."):
            return Noted(whole(section), "torchao's has a scale for each 256 numbers, as this one of bitsandbytes has.")
        return whole(section)

    def argument(value: Any, section: Section) -> Any:
        name = our_optimizer(section.get(class_key))
        is_own = isinstance(name, str) and ":" in name
        return {"training.optimizer": whole(section)} if is_own else Refused("shoal's optimizer has no such option")

    known = sorted({option for options in OPTIONS.values() for option in options})
    return {
        f"{prefix}{class_key}": Rule("training.optimizer", named_class),
        f"{prefix}lr": Rule("training.learning_rate"),
        f"{prefix}weight_decay": Rule("training.weight_decay", _decay),
        **{f"{prefix}{key}": Rule("training.optimizer", option(key)) for key in known},
        **{f"{prefix}{key}": idle("shoal takes the fused kernel where there is one") for key in ("fused", "foreach")},
        **{
            f"{prefix}{key}": Rule(
                (), lambda value, section: Idle(_OFF) if value is False else Refused("shoal has no such option")
            )
            for key in ("maximize", "capturable", "differentiable", "decoupled_weight_decay")
        },
        f"{prefix}*": Rule(("training.optimizer",), argument),
    }


def optimizer_defaults(section: Section, prefix: str, class_key: str) -> dict[str, Any]:
    """Returns what torch uses for the arguments that a section leaves out, as far as shoal would use something else."""
    name = our_optimizer(section.get(class_key))
    if not isinstance(name, str) or ":" in name:
        return {}
    betas = {f"{prefix}betas": [0.9, 0.999]} if name == "adamw" else {}
    return {f"{prefix}lr": RATES.get(name, 1e-3), f"{prefix}weight_decay": DECAYS.get(name, 0.0), **betas}
