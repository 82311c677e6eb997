"""Reads records from JSON lines and Hugging Face datasets, and turns their five shapes into prompts and answers."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.data.hub import hub
from shoal.data.instructions.config import DataSource
from shoal.data.local_files import READERS, looks_like_path, near_names
from shoal.errors import UserError, one_line

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
"""The roles that templates of models know. A template of your own may know others, unless they are nearly these."""
_KEYS_BY_FORMAT = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The keys that a record of each format must have. `auto` takes the first format whose keys a record has."""

_CSV_OPTIONS = {"keep_default_na": False, "na_values": [""]}
"""Only an empty cell has no value: NA, null and None are texts, such as answers."""


@dataclass(frozen=True)
class Record:
    """A record with the place that it came from, for messages."""

    place: str
    """Such as `train.jsonl, line 7`."""
    fields: dict[str, Any]

    @property
    def fraction(self) -> float:
        """A number in [0, 1) that depends on the contents alone, by which records are held out."""
        text = json.dumps(self.fields, sort_keys=True, default=str)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / (1 << 64)


@dataclass(frozen=True)
class Conversation:
    """A record in the form that is rendered: messages for a chat template, or a plain prompt with its completion."""

    place: str
    messages: Sequence[dict[str, Any]] | None = None
    tools: Any = None
    prompt: str = ""
    completion: str = ""
    num_prompt_messages: int = 0
    """How many of the first messages are a prompt, whose assistant turns do not count."""


@dataclass(frozen=True)
class RecordFile:
    """An opened source of records."""

    name: str
    files: list[Path]
    """The files whose contents decide what the records are."""
    selection: str
    """Which part of the files is used."""
    read: Callable[[], Iterator[Record]]


def open_records(key: str, source: DataSource) -> RecordFile:
    """Opens a source; `key` is the config key that names it, for messages."""
    name = source.file
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if path.is_file() and (source.config or source.split != "train"):
        chosen = "config" if source.config else "split"
        raise UserError(f"{key}: {chosen} has no effect with the file {name!r}; leave it out")
    if path.is_file() and suffix in (".jsonl", ".ndjson", ".json"):
        return RecordFile(name, [path], "", lambda: _read_json(key, path))
    if path.is_file() and suffix not in READERS:
        raise UserError(f"{key} = {name!r}: records are read from {', '.join(READERS)}; convert the file")
    if not path.exists() and (looks_like_path(name) or suffix in {*READERS, ".txt"}):
        raise UserError(f"{key} = {name!r}: no such file{near_names(name)}; correct the path")
    with hub(key, name, "datasets", local=path.exists()) as datasets:
        if path.is_file():
            options = _CSV_OPTIONS if suffix == ".csv" else {}
            builder = datasets.load_dataset_builder(READERS[suffix], source.config, data_files=str(path), **options)
        else:
            builder = datasets.load_dataset_builder(str(path) if path.is_dir() else name, source.config)
        builder.download_and_prepare()
        try:
            data = builder.as_dataset(split=source.split)
        except ValueError as error:
            raise UserError(
                f"{key}: {name!r} has no split {source.split!r} ({one_line(error)}); give it as {{file: {name}, "
                "split: …}"
            ) from error
    files = [Path(file["filename"]) for file in data.cache_files]
    return RecordFile(
        name,
        files,
        source.split,
        lambda: (Record(f"{name}, row {number}", _without_none(row)) for number, row in enumerate(data, 1)),
    )


