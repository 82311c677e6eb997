"""DeepSpeed's own JSON, as people have it: what of it is ours, what has to agree with the run, what has no effect.

"auto", null       says nothing; what there is to say comes from the run
batch, clipping,   have to say what the run says; a contradiction is refused with both values
types, optimizer,
schedule
zero_optimization  becomes the keys of `distributed.deepspeed`
the rest           is about things that shoal does itself, and is reported as idle, or refused if it changes results
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from shoal.config.batch import accumulation, derive_batches
from shoal.config.deepspeed_keys import (
    HALF,
    HALF_BLOCKS,
    OFFLOAD,
    OLD_OFFLOAD,
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    SCHEDULE_DEFAULTS,
    SCHEDULES,
    TOP,
    ZERO,
    Only,
    Rules,
    Take,
)
from shoal.config.schema import Decay, DeepSpeedConfig, TrainingConfig
from shoal.errors import UserError

AUTO = "auto"
ONLY_STAGE_3 = {
    *(name for name in DeepSpeedConfig.model_fields if name.startswith("stage3_")),
    "sub_group_size",
}
ONLY_BELOW_3 = {"allgather_bucket_size"}


@dataclass
class Fitted:
    """What a JSON means for a run."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keys of `distributed.deepspeed`."""
    idle: dict[str, str] = field(default_factory=dict)
    """Keys that have no effect, and why."""


def idle_keys(stage: int) -> dict[str, str]:
    """The keys of `distributed.deepspeed` that a stage has no use for."""
    if stage == 3:
        return dict.fromkeys(ONLY_BELOW_3, "ZeRO stage 3 gathers weights when they are needed")
    return dict.fromkeys(ONLY_STAGE_3, f"it is for ZeRO stage 3, and the stage is {stage}")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    where = f"distributed.deepspeed.config_file = {os.fspath(path)!r}"
    try:
        text = Path(path).expanduser().read_text()
        told = _parse(text)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid JSON: {error}") from None
    if not isinstance(told, dict):
        raise UserError(f"{where} holds a {type(told).__name__}, not an object")
    return told


def _parse(text: str) -> Any:
    """JSON; and with comments and trailing commas where hjson is, which DeepSpeed brings and reads with."""
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except ValueError as error:
        with suppress(ImportError, ValueError):
            import hjson

            if isinstance(told := hjson.loads(text, object_pairs_hook=_once_each), dict):
                return told
        raise error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for key, value in pairs:
        if key in told:
            raise ValueError(f"{key} is given twice, as {json.dumps(told[key])} and as {json.dumps(value)}")
        told[key] = value
    return told


def fit_file(path: str, training: TrainingConfig, processes: int) -> Fitted:
    """As the strategy will do it, for those who want to know before."""
    return fit_json(read_json(path), training, processes, f"distributed.deepspeed.config_file {path}")


def fit_json(
    told: dict[str, Any], training: TrainingConfig | None, processes: int, where: str, mixed_precision: str = "fp32"
) -> Fitted:
    """Compares a JSON with the run, and takes ZeRO's options from it.

    Without a run there is a loop of one's own, which has the optimizer and the batches, and `mixed_precision` alone to
    compare with.
    """
    return _Fit(training, processes, where, mixed_precision)(told)


