"""Sequence parallelism: between the boundaries of tensor parallelism, each rank keeps some of the tokens.

The vocabulary-parallel embedding splits the tokens at first. Each boundary then gathers them, and scatters its sums
(`TensorParallel.enter` and `leave`). Here are the conditions under which that works.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.errors import UserError
from shoal.parallel.pipeline.stages import PassThrough
from shoal.types import TensorStyle

_KEY = "distributed.tensor.sequence_parallel = true"


def check_plan(styles: Mapping[str, TensorStyle], modules: Mapping[str, nn.Module]) -> None:
    """Refuses a plan without modules that treat every token by itself, or without an embedding that splits tokens."""
    if "sequence" not in styles.values():
        raise UserError(
            f"{_KEY}: the recipe's plan names no modules of style `sequence`, which treat every token by itself, or "
            "the model makes masks for whole sequences; set it to false"
        )
    staged = any(isinstance(module, PassThrough) for module in modules.values())
    splits = any(style == "vocabulary" and isinstance(modules.get(n), nn.Embedding) for n, style in styles.items())
    if not splits and not staged:  # another stage may have the embedding
        raise UserError(
            f"{_KEY}: nothing splits the tokens at first; let parallel_plan split the embedding as `vocabulary`, or "
            "set it to false"
        )


def check_length(tokens: int, ranks: int) -> None:
    """Refuses sequences that tensor-parallel ranks cannot share evenly."""
    if tokens % ranks:
        raise UserError(
            f"{_KEY}, but {ranks} tensor-parallel ranks cannot share {tokens} tokens of a sequence evenly; choose "
            "another length of sequences (dataset.seq_length or max_seq_length), or set it to false"
        )
