"""The optimizers and learning-rate schedules of the section `training`, each with its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from shoal.config.section import Fraction, NonNegative, Positive, Section

PATH = "path.to:name"
"""The tag of an optimizer or schedule of the user's own, which is named by where it is imported from."""

Rate = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Rates = Annotated[list[Rate], Field(min_length=2, max_length=2)]
Pair = Annotated[list[Above0], Field(min_length=2, max_length=2)]


class AdamW(Section):
    name: Literal["adamw"] = "adamw"
    betas: Rates = [0.9, 0.95]  # noqa: RUF012, pydantic copies it
    """The decay rates of the averages of the gradient and of its square."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""


class Adam(Section):
    name: Literal["adam"] = "adam"
    betas: Rates = [0.9, 0.999]  # noqa: RUF012
    """The decay rates of the averages of the gradient and of its square."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""
    amsgrad: bool = False
    """Divide by the largest average of the squared gradient so far."""


class SGD(Section):
    name: Literal["sgd"] = "sgd"
    momentum: Rate = 0.0
    """The momentum factor."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    dampening: Fraction = 0.0
    """How much of a gradient is left out of the momentum."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        wrong = self.nesterov and (not self.momentum or self.dampening > 0)
        return ((wrong, "nesterov = true needs a momentum above 0 and no dampening; set momentum, or leave it out"),)


class RMSprop(Section):
    name: Literal["rmsprop"] = "rmsprop"
    alpha: Rate = 0.99
    """The decay rate of the average of the squared gradient."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""
    momentum: Rate = 0.0
    """The momentum factor."""
    centered: bool = False
    """Divide by an estimate of the variance instead of the second moment."""


class Adagrad(Section):
    name: Literal["adagrad"] = "adagrad"
    lr_decay: AtLeast0 = 0.0
    """How fast the learning rate falls with the number of steps, besides the schedule."""
    initial_accumulator_value: AtLeast0 = 0.0
    """The value with which the sums of squared gradients begin."""
    eps: Above0 = 1e-10
    """Added to the denominator of an update."""


class Adadelta(Section):
    name: Literal["adadelta"] = "adadelta"
    rho: Rate = 0.9
    """The decay rate of the average of the squared gradient."""
    eps: Above0 = 1e-6
    """Added to the denominator of an update."""


class AdamLike(Section):
    name: Literal["adamax", "radam"]
    betas: Rates = [0.9, 0.999]  # noqa: RUF012
    """The decay rates of the averages of the gradient and of its size."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""


class NAdam(Section):
    name: Literal["nadam"] = "nadam"
    betas: Rates = [0.9, 0.999]  # noqa: RUF012
    """The decay rates of the averages of the gradient and of its square."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""
    momentum_decay: AtLeast0 = 0.004
    """How fast the momentum approaches its final value."""


class ASGD(Section):
    name: Literal["asgd"] = "asgd"
    lambd: AtLeast0 = 1e-4
    """The decay of the weights in each step."""
    alpha: Above0 = 0.75
    """The power with which the learning rate falls, besides the schedule."""
    t0: AtLeast0 = 1e6
    """The step from which on weights are averaged. The average is kept in the checkpoint; the model trains on."""


class Rprop(Section):
    name: Literal["rprop"] = "rprop"
    etas: Pair = [0.5, 1.2]  # noqa: RUF012
    """The factors on the step size of a weight whose gradient changed its sign, or did not."""
    step_sizes: Pair = [1e-6, 50.0]  # noqa: RUF012
    """The smallest and the largest step size."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (not self.etas[0] < 1 < self.etas[1], f"etas = {self.etas}: the first must be below 1, the second above"),
        )


class Adafactor(Section):
    name: Literal["adafactor"] = "adafactor"
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """The power of the step count that makes the decay rate of the average of the squared gradient."""
    d: Annotated[float, Field(ge=1)] = 1.0
    """The largest root mean square of an update."""


class Lion(Section):
    name: Literal["lion"] = "lion"
    betas: Rates = [0.9, 0.99]  # noqa: RUF012
    """How much of the average is in an update, and the decay rate of the average."""


class Muon(Section):
    name: Literal["muon"] = "muon"
    momentum: Rate = 0.95
    """The momentum factor."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Number of Newton-Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How the learning rate depends on a matrix's shape. With `match_rms_adamw`, learning rates of AdamW fit."""
    adamw_learning_rate: Above0 = 3e-4
    """The peak learning rate of AdamW, which updates all parameters other than the 2-D weights inside of blocks."""
    betas: Rates = [0.9, 0.95]  # noqa: RUF012
    """The decay rates of AdamW."""
    eps: Above0 = 1e-8
    """Added to the denominator of AdamW's update."""


