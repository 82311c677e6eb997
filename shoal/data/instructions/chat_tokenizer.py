"""A tokenizer with a chat template, as transformers has it: renders conversations, and encodes texts with the place of
every token in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.hub import hub
from shoal.data.instructions.templates import TEMPLATE_DATE, TEMPLATES, with_fixed_date
from shoal.data.tokenizer import add_tokens, refuse_bytes
from shoal.errors import UserError, one_line

Encoded = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and for each the range of characters that it stands for."""
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|</?[A-Za-z_]+>|\[/?[A-Z_]+\]")
"""What markers of turns look like: <|im_end|>, <end_of_turn>, </s>, [/INST]."""


class ChatTokenizer:
    """Wraps a fast tokenizer of transformers. It is a `shoal.data.Tokenizer`, too."""

    def __init__(self, name: str, tokenizer: Any, chat_template: str | None = None):
        self.name, self._tokenizer, self._chat_template = name, tokenizer, chat_template
        own = tokenizer.chat_template
        self.template: str | None = resolve_template(name, own, chat_template)
        self.tool_template: str | None = own.get("tool_use") if isinstance(own, dict) and not chat_template else None
        """The template for conversations with tools; None if it is the same one."""
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.eos: int | None = tokenizer.eos_token_id
        self.identity = json.dumps(
            [
                tokenizer.backend_tokenizer.to_str(),
                self.template,
                self.tool_template,
                str(tokenizer.special_tokens_map),
                *([str(TEMPLATE_DATE)] if self.writes_date else []),
            ]
        )

    @property
    def writes_date(self) -> bool:
        """True if a template asks for today's date. It gets `TEMPLATE_DATE`."""
        return any(one is not None and with_fixed_date(one) != one for one in (self.template, self.tool_template))

    @property
    def filler(self) -> int:
        """The token that sequences are padded with. It never counts, and no counted token attends to it, so any token
        serves if the tokenizer has none for padding."""
        pad = self._tokenizer.pad_token_id
        return int(next(token for token in (pad, self.eos, 0) if token is not None))

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokens that templates mark turns with, such as <|im_end|>."""
        return (*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab())

    @cached_property
    def special_ids(self) -> set[int]:
        """The numbers of the special tokens."""
        return {*self._tokenizer.convert_tokens_to_ids([*self.special_tokens])}

    @cached_property
    def leading(self) -> list[int]:
        """The tokens that the tokenizer puts before a plain text, usually the beginning-of-text token or nothing."""
        plain = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        return list(whole[: starts[0]]) if starts else []

    @cached_property
    def split_markers(self) -> list[str]:
        """The markers that the template puts around turns, such as <|im_end|>, which are several tokens and not one."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text = "" if self.template is None else self.render(turns)
        except ValueError:  # a template that needs more than these turns
            return []
        _, places = self.encode_with_places(text)
        found = {marker[0]: marker.span() for marker in _MARKER.finditer(text)}
        return [
            marker
            for marker, (start, end) in found.items()
            if sum(first < end and last > start for first, last in places) > 1
        ]

    @cached_property
    def unended_answer(self) -> str | None:
        """What the template writes after an answer, if there is no special token in it: a model cannot learn from it to
        stop. None if there is one, or no template."""
        answer = "bcd"
        try:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
            before, found, after = ("", "", "") if self.template is None else self.render(turns).rpartition(answer)
        except ValueError:  # a template that needs more than these turns
            return None
        ids, places = self.encode_with_places(before + found + after)
        end = len(before + found)
        is_ended = any(token in self.special_ids for token, (start, _) in zip(ids, places, strict=True) if start >= end)
        return after if found and not is_ended else None

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """Returns the text of a conversation; with `prompt`, also the beginning of the next assistant turn.

        Raises ValueError if the template refuses the conversation.
        """
        from jinja2 import TemplateError

        if self.template is None:
            raise UserError(
                f"dataset.chat_template: the tokenizer {self.name!r} has no chat template; name one of "
                f"{', '.join(TEMPLATES)}, or give a file"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=with_fixed_date((self.tool_template if tools else None) or self.template),
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(one_line(error)) from error

    def encode_with_places(self, text: str) -> Encoded:
        """Returns the tokens of a text, without special tokens around it, each with its characters.

        Raises UnicodeEncodeError for a text with half a character, which JSON can escape as a lone surrogate:
        tokenizers would raise a TypeError that does not name it.
        """
        text.encode()
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def decode_lines(self, ids: Iterable[int]) -> str:
        """Returns a text for people to read: special tokens end a line, and are left out."""
        runs = groupby(map(int, ids), key=self.special_ids.__contains__)
        lines = (self.decode(run, skip_special_tokens=True).strip() for is_mark, run in runs if not is_mark)
        return "\n".join(filter(None, lines))

    def encode(self, text: str | bytes) -> NDArray[Any]:
        text = text.decode() if isinstance(text, bytes) else text
        return np.array(self.encode_with_places(text)[0], np.int64)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))


