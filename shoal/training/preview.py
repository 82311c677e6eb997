"""Asks a recipe for something to look at after an evaluation: a text, or several that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.errors import UserError
from shoal.seeding import mix, seed_generators
from shoal.strategies import DistributedStrategy
from shoal.strategies.recipe_results import place_of
from shoal.training.metric_sums import gather_from_ranks


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Within this context, attention is not computed by cuDNN, which plans each new length of a sequence anew.

    A plan takes about 40 ms (H200, torch 2.11), and every generated token makes the sequence longer.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def make_preview(strategy: DistributedStrategy, recipe: Any, model: nn.Module, seed: int, step: int) -> str | None:
    """Returns the recipe's preview, equal on all ranks; None if there is none. All ranks call it together.

    Eagerly: generating goes through many shapes once each, and compiling for them costs more.
    """
    seed = mix(seed, "preview", step)
    seed_generators(seed)
    torch.manual_seed(seed)  # on every device
    eagerly = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), eagerly, without_cudnn_attention(), strategy.whole_model(model) as whole:
        if whole is None:
            return None
        preview = recipe.preview(whole)
        texts = list(recipe.preview_texts(whole, strategy.data_rank, strategy.data_size))
    if not isinstance(preview, str | None):
        raise UserError(
            f"{place_of(recipe.preview)}: preview returned a {type(preview).__name__}; return a text or None"
        )
    shown = [text for text in (preview, *_of_all_ranks(strategy, texts)) if text is not None]
    return "\n\n".join(shown) if shown else None


def _of_all_ranks(strategy: DistributedStrategy, texts: list[str]) -> list[str]:
    """Returns the texts of all ranks in their order: rank 0 has the first, rank 1 the second, and so on in turn."""
    # Ranks that work on the same samples, such as tensor-parallel ones, have the same texts.
    by_rank = dict(gather_from_ranks(strategy, (strategy.data_rank, texts)))
    number = sum(map(len, by_rank.values()))
    return [by_rank[index % strategy.data_size][index // strategy.data_size] for index in range(number)]