class BitsAndBytesAdamW(Section):
    name: Literal["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
    betas: Rates = [0.9, 0.999]  # noqa: RUF012
    """The decay rates of the averages of the gradient and of its square."""
    eps: Above0 = 1e-8
    """Added to the denominator of an update."""


class BitsAndBytesLion(Section):
    name: Literal["lion_8bit"] = "lion_8bit"
    betas: Rates = [0.9, 0.99]  # noqa: RUF012
    """How much of the average is in an update, and the decay rate of the average."""


class Imported(Section):
    """An optimizer or a schedule of the user's own."""

    name: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")]
    """Where it is imported from, such as `my_package.lion:Lion`."""


class ImportedOptimizer(Imported):
    """A class of the user's own. All other keys are passed to its constructor."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the constructor; lists become tuples, which is what torch's optimizers take."""
        extra = self.model_extra or {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in extra.items()}


class Constant(Section):
    name: Literal["constant", "constant_with_warmup"]


class Decay(Section):
    name: Literal["linear", "cosine"]
    min_ratio: Fraction = 0.0
    """What the learning rate falls to, as a fraction of `learning_rate`; it is there after the last step."""


class WarmupStableDecay(Section):
    name: Literal["wsd"]
    decay_ratio: Fraction = 0.2
    """The fraction of all steps, at the end, in which the learning rate decays."""
    min_ratio: Fraction = 0.0
    """What the learning rate falls to, as a fraction of `learning_rate`; it is there after the last step."""


class StepDecay(Section):
    name: Literal["step"]
    step_size: Positive
    """Multiply the learning rate by `gamma` after every so many steps of the run."""
    gamma: Fraction = 0.1
    """The factor."""


class MultiStep(Section):
    name: Literal["multistep"]
    milestones: Annotated[list[Positive], Field(min_length=1)]
    """The steps of the run after which the learning rate is multiplied by `gamma`."""
    gamma: Fraction = 0.1
    """The factor."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        return ((not rising, f"milestones = {self.milestones} must rise; sort them, each once"),)


class OneCycle(Section):
    name: Literal["one_cycle"]
    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """The fraction of all steps in which the learning rate rises, along a cosine. The momentum is not cycled."""
    div_factor: Annotated[float, Field(ge=1)] = 25.0
    """The first learning rate is `learning_rate` divided by this."""
    final_div_factor: Annotated[float, Field(ge=1)] = 1e4
    """The last learning rate is the first one divided by this."""


class Exponential(Section):
    name: Literal["exponential"]
    gamma: Annotated[float, Field(gt=0, le=1)]
    """The factor on the learning rate in every step after the warmup."""


class Polynomial(Section):
    name: Literal["polynomial"]
    power: Above0 = 1.0
    """The power of the fraction of steps that are left."""
    min_ratio: Fraction = 0.0
    """What the learning rate falls to, as a fraction of `learning_rate`; it is there after the last step."""


class InverseSqrt(Section):
    name: Literal["inverse_sqrt"]
    timescale: Positive | None = None
    """The learning rate halves after three times as many steps as this. Default: the number of warmup steps."""


class Plateau(Section):
    name: Literal["plateau"]
    metric: str = "eval/loss"
    """The metric of an evaluation that has to improve. Evaluations by `eval_steps` and `eval_epochs` count, and not the
    one at the end."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (`min`) or a larger (`max`) metric is better."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """What the learning rate is multiplied by if the metric does not improve."""
    patience: NonNegative = 10
    """Number of evaluations without improvement that are waited for."""
    threshold: AtLeast0 = 1e-4
    """By how much a metric must be better to count as an improvement, as a fraction of the best one."""
    min_ratio: Fraction = 0.0
    """The smallest learning rate, as a fraction of `learning_rate`."""


def _tag(value: Any) -> Any:
    """Returns the tag of an optimizer or schedule: its name, or PATH if it is imported."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return PATH if isinstance(name, str) and ":" in name else name


by_name = Discriminator(_tag)

Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[SGD, Tag("sgd")]
    | Annotated[Lion, Tag("lion")]
    | Annotated[Muon, Tag("muon")]
    | Annotated[RMSprop, Tag("rmsprop")]
    | Annotated[Adagrad, Tag("adagrad")]
    | Annotated[Adadelta, Tag("adadelta")]
    | Annotated[AdamLike, Tag("adamax")]
    | Annotated[AdamLike, Tag("radam")]
    | Annotated[NAdam, Tag("nadam")]
    | Annotated[ASGD, Tag("asgd")]
    | Annotated[Rprop, Tag("rprop")]
    | Annotated[Adafactor, Tag("adafactor")]
    | Annotated[BitsAndBytesAdamW, Tag("adamw_8bit")]
    | Annotated[BitsAndBytesAdamW, Tag("paged_adamw_8bit")]
    | Annotated[BitsAndBytesAdamW, Tag("paged_adamw_32bit")]
    | Annotated[BitsAndBytesLion, Tag("lion_8bit")]
    | Annotated[ImportedOptimizer, Tag(PATH)],
    by_name,
]
"""The optimizer of a run."""

Scheduler = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Constant, Tag("constant_with_warmup")]
    | Annotated[Decay, Tag("linear")]
    | Annotated[Decay, Tag("cosine")]
    | Annotated[WarmupStableDecay, Tag("wsd")]
    | Annotated[StepDecay, Tag("step")]
    | Annotated[MultiStep, Tag("multistep")]
    | Annotated[OneCycle, Tag("one_cycle")]
    | Annotated[Exponential, Tag("exponential")]
    | Annotated[Polynomial, Tag("polynomial")]
    | Annotated[InverseSqrt, Tag("inverse_sqrt")]
    | Annotated[Plateau, Tag("plateau")]
    | Annotated[Imported, Tag(PATH)],
    by_name,
]
"""The learning-rate schedule of a run."""
