"""A mistake in the user's code is one line with its place, and exit code 2; the traceback is in the log."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from conftest import ToyRun

from shoal.config import load_run
from shoal.launch.mistakes import RecipeFailure, describe, explained

MISTAKES = {
    "a key that a batch lacks": ('batch["y"]', 'batch["z"]', r"toy_recipe\.py:\d+ in loss: KeyError: 'z'"),
    "samples that are no dicts": (
        'return {"x": x, "y": x * x}',
        "return x, x * x",
        r"toy_recipe\.py:\d+ in inputs: TypeError: list indices .*__getitem__ of the data returns a dict",
    ),
    "samples that cannot be batched": (
        'return {"x": x, "y": x * x}',
        "return None",
        r"recipe Toy: samples of type NoneType cannot be batched .*; let the data return dicts of tensors",
    ),
    "inputs that are no dict": (
        'return {"input": batch["x"]}',
        'return batch["x"]',
        r"toy_recipe\.py:\d+: inputs returned a Tensor, .*; return a dict",
    ),
    "a loss that is no tensor": (
        "** 2).sum()",
        "** 2).sum().item()",
        r"toy_recipe\.py:\d+: loss returned a float, .* without \.item\(\)",
    ),
    "a detached loss": (
        "** 2).sum()",
        "** 2).sum().detach()",
        r"toy_recipe\.py:\d+: the loss has no gradient; .* without \.detach\(\)",
    ),
    "labels out of range": (
        'return ((output - batch["y"]) ** 2).sum()',
        'return nn.functional.cross_entropy(output, batch["y"][:, 0].long() + 7, reduction="sum")',
        r"toy_recipe\.py:\d+ in loss: IndexError: Target 7 is out of bounds.; a label or token is not below",
    ),
    "a preview that is no text": (
        "    def inputs(",
        "    def preview(self, model):\n        return {}\n\n    def inputs(",
        r"toy_recipe\.py:\d+: preview returned a dict; return a text or None",
    ),
    "an error while the module is imported": (
        "class Toy(",
        "undefined_name\n\n\nclass Toy(",
        r"toy_recipe\.py:\d+ in .*NameError",
    ),
    "a module that is not Python": ("class Toy(", "class class Toy(", r"toy_recipe\.py:\d+ in the module: SyntaxError"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(toy: ToyRun, change_recipe: Callable[[str, str], None], mistake: str) -> None:
    old, new, said = MISTAKES[mistake]
    change_recipe(old, new)
    result = toy.call("train", "run.yaml", "training.max_steps=1")
    assert result.returncode == 2
    assert re.fullmatch(rf"shoal: error: .*{said}.*\n", result.stderr), result.stderr


def test_the_traceback_is_in_the_log_and_shown_by_debug(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe('batch["y"]', 'batch["z"]')
    toy.call("train", "run.yaml")
    assert "Traceback (most recent call last)" in (toy.output / "logs" / "rank_0.log").read_text()
    with pytest.raises(RecipeFailure) as failure:
        toy.call("train", "run.yaml", "--debug")
    assert isinstance(failure.value.__cause__, KeyError)


def test_errors_outside_of_the_users_code_pass_as_they_are() -> None:
    error = ValueError("raised where nobody's code is")
    assert describe(error) is None
    with pytest.raises(RuntimeError, match="Connection closed by peer") as lost, explained():
        raise RuntimeError("Connection closed by peer")
    assert not isinstance(lost.value, RecipeFailure)


def test_an_error_of_a_data_worker_has_the_place_in_the_data(toy: ToyRun) -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{torch.__file__}", line 1, in fetch\n'
        f'  File "{toy.folder / "toy_recipe.py"}", line 3, in __getitem__\n'
        "ValueError: no such image\n"
    )
    assert str(describe(ValueError(text))).endswith("toy_recipe.py:3 in __getitem__: ValueError: no such image")


@pytest.mark.parametrize(
    ("overrides", "remedies"),
    [
        ([], ["training.batch_size = 2 with", "activation_checkpointing = full", "loss_chunks = 8"]),
        (
            ["training.batch_size=1", "training.loss_chunks=4", "launch.procs_per_node=2"],
            ["activation_checkpointing = full", "distributed.strategy = fsdp", "mixed_precision = bf16"],
        ),
    ],
)
def test_a_lack_of_memory_names_what_is_not_in_force(toy: ToyRun, overrides: list[str], remedies: list[str]) -> None:
    with pytest.raises(RecipeFailure) as failure, explained(load_run(toy.config, overrides)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has …")
    assert str(failure.value).startswith("CUDA out of memory; use ")
    assert str(failure.value).count(", or ") == 2
    for remedy in remedies:
        assert remedy in str(failure.value)
