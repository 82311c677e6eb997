"""How values in Hugging Face's words become ours. A conversion gets the value and the section that it is in.

Values of a wrong type pass as they are, so that the check of our own keys refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from shoal.config.foreign.rules import Convert, Idle, Refused, Rule

Section = Mapping[str, Any]


def whole(value: Any, section: Section) -> Any:
    """Returns 3 for 3.0, and every other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def only(accepted: Any, why_idle: str, why_refused: str) -> Rule:
    """Returns the rule of a key of which shoal has one value: that one changes nothing, any other is refused."""

    def convert(value: Any, section: Section) -> Idle | Refused:
        return Idle(why_idle) if _is(value, accepted) else Refused(why_refused)

    return Rule((), convert, why_refused)


def by_name(names: Mapping[str, Any], otherwise: Convert | None = None) -> Convert:
    """Returns a conversion of texts by their names, in lower case; other values pass."""

    def convert(value: Any, section: Section) -> Any:
        key = value.lower() if isinstance(value, str) else "no" if value is False else ""
        return names[key] if key in names else otherwise(value, section) if otherwise else value

    return convert


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def steps(value: Any, section: Section) -> Any:
    """Returns a number of steps. Below 1 it is a share of the run for Hugging Face, which shoal does not have."""
    if is_number(value) and 0 < value < 1:
        return Refused("it is a share of all steps; give a number of steps")
    return whole(value, section)


# How long


def max_steps(value: Any, section: Section) -> Any:
    """Returns the number of steps; -1 leaves the end of the run to the epochs."""
    value = whole(value, section)
    return Idle("num_train_epochs ends the run") if isinstance(value, int) and value in (-1, 0) else value


def epochs(value: Any, section: Section) -> Any:
    """Returns the number of epochs, unless `max_steps` ends the run."""
    limit = section.get("max_steps")
    if is_number(limit) and limit > 0:
        return Idle("max_steps ends the run")
    value = whole(value, section)
    return Refused("it has a part of an epoch; give max_steps") if isinstance(value, float) else value


# Learning rate


def _is_constant(section: Section) -> bool:
    return "constant" in (section.get("lr_scheduler_type"), section.get("lr_scheduler"))


_NO_WARMUP = Idle("the schedule constant has no warmup; constant_with_warmup has")


def warmup_steps(value: Any, section: Section) -> Any:
    """Returns a number of steps or, below 1, a share of all steps."""
    value = whole(value, section)
    if not is_number(value):
        return {"training.warmup_steps": value}
    if value == 0 and section.get("warmup_ratio"):
        return Idle("warmup_ratio sets the warmup")
    if value and _is_constant(section):
        return _NO_WARMUP
    return {"training.warmup_ratio" if 0 < value < 1 else "training.warmup_steps": value}


def warmup_ratio(value: Any, section: Section) -> Any:
    """Returns the share of all steps, unless `warmup_steps` contradicts it."""
    in_steps = section.get("warmup_steps")
    if value and _is_constant(section):
        return _NO_WARMUP
    if not is_number(in_steps) or in_steps < 1:
        return value
    if not value:
        return Idle("warmup_steps sets the warmup")
    return Refused(f"warmup_steps = {in_steps!s:.100} sets the warmup, too; leave one of them out")


def clip(value: Any, section: Section) -> Any:
    """Returns the norm to clip to; 0 means no clipping, which is null here."""
    return None if _is(value, 0) else value


# Evaluating and saving


def _cadence(section: Section, *keys: str) -> Any:
    """Returns the strategy (`no`, `steps`, `epoch` …) that one of these keys has, in lower case, or None."""
    found = next((section[key] for key in keys if section.get(key) is not None), None)
    return "no" if found is False else found.lower() if isinstance(found, str) else found


_STRATEGIES = ("no", "steps", "epoch")
_SAVE_STRATEGIES = (*_STRATEGIES, "best")


def eval_strategy(value: Any, section: Section) -> Any:
    """Returns when to evaluate; for `steps` without `eval_steps` it is whenever the log is written."""
    strategy = _cadence({"it": value}, "it")
    if strategy not in _STRATEGIES:
        return Refused("should be no, steps or epoch")
    for key in ("eval_strategy", "evaluation_strategy"):
        if (other := _cadence(section, key)) not in (None, strategy):
            return Refused(f"{key} = {other!s:.100} says otherwise; leave one of them out")
    ours = {"training.eval_epochs": 1 if strategy == "epoch" else None}
    if strategy != "steps":
        return {**ours, "training.eval_steps": None}
    if section.get("eval_steps") is not None:
        return ours
    interval = steps(section.get("logging_steps") or 500, section)
    return interval if isinstance(interval, Refused) else {**ours, "training.eval_steps": interval}


