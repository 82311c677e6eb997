"""Trained rows of an embedding or a head, while all other rows are frozen: `trainable_token_indices`.

The rows are a parameter of their own, which starts as a copy and takes the place of the frozen rows. PEFT copies the
whole table in each forward to put them in; here a token's row is looked up in the one or the other, and a head computes
some logits twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.lora.config import ADDED, LoraConfig
from shoal.lora.layers import ADAPTER, AdaptedLayer, LowRankLayer, attach
from shoal.weights.added_rows import Rows
from shoal.weights.conversion import Source

KEY = "lora.trainable_token_indices"
_DELTA = f"token_adapter.trainable_tokens_delta.{ADAPTER}"


class TrainedRows(nn.Module):
    """The trained rows of some tokens, by PEFT's names. The embedding and a tied head share one."""

    indices: Tensor
    sorted_indices: Tensor
    places: Tensor

    def __init__(self, indices: Sequence[int], width: int) -> None:
        super().__init__()
        self.tokens = tuple(indices)
        self.trainable_tokens_delta = nn.ParameterDict({ADAPTER: nn.Parameter(torch.empty(len(indices), width))})
        numbers = torch.tensor(indices)
        ordered, places = numbers.sort()
        for name, value in (("indices", numbers), ("sorted_indices", ordered), ("places", places)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, tokens: Tensor | None = None) -> Any:
        """Returns a copy of the rows; for tokens, the place of each among the rows, and whether it has one."""
        rows = self.trainable_tokens_delta[ADAPTER].clone()  # as `Factor`: nobody else may read the parameter
        if tokens is None:
            return rows
        near = torch.searchsorted(self.sorted_indices, tokens).clamp(max=len(self.places) - 1)
        return rows, self.places[near], self.sorted_indices[near] == tokens


class TokensEmbedding(AdaptedLayer):
    """An embedding with trained rows."""

    token_adapter: TrainedRows

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = super().forward(tokens)
        rows, places, is_trained = self.token_adapter(tokens)
        padding: Any = getattr(self, "padding_idx", None)  # no gradient goes to its row
        padding = self.token_adapter.tokens.index(padding) if padding in self.token_adapter.tokens else None
        found = F.embedding(places, rows, padding)
        found = found.to(result.dtype) * getattr(self, "embed_scale", 1.0)  # Gemma's embedding multiplies
        return torch.where(is_trained[..., None], found.to(result.dtype), result)


class TokensHead(AdaptedLayer):
    """A head with trained rows."""

    token_adapter: TrainedRows

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = super().forward(hidden)
        trained = F.linear(hidden, self.token_adapter().to(hidden.dtype))
        return logits.index_copy(-1, self.token_adapter.indices, trained.to(logits.dtype))


def train_tokens(model: Any, lora: LoraConfig, added: Sequence[int]) -> None:
    """Gives an embedding, and the head if it is tied to it or named, trained rows. `added` are the model's new tokens.

    Raises UserError for names and numbers that the model does not have.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    shared: dict[int, TrainedRows] = {}
    for end, indices in _indices_by_name(model, lora, added).items():
        found = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not found:
            raise UserError(f"{KEY} = {{{end}: …}}: the model has no such module; name {names[embedding]}")
        for name in found:
            module: Any = modules[name]
            _check_module(name, module, indices, is_head=module is head)
            tied = [one for one in (embedding, head) if one is not None and one.weight is module.weight]
            for one in tied or [module]:
                if id(module.weight) in shared and hasattr(one, "token_adapter"):
                    if one.token_adapter.tokens != (*indices,):
                        raise UserError(f"{KEY}: {names[one]} is tied to {name}; give both the same tokens")
                    continue
                rows = shared.setdefault(
                    id(module.weight), TrainedRows(indices, module.weight.shape[1]).train(module.training)
                )
                kind = TokensEmbedding if isinstance(one, nn.Embedding) else TokensHead
                attach(one, kind, token_adapter=rows)


def _indices_by_name(model: Any, lora: LoraConfig, added: Sequence[int]) -> Mapping[str, Sequence[int]]:
    """Returns the tokens that are trained, by the end of a module's name."""
    wanted, embedding, head = (
        lora.trainable_token_indices,
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
    if isinstance(wanted, dict):
        return wanted
    names = {module: name for name, module in model.named_modules()}
    if isinstance(wanted, list):
        return {names[embedding]: wanted}
    if not added:
        raise UserError(f"{KEY} = {ADDED}: model.added_tokens is empty; name new tokens there, or give numbers")
    is_untied = head is not None and head.weight is not embedding.weight
    return {names[embedding]: added, **({names[head]: added} if is_untied else {})}


def _check_module(name: str, module: Any, indices: Sequence[int], is_head: bool) -> None:
    if isinstance(module, LowRankLayer) or any(p.requires_grad for p in module.parameters(recurse=False)):
        key = "target_modules" if isinstance(module, LowRankLayer) else "modules_to_save"
        raise UserError(f"{KEY}: {name} is in lora.{key}, too; take it out of one of them")
    if not isinstance(module, nn.Embedding) and (not is_head or getattr(module, "bias", None) is not None):
        raise UserError(f"{KEY}: {name} is a {type(module).__name__}; name an embedding, or a head without a bias")
    if wrong := [index for index in indices if not 0 <= index < len(module.weight)]:
        raise UserError(f"{KEY}: {wrong[0]} is not a token of {name}, which has {len(module.weight)}")
    if len({*indices}) < len(indices):
        raise UserError(f"{KEY}: a token is named twice; name each once")


def token_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers with trained rows by name; a tied head has the rows of the embedding."""
    return {n: m for n, m in model.named_modules() if isinstance(m, TokensEmbedding | TokensHead)}


def token_indices(model: nn.Module) -> dict[str, list[int]]:
    """Returns the trained tokens of each module that has rows of its own, as PEFT's config has them."""
    found: dict[int, tuple[str, list[int]]] = {}
    for name, layer in token_layers(model).items():
        found.setdefault(id(layer.token_adapter), (name, [*layer.token_adapter.tokens]))
    return dict(found.values())


def row_sources(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns how the first values of trained rows are read from the files of the base."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, Source] = {}
    for name, layer in token_layers(model).items():
        table = next((sources[alias] for alias in names[id(layer.weight)] if alias in sources), None)
        if table is not None:
            found[f"{name}.{_DELTA}"] = Rows((table,), layer.token_adapter.tokens)
    return found


@torch.no_grad()
def merge_rows(layer: Any) -> None:
    """Writes the trained rows of a layer into its weight."""
    layer.weight[layer.token_adapter.indices] = layer.token_adapter().to(layer.weight.dtype)
