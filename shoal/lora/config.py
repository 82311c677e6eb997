"""The section `lora:`. Its keys are the fields of PEFT's LoraConfig: each is used, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shoal.config.section import NonNegative, Positive, Section, refuse_if

OTHER_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Other spellings of keys, and the names that PEFT has for them."""

ADDED = "added"
"""The value of `trainable_token_indices` that means the tokens in `model.added_tokens`."""

REFUSED = {
    "fan_in_fan_out": "the class of a layer says how its weight is stored",
    "layer_replication": "layers keep their number",
    "loftq_config": "adapters do not start from the error of a quantisation",
    "eva_config": "adapters do not start from data",
    "corda_config": "adapters do not start from data",
    "lora_ga_config": "adapters do not start from gradients",
    "velora_config": "use training.activation_checkpointing to save memory",
    "kasa_config": "it changes the base",
    "monteclora_config": "it samples adapters",
    "arrow_config": "it is for several adapters",
    "alora_invocation_tokens": "an adapter is in force for all tokens",
    "use_qalora": "it is for weights quantised by GPTQ",
    "qalora_group_size": "it is for weights quantised by GPTQ",
    "use_bdlora": "adapters are not block-diagonal",
    "megatron_config": "the model is not Megatron's",
    "megatron_core": "the model is not Megatron's",
    "runtime_config": "distributed.fsdp.cpu_offload moves weights to the host",
    "peft_type": "it is always LORA",
    "auto_mapping": "PEFT writes it",
    "peft_version": "PEFT writes it",
    "base_model_name_or_path": "model.name names the base",
    "revision": "model.revision names the base's",
    "inference_mode": "a run trains",
}
"""The fields of PEFT's that are refused unless they are null, false or empty, each with the reason."""

PATTERNS = (
    "target_modules",
    "exclude_modules",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)
"""The keys that have regular expressions, or may have them."""

_BY_BASE = ("pissa", "olora", "mica", "eva", "corda", "loftq", "lora_ga", "orthogonal")


def _draws_alone(value: Any) -> bool:
    """Returns whether an initialisation is one that needs more than the adapter's own shapes."""
    return isinstance(value, str) and value.startswith(_BY_BASE)


def _has_tokens(indices: list[int] | dict[str, list[int]] | str) -> bool:
    return all(indices.values()) and bool(indices) if isinstance(indices, dict) else bool(indices)


