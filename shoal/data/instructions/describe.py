"""Describes prepared instruction data: in a line for the report at step 1, and in full for `shoal data`."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shoal.data.instructions.chat_tokenizer import ChatTokenizer
from shoal.data.instructions.packing import pack
from shoal.data.instructions.prepare import Prepared
from shoal.data.instructions.samples import Packs
from shoal.data.instructions.templates import TEMPLATE_DATE
from shoal.data.view import DataView

_BARS = 12


def describe_data(prepared: Prepared, tokenizer: ChatTokenizer) -> str:
    """Returns what an epoch of the training data has, and what was done to the records."""
    summaries = prepared.summaries("train")
    samples, tokens, counted = _epoch_totals(prepared)
    packs = f"packs, {prepared.train.fill():.1%} full, of " if isinstance(prepared.train, Packs) else ""
    parts = [f"{packs}{samples:,} samples, {tokens:,} tokens, {counted:,} counted", *_what_was_done(summaries)]
    shares = _shares(prepared) if prepared.config.is_mixture else []
    return "; ".join([", ".join(parts), ", ".join(_settings(prepared, tokenizer)), *shares])


def data_warnings(prepared: Prepared, tokenizer: ChatTokenizer) -> list[str]:
    """Returns warnings if the chat template has markers that the tokenizer does not know, or does not end answers."""
    if not any(one["rendered"] for one in prepared.summaries("train")):
        return []
    given = prepared.config.chat_template
    key = "dataset.chat_template" if given is None else f"dataset.chat_template = {_template_name(given)}"
    warnings = []
    if split := tokenizer.split_markers:
        warnings.append(
            f"{key}: the tokenizer {tokenizer.name!r} splits {', '.join(split)} into pieces, because they are no "
            "tokens of its own, and the model has learnt nothing about them; use the template that belongs to the "
            "model, or one without such markers, such as alpaca"
        )
    if (after := tokenizer.unended_answer) is not None:
        warnings.append(
            f"{key}: no special token ends an answer (the template writes {after!r} after it), so that the model does "
            "not learn to stop; write {{ eos_token }} after answers in the template, or use one that ends them, such "
            "as alpaca"
        )
    return warnings


def _settings(prepared: Prepared, tokenizer: ChatTokenizer) -> list[str]:
    """Returns how records became samples."""
    config = prepared.config
    formats = dict.fromkeys(one["format"] for one in prepared.summaries("train"))
    settings = [f"format {', '.join(formats)}", f"loss on {config.loss_on}"]
    if config.chat_template is not None:
        settings.append(f"template {_template_name(config.chat_template)}")
    if any(one["rendered"] for one in prepared.summaries("train")):
        settings += _dates(tokenizer)
    if config.pad_to_max:
        settings.append(f"padded to {config.max_seq_length:,} tokens")
    return settings


def _dates(tokenizer: ChatTokenizer) -> list[str]:
    """Returns the date that the template writes, if it writes one."""
    return [f"today's date in the template: {TEMPLATE_DATE:%Y-%m-%d}"] if tokenizer.writes_date else []


def _template_name(chat_template: str) -> str:
    return "given as text" if "{" in chat_template else chat_template


def _epoch_totals(prepared: Prepared) -> tuple[int, int, int]:
    """Returns the samples, tokens and counted tokens of an epoch."""
    summaries, repeats = prepared.summaries("train"), prepared.repeats
    totals = (sum(s[key] * r for s, r in zip(summaries, repeats, strict=True)) for key in ("tokens", "counted"))
    return len(prepared.samples("train")), *(round(total) for total in totals)


def _what_was_done(summaries: list[dict[str, int]]) -> list[str]:
    totals = {key: sum(one[key] for one in summaries) for key in ("truncated", "dropped", "split", "divided")}
    done = [f"{totals[key]:,} {key}" for key in ("truncated", "dropped")]
    if totals["split"]:
        done.append(f"{totals['split']:,} split")
    if totals["divided"]:
        done.append(f"{totals['divided']:,} conversations made into several samples")
    return done


def _shares(prepared: Prepared) -> list[str]:
    """Returns the sets of a mixture with their shares of an epoch, and how often it has their samples."""
    weights = prepared.config.weights
    return [
        f"{one['name']} {weight / sum(weights):.1%} (each sample {repeat:.2f} times an epoch)"
        for one, weight, repeat in zip(prepared.summaries("train"), weights, prepared.repeats, strict=True)
    ]


def view_data(prepared: Prepared, tokenizer: ChatTokenizer, number: int) -> DataView:
    """Returns samples from all over each set in turn, as text, and figures about all."""
    config, summaries, samples = prepared.config, prepared.summaries("train"), prepared.samples("train")
    count, tokens, counted = _epoch_totals(prepared)
    lengths = samples.lengths()
    template = "none" if tokenizer.template is None else _template_name(config.chat_template or f"of {tokenizer.name}")
    facts = {
        "records": "; ".join(f"{one['records']:,} in {one['name']} ({one['format']})" for one in summaries),
        "template": ", ".join([template, *_dates(tokenizer)]),
        "samples": f"{count:,} an epoch",
        "tokens": f"{tokens:,} an epoch, {counted:,} of them counted ({counted / tokens:.1%})",
        "longest": f"{max(one['longest'] for one in summaries):,} tokens; max_seq_length {config.max_seq_length:,}",
        "too long": f"{', '.join(_what_was_done(summaries))} (too_long: {config.too_long})",
        "packing": _packing(prepared, lengths),
    }
    if config.is_mixture:
        facts["mixture"] = "; ".join(_shares(prepared))
    if evaluation := prepared.summaries("eval"):
        facts["evaluation"] = f"{evaluation[0]['samples']:,} samples, {evaluation[0]['counted']:,} counted tokens"
    sets = prepared.sets("train")
    places = _spread([len(one) for one in sets], number)
    shown = [_pieces(*sets[one].sample(index), tokenizer) for one, index in places]
    titles = []
    for one, index in places:
        length = int(sets[one].lengths()[index])
        may_be_cut = bool(summaries[one]["truncated"]) and length == config.max_seq_length
        name = f"sample {index}" + f" of {summaries[one]['name']}" * (len(sets) > 1)
        titles.append(f"{name}, {length:,} tokens" + ", probably truncated: dataset.max_seq_length" * may_be_cut)
    return DataView(shown, facts, _histogram(lengths), titles)


def _spread(sizes: list[int], number: int) -> list[tuple[int, int]]:
    """Returns so many (set, index) from sets of these sizes, all sets in turn, the indices far apart in each."""
    each = -(-number // len(sizes))
    turns = [
        (one, turn * size // min(each, size)) for turn in range(each) for one, size in enumerate(sizes) if turn < size
    ]
    return sorted(turns[:number])


def _packing(prepared: Prepared, lengths: NDArray[np.int64]) -> str:
    length = prepared.config.max_seq_length
    if isinstance(prepared.train, Packs):
        return f"on: {_packs(len(prepared.train), length)}, {prepared.train.fill():.1%} full"
    _, bounds = pack(lengths, length, prepared.config.packing_seed)
    number = len(bounds) - 1
    return f"off; it would make {_packs(number, length)}, {lengths.sum() / (number * length):.1%} full"


def _packs(number: int, length: int) -> str:
    return f"{number:,} pack{'s' * (number != 1)} of {length:,} tokens"


def _pieces(tokens: NDArray[np.int64], counted: NDArray[np.bool_], tokenizer: ChatTokenizer) -> list[tuple[str, bool]]:
    """Returns a sample as pieces of text: runs of tokens that count, or do not."""
    runs = groupby(zip(tokens.tolist(), counted.tolist(), strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in run]), bool(counts)) for counts, run in runs]


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Returns (shortest, longest, samples) of ranges of equal width."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _BARS))
    counts = np.bincount((lengths - low) // width)
    return [(low + i * width, min(low + (i + 1) * width - 1, high), int(count)) for i, count in enumerate(counts)]
