"""PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors, written and read.

PEFT puts `base_model.model.` before the names of tensors and leaves out the name of the adapter. In the metadata of the
safetensors file shoal also keeps what PEFT does not look at: digests of the base's tensors, because a name of a base
says less, and the new tokens of the model, whose rows have their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import UserError, as_user_error
from shoal.lora.adapters import adapted_layers, scalings
from shoal.lora.config import LoraConfig
from shoal.lora.layers import ADAPTER
from shoal.lora.targets import find_targets, scale_by_pattern, target_names
from shoal.lora.trained_tokens import token_indices
from shoal.weights.conversion import open_safetensors
from shoal.weights.regular_files import read_json_text

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DIGESTS, _ADDED = "shoal_base_sha256", "shoal_added_tokens"
_OWN_KEYS = {"lora_plus_ratio", "rank", "alpha", "dropout"}
"""Keys of the section `lora:` that PEFT's config does not have."""


def is_adapter_folder(folder: Path) -> bool:
    """Returns whether a folder has an adapter as PEFT saves it."""
    return (folder / CONFIG).is_file() and (folder / TENSORS).is_file()


def name_in_folder(model: nn.Module, name: str) -> str:
    """Returns PEFT's name for a trained tensor of a model."""
    owner, _, key = name.rpartition(".")
    if f".{ADAPTER}" in name:
        short = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name
        return _PREFIX + short.replace(f".{ADAPTER}", "", 1)
    is_adapted = owner in dict(adapted_layers(model))
    return _PREFIX + (f"{owner}.base_layer.{key}" if is_adapted else name)


def name_in_model(name: str) -> str:
    """Returns the name in the model of a tensor in PEFT's folder; the inverse of `name_in_folder`."""
    # An adapter of several parameters of one module is in a `base_layer` of its own, which keeps its name.
    name = re.sub(r"\.base_layer\.(?!lora_|base_layer\.)", ".", name.removeprefix(_PREFIX))
    name = re.sub(r"\.(token_adapter\.trainable_tokens_delta)$", rf".\1.{ADAPTER}", name)
    name = re.sub(r"\.(lora_[AB])\.(weight|bias)$", rf".\1.{ADAPTER}.\2", name)
    name = re.sub(r"\.(lora_embedding_[AB])$", rf".\1.{ADAPTER}", name)
    return re.sub(r"\.lora_magnitude_vector(\.weight)?$", f".lora_magnitude_vector.{ADAPTER}.weight", name)


def config_for_peft(
    plain_model: Any,
    lora: LoraConfig,
    base: str | None,
    revision: str | None,
    tokens: Mapping[str, list[int]] | None = None,
) -> dict[str, Any]:
    """Returns the content of adapter_config.json. `plain_model` is the model without adapters; `tokens` are those with
    trained rows, by the name of their module."""
    names = target_names(plain_model, lora)
    if lora.target_modules == "all-linear":  # the ends of the names, if they mean the same modules
        ends = sorted({name.rpartition(".")[2] for name in names})
        alike = find_targets(plain_model, lora.model_copy(update={"target_modules": ends}))
        names = ends if alike.keys() == find_targets(plain_model, lora).keys() else names
    transposed = any(type(module).__name__ == "Conv1D" for module in plain_model.modules())
    fields = lora.model_dump(exclude=_OWN_KEYS | {"target_modules", "trainable_token_indices"}, exclude_none=True)
    if tokens:
        only_embedding = [*tokens] == [_name_of(plain_model, plain_model.get_input_embeddings())]
        fields["trainable_token_indices"] = next(iter(tokens.values())) if only_embedding else dict(tokens)
    fields = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in fields.items()
    }
    with suppress(PackageNotFoundError):
        fields["peft_version"] = version("peft")
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "fan_in_fan_out": transposed,
        "target_modules": names,
        **fields,
    }