def _without_none(value: Any) -> Any:
    """Drops keys without a value: a table has a column for every key that any of its records has."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _read_json(key: str, path: Path) -> Iterator[Record]:
    """Yields the objects of a file of JSON lines, or of a JSON file with a list of objects."""
    count = 0
    with path.open("rb") as file:
        start = file.read(1 << 12).removeprefix(BOM_UTF8).lstrip()
    if path.suffix.lower() == ".json" and start.startswith(b"["):
        for number, fields in enumerate(_parse(key, path, path.read_bytes(), "it"), 1):
            yield _record(key, f"{path}, item {number}", fields)
            count += 1
    else:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield _record(key, place, _parse(key, place, line, "the line"))
                    count += 1
    if not count:
        raise UserError(f"{key}: {path} is empty; it needs one JSON object in each line")


def _parse(key: str, place: object, text: bytes, what: str) -> Any:
    text = text.strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        about: object = error
        if isinstance(error, json.JSONDecodeError) and b"\n" not in text:  # json would call it line 1
            about = f"{error.msg} in column {error.colno}"
        raise UserError(f"{key}: {place}: {what} is not JSON ({one_line(about, 100)}); correct it") from None


def _record(key: str, place: str, fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise UserError(f"{key}: {place}: a {type(fields).__name__} where an object with keys is needed; correct it")
    return Record(place, fields)


def detect_format(record: Record) -> str:
    """Returns the format of a record by its keys. Raises UserError if it has those of no format."""
    for name, keys in _KEYS_BY_FORMAT.items():
        if all(key in record.fields for key in keys):
            return name
    known = "; ".join(", ".join(keys) for keys in _KEYS_BY_FORMAT.values())
    raise UserError(
        f"dataset.format = auto: {record.place} has the keys {', '.join(record.fields) or 'none'}; rename them to "
        f"those of a known format ({known})"
    )


def to_conversation(record: Record, format: str, as_chat: bool) -> Conversation:
    """Returns a record as messages, or as a prompt and a completion.

    `as_chat` says whether there is a chat template: Alpaca records are then messages, and else a plain text.
    """
    fields, place = record.fields, record.place
    for key in _KEYS_BY_FORMAT[format]:
        if key not in fields:
            raise UserError(f"dataset.format = {format}: {place} has no key {key!r}; correct the record or the format")
    if format == "text":
        return Conversation(place, completion=_text(record, "text"))
    if format == "alpaca":
        return _from_alpaca(record, as_chat)
    if format == "prompt_completion":
        if isinstance(fields["prompt"], list) and isinstance(fields["completion"], list):
            prompt, completion = (_messages(record, fields[key]) for key in ("prompt", "completion"))
            return Conversation(place, prompt + completion, _tools(record), num_prompt_messages=len(prompt))
        return Conversation(place, prompt=_text(record, "prompt"), completion=_text(record, "completion"))
    if format == "messages":
        return Conversation(place, _messages(record, fields["messages"]), _tools(record))
    turns = fields["conversations"]
    if isinstance(turns, list) and all(isinstance(turn, dict) and "from" in turn and "value" in turn for turn in turns):
        turns = [{"role": _sharegpt_role(record, turn["from"]), "content": turn["value"]} for turn in turns]
    messages = _messages(record, turns)
    if fields.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    return Conversation(place, messages, _tools(record))


def _from_alpaca(record: Record, as_chat: bool) -> Conversation:
    """Returns messages, or the text in which the Alpaca data were first trained on."""
    instruction, answer = _text(record, "instruction"), _text(record, "output")
    given = _text(record, "input") if record.fields.get("input") else ""
    system = _text(record, "system") if record.fields.get("system") else ""
    if as_chat:
        question = f"{instruction}\n\n{given}" if given else instruction
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(record.place, messages)
    paired = ", paired with an input that provides further context" if given else ""
    context = f"### Input:\n{given}\n\n" if given else ""
    before = f"{system}\n\n" if system else ""
    prompt = (
        f"{before}Below is an instruction that describes a task{paired}. Write a response that appropriately completes "
        f"the request.\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n"
    )
    return Conversation(record.place, prompt=prompt, completion=answer)


def _text(record: Record, key: str) -> str:
    value = record.fields[key]
    if not isinstance(value, str):
        raise UserError(f"{record.place}: {key} is a {type(value).__name__}, but a text is needed; correct the record")
    return value


def _sharegpt_role(record: Record, name: Any) -> str:
    if not isinstance(name, str) or name not in _SHAREGPT_ROLES:
        raise UserError(f"{record.place}: from = {name!r:.100} is not one of {', '.join(_SHAREGPT_ROLES)}; rename it")
    return _SHAREGPT_ROLES[name]


def _tools(record: Record) -> Any:
    """Returns the tools of a record, which may be stored as a JSON text."""
    tools = record.fields.get("tools")
    if isinstance(tools, str):
        tools = _parse("tools", record.place, tools.encode(), "its value") if tools.strip() else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{record.place}: tools is not a list of objects; correct the record")
    return tools or None


def _messages(record: Record, messages: Any) -> list[dict[str, Any]]:
    """Checks messages, joins contents that are lists of texts, and parses arguments of tool calls that are stored as
    JSON texts, as OpenAI's are."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{record.place}: its messages are not a list with at least one message; correct the record")
    checked = []
    for number, message in enumerate(messages, 1):
        where = f"{record.place}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} has no role; give it role and content")
        if message["role"] in ("human", "gpt"):  # templates would write it as it is
            name = _SHAREGPT_ROLES[message["role"]]
            raise UserError(f"{where} has the role {message['role']!r}, which is ShareGPT's word; write {name!r}")
        if message["role"] not in _ROLES and (near := get_close_matches(message["role"].lower(), _ROLES, n=1)):
            raise UserError(f"{where} has the role {message['role']!r}, which is none; write {near[0]!r}")
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": _joined(content, f"{where} ({message['role']})")}
        elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise UserError(f"{where} ({message['role']}) has no content; give it a text")
        checked.append(_with_parsed_calls(message))
    return checked


def _joined(parts: list[Any], where: str) -> str:
    """Returns the text of a content that is a list of parts. Raises UserError for parts that are no texts, such as
    images: a template would write them as Python does, or leave them out."""
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise UserError(f"{where} has a part {kind!r:.50} that is no text; remove the part or the record")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f"{where} has a part of type text without a text; correct the record")
        texts.append(text)
    return "".join(texts)


def _with_parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            with suppress(ValueError):  # a text that is no JSON is rendered as it is
                call = {**call, "function": {**function, "arguments": json.loads(arguments)}}
        parsed.append(call)
    return {**message, "tool_calls": parsed}
