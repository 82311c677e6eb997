"""Long sequences of BDH are computed in chunks: the numbers of all pairs of tokens, at a cost that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.test_bdh_fused import check_near, distance, pair, text, trained
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.models.bdh.attention import attend_in_chunks, chunks_backward
from shoal.models.bdh.model import CHUNK, LONGEST_AT_ONCE, Memory, State, attend

HEADS, BATCH, NEURONS, EMBD = 2, 2, 12, 6
LENGTHS = [LONGEST_AT_ONCE + 1, 5 * CHUNK, 5 * CHUNK + 100]


def drawn(time: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys, values, and the gradient of what is attended to."""
    generator = torch.Generator().manual_seed(time)
    shapes = ((HEADS, BATCH, time, NEURONS), (BATCH, time, EMBD), (HEADS, BATCH, time, EMBD))
    keys, values, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return keys.requires_grad_(), values.requires_grad_(), gradient


def by_all_pairs(keys: Tensor, values: Tensor) -> Tensor:
    return (keys @ keys.mT).tril(-1) @ values


def counted(function: Any, *args: Any) -> tuple[Any, int]:
    with FlopCounterMode(display=False) as counter:
        result = function(*args)
    return result, counter.get_total_flops()


@pytest.mark.parametrize("time", LENGTHS)
def test_chunks_give_the_numbers_of_all_pairs(time: int) -> None:
    keys, values, gradient = drawn(time)
    expected = by_all_pairs(keys, values)
    to_expected = torch.autograd.grad(expected, [keys, values], gradient)
    attended = attend(keys, values.expand(HEADS, -1, -1, -1))
    for found, right in zip(torch.autograd.grad(attended, [keys, values], gradient), to_expected, strict=True):
        assert distance(found, right) < 1e-14
    assert distance(attended, expected) < 1e-14
    with torch.no_grad():
        attended, scores, sums = attend_in_chunks(keys, values)
        to_keys, to_values = chunks_backward(keys, values, scores, sums, gradient)
    assert distance(attended, expected) < 1e-14
    for found, right in zip((to_keys, to_values.sum(0)), to_expected, strict=True):
        assert distance(found, right) < 1e-14


@pytest.mark.parametrize("time", LENGTHS)
def test_products_are_counted_and_their_number_grows_with_the_length_alone(time: int) -> None:
    """The operators have formulas, which have to give what torch counts in the function with autograd."""
    keys, values, gradient = drawn(time)
    attended, forward = counted(attend, keys, values.expand(HEADS, -1, -1, -1))
    _, backward = counted(torch.autograd.grad, attended, [keys, values], gradient)
    with torch.no_grad():
        (_, scores, sums), of_operator = counted(attend_in_chunks, keys, values)
        _, of_backward = counted(chunks_backward, keys, values, scores, sums, gradient)
    assert of_operator == forward
    of_scores = sum(2 * HEADS * BATCH * len(part) ** 2 * NEURONS for part in torch.arange(time).split(CHUNK))
    assert of_backward == backward - of_scores  # queries and keys are one tensor
    assert forward < 0.5 * counted(by_all_pairs, keys, values)[1]
    assert (scores.shape[-1], sums.shape[2]) == (CHUNK, -(-time // CHUNK) - 1)


def test_a_memory_goes_on_after_a_long_prompt() -> None:
    keys, values, _ = drawn(LENGTHS[-1])
    heads = values.expand(HEADS, -1, -1, -1)
    memory, parts = Memory(), []
    for first, end in ((0, LENGTHS[0]), (LENGTHS[0], LENGTHS[-1])):
        parts.append(attend(keys[:, :, first:end], heads[:, :, first:end], memory))
    assert distance(torch.cat(parts, 2), by_all_pairs(keys, values)) < 1e-14
    assert memory.total is not None
    assert distance(memory.total, keys.mT @ heads) < 1e-14


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_long_sequences_of_fused_heads_are_those_of_plain_ones(dropout: float) -> None:
    plain, fused = pair(2, dropout)
    tokens = text(1, LENGTHS[0])
    expected = trained(plain, tokens)
    check_near(trained(fused, tokens), expected, 1e-12)
    plain.eval(), fused.eval()
    with torch.no_grad():
        state = State(2)
        together = torch.cat([plain(part, state=state)[0] for part in tokens.split([7, LENGTHS[0] - 7], 1)], 1)
        for model in (plain, fused):
            assert distance(model(tokens)[0], together) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_long_sequences_compile_to_one_graph(dtype: torch.dtype) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # as in test_bdh_fused.py
        results = []
        for compiled in (False, True):
            _, fused = pair(2, 0.0, torch.float64)  # compiled code draws other random numbers
            with torch.no_grad():
                for parameter in fused.parameters():
                    parameter.div_(10)
            fused = fused.to(dtype)
            torch.compiler.reset()
            for level in fused.levels if compiled else ():
                level.compile(fullgraph=True)
            results.append(trained(fused, text(1, LENGTHS[0])))
        check_near(*results, 1e-12 if dtype == torch.float64 else 0.1)
