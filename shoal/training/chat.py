"""Talks to the model of a run: by its chat template if the recipe's tokenizer has one, else by continuing a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import find_latest_checkpoint, step_folders
from shoal.checkpoint.inspect import open_step_folder
from shoal.checkpoint.trained_model import built_in_recipe, make_recipe
from shoal.errors import UserError, one_line
from shoal.training.load import base_needed, load
from shoal.training.preview import without_cudnn_attention

Print = Callable[[str], None]
"""A function that prints a piece of text, without a new line."""


class Chat:
    """A conversation with a model. With a chat template it remembers the turns before."""

    def __init__(
        self,
        path: Path,
        device: str = "cpu",
        max_new_tokens: int = 256,
        temperature: float = 0.7,
        base: Path | None = None,
    ):
        """Loads the model of a checkpoint, or of the latest one of a run; `base` is where its frozen weights are."""
        if temperature < 0 or max_new_tokens < 1:
            key, value = ("--temperature", temperature) if temperature < 0 else ("--max-new-tokens", max_new_tokens)
            raise UserError(f"{key} {value}: it must be {'0 or more' if temperature < 0 else '1 or more'}")
        _check_device(device)
        folder = find_latest_checkpoint(path) if step_folders(path) else path
        if folder is None:
            raise UserError(f"{path}: all its checkpoints are damaged; choose another run")
        with base_needed(folder):
            name, sections = built_in_recipe(open_step_folder(folder, base), "shoal chat", "use shoal.load in Python")
        self.recipe = make_recipe(name, sections)
        if not hasattr(self.recipe, "transformers_config"):
            raise UserError(f"{folder} was trained by recipe {name}, which has no model to talk to; use causal_lm")
        self.folder = folder
        """The checkpoint whose model talks."""
        self.model: Any = load(folder, device=device, base=base)
        self.tokenizer = self.recipe.tokenizer
        self.has_template = getattr(self.tokenizer, "template", None) is not None
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        self._options |= {"temperature": temperature} if temperature else {}
        self._messages: list[dict[str, str]] = []
        self._ends = self._end_tokens()

    def answer(self, text: str, show: Print) -> str:
        """Returns the model's answer to a turn, or the continuation of a text; `show` gets it piece by piece."""
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self.tokenizer.render(self._messages, prompt=True) if self.has_template else text
            prompt.encode()
        except ValueError as error:  # of a template that refuses it, or of bytes that are no text
            self._messages.pop()
            raise UserError(f"the prompt cannot be used: {one_line(error)}; give another text") from None
        ids = torch.as_tensor(self.tokenizer.encode(prompt).tolist(), device=self.model.device)[None]
        room = (getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30) - ids.shape[1]
        if not ids.numel() or room < 1:
            self._messages.pop()
            raise UserError(
                f"the prompt has {ids.numel()} tokens, and the model takes {room + ids.shape[1]}; give another text"
            )
        stream = _Stream(self.tokenizer, self._ends, show)
        number = min(self._options["max_new_tokens"], room)
        with torch.no_grad(), without_cudnn_attention():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=stream,
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else 0,
                suppress_tokens=list(range(self.tokenizer.vocab_size, self.model.config.get_text_config().vocab_size))
                or None,
                **{**self._options, "max_new_tokens": number},
            )
        self._messages.append({"role": "assistant", "content": stream.text})
        return stream.text

    def _end_tokens(self) -> list[int]:
        """Returns the tokens that end an answer: the tokenizer's own, and the one after an answer in the template."""
        ends = [] if self.tokenizer.eos is None else [int(self.tokenizer.eos)]
        if self.has_template:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
            after = self.tokenizer.render(turns).rpartition("bcd")[2]
            ends += self.tokenizer.encode(after).tolist()[:1]
        return [*dict.fromkeys(ends)]


class _Stream:
    """Gets the tokens of an answer from transformers, one at a time, and shows their text when it is complete."""

    def __init__(self, tokenizer: Any, ends: list[int], show: Print):
        self._tokenizer, self._ends, self._show = tokenizer, ends, show
        self._ids: list[int] | None = None
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self._ids is None:  # the prompt comes first
            self._ids = []
            return
        self._ids += [token for token in value.flatten().tolist() if token not in self._ends]
        self._show_until(complete=False)

    def end(self) -> None:
        self._show_until(complete=True)

    def _show_until(self, complete: bool) -> None:
        text = self._tokenizer.decode(self._ids or [])
        if complete or not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the last character may lack bytes
            self._show(text[len(self.text) :])
            self.text = text


def _check_device(name: str) -> None:
    """Raises UserError if torch cannot compute on a device."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        available = torch.accelerator.current_accelerator(check_available=True)
        raise UserError(f"--device {name}: torch cannot use it here; use {available or 'cpu'}") from None