class LoraConfig(Section):
    """The section `lora:`, which adds trained adapters to a frozen model. Without it all weights are trained."""

    r: Positive = 8
    """The rank of the adapters. Another spelling is `rank`."""
    lora_alpha: Annotated[float, Field(gt=0)] = 8
    """The adapters' output is multiplied by `lora_alpha / r`. Another spelling is `alpha`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The dropout on the adapters' inputs. Another spelling is `dropout`."""
    target_modules: list[str] | str = "auto"
    """The modules that get an adapter: names or ends of names, or one regular expression for whole names. `all-linear`:
    all linear layers except the head. `auto`: what PEFT has for the kind of model, for most the query and value
    projections."""
    target_parameters: list[str] | None = None
    """Parameters outside of linear layers that get an adapter, by their names or the ends of them, such as
    `mlp.experts.gate_up_proj` in a mixture of experts."""
    exclude_modules: list[str] | str | None = None
    """The modules that get none, in the same forms."""
    layers_to_transform: list[int] | int | None = None
    """With a list of `target_modules`: the numbers of the layers that get adapters. Default: all."""
    layers_pattern: list[str] | str | None = None
    """With `layers_to_transform`: the name of the list of layers, such as `layers`. Default: the first number in a
    module's name counts."""
    rank_pattern: dict[str, Positive] | None = None
    """Other ranks for some modules, by the end of a name or a regular expression for it."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Other values of `lora_alpha` for some modules, in the same form."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / sqrt(r)` instead (rank-stabilised LoRA)."""
    use_dora: bool = False
    """Also train the length of each row of a weight (DoRA)."""
    lora_bias: bool = False
    """Give the second matrix of each adapter a bias."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """The biases of the model that are trained: none, all, or those of modules with an adapter."""
    modules_to_save: list[str] | None = None
    """Modules that are trained as a whole, by the end of their names, such as `lm_head`."""
    trainable_token_indices: list[NonNegative] | dict[str, list[NonNegative]] | Literal["added"] | None = None
    """Tokens whose rows of the embedding are trained while all other rows are frozen; a tied head has the same rows. A
    mapping has the tokens of several modules by name. `added`: the tokens in `model.added_tokens`, also in the head."""
    ensure_weight_tying: bool = False
    """With `modules_to_save` of a tied embedding or head: train both as one. Without it they are refused."""
    init_lora_weights: Annotated[
        bool | Literal["gaussian"],
        refuse_if(_draws_alone, "is not supported: it needs more than an adapter's shape; use true, false or gaussian"),
    ] = True
    """How adapters start: `true` and `gaussian` draw the first matrix and set the second to zero, so that the model
    begins as it was; `false` draws both."""
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    """What PEFT calls this kind of model."""
    lora_plus_ratio: Annotated[float, Field(gt=0)] = 1.0
    """LoRA+: the learning rate of each adapter's second matrix, as a multiple of `training.learning_rate`."""
    rank: Positive | None = None
    """The same as `r`."""
    alpha: float | None = None
    """The same as `lora_alpha`."""
    dropout: float | None = None
    """The same as `lora_dropout`."""
    fan_in_fan_out: None = None
    """Refused: the class of a layer says how its weight is stored."""
    layer_replication: None = None
    """Refused: layers keep their number."""
    loftq_config: None = None
    """Refused: adapters do not start from the error of a quantisation."""
    eva_config: None = None
    """Refused: adapters do not start from data."""
    corda_config: None = None
    """Refused: adapters do not start from data."""
    lora_ga_config: None = None
    """Refused: adapters do not start from gradients."""
    velora_config: None = None
    """Refused: use training.activation_checkpointing to save memory."""
    kasa_config: None = None
    """Refused: it changes the base."""
    monteclora_config: None = None
    """Refused: it samples adapters."""
    arrow_config: None = None
    """Refused: it is for several adapters."""
    alora_invocation_tokens: None = None
    """Refused: an adapter is in force for all tokens."""
    use_qalora: None = None
    """Refused: it is for weights quantised by GPTQ."""
    qalora_group_size: None = None
    """Refused: it is for weights quantised by GPTQ."""
    use_bdlora: None = None
    """Refused: adapters are not block-diagonal."""
    megatron_config: None = None
    """Refused: the model is not Megatron's."""
    megatron_core: None = None
    """Refused: the model is not Megatron's."""
    runtime_config: None = None
    """Refused: distributed.fsdp.cpu_offload moves weights to the host."""
    peft_type: None = None
    """Refused: it is always LORA."""
    auto_mapping: None = None
    """Refused: PEFT writes it."""
    peft_version: None = None
    """Refused: PEFT writes it."""
    base_model_name_or_path: None = None
    """Refused: model.name names the base."""
    revision: None = None
    """Refused: model.revision names the base's."""
    inference_mode: None = None
    """Refused: a run trains."""

    @field_validator(*REFUSED, mode="before")
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise ValueError(f"is not supported: {REFUSED[str(info.field_name)]}; leave it out")
        return None

    @field_validator(*PATTERNS)
    @classmethod
    def _check_patterns(cls, value: Any, info: ValidationInfo) -> Any:
        is_list_of_names = info.field_name in ("target_modules", "exclude_modules") and not isinstance(value, str)
        for pattern in () if is_list_of_names else [value] if isinstance(value, str) else value or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression ({error}); any characters are .*") from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, values: Any) -> Any:
        """Moves the values of other spellings to PEFT's names."""
        if not isinstance(values, dict):
            return values
        moved = dict(values)
        for other, name in OTHER_NAMES.items():
            if (value := moved.pop(other, None)) is None:
                continue
            if moved.setdefault(name, value) != value:
                raise ValueError(f"{other} = {value} and {name} = {moved[name]} are the same key; give one of them")
        return moved

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        is_pattern = isinstance(self.target_modules, str)
        return (
            (
                is_pattern and self.layers_to_transform is not None,
                f"layers_to_transform is for a list of target_modules, but target_modules = {self.target_modules!r}; "
                "give a list",
            ),
            (
                self.layers_pattern is not None and self.layers_to_transform is None,
                "layers_pattern has no effect without layers_to_transform; leave it out",
            ),
            (
                self.target_modules == [] and not self.target_parameters,
                "target_modules = []: no module gets an adapter; name some, or use all-linear",
            ),
            (
                self.trainable_token_indices is not None and not _has_tokens(self.trainable_token_indices),
                f"trainable_token_indices = {self.trainable_token_indices}: it names no token; leave it out",
            ),
            *(
                (
                    bool(self.target_parameters) and bool(getattr(self, key)),
                    f"{key} = {getattr(self, key)}: PEFT has it without target_parameters alone; leave one of them out",
                )
                for key in ("lora_dropout", "use_dora", "lora_bias")
            ),
            (
                self.use_dora and self.lora_bias,
                "lora_bias = true: adapters with use_dora have no bias; leave one of them out",
            ),
            (
                self.use_dora and self.init_lora_weights is False,
                "init_lora_weights = false: with use_dora adapters start with a second matrix of zeros; use true",
            ),
            (
                self.lora_bias and self.init_lora_weights == "gaussian",
                "init_lora_weights = gaussian: PEFT has it without lora_bias alone; use true, or leave lora_bias out",
            ),
        )

    def scaling(self, rank: int, alpha: float) -> float:
        """Returns what the output of an adapter is multiplied by."""
        return alpha / (sqrt(rank) if self.use_rslora else rank)