def eval_steps(value: Any, section: Section) -> Any:
    """Returns after how many steps to evaluate, unless the strategy is another one."""
    strategy = _cadence(section, "eval_strategy", "evaluation_strategy")
    if strategy in ("no", "epoch"):
        return Idle(f"the evaluation strategy is {strategy}")
    return steps(value, section)


def save_strategy(value: Any, section: Section) -> Any:
    """Returns when to save; the end of a run is always saved."""
    strategy = _cadence({"it": value}, "it")
    if strategy not in _SAVE_STRATEGIES:
        return Refused("should be no, steps, epoch or best")
    return {
        **({"checkpoint.every": None} if strategy != "steps" else {}),
        "checkpoint.every_epochs": 1 if strategy == "epoch" else None,
        **({"checkpoint.keep_best": 1} if strategy == "best" else {}),
    }


def save_steps(value: Any, section: Section) -> Any:
    """Returns after how many steps to save, unless the strategy is another one."""
    strategy = _cadence(section, "save_strategy")
    if strategy in _SAVE_STRATEGIES and strategy != "steps":
        return Idle(f"the save strategy is {strategy}")
    return steps(value, section)


def load_best(value: Any, section: Section) -> Any:
    """Returns whether the best weights are loaded at the end, which needs a best checkpoint to be kept."""
    ours = {"checkpoint.load_best_model_at_end": value}
    return {**ours, "checkpoint.keep_best": 1} if value is True else ours


def metric(value: Any, section: Section) -> Any:
    """Returns the metric that decides which checkpoint is best; one that ends in `loss` should be small."""
    if not isinstance(value, str):
        return {"checkpoint.metric": value}
    name = value.removeprefix("eval_").removeprefix("eval/")
    greater = section.get("greater_is_better")
    greater = not value.endswith("loss") if greater is None else greater
    return {"checkpoint.metric": f"eval/{name}", "checkpoint.mode": mode(greater, section)}


def mode(value: Any, section: Section) -> Any:
    """Returns `max` if a greater metric is better."""
    return {True: "max", False: "min"}[value] if isinstance(value, bool) else value


def resume(value: Any, section: Section) -> Any:
    """Returns the checkpoint to resume from."""
    if isinstance(value, bool):
        return Idle("a run resumes from its last checkpoint by itself; start anew with --fresh")
    return value


# Precision and memory


def half(name: str) -> Convert:
    """Returns the conversion of `bf16: true` and the like."""

    def convert(value: Any, section: Section) -> Any:
        if value is False:
            other = section.get("mixed_precision")
            if isinstance(other, str) and PRECISIONS.get(other.lower()) == name:
                return Refused(f"mixed_precision = {other:.100} turns it on; leave one of them out")
            return Idle("it is off anyway")
        return name if value is True else value

    return convert


PRECISIONS = {
    **dict.fromkeys(("no", "fp32", "float32", "32", "32-true"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
}
"""Our names of mixed precisions."""
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Our names of floating-point types."""


def recompute(value: Any, section: Section) -> Any:
    """Returns our `activation_checkpointing` for true; false is what it is anyway, if no other key asks for it."""
    if value is False:
        return Idle("it is off anyway")
    return "full" if value is True else value


def report_to(value: Any, section: Section) -> Any:
    """Returns the loggers that are named."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return Refused("should be the name of a logger, or a list of names")
    known = ("tensorboard", "wandb", "mlflow")
    for name in names:
        if name not in (*known, "none"):
            return Refused(f"shoal has the loggers {', '.join(known)}; {name:.100} is none of them")
    return {f"logging.{name}": name in names for name in known}


def strategy_with(strategy: str, ours: str, convert: Convert | None = None) -> Rule:
    """Returns the rule of a key that sets one of ours and chooses the strategy with it."""

    def converted(value: Any, section: Section) -> Any:
        if section.get("enabled") is False:
            return Idle("enabled is false")
        made = convert(value, section) if convert else value
        return made if isinstance(made, Idle | Refused) else {"distributed.strategy": strategy, ours: made}

    return Rule(("distributed.strategy", ours), converted)


def deepspeed(value: Any, section: Section) -> Any:
    """Returns the path of a DeepSpeed JSON, and the strategy with it."""
    if isinstance(value, Mapping):
        return Refused("shoal reads a DeepSpeed JSON from a file; write it into one, and give its path")
    return {"distributed.strategy": "deepspeed", "distributed.deepspeed.config_file": value}
