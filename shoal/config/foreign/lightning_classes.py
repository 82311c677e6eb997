"""The callbacks, loggers and learning-rate schedules of Lightning CLI files, by the names of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.foreign.conversions import is_number, only
from shoal.config.foreign.rules import Convert, Idle, Noted, Refused, Rule, Rules, idle

Section = Mapping[str, Any]

CLASS = "class_path"
"""The key of the path of a class, beside its arguments."""
_OFF, _ANYWAY = "it is off anyway", "shoal does so anyway"
IN_EPOCHS = "it counts epochs, and schedules of shoal count steps; write it with steps, as docs/config.md says"


def minutes(value: Any, section: Section) -> Any:
    """Returns a time such as 00:12:00:00 in minutes."""
    parts = value if isinstance(value, dict) else {}
    if isinstance(value, str) and value.count(":") == 3 and value.replace(":", "").isdecimal():
        parts = dict(zip(("days", "hours", "minutes", "seconds"), map(int, value.split(":")), strict=True))
    in_minutes = {"weeks": 10080, "days": 1440, "hours": 60, "minutes": 1, "seconds": 1 / 60}
    if not parts or not all(key in in_minutes and is_number(number) for key, number in parts.items()):
        return Refused("should be days:hours:minutes:seconds")
    return sum(in_minutes[key] * number for key, number in parts.items())


def _metric(value: Any, section: Section) -> Any:
    """Returns our name for the metric that a callback watches."""
    if not isinstance(value, str):
        return value
    if "train" in value:
        return Refused("metrics of evaluations decide; give one of these")
    name = value
    for prefix in ("validation", "valid", "val", "eval"):
        if name.startswith((f"{prefix}_", f"{prefix}/")):
            name = name[len(prefix) + 1 :]
            break
    return f"eval/{name}" if name == "loss" else Noted(f"eval/{name}", f"The recipe's metrics need one named {name}.")


def _without_training(convert: Convert) -> Convert:
    """Returns a conversion that leaves a callback out which watches a metric of the training."""

    def made(value: Any, section: Section) -> Any:
        refused = isinstance(_metric(section.get("monitor"), section), Refused)
        return Refused("metrics of evaluations decide") if refused else convert(value, section)

    return made


def _delta(value: Any, section: Section) -> Any:
    return abs(value) if is_number(value) else value


def _keep_best(value: Any, section: Section) -> Any:
    if value == -1:
        return Refused("every checkpoint would be kept; use checkpoint.keep_every")
    return value if section.get("monitor") else Idle("without monitor only the last checkpoint is kept")


def _wandb(value: Any, section: Section) -> Any:
    ours = {key: section[key] for key in ("project", "entity") if key in section}
    return {**ours, **({"mode": "offline"} if section.get("offline") is True else {})} or True


def _mlflow(value: Any, section: Section) -> Any:
    names = {"experiment_name": "experiment", "tracking_uri": "tracking_uri"}
    return {ours: section[key] for key, ours in names.items() if key in section} or True


def no_logger(value: Any, section: Section) -> Any:
    return {"logging.tensorboard": value} if isinstance(value, bool) else Refused("shoal has no such logger")


_CHECKPOINT: Rules = {
    CLASS: idle("a run always saves checkpoints; the section checkpoint has the options"),
    "monitor": Rule("checkpoint.metric", _metric),
    "mode": Rule("checkpoint.mode", _without_training(lambda value, section: value)),
    "save_top_k": Rule("checkpoint.keep_best", _without_training(_keep_best)),
    "save_last": idle("the last checkpoints are always kept"),
    "every_n_train_steps": Rule("checkpoint.every", lambda value, section: value if value else Idle("it is not set")),
    "every_n_epochs": Rule("checkpoint.every_epochs"),
    "dirpath": idle("checkpoints are in checkpoints/ of experiment.output_dir"),
    "filename": idle("checkpoints are named by their step"),
    "auto_insert_metric_name": idle("checkpoints are named by their step"),
    "verbose": idle("the log says when a checkpoint is saved"),
    "save_weights_only": only(False, _ANYWAY, "a checkpoint has all that a run needs to resume"),
    "save_on_train_epoch_end": idle("a step whose evaluation is among the best is saved at once"),
}
_STOPPING: Rules = {
    CLASS: idle("it is in the section callbacks"),
    "monitor": Rule("callbacks.early_stopping.metric", _metric),
    "mode": Rule("callbacks.early_stopping.mode", _without_training(lambda value, section: value)),
    "patience": Rule("callbacks.early_stopping.patience", _without_training(lambda value, section: value)),
    "min_delta": Rule("callbacks.early_stopping.min_delta", _without_training(_delta)),
    "verbose": idle("the log says why a run ended"),
    "strict": only(True, "a metric that is missing is refused", "a metric that is missing is refused"),
    "check_finite": idle("a run stops after training.max_skipped_steps updates that are not finite"),
}
LOGGERS: Rules = {
    f"TensorBoardLogger.{CLASS}": Rule("logging.tensorboard", lambda value, section: True),
    f"CSVLogger.{CLASS}": Rule("logging.jsonl", lambda value, section: True),
    **{f"WandbLogger.{key}": Rule("logging.wandb", _wandb) for key in (CLASS, "project", "entity", "offline")},
    **{f"MLFlowLogger.{key}": Rule("logging.mlflow", _mlflow) for key in (CLASS, "experiment_name", "tracking_uri")},
    **{
        f"{name}.{key}": idle("logs are in experiment.output_dir")
        for name in ("TensorBoardLogger", "CSVLogger", "WandbLogger", "MLFlowLogger")
        for key in ("save_dir", "name", "version", "prefix", "default_hp_metric", "sub_dir", "id")
    },
    "TensorBoardLogger.log_graph": only(False, _OFF, "the graph is not logged"),
    "WandbLogger.log_model": only(False, _OFF, "a run uploads no checkpoints; see shoal checkpoint export --push"),
    "*": Rule(why="shoal has TensorBoard, metrics.jsonl, Weights & Biases and MLflow"),
}
_SHOWN = ("RichProgressBar", "TQDMProgressBar", "RichModelSummary", "ModelSummary", "LearningRateMonitor")
CALLBACKS: Rules = {
    **{f"ModelCheckpoint.{key}": rule for key, rule in _CHECKPOINT.items()},
    **{f"EarlyStopping.{key}": rule for key, rule in _STOPPING.items()},
    **{f"{name}.*": idle("the console and the log show it") for name in _SHOWN},
    **{f"{name}.{key}": idle("the console and the log show it") for name in _SHOWN for key in (CLASS,)},
    "Timer.duration": Rule("callbacks.time_limit.minutes", minutes),
    f"Timer.{CLASS}": idle("it is in the section callbacks"),
    "GradientAccumulationScheduler.scheduling": Rule("training.gradient_accumulation"),
    f"GradientAccumulationScheduler.{CLASS}": idle("training.gradient_accumulation is a schedule by epoch"),
    "*": Rule(why="a callback that shoal does not have; write it as one of shoal's: docs/callbacks.md"),
}

# Learning rate


def _plateau(section: Section) -> dict[str, Any]:
    metric = _metric(section.get("monitor", "val_loss"), section)
    metric = metric.value if isinstance(metric, Noted) else metric
    options = {key: section[key] for key in ("mode", "factor", "patience", "threshold") if key in section}
    return {"name": "plateau", **({} if metric == "eval/loss" else {"metric": metric}), **options}


def _schedule(value: Any, section: Section) -> Any:
    name = str(section.get(CLASS)).rpartition(".")[2]
    if name == "CosineAnnealingLR":
        return Noted("cosine", "It falls to 0 over the whole run here, and over T_max epochs there.")
    if name == "PolynomialLR":
        power = section.get("power", 1.0)
        return Noted({"name": "polynomial", "power": power}, "It falls over the whole run here, there in total_iters.")
    if name == "OneCycleLR":
        keys = ("pct_start", "div_factor", "final_div_factor")
        return {"name": "one_cycle", **{key: section[key] for key in keys if key in section}}
    if name == "ReduceLROnPlateau":
        return _plateau(section)
    if value == "none":
        return "constant"
    return Refused(IN_EPOCHS if name in _STEPPED else "shoal has no such schedule; see training.lr_scheduler")


_STEPPED = ("StepLR", "MultiStepLR", "ExponentialLR", "LinearLR", "CosineAnnealingWarmRestarts")


def _option(*names: str) -> Convert:
    """Returns the conversion of an option that these schedules have."""

    def convert(value: Any, section: Section) -> Any:
        name = str(section.get(CLASS)).rpartition(".")[2]
        return _schedule(value, section) if name in names else Refused(IN_EPOCHS)

    return convert


SCHEDULE: Rules = {
    CLASS: Rule("training.lr_scheduler", _schedule),
    "T_max": idle("it falls over the whole run"),
    "total_iters": idle("it falls over the whole run"),
    "total_steps": idle("it is the number of steps of the run"),
    "eta_min": only(0, "it falls to 0", "give it as training.lr_scheduler.min_ratio, a fraction of the first rate"),
    "power": Rule("training.lr_scheduler", _option("PolynomialLR")),
    "max_lr": Rule("training.learning_rate"),
    **{
        key: Rule("training.lr_scheduler", _option("OneCycleLR"))
        for key in ("pct_start", "div_factor", "final_div_factor")
    },
    **{
        key: Rule("training.lr_scheduler", _option("ReduceLROnPlateau"))
        for key in ("monitor", "mode", "factor", "patience", "threshold")
    },
    "threshold_mode": only("rel", "a threshold is a fraction of the best", "a threshold is a fraction of the best"),
    "verbose": idle("the learning rate is in the log"),
    "*": Rule(why=IN_EPOCHS),
}
