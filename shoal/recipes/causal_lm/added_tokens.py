"""New tokens of a model (`model.added_tokens`): the rows that its embedding and head get for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import UserError
from shoal.weights.added_rows import AddedRows, AddedRowsSource
from shoal.weights.conversion import Source


def with_added_rows(model: Any, sources: Mapping[str, Source], added: Sequence[int]) -> dict[str, Source]:
    """Returns the sources of a model, with new rows in the tables that have one for each token.

    `added` are the numbers of the new tokens, one after another.
    """
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    parameters = {id(p) for table in tables if table is not None for p in table.parameters(recurse=False)}
    names = {name: len(p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in parameters}
    return {
        name: AddedRowsSource((source,), AddedRows(added[0], added[-1] + 1, names[name])) if name in names else source
        for name, source in sources.items()
    }


def check_trained(model: Any) -> None:
    """Raises UserError if adapters are trained and the rows of new tokens are not: they would never mean anything."""
    embedding = model.get_input_embeddings()
    if not embedding.weight.requires_grad and not hasattr(embedding, "token_adapter"):
        name = next(name for name, module in model.named_modules() if module is embedding)
        raise UserError(
            "model.added_tokens: with lora: the rows of new tokens are frozen; set lora.trainable_token_indices: added "
            f"to train them, or lora.modules_to_save: [{name.rpartition('.')[2]}, …] to train all rows"
        )