class _Fit:
    def __init__(self, training: TrainingConfig | None, processes: int, where: str, mixed_precision: str):
        self.training, self.processes, self.where = training, processes, where
        self.precision = training.mixed_precision if training else mixed_precision
        self.precision_key = "training.mixed_precision" if training else "mixed_precision"
        self.fitted = Fitted()
        self.taken: dict[tuple[str, ...], str] = {}
        """From keys of `distributed.deepspeed` to those of the JSON."""

    def __call__(self, told: dict[str, Any]) -> Fitted:
        if "zero_optimization" not in told:
            raise UserError(f"{self.where} has no zero_optimization; without ZeRO use distributed.strategy: ddp")
        self._object("zero_optimization", told["zero_optimization"])
        run = self.training
        rules: Rules = {
            **TOP,
            **_batches(run, self.processes),
            "zero_optimization": self._zero,
            "optimizer": partial(self._optimizer, run) if run else self._leave_to_own_loop,
            "scheduler": partial(self._scheduler, run) if run else self._leave_to_own_loop,
            **{key: partial(self._half, half) for key, half in HALF_BLOCKS.items()},
        }
        self._read("", told, rules)
        try:
            DeepSpeedConfig(**self.fitted.options)
        except ValidationError as error:
            first = error.errors()[0]
            place = tuple(map(str, first["loc"]))
            self._refuse(self.taken.get(place, ".".join(place)), first["input"], first["msg"].lower())
        return self.fitted

    def _read(self, prefix: str, told: Any, rules: Rules) -> None:
        """Treats every key of an object by its rule."""
        for key, value in told.items():
            name, rule = f"{prefix}{key}", rules.get(key)
            if rule is None:
                self._unknown(prefix, key, rules)
            elif value is None or value == AUTO:
                continue
            elif isinstance(rule, str):
                self.fitted.idle[name] = rule
            elif isinstance(rule, Only):
                self._only(name, value, rule)
            elif isinstance(rule, Take):
                self._take(name, value, rule.place)
            elif callable(rule):
                rule(name, value)
            else:
                self._read(f"{name}.", self._object(name, value), rule)

    def _only(self, name: str, value: Any, rule: Only) -> None:
        switch = next((key for key in rule.switches if isinstance(value, dict) and key in value), None)
        if switch is not None:
            self._read(f"{name}.", {switch: value[switch]}, {switch: replace(rule, switches=())})
        elif not (rule.switches and value == {}) and not any(_equal(value, allowed) for allowed in rule.values):
            self._refuse(name, value, rule.why)

    def _take(self, name: str, value: Any, place: tuple[str, ...]) -> None:
        *outer, key = place
        section = self.fitted.options
        for step in outer:
            section = section.setdefault(step, {})
        section[key] = int(value) if isinstance(value, float) and value.is_integer() else value  # people write 5e8
        self.taken[place] = name

    def _zero(self, name: str, section: Any) -> None:
        stage = section.get("stage", 0)
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            advice = "use distributed.strategy: ddp" if stage == 0 else "use 1, 2 or 3"
            self._refuse(f"{name}.stage", stage, f"is no stage that splits anything; {advice}")
        stage = int(stage)
        offload = {key: partial(self._offload, stage) for key in ("offload_optimizer", "offload_param")}
        old = {key: partial(self._old_offload, stage) for key in OLD_OFFLOAD}
        self._read(f"{name}.", section, {**ZERO, **idle_keys(stage), **offload, **old})

    def _offload(self, stage: int, name: str, section: Any) -> None:
        device, path = self._object(name, section).get("device"), section.get("nvme_path")
        used = {"nvme_path"} if device == "nvme" else set()
        self._read(f"{name}.", {key: value for key, value in section.items() if key not in used}, OFFLOAD)
        if device in (None, AUTO, "none"):
            return
        weights = name.endswith("offload_param")
        if weights and stage < 3:
            why = f"is for stage 3: stage {stage} keeps all weights on every device; raise the stage"
            self._refuse(f"{name}.device", device, why)
        if device == "nvme" and stage < 3:
            self._refuse(f"{name}.device", device, f"is for stage 3, and the stage is {stage}; use cpu")
        if device == "nvme" and (not isinstance(path, str) or path == AUTO):
            self._refuse(f"{name}.device", device, "needs nvme_path, a folder on a local disk")
        place = str(Path(path).expanduser().absolute()) if device == "nvme" else device
        self._take(f"{name}.device", place, ("offload_parameters" if weights else "offload_optimizer",))

    def _old_offload(self, stage: int, name: str, value: Any) -> None:
        prefix, _, key = name.rpartition(".")
        if not isinstance(value, bool):
            self._refuse(name, value, "should be true or false")
        if value:
            self._offload(stage, f"{prefix}.{OLD_OFFLOAD[key]}", {"device": "cpu"})

    def _half(self, half: str, name: str, section: Any) -> None:
        rules = HALF[half]
        if half != self.precision:
            why = f"it is for {half}, and {self.precision_key} is {self.precision}"
            rules = {key: why if isinstance(rule, str) else rule for key, rule in rules.items()}
        self._read(f"{name}.", self._object(name, section), rules)
        enabled = section.get("enabled")
        if isinstance(enabled, bool) and enabled != (half == self.precision):
            whose, wanted = "run" if self.training else "strategy", half if enabled else "fp32"
            why = f"contradicts the {whose}: {self.precision_key} is {self.precision}; set that to {wanted}"
            self._refuse(f"{name}.enabled", enabled, why)

    def _optimizer(self, training: TrainingConfig, name: str, section: Any) -> None:
        chosen = training.optimizer
        says: dict[str, tuple[str, Any]] = {
            "lr": ("training.learning_rate", training.learning_rate),
            "weight_decay": ("training.weight_decay", training.weight_decay),
            **{key: (f"training.optimizer.{key}", value) for key, value in chosen if key != "name"},
        }
        rules: Rules = {
            "type": partial(self._kind, OPTIMIZERS, chosen.name, "training.optimizer"),
            "params": {
                **{key: _as_in_run(f"{ours} is {value}", value) for key, (ours, value) in says.items()},
                **OPTIMIZER_PARAMS,
            },
            "legacy_fusion": "the optimizer is torch's, fused",
        }
        self._read(f"{name}.", self._object(name, section), rules)

    def _scheduler(self, training: TrainingConfig, name: str, section: Any) -> None:
        chosen, says = training.lr_scheduler, _schedule(training)
        ours = chosen.name.removesuffix("_with_warmup")
        if isinstance(chosen, Decay) and ours == "linear":
            ours = f"linear to {chosen.min_ratio:g}"
        rules: Rules = {
            "type": partial(self._kind, SCHEDULES, ours, "training.lr_scheduler"),
            "params": {key: _as_in_run(*said) for key, said in says.items()},
        }
        self._read(f"{name}.", self._object(name, section), rules)
        params = section.get("params") or {}
        if section.get("type") in (None, AUTO) or params == AUTO:
            return
        for key, default in SCHEDULE_DEFAULTS.items():
            if key in says and key not in params and default not in says[key][1:]:
                self.fitted.idle[f"{name}.params.{key}"] = f"{says[key][0]}; DeepSpeed's own default is {default}"

    def _kind(self, known: dict[str, str], ours: str, key: str, name: str, told: Any) -> None:
        theirs = {kind.lower(): meant for kind, meant in known.items()}.get(str(told).lower())
        if theirs is None:
            self._refuse(name, told, f"is not one that shoal has; it knows {', '.join(known)}")
        if theirs != ours:
            self._refuse(name, told, f"is {theirs}, which contradicts the run: {key} is {ours}")

    def _leave_to_own_loop(self, name: str, section: Any) -> None:
        params = self._object(name, section).get("params")
        why = "your own loop has that"
        inner = dict.fromkeys(params if isinstance(params, dict) else (), why)
        self._read(f"{name}.", section, {"type": why, "params": inner, "legacy_fusion": why})

    def _object(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(name, value, "should be an object")
        return value

    def _refuse(self, name: str, value: Any, why: str) -> NoReturn:
        raise UserError(f"{self.where}: {name} = {json.dumps(value, default=str)} {why}")

    def _unknown(self, prefix: str, key: str, known: Iterable[str]) -> NoReturn:
        nearest = get_close_matches(str(key), known, n=1)
        hint = f"did you mean {prefix}{nearest[0]}?" if nearest else "leave it out"
        raise UserError(f"{self.where}: {prefix}{key} is not a key of DeepSpeed's that shoal knows; {hint}")


def _equal(told: Any, value: Any) -> bool:
    """Numbers by their size; true is no number."""
    if isinstance(told, bool) or isinstance(value, bool):
        return told is value
    if isinstance(told, int | float) and isinstance(value, int | float):
        return abs(told - value) <= 1e-9 * abs(value)
    return bool(told == value)


def _as_in_run(how: str, *values: Any) -> Only:
    return Only(values, f"contradicts the run: {how}; say auto, or make them agree")


def _batches(training: TrainingConfig | None, processes: int) -> dict[str, Only]:
    keys = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
    if training is None:
        why = "is for a run of the trainer; in a loop of your own leave it out, or say auto"
        return dict.fromkeys(keys, Only((), why))
    (first, *later) = derive_batches(training, processes)
    micro, times, batch = first.batch_size, accumulation(first, processes), first.global_batch_size
    product, clip = micro * times * processes, training.max_grad_norm or 0.0
    sums = f"the run has batch_size {micro} × gradient_accumulation {times} × {processes} processes = {product}"
    sums += "" if product == batch else f", cut to {batch}"
    rules = {key: _as_in_run(sums, value) for key, value in zip(keys, (batch, times, micro), strict=False)}
    if later:
        rules |= dict.fromkeys(
            keys[:2], _as_in_run(f"training.gradient_accumulation is a schedule, {training.gradient_accumulation}")
        )
    return {**rules, "gradient_clipping": _as_in_run(f"training.max_grad_norm is {clip or None}", clip)}


def _schedule(training: TrainingConfig) -> dict[str, tuple[Any, ...]]:
    """For the parameters of a schedule: how the run says it, and the values that agree."""
    peak, total, ratio = training.learning_rate, training.max_steps, training.warmup_ratio or 0.0
    epochs = f"it counts epochs, training.num_epochs is {training.num_epochs}"
    warmup = training.warmup_steps
    if warmup is None and (total is not None or not ratio):
        warmup = round(ratio * (total or 0))
    says: dict[str, tuple[Any, ...]] = {
        "warmup_max_lr": (f"training.learning_rate is {peak:g}", peak),
        "warmup_num_steps": (epochs,) if warmup is None else (f"the run warms up for {warmup} steps", warmup),
        "total_num_steps": (epochs,) if total is None else (f"training.max_steps is {total}", total),
        "warmup_type": ("warmup is linear", "linear", *(() if warmup != 0 else ("log",))),
        "warmup_min_lr": ("warmup begins at 0", 0),
        "warmup_min_ratio": ("warmup begins at 0", 0),
        "last_batch_iteration": ("it goes on from checkpoints", -1),
    }
    if training.lr_scheduler.name == "cosine":
        floor = training.lr_scheduler.min_ratio
        says["cos_min_ratio"] = (f"training.lr_scheduler.min_ratio is {floor}", floor)
    return says
