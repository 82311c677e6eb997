"""Turns a conversation into tokens, of which those of answers count in the loss.

Answers are found by rendering: the text of the conversation up to an answer, and up to its end. What lies between is
the answer as the template writes it, with the token that ends the turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.instructions.chat_tokenizer import ChatTokenizer
from shoal.data.instructions.records import Conversation
from shoal.errors import UserError

Span = tuple[int, int]
"""A range of characters."""


@dataclass(frozen=True)
class Sample:
    """Tokens, and for each whether it counts in the loss. The first token is never predicted, so it never counts."""

    tokens: list[int]
    counted: list[bool]


@dataclass(frozen=True)
class Rendered:
    """A text with the spans of its answers."""

    text: str
    spans: list[Span]


def make_samples(conversation: Conversation, tokenizer: ChatTokenizer, loss_on: str) -> list[Sample]:
    """Returns the samples of a conversation: one, or several if the template needs it."""
    try:
        if conversation.messages is None:
            return [_plain_sample(conversation, tokenizer, loss_on)]
        if loss_on == "all":
            text = _render(conversation, tokenizer, conversation.messages)
            return [_encode(Rendered(text, [(0, len(text))]), tokenizer)]
        return [_encode(rendered, tokenizer) for rendered in find_answers(conversation, tokenizer)]
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(f"{conversation.place}: {half!r} is half a character; correct the record") from None


def find_answers(conversation: Conversation, tokenizer: ChatTokenizer) -> list[Rendered]:
    """Returns the text of a conversation with the spans of all assistant turns that do not belong to a prompt.

    Some templates write an earlier turn otherwise than the last one: Qwen3 removes its thinking, Mistral moves the
    tools to the last question. Then there are several texts, each ending with an answer: what the model sees when it
    gives that one. A template that writes the conversation before an answer otherwise than with the answer is refused.
    """
    messages = conversation.messages or ()
    first = max(1, conversation.num_prompt_messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not answers:
        raise UserError(
            f"{conversation.place}: no assistant turn after a question, so that nothing would count; correct the "
            "record, or use dataset.loss_on: all"
        )
    messages = messages[: answers[-1] + 1]  # what follows the last answer would only cost time
    texts: list[Rendered] = []
    for number, i in enumerate(answers, 1):
        prompt = _render(conversation, tokenizer, messages[:i], prompt=True)
        text = _render(conversation, tokenizer, messages[: i + 1])
        if not text.startswith(prompt):
            raise UserError(
                f"dataset.chat_template of {tokenizer.name!r}: {conversation.place}: the text before answer {number} "
                "is not the beginning of the text with it, so that the answer cannot be found; use another template, "
                "or dataset.loss_on: all"
            )
        # An earlier text that is the beginning of this one is left out: this one has its answers, too.
        earlier = texts.pop().spans if texts and text.startswith(texts[-1].text) else []
        texts.append(Rendered(text, [*earlier, (len(prompt), _end_of_answer(text, len(prompt), tokenizer))]))
    return texts


def _render(
    conversation: Conversation, tokenizer: ChatTokenizer, messages: Sequence[dict[str, Any]], prompt: bool = False
) -> str:
    try:
        return tokenizer.render(messages, conversation.tools, prompt)
    except ValueError as error:
        raise UserError(
            f"{conversation.place}: the chat template of {tokenizer.name!r} refuses it: {error}; correct the record, "
            "or set dataset.chat_template"
        ) from None


def _end_of_answer(text: str, start: int, tokenizer: ChatTokenizer) -> int:
    """Returns where an answer ends that reaches to the end of a text: after the token that ends the turn, without line
    breaks after it."""
    stripped = text[start:].rstrip()
    if stripped.endswith(tokenizer.special_tokens):
        return start + len(stripped)
    return len(text)


def _encode(rendered: Rendered, tokenizer: ChatTokenizer) -> Sample:
    """Encodes a rendered text. The tokens of its answers count."""
    tokens, counted = _encode_spans(rendered.text, rendered.spans, tokenizer)
    counted[:1] = [False] * len(counted[:1])
    return Sample(tokens, counted)


def _encode_spans(text: str, spans: Sequence[Span], tokenizer: ChatTokenizer) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a text, and for each whether any of its characters belongs to a span.

    Of a special token only the first character decides: some take the white space after them, with which an answer may
    begin.
    """
    tokens, places = tokenizer.encode_with_places(text)
    deciding = [
        (start, start + 1 if token in tokenizer.special_ids else end)
        for token, (start, end) in zip(tokens, places, strict=True)
    ]
    return tokens, [*_overlaps(deciding, spans)]


def _overlaps(places: Sequence[Span], spans: Sequence[Span]) -> Iterator[bool]:
    """Yields for each place whether it shares a character with a span. Both are sorted."""
    index = 0
    for start, end in places:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        yield index < len(spans) and max(end, start + 1) > spans[index][0]


def _plain_sample(conversation: Conversation, tokenizer: ChatTokenizer, loss_on: str) -> Sample:
    """Encodes a prompt and its completion without a template, with the end-of-text token after them."""
    prompt, text = conversation.prompt, conversation.prompt + conversation.completion
    if not text:
        raise UserError(f"{conversation.place}: its text is empty; remove the record")
    span = (0 if loss_on == "all" else len(prompt), len(text))
    tokens, in_span = _encode_spans(text, [span], tokenizer)
    ends = [] if tokens[-1:] == [tokenizer.eos] else [int(tokenizer.eos or 0)]
    counted = [*[False] * len(tokenizer.leading), *in_span, *[True] * len(ends)]
    counted[0] = False
    return Sample([*tokenizer.leading, *tokens, *ends], counted)