def with_added_tokens(tokenizer: ChatTokenizer, tokens: Sequence[str]) -> ChatTokenizer:
    """Returns the tokenizer with new tokens (`model.added_tokens`)."""
    if not tokens:
        return tokenizer
    if tokenizer.name == "bytes":
        refuse_bytes(tokens)
    add_tokens(tokenizer._tokenizer, tokens)
    return ChatTokenizer(tokenizer.name, tokenizer._tokenizer, tokenizer._chat_template)


def resolve_template(name: str, own: Any, value: str | None) -> str | None:
    """Returns the template that `dataset.chat_template` means: a name, a file, or a text.

    `own` is the template of the tokenizer `name`, or a mapping if it has several: then `value` may be one of their
    names, and without `value` it is the one with the name `default`.
    """
    named = own if isinstance(own, dict) else {}
    if value is None:
        if named and "default" not in named:
            raise UserError(
                f"dataset.tokenizer = {name!r}: it has the chat templates {', '.join(map(repr, named))}, and none is "
                "the default; name one in dataset.chat_template"
            )
        return named["default"] if named else own
    if value in named or value in TEMPLATES:
        return str((TEMPLATES | named)[value])
    if "{" in value:
        return value
    path = Path(value).expanduser()
    if path.is_file():
        return path.read_text()
    raise UserError(
        f"dataset.chat_template = {value!r}: neither a template's name ({', '.join(TEMPLATES | named)}), nor a file, "
        "nor a Jinja text; correct it"
    )


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)


def load_chat_tokenizer(
    name: str | None, chat_template: str | None = None, revision: str | None = None
) -> ChatTokenizer:
    """Loads a tokenizer: `bytes`, a folder, a tokenizer.json, or a name on the Hugging Face Hub.

    `chat_template` is the value of `dataset.chat_template`; `revision` is the branch, tag or commit on the Hub.
    """
    if name is None:
        raise UserError(
            "dataset.tokenizer is missing; name a tokenizer, or set model.name, whose tokenizer is used then"
        )
    path = Path(name).expanduser()
    if name.endswith(".json") and not path.exists():
        raise UserError(f"dataset.tokenizer = {name!r}: this file does not exist; correct the path")
    if path.is_dir() and not any((path / file).exists() for file in _TOKENIZER_FILES):
        raise UserError(
            f"dataset.tokenizer = {name!r}: the folder has no tokenizer (without the key, it is that of model.name); "
            "give another folder, a name on the Hugging Face Hub, or bytes, which makes each byte a token"
        )
    with hub("dataset.tokenizer", name, "transformers", local=name == "bytes" or path.exists()) as transformers:
        if name == "bytes":
            tokenizer = _byte_tokenizer(transformers)
        elif path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            place, options = (str(path), {}) if path.is_dir() else (name, {"revision": revision or "main"})
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"dataset.tokenizer = {name!r}: transformers has it in Python only, without the places of tokens in a "
            "text; use a model that has a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"dataset.tokenizer = {name!r}: it has no end-of-text token, which ends an answer; give a folder whose "
            "tokenizer_config.json names an eos_token"
        )
    return ChatTokenizer(name, tokenizer, chat_template)


def _byte_tokenizer(transformers: Any) -> Any:
    """Returns a tokenizer in which every byte is a token, with its value as the id. Byte 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet shows printable characters as themselves, and the other bytes, in order, from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(256))