def _name_of(model: nn.Module, member: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is member)


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    base_digests: Mapping[str, str],
    added_tokens: Sequence[str],
) -> None:
    """Writes both files; `tensors` have PEFT's names, `base_digests` the names in the model."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / TENSORS, {"format": "pt", **about_base(base_digests, added_tokens)})


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors in PEFT's folder, by their names in the model."""
    file = open_safetensors(folder / TENSORS)
    return {name_in_model(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a file is no mapping


def read_config(where: str, folder: Path) -> dict[str, Any]:
    """Returns the content of adapter_config.json. Raises UserError unless it is that of a LoRA."""
    with as_user_error(f"{where}: it is damaged", OSError, ValueError, TypeError):
        config = dict(json.loads(read_json_text(folder / CONFIG, follow_links=True)))
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: it holds an adapter of kind {config.get('peft_type')!r:.100}; give a LoRA")
    return config


def about_base(base_digests: Mapping[str, str], added_tokens: Sequence[str]) -> dict[str, str]:
    """Returns the metadata of a safetensors file with an adapter: the digests of its base by name in the model, and the
    base's new tokens."""
    return {_DIGESTS: json.dumps(base_digests, sort_keys=True), _ADDED: json.dumps([*added_tokens])}


def read_about_base(where: str, file: Path) -> tuple[dict[str, str], list[str] | None]:
    """Returns the digests and the new tokens that `about_base` has put into a safetensors file; no digests and None
    where it has not."""
    with as_user_error(f"{where}: it is damaged", OSError, ValueError, TypeError, AttributeError):
        metadata = open_safetensors(file).metadata() or {}
        digests = {name: str(digest) for name, digest in dict(json.loads(metadata.get(_DIGESTS, "{}"))).items()}
        added = [str(token) for token in json.loads(metadata[_ADDED])] if _ADDED in metadata else None
    return digests, added


def check_adapter(where: str, config: Mapping[str, Any], source: str, model: nn.Module) -> None:
    """Raises UserError if an adapter is scaled otherwise than the model's, or has the rows of other tokens.

    `config` has the keys of PEFT's LoraConfig. It is not trusted: a value may be of any type. `source` says where they
    are, for messages.
    """
    found = scalings(model)
    with as_user_error(f"{where}: it is damaged", ValueError, LookupError, TypeError, AttributeError):
        expected = {name: scale_by_pattern(config, name) for name in found}
    for name, scaling in expected.items():
        if abs(scaling - found[name]) > 1e-6 * abs(scaling):
            raise UserError(
                f"{where}: its adapter of {name} is scaled by {scaling:g}, and lora: says {found[name]:g}; set "
                f"lora.r = {config.get('r')}, lora.lora_alpha = {config.get('lora_alpha')} and the patterns as in its "
                f"{source}"
            )
    _check_tokens(where, config.get("trainable_token_indices"), source, token_indices(model))


def _check_tokens(where: str, stored: Any, source: str, trained: Mapping[str, list[int]]) -> None:
    """Raises UserError if an adapter has the rows of other tokens than this run trains."""
    if stored == "added":  # the new tokens, in the config of a run; others have another number of rows
        return
    by_name = stored if isinstance(stored, dict) else {"": stored} if stored else {}
    for name, tokens in trained.items():
        found = [numbers for end, numbers in by_name.items() if not end or name == end or name.endswith(f".{end}")]
        if tokens not in found:
            raise UserError(
                f"{where}: it has the rows of the tokens {found[0] if found else []!r:.100}, and this run trains "
                f"{tokens!r:.100} of {name}; set lora.trainable_token_indices as in its {source}"
            )


def is_named(base: str, folder: Path) -> bool:
    """Returns whether a folder with weights is what an adapter calls its base: the same path, the same last name, or
    the cache of that repository."""
    path = Path(base).expanduser()
    return (
        path.resolve() == folder.resolve()
        or path.name == folder.name
        or f"models--{base.replace('/', '--')}" in folder.parts
    )
