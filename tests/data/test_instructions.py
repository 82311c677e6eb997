"""Instruction data: the shapes of records, answers in chat templates, lengths, the split, and error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import SPECIAL_TOKENS, save_tokenizer, write_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.data.instructions import InstructionDataset, open_instructions, prepare_instructions
from shoal.data.instructions import prepare as prepare_module
from shoal.data.instructions.chat_tokenizer import ChatTokenizer, load_chat_tokenizer, with_added_tokens
from shoal.data.instructions.describe import describe_data, view_data
from shoal.data.instructions.records import Conversation, Record, detect_format, to_conversation
from shoal.data.instructions.spans import Sample, make_samples
from shoal.data.instructions.templates import TEMPLATES
from shoal.errors import UserError

pytest.importorskip("transformers")

QUESTION, ANSWER = "What is the capital of France?", "Paris."
USER, ASSISTANT = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
CHAT = [USER, ASSISTANT, {"role": "user", "content": "And of Italy?"}, {"role": "assistant", "content": "Rome."}]
THOUGHT = {"role": "assistant", "content": "<think>\nIt is Paris\n</think>\n\nParis."}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It", "parameters": {}}}]
WITH_TOOLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {model: load_chat_tokenizer(save_tokenizer(folder, model)) for model in SPECIAL_TOKENS}


def bytes_config(tmp_path: Path, **keys: Any) -> InstructionDataset:
    keys = {"tokenizer": "bytes", "max_seq_length": 64, "cache_dir": str(tmp_path / "cache"), **keys}
    return InstructionDataset.model_validate(keys)


def load(config: InstructionDataset) -> Any:
    tokenizer = load_chat_tokenizer(config.tokenizer, config.chat_template)
    prepare_instructions(config, tokenizer)
    return open_instructions(config, tokenizer)


def counted_texts(sample: Sample, tokenizer: ChatTokenizer) -> list[str]:
    """Returns the runs of counted tokens as text."""
    runs: list[list[int]] = [[]]
    for token, counts in zip(sample.tokens, sample.counted, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def answers(model: str, tokenizers: dict[str, ChatTokenizer], messages: Any, tools: Any = None) -> list[list[str]]:
    fields = {"messages": messages, "tools": tools}
    conversation = to_conversation(Record("a.jsonl, line 1", fields), "messages", as_chat=True)
    made = make_samples(conversation, tokenizers[model], "answers")
    return [counted_texts(sample, tokenizers[model]) for sample in made]


def assert_refused(message: str, action: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), caught.value


def test_every_answer_counts_with_the_token_that_ends_it(tokenizers: dict[str, ChatTokenizer]) -> None:
    assert answers("llama31", tokenizers, CHAT) == [["Paris.<|eot_id|>", "Rome.<|eot_id|>"]]
    assert answers("gemma", tokenizers, CHAT) == [["Paris.<end_of_turn>", "Rome.<end_of_turn>"]]
    assert answers("mistral", tokenizers, CHAT) == [[" Paris.</s>", " Rome.</s>"]]
    assert answers("qwen3", tokenizers, CHAT[:2]) == [["<think>\n\n</think>\n\nParis.<|im_end|>"]]
    trailing = [*CHAT, {"role": "user", "content": "Thanks"}]
    assert answers("llama31", tokenizers, trailing) == answers("llama31", tokenizers, CHAT)


def test_answers_with_tools(tokenizers: dict[str, ChatTokenizer]) -> None:
    call = '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'
    assert answers("llama31", tokenizers, WITH_TOOLS, TOOLS) == [[call, "It is sunny.<|eot_id|>"]]
    ((first, second),) = answers("mistral", tokenizers, WITH_TOOLS, TOOLS)
    assert first.startswith("[TOOL_CALLS] [")
    assert first.endswith("]</s>")
    assert '"arguments": {"city": "Rome"}' in first
    assert second == " It is sunny.</s>"
    # Mistral shows the tools before the last question only, so a later answer sees another text before it.
    later = [*WITH_TOOLS, {"role": "user", "content": "And in Paris?"}, ASSISTANT]
    assert answers("mistral", tokenizers, later, json.dumps(TOOLS)) == [[first, second], [" Paris.</s>"]]


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_for_each_answer(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    messages = [USER, THOUGHT, *CHAT[2:]]
    assert answers("qwen3", tokenizers, messages) == [
        ["<think>\nIt is Paris\n</think>\n\nParis.<|im_end|>"],
        ["<think>\n\n</think>\n\nRome.<|im_end|>"],
    ]
    first, second = make_samples(Conversation("", messages), tokenizers["qwen3"], "answers")
    assert "It is Paris" in tokenizers["qwen3"].decode(first.tokens)
    assert "It is Paris" not in tokenizers["qwen3"].decode(second.tokens)  # as when the model is used
    (everything,) = make_samples(Conversation("", messages), tokenizers["qwen3"], "all")
    assert everything.tokens == second.tokens
    assert everything.counted == [False] + [True] * (len(everything.tokens) - 1)


def test_a_template_in_which_answers_cannot_be_found_is_refused(tokenizers: dict[str, ChatTokenizer]) -> None:
    message = "dataset.chat_template of '.*rewriting': a.jsonl, line 1: the text before answer 1 is not the beginning"
    assert_refused(message, lambda: answers("rewriting", tokenizers, CHAT))
    refused = "a.jsonl, line 1: the chat template of '.*gemma' refuses it: .*System role not supported; correct"
    assert_refused(refused, lambda: answers("gemma", tokenizers, [{"role": "system", "content": "x"}, *CHAT]))
    assert_refused("line 1: no assistant turn after a question", lambda: answers("gemma", tokenizers, [USER]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_by_name(name: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    data = load(bytes_config(tmp_path, train_file=file, chat_template=name, max_seq_length=512))
    tokenizer = load_chat_tokenizer("bytes", name)
    tokens, counted = data.samples("train").tokens(0)
    first, second = counted_texts(Sample(tokens.tolist(), counted.tolist()), tokenizer)
    assert first.strip().startswith("Paris.")
    assert second.strip().startswith("Rome.")
    ends = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>\n"}
    assert first.endswith(ends.get(name, "\0"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_by_name_refuse_tools_and_tool_calls(name: str, tokenizers: dict[str, ChatTokenizer]) -> None:
    """A call that is left out would be learnt as an empty answer, or as the word None."""
    by_name = {name: load_chat_tokenizer(tokenizers["qwen3"].name, name)}

    def refused(what: str, messages: Any, tools: Any = None) -> None:
        message = f"a.jsonl, line 1: the chat template of .* {name} writes no {what}"
        assert_refused(message, lambda: answers(name, by_name, messages, tools))

    for content in ("", None):
        refused("tool calls", [WITH_TOOLS[0], {**WITH_TOOLS[1], "content": content}])
    refused("tools", CHAT, TOOLS)
    assert answers(name, by_name, CHAT)


def test_contents_that_are_lists_of_texts_are_joined(tokenizers: dict[str, ChatTokenizer]) -> None:
    def in_parts(message: dict[str, Any]) -> dict[str, Any]:
        head, tail = message["content"][:3], message["content"][3:]
        return {**message, "content": [{"type": "text", "text": head}, tail]}

    for model in ("llama31", "qwen3", "gemma", "mistral"):
        assert answers(model, tokenizers, [*map(in_parts, CHAT)]) == answers(model, tokenizers, CHAT)
    image = {**USER, "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": QUESTION}]}
    message = r"a.jsonl, line 1: message 1 \(user\) has a part 'image' that is no text; remove the part or the record"
    assert_refused(message, lambda: answers("qwen3", tokenizers, [image, ASSISTANT]))
    empty = {**USER, "content": [{"type": "text", "text": None}]}
    assert_refused("has a part of type text without a text", lambda: answers("qwen3", tokenizers, [empty, ASSISTANT]))
    human = {**USER, "role": "human"}
    assert_refused(
        "has the role 'human', which is ShareGPT's word; write 'user'",
        lambda: answers("qwen3", tokenizers, [human, ASSISTANT]),
    )
    for role, meant in (("usr", "user"), ("User", "user"), ("asistant", "assistant")):
        misspelt = [{**USER, "role": role}, ASSISTANT]
        refusal = f"a.jsonl, line 1: message 1 has the role {role!r}, which is none; write {meant!r}"
        assert_refused(refusal, lambda misspelt=misspelt: answers("qwen3", tokenizers, misspelt))
    answers("qwen3", tokenizers, [{**USER, "role": "narrator"}, USER, ASSISTANT])  # of a template of one's own


def test_a_template_that_ends_no_answer_is_recognised(tokenizers: dict[str, ChatTokenizer]) -> None:
    """The tokenizer must know the token that ends it; a blank may come before."""
    for model in ("llama31", "qwen3", "gemma", "mistral"):
        assert tokenizers[model].unended_answer is None

    def after(model: str, template: str) -> str | None:
        return load_chat_tokenizer(tokenizers[model].name, template).unended_answer

    fitting = {"chatml": "qwen3", "llama3": "llama31", "gemma": "gemma", "mistral": "mistral", "alpaca": "qwen3"}
    assert {name: after(fitting[name], name) for name in TEMPLATES} == dict.fromkeys(TEMPLATES)
    turn = "{% for m in messages %}{{ m.role + ': ' + m.content + END }}{% endfor %}"
    assert after("qwen3", turn.replace("END", "'\\n\\n'")) == "\n\n"
    assert after("qwen3", turn.replace("END", "''")) == ""
    assert after("qwen3", turn.replace("END", "' ' + eos_token")) is None
    assert after("qwen3", "gemma") == "<end_of_turn>\n"
    assert after("qwen3", "{{ raise_exception('no') }}") is None
    assert load_chat_tokenizer("bytes").unended_answer is None  # without a template the end-of-text token follows


def test_a_template_that_asks_for_today_gets_one_date(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y %H:%M:%S') }} {% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}{% endif %}"
    file = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT[:2]}])
    tokenizer = load_chat_tokenizer("bytes", template)
    assert tokenizer.render(CHAT[:1]) == f"26 Jul 2024 00:00:00 {QUESTION}"
    data = load(bytes_config(tmp_path, train_file=file, chat_template=template))
    assert describe_data(data, tokenizer).endswith("today's date in the template: 2024-07-26")
    assert view_data(data, tokenizer, 1).facts["template"].endswith("today's date in the template: 2024-07-26")
    defined = load_chat_tokenizer(
        "bytes", "\n {% if strftime_now is defined %}{{ strftime_now(format='%-d.%m') }}{% endif %}"
    )
    assert defined.render(CHAT) == "\n26.07"
    assert "2024" in tokenizer.identity
    assert "2024" not in load_chat_tokenizer("bytes", "chatml").identity


def test_a_tokenizer_with_several_templates(tmp_path: Path) -> None:
    """`default` is used, and `tool_use` for records with tools."""
    from transformers import AutoTokenizer

    turn = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    turn += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    several = {name: f"{name} {turn}" for name in ("default", "tool_use", "rag")}

    def folder_with(*names: str) -> str:
        wrapped = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path, "qwen3"))
        wrapped.chat_template = {name: several[name] for name in names}
        wrapped.save_pretrained(tmp_path / "".join(names))
        return str(tmp_path / "".join(names))

    folder = folder_with("default", "tool_use", "rag")
    for tokenizer in (load_chat_tokenizer(folder), with_added_tokens(load_chat_tokenizer(folder), ["<fox>"])):
        assert tokenizer.render(CHAT).startswith("default user:")
        assert tokenizer.render(CHAT, TOOLS).startswith("tool_use user:")
    assert load_chat_tokenizer(folder, "rag").render(CHAT, TOOLS).startswith("rag user:")
    folder = folder_with("rag", "tool_use")
    message = "dataset.tokenizer = .*: it has the chat templates '.*', '.*', and none is the default; name one in datas"
    assert_refused(message, lambda: load_chat_tokenizer(folder))
    assert load_chat_tokenizer(folder, "rag").render(CHAT).startswith("rag user:")


ALPACA = {"instruction": QUESTION, "input": "", "output": ANSWER}
SHAPES: dict[str, dict[str, Any]] = {
    "text": {"text": "Paris is the capital."},
    "alpaca": ALPACA,
    "prompt_completion": {"prompt": QUESTION, "completion": ANSWER},
    "messages": {"messages": CHAT[:2]},
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_records(shape: str, tokenizers: dict[str, ChatTokenizer]) -> None:
    record, tokenizer = Record("here", SHAPES[shape]), tokenizers["llama31"]
    assert detect_format(record) == shape
    (sample,) = make_samples(to_conversation(record, shape, as_chat=True), tokenizer, "answers")
    text, (counted,) = tokenizer.decode(sample.tokens), counted_texts(sample, tokenizer)
    if shape == "text":
        assert text == "Paris is the capital.<|eot_id|>"
        assert counted == text.removeprefix(tokenizer.decode(sample.tokens[:1]))
    elif shape == "prompt_completion":
        assert (text, counted) == (f"{QUESTION}{ANSWER}<|eot_id|>", f"{ANSWER}<|eot_id|>")
    else:
        assert text.endswith(f"{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{counted}")
        assert counted == f"{ANSWER}<|eot_id|>"


def test_only_the_completion_counts_if_both_are_messages(tokenizers: dict[str, ChatTokenizer]) -> None:
    record = Record("here", {"prompt": CHAT[:3], "completion": CHAT[3:]})
    conversation = to_conversation(record, "prompt_completion", as_chat=True)
    (sample,) = make_samples(conversation, tokenizers["llama31"], "answers")
    assert counted_texts(sample, tokenizers["llama31"]) == ["Rome.<|eot_id|>"]
    assert "Paris." in tokenizers["llama31"].decode(sample.tokens)


def test_a_system_text_beside_the_turns(tokenizers: dict[str, ChatTokenizer]) -> None:
    for shape in ("alpaca", "sharegpt"):
        record = Record("here", {**SHAPES[shape], "system": "Be brief."})
        conversation = to_conversation(record, shape, as_chat=True)
        assert conversation.messages is not None
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
        (sample,) = make_samples(conversation, tokenizers["llama31"], "answers")
        assert "Be brief.<|eot_id|>" in tokenizers["llama31"].decode(sample.tokens)


def test_alpaca_records_without_a_chat_template() -> None:
    tokenizer = load_chat_tokenizer("bytes")
    record = Record("here", {**ALPACA, "input": "a map"})
    (sample,) = make_samples(to_conversation(record, "alpaca", as_chat=False), tokenizer, "answers")
    assert counted_texts(sample, tokenizer) == ["Paris.\0"]
    assert f"### Instruction:\n{QUESTION}\n\n### Input:\na map\n\n### Response:\n" in tokenizer.decode(sample.tokens)
    assert "paired with an input" in tokenizer.decode(sample.tokens)
    record = Record("here", {**ALPACA, "system": "Be brief."})
    (sample,) = make_samples(to_conversation(record, "alpaca", as_chat=False), tokenizer, "answers")
    assert counted_texts(sample, tokenizer) == ["Paris.\0"]
    assert tokenizer.decode(sample.tokens).startswith("Be brief.\n\nBelow is an instruction")


def test_a_token_across_the_border_counts(tokenizers: dict[str, ChatTokenizer]) -> None:
    """The tokenizer has a token " is": with the blank in the prompt, it can only be learnt as a whole."""
    tokenizer = tokenizers["qwen3"]
    conversation = Conversation("", prompt="Paris ", completion="is the capital")
    (sample,) = make_samples(conversation, tokenizer, "answers")
    assert counted_texts(sample, tokenizer) == [" is the capital<|im_end|>"]


def test_a_special_token_that_takes_the_white_space_of_an_answer_does_not_count(tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    wrapped = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path, "qwen3", template=False))
    marks = [AddedToken(f"<|{role}|>", rstrip=True, special=True) for role in ("user", "assistant", "end")]
    wrapped.add_special_tokens({"additional_special_tokens": marks})
    wrapped.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    phi = {"phi": ChatTokenizer("phi", wrapped)}
    turns = [USER, {**ASSISTANT, "content": "\n Paris."}]
    assert answers("phi", phi, turns * 2) == [["Paris.<|end|>", "Paris.<|end|>"]]
    (plain,) = make_samples(Conversation("", prompt="<|assistant|>", completion=" Rome"), phi["phi"], "answers")
    assert counted_texts(plain, phi["phi"]) == ["Rome<|im_end|>"]


def test_other_files_are_read_by_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.csv").write_text("prompt,completion\nTwo,three\nFour,five\n")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "One", "completion": "two"}]))
    data = load(bytes_config(tmp_path, train_file=[str(tmp_path / "a.csv"), str(tmp_path / "b.json")]))
    texts = [bytes(data.train[i]["input_ids"].tolist()) for i in range(3)]
    assert texts == [b"Twothree\0", b"Fourfive\0", b"Onetwo\0"]


def test_cells_of_a_table_that_read_like_no_value_are_texts(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "a.csv").write_text("instruction,input,output\n1,,NA\nb,,null\nc,None,nan\n")
    data = load(bytes_config(tmp_path, train_file=str(tmp_path / "a.csv"), max_seq_length=512))
    texts = [bytes(data.train[i]["input_ids"].tolist()).decode() for i in range(3)]
    assert [text.rpartition("\n")[2] for text in texts] == ["NA\0", "null\0", "nan\0"]
    assert ["### Input:" in text for text in texts] == [False, False, True]


def test_a_list_after_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([SHAPES["text"]] * 2), encoding="utf-8-sig")
    assert len(load(bytes_config(tmp_path, train_file=str(tmp_path / "a.json"))).train) == 2


def test_labels_are_the_next_tokens_that_count(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}])
    for loss_on, counted in (("answers", b"cd\0"), ("all", b"bcd\0")):
        sample = load(bytes_config(tmp_path, train_file=file, loss_on=loss_on)).train[0]
        assert bytes(sample["input_ids"].tolist()) == b"abcd\0"
        labels = sample["labels"].tolist()
        assert labels == [-100] * (4 - len(counted)) + [*counted, -100]


def test_samples_that_are_too_long(tmp_path: Path) -> None:
    records = [{"prompt": "p" * 4, "completion": "abcdefgh"}, {"prompt": "p", "completion": "ok"}]
    file = write_lines(tmp_path / "a.jsonl", records)
    expected = {"truncate": [b"ppppab", b"pok\0"], "drop": [b"pok\0"], "split": [b"ppppab", b"cdefgh", b"pok\0"]}
    for policy, texts in expected.items():
        data = load(bytes_config(tmp_path, train_file=file, too_long=policy, max_seq_length=6))
        assert [bytes(data.train[i]["input_ids"].tolist()) for i in range(len(data.train))] == texts
        (summary,) = data.summaries("train")
        counts = [summary[key] for key in ("records", "samples", "truncated", "dropped", "split", "longest")]
        assert counts == [2, len(texts), policy == "truncate", policy == "drop", policy == "split", 13]
    refused = bytes_config(tmp_path, train_file=file, max_seq_length=4)
    assert_refused(
        r"max_seq_length = 4: .*a.jsonl, line 1 has no counted token left after trunc", lambda: load(refused)
    )
    nothing = bytes_config(tmp_path, train_file=file, max_seq_length=2, too_long="drop")
    assert_refused(
        r"a.jsonl: no sample is left \(all 2 samples were too long\); raise dataset.max_",
        lambda: load(nothing),
    )
    few = bytes_config(tmp_path, train_file=file, eval_fraction=1e-9)
    assert_refused(
        r"dataset.eval_fraction = 1e-09: no record of .*a.jsonl is held out for evaluation; raise it", lambda: load(few)
    )


def test_records_are_held_out_by_their_contents(tmp_path: Path) -> None:
    records = [{"text": f"record {i % 150}"} for i in range(300)]
    file = write_lines(tmp_path / "a.jsonl", records)
    other = write_lines(tmp_path / "b.jsonl", [*reversed(records), {"text": "one more"}])

    def sides(path: str) -> tuple[set[str], set[str]]:
        data = load(bytes_config(tmp_path, train_file=path, eval_fraction=0.2))
        return tuple(
            {str(bytes(side[i]["input_ids"].tolist())) for i in range(len(side))}
            for side in (data.train, data.evaluation)
        )  # type: ignore[return-value]

    train, held_out = sides(file)
    assert not train & held_out
    assert 15 < len(held_out) < 45
    assert len(train | held_out) == 150
    assert sides(other)[1] - held_out <= {str(b"one more\0")}


def test_preparing_is_cached_by_content_and_equal_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(40)]
    first = write_lines(tmp_path / "a.jsonl", records)
    monkeypatch.setattr(prepare_module, "_CHUNK", 8)
    data = load(bytes_config(tmp_path, train_file=first, preprocessing_num_workers=1))
    (kept,) = data.sets("train")
    parallel = bytes_config(tmp_path, train_file=first, cache_dir=str(tmp_path / "b"), preprocessing_num_workers=2)
    (forked,) = load(parallel).sets("train")
    assert kept.stem.name == forked.stem.name
    for part in ("tokens", "counted", "bounds"):
        assert np.array_equal(getattr(kept, part), getattr(forked, part))
    written = kept.stem.with_name(f"{kept.stem.name}.tokens.npy")
    times = written.stat().st_mtime_ns
    copy = write_lines(tmp_path / "copy.jsonl", records)
    assert load(bytes_config(tmp_path, train_file=copy)).sets("train")[0].stem == kept.stem
    assert written.stat().st_mtime_ns == times
    written.write_bytes(written.read_bytes()[:-50])  # a damaged file is written again
    assert len(load(bytes_config(tmp_path, train_file=first)).train[39]["input_ids"]) == 21
    changed = write_lines(tmp_path / "a.jsonl", records[:-1])
    assert len(load(bytes_config(tmp_path, train_file=changed)).train) == 39


def test_an_error_in_a_worker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"prompt": "q", "completion": "a"}] * 30 + [{"prompt": "q", "completion": 3}]
    monkeypatch.setattr(prepare_module, "_CHUNK", 8)
    config = bytes_config(tmp_path, train_file=write_lines(tmp_path / "a.jsonl", records), preprocessing_num_workers=2)
    assert_refused("a.jsonl, line 31: completion is a int, but a text is needed", lambda: load(config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"dataset.train_file: .*bad.jsonl is empty; it needs one JSON object in each line"),
        ("\n\n", r"bad.jsonl is empty"),
        ('{"text": "a"}\n{"text": \n', r"bad.jsonl, line 2: the line is not JSON \(Expecting value in column 9\)"),
        ('{"text": "a"}\n[1]\n', r"bad.jsonl, line 2: a list where an object with keys is needed"),
        ('{"text": "a"}\n{"prompt": "b"}\n', r"dataset.format = text: .*bad.jsonl, line 2 has no key 'text'"),
        ('{"question": "a"}\n', r"dataset.format = auto: .*bad.jsonl, line 1 has the keys question; rename them"),
        ('{"text": ""}\n', r"bad.jsonl, line 1: its text is empty; remove the record"),
        ('{"text": "a"}\n{"text": "a \\ud83d b"}\n', r"bad.jsonl, line 2: '\\ud83d' is half a character"),
        ('{"messages": []}\n', r"line 1: its messages are not a list with at least one message"),
        ('{"messages": [{"role": "user"}]}\n', r"line 1: message 1 \(user\) has no content"),
        ('{"messages": [{"content": "a"}]}\n', r"line 1: message 1 has no role"),
        ('{"conversations": [{"from": "bot", "value": "a"}]}\n', r"line 1: from = 'bot' is not one of human, user"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "[1]"}\n', r"tools is not a list of objects"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
            r"no chat template",
        ),
    ],
)
def test_bad_records_are_refused_with_file_and_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    assert_refused(message, lambda: load(bytes_config(tmp_path, train_file=str(tmp_path / "bad.jsonl"))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "function"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGE = st.fixed_dictionaries({"role": ROLES}, optional={"content": JSON, "tool_calls": JSON})
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "messages": JSON | st.lists(MESSAGE, max_size=3),
        "conversations": JSON,
        "tools": JSON,
        **dict.fromkeys(("system", "instruction", "input", "output", "prompt", "completion", "text"), JSON),
    },
)


@settings(max_examples=60)
@example(fields={"conversations": "ab", "system": "be kind"}, loss_on="all")
@given(fields=FIELDS, loss_on=st.sampled_from(["answers", "all"]))
def test_no_record_is_more_than_one_line_of_trouble(
    fields: dict[str, Any], loss_on: str, tokenizers: dict[str, ChatTokenizer]
) -> None:
    trouble = ""
    try:
        record = Record("a.jsonl, line 1", fields)
        conversation = to_conversation(record, detect_format(record), as_chat=True)
        made = make_samples(conversation, tokenizers["qwen3"], loss_on)
        assert all(len(sample.tokens) == len(sample.counted) for sample in made)
    except UserError as error:
        trouble = str(error)
    assert not trouble or "a.jsonl, line 1" in trouble
    assert "\n" not in trouble


def test_bad_values_are_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [SHAPES["text"]])

    def refused(message: str, **keys: Any) -> None:
        assert_refused(message, lambda: load(bytes_config(tmp_path, **{"train_file": file, **keys})))

    refused("dataset.train_file = './b.jsonl': no such file", train_file="./b.jsonl")
    refused("dataset.train_file = 'b.jsonl': no such file", train_file="b.jsonl")
    (tmp_path / "a.txt").write_text("text")
    refused("a.txt': records are read from .json", train_file=str(tmp_path / "a.txt"))
    refused("train_file: split has no effect with the file", train_file=[{"file": file, "split": "test"}])
    refused("dataset.chat_template = 'chatlm': neither a template's name", chat_template="chatlm")
    refused("dataset.tokenizer is missing", tokenizer=None)
    refused("dataset.tokenizer = 'x/tokenizer.json': this file does not exist", tokenizer="x/tokenizer.json")
    refused("dataset.train_file = .*the list is empty", train_file=[])
    refused("train_file: split has no effect with the file", train_file={"file": file, "split": "test"})
    refused("some entries have a weight and others have none", train_file=[{"file": file, "weight": 1.0}, file])
    refused("weights have no effect in an evaluation", eval_file=[{"file": file, "weight": 1.0}])
    refused("dataset.eval_fraction = 0.1: no effect with dataset.eval_file", eval_file=file, eval_fraction=0.1)
    refused("dataset.pad_to_max = true: packs always have", packing=True, pad_to_max=True)
    refused("dataset.packing_seed = 3: no effect without", packing_seed=3)


def test_a_tokenizer_without_padding_or_end(tmp_path: Path, tokenizers: dict[str, ChatTokenizer]) -> None:
    """Padding is never seen, so that any token serves; without a token that ends answers none would end."""
    assert tokenizers["llama31"].filler == tokenizers["llama31"].eos
    folder = save_tokenizer(tmp_path, "qwen3", template=False)
    config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    assert_refused("qwen3': it has no end-of-text token", lambda: load_chat_tokenizer(folder))


def test_a_folder_without_a_tokenizer_is_called_one(tmp_path: Path) -> None:
    """As of a base that somebody has saved without its tokenizer."""
    (tmp_path / "config.json").write_text("{}")
    assert_refused("the folder has no tokenizer", lambda: load_chat_tokenizer(str(tmp_path)))
