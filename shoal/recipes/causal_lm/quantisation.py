"""The keys of `model:` that keep the base in 4 or 8 bits, with the names and meanings of transformers' own."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from shoal.errors import UserError
from shoal.quantised.schemes import EightBit, FourBit, Scheme

_FOUR_BIT = ("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type", "bnb_4bit_quant_storage")


class QuantisationKeys(BaseModel):
    """The keys of `model:` about quantisation."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    load_in_4bit: bool = False
    """Freeze the model and keep its linear layers, except the head, in 4 bits (bitsandbytes). Weights that are stored
    in 4 bits are kept so without this key."""
    load_in_8bit: bool = False
    """The same in 8 bits, as LLM.int8() does."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = None
    """The 16 values of 4-bit weights. Default: nf4, unlike transformers, whose default is fp4."""
    bnb_4bit_use_double_quant: bool | None = None
    """Quantise the scales of 4-bit weights, too, which saves 0.4 bits a weight. Default: false."""
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type in which 4-bit layers compute. Default: that of `training.mixed_precision`."""
    bnb_4bit_quant_storage: Literal["uint8", "float16", "bfloat16", "float32"] | None = None
    """The type of the tensors that hold 4-bit weights. FSDP under torch older than 2.13 needs one that is
    floating-point. Default: uint8."""

    def check_quantisation(self, stored: str = "") -> None:
        """Raises UserError for keys that contradict each other, or have no effect. `stored` is 4 or 8 if the weights
        are stored in so many bits, and `?` if that is not known yet."""
        if self.load_in_4bit and self.load_in_8bit:
            raise UserError("model.load_in_4bit and model.load_in_8bit are both true; set one of them")
        for bits, key, given in (("4", "load_in_4bit", self.load_in_4bit), ("8", "load_in_8bit", self.load_in_8bit)):
            if given and stored in ("4", "8") and stored != bits:
                raise UserError(
                    f"model.{key} = true: the weights of model.name are stored in {stored} bits; leave it out"
                )
        for key in _FOUR_BIT:
            value = getattr(self, key)
            if value is not None and not self.load_in_4bit and (self.load_in_8bit or stored in ("", "8")):
                raise UserError(
                    f"model.{key} = {value}: no effect without model.load_in_4bit: true; set it, or leave it out"
                )

    def scheme(self, stored: dict[str, Any] | None = None) -> Scheme | None:
        """Returns how the base is quantised, or None if it is not. `stored` is the `quantization_config` of weights
        that are stored in 4 or 8 bits."""
        bits = "" if stored is None else "4" if stored.get("load_in_4bit") else "8"
        self.check_quantisation(bits)
        if self.load_in_8bit or bits == "8":
            return EightBit((stored or {}).get("llm_int8_threshold", 6.0))
        if not self.load_in_4bit and bits != "4":
            return None
        kind, double = self.bnb_4bit_quant_type or "nf4", bool(self.bnb_4bit_use_double_quant)
        if stored is not None:
            pairs = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
            for key in pairs:
                if getattr(self, key) not in (None, stored.get(key)):
                    raise UserError(
                        f"model.{key} = {getattr(self, key)}: the weights are stored with {stored.get(key)}; leave it "
                        "out"
                    )
            kind, double = stored["bnb_4bit_quant_type"], stored["bnb_4bit_use_double_quant"]
        return FourBit(kind, double, self.bnb_4bit_quant_storage or "uint8", self.bnb_4bit_compute_dtype)


def stored_quantisation(config: Any, name: str) -> dict[str, Any] | None:
    """Returns the `quantization_config` of a transformers configuration, or None if its weights are not quantised.

    Raises UserError if they are quantised in a way that cannot be trained.
    """
    about = getattr(config, "quantization_config", None)
    if not about:
        return None
    about = about if isinstance(about, dict) else about.to_dict()
    method = str(getattr(about.get("quant_method"), "value", about.get("quant_method")))
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if about.get(key) or about.get(f"_{key}")]
    if method != "bitsandbytes" or len(bits) != 1:
        raise UserError(
            f"model.name = {name!r}: its weights are quantised ({method}), which recipe causal_lm cannot train; use "
            "the weights that they were made from"
        )
    del config.quantization_config  # or an export, which is not quantised, would have it
    return {**about, "load_in_4bit": bits == ["load_in_4bit"]}


def skipped_layers(model: Any, stored: dict[str, Any] | None) -> set[str]:
    """Returns the names of the linear layers that stay as they are: the head, and those that were skipped when the
    weights were stored, by the rules of transformers: a regular expression for the beginning, or an end."""
    head = model.get_output_embeddings()
    skipped = (stored or {}).get("llm_int8_skip_modules") or ()

    def is_skipped(name: str) -> bool:
        return any(re.match(rf"(?:{part})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(part) for part in skipped)

    modules = model.named_modules(remove_duplicate=False)
    return {name for name, module in modules if module is head or is_skipped(name)}
