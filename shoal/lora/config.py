"""The section `lora:`. Its keys are the fields of PEFT's LoraConfig: each is used, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.config.section import Positive, Section, refuse_if

OTHER_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Other spellings of keys, and the names that PEFT has for them."""

_BY_BASE = ("pissa", "olora", "mica", "eva", "corda", "loftq", "lora_ga", "orthogonal")


def _not_supported(reason: str) -> Any:
    """Returns the type of a key of PEFT's that may only be left out, null or empty."""
    return Annotated[Any, refuse_if(bool, f"is not supported: {reason}; leave it out")]


def _draws_alone(value: Any) -> bool:
    """Returns whether an initialisation is one that needs more than the adapter's own shapes."""
    return isinstance(value, str) and value.startswith(_BY_BASE)


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
    exclude_modules: list[str] | str | None = None
    """The modules that get none, in the same forms."""
    layers_to_transform: list[int] | int | None = None
    """With a list of `target_modules`: the numbers of the layers that get adapters. Default: all."""
    layers_pattern: list[str] | str | None = None
    """With `layers_to_transform`: the name of the list of layers, such as `layers`. Default: the first number in a
    module's name counts."""
    rank_pattern: dict[str, Positive] = {}
    """Other ranks for some modules, by the end of a name or a regular expression for it."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
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
    rank: Any = None
    """The same as `r`."""
    alpha: Any = None
    """The same as `lora_alpha`."""
    dropout: Any = None
    """The same as `lora_dropout`."""
    fan_in_fan_out: _not_supported("the class of a layer says how its weight is stored") = None
    """Refused: the class of a layer says how its weight is stored."""
    target_parameters: _not_supported("adapters are put on modules; name them in target_modules") = None
    """Refused: adapters are put on modules."""
    trainable_token_indices: _not_supported("name the embedding in modules_to_save to train all of it") = None
    """Refused."""
    layer_replication: _not_supported("layers keep their number") = None
    """Refused."""
    loftq_config: _not_supported("adapters do not start from the error of a quantisation") = None
    """Refused."""
    eva_config: _not_supported("adapters do not start from data") = None
    """Refused."""
    corda_config: _not_supported("adapters do not start from data") = None
    """Refused."""
    lora_ga_config: _not_supported("adapters do not start from gradients") = None
    """Refused."""
    velora_config: _not_supported("use training.activation_checkpointing to save memory") = None
    """Refused."""
    kasa_config: _not_supported("it changes the base") = None
    """Refused."""
    monteclora_config: _not_supported("it samples adapters") = None
    """Refused."""
    arrow_config: _not_supported("it is for several adapters") = None
    """Refused."""
    alora_invocation_tokens: _not_supported("an adapter is in force for all tokens") = None
    """Refused."""
    use_qalora: _not_supported("it is for weights quantised by GPTQ") = None
    """Refused."""
    qalora_group_size: _not_supported("it is for weights quantised by GPTQ") = None
    """Refused."""
    use_bdlora: _not_supported("adapters are not block-diagonal") = None
    """Refused."""
    megatron_config: _not_supported("the model is not Megatron's") = None
    """Refused."""
    megatron_core: _not_supported("the model is not Megatron's") = None
    """Refused."""
    runtime_config: _not_supported("distributed.fsdp.cpu_offload moves weights to the host") = None
    """Refused."""
    peft_type: _not_supported("it is always LORA") = None
    """Refused."""
    auto_mapping: _not_supported("PEFT writes it") = None
    """Refused."""
    peft_version: _not_supported("PEFT writes it") = None
    """Refused."""
    base_model_name_or_path: _not_supported("model.name names the base") = None
    """Refused."""
    revision: _not_supported("model.revision names the base's") = None
    """Refused."""
    inference_mode: _not_supported("a run trains") = None
    """Refused."""

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
            (self.target_modules == [], "target_modules = []: no module gets an adapter; name some, or use all-linear"),
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
