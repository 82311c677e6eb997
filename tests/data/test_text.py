import io
import json
import pickle
import sys
import time

import numpy as np
import pytest
from conftest import PATIENCE_SECONDS
from pool import start_process
from pydantic import ValidationError

from shoal.data import ByteTokenizer, TextDataset, load_tokenizer, open_text, prepare_text, token_cache
from shoal.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "text"


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with two documents of 40 and 24 bytes, and hidden files."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(range(1, 41)))
    (folder / "sub" / "b.txt").write_bytes(bytes(range(101, 125)))
    (folder / ".git").mkdir()
    for hidden in (".hidden", ".git/object"):
        (folder / hidden).write_text("not this")
    return folder


def text(files, **keys):
    return TextDataset(name="text", files=files if isinstance(files, list) else str(files), **keys)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


TOKENS = [*range(1, 41), 0, *range(101, 125), 0]


def test_windows_are_the_text_and_labels_the_next_tokens(folder):
    train, evaluation = open_text(text(folder, seq_length=8, eval_fraction=0))
    assert evaluation is None
    assert len(train) == 8
    for i, window in enumerate(train):
        assert window["input_ids"].tolist() == TOKENS[8 * i : 8 * i + 8]
        assert window["labels"].tolist() == TOKENS[8 * i + 1 : 8 * i + 9]
        assert str(window["labels"].dtype) == "torch.int64"
    assert train.tokens.dtype == np.uint8
    with pytest.raises(IndexError):
        train[8]


@pytest.mark.parametrize(("fraction", "every"), [(0.5, 2), (0.3, 3), (0.25, 4), (0.01, 100)])
def test_every_nth_window_is_held_out(folder, fraction, every):
    train, evaluation = open_text(text(folder, seq_length=4, eval_fraction=fraction))
    windows = [TOKENS[i : i + 4] for i in range(0, 64, 4)]
    assert [w["input_ids"].tolist() for w in evaluation] == windows[::every]
    assert [w["input_ids"].tolist() for w in train] == [w for i, w in enumerate(windows) if i % every]


def test_files_folders_and_globs_are_read_in_order_and_once(folder):
    def tokens(files):
        return open_text(text(files, seq_length=1, eval_fraction=0))[0].tokens.tolist()

    a, b = str(folder / "a.txt"), str(folder / "sub" / "b.txt")
    assert (
        tokens([a, b])
        == tokens(str(folder))
        == tokens(str(folder / "**" / "*.txt"))
        == tokens([a, str(folder)])
        == TOKENS
    )
    assert tokens([b, a]) == TOKENS[41:] + TOKENS[:41]


def test_a_document_larger_than_a_piece_stays_whole(folder, monkeypatch):
    monkeypatch.setattr("shoal.data.corpus._PIECE_BYTES", 16)
    content = "".join(f"line {i} äöü\n" for i in range(50)).encode()
    (folder / "c.txt").write_bytes(content)
    train, _ = open_text(text(folder / "c.txt", seq_length=1, eval_fraction=0))
    assert train.tokens.tobytes() == content + b"\0"


def test_the_standard_library_leaves_out_tests_and_packages(tmp_path, monkeypatch):
    kept = ["b.py", "a/z.py", "a/b.py"]
    for name in [*kept, "test/x.py", "a/tests/x.py", "site-packages/x.py", "dist-packages/x.py", "notes.txt"]:
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda key: str(tmp_path / "lib"))
    train, _ = open_text(TextDataset(seq_length=2))
    assert train.tokens.tobytes().split(b"\0") == [b"a/b.py", b"a/z.py", b"b.py", b""]


def test_the_standard_library_of_this_python():
    train, evaluation = open_text(TextDataset())
    assert len(train) > 10_000
    assert len(evaluation) == pytest.approx(len(train) / 99, rel=0.01)
    found = train.tokens.tobytes()
    assert b"class OrderedDict(dict)" in found
    assert "def" in ByteTokenizer().decode(train.tokens[:100_000])


def test_pickling_sends_no_tokens_and_opens_again(folder):
    (folder / "a.txt").write_bytes(b"long" * 1000)
    train, _ = open_text(text(folder, seq_length=8))
    assert len(pickle.dumps(train)) < 1000
    assert pickle.loads(pickle.dumps(train))[1]["labels"].tolist() == train[1]["labels"].tolist()


def test_nothing_is_tokenised_twice(folder, monkeypatch):
    written = []
    write = token_cache._write_tokens
    monkeypatch.setattr(token_cache, "_write_tokens", lambda *args: written.append(1) or write(*args))
    prepare_text(text(folder, seq_length=8))
    prepare_text(text(folder, seq_length=4, eval_fraction=0.1))
    open_text(text(folder, seq_length=8))
    assert len(written) == 1
    (folder / "a.txt").write_bytes(b"changed")
    prepare_text(text(folder))
    assert len(written) == 2
    assert open_text(text(folder, seq_length=2))[0].tokens.tobytes().startswith(b"changed\0")


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "unfinished temporary file"])
def test_a_damaged_cache_is_prepared_again(folder, cache, damage):
    config = text(folder, seq_length=8, eval_fraction=0)
    prepare_text(config)
    [path] = cache.glob("*.npy")
    whole = path.read_bytes()
    if damage == "unfinished temporary file":
        path.rename(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").write_bytes(whole[:50])
    else:
        path.write_bytes({"truncated": whole[:-5], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"dataset.cache_dir: .* missing or damaged"):
        open_text(config)
    prepare_text(config)
    assert path.read_bytes() == whole
    assert open_text(config)[0].tokens.tolist() == TOKENS


def test_a_failed_preparation_publishes_nothing(folder, cache, monkeypatch):
    def fail(self, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare_text(text(folder))
    assert not [*cache.glob("*.npy"), *cache.glob("*.json")]
    assert open_text(text(folder, seq_length=8, eval_fraction=0))[0].tokens.tolist() == TOKENS


def prepare_slowly(folder, log):
    encode = ByteTokenizer.encode

    def slow(self, text):
        with log.open("a") as file:
            file.write("encoded\n")
        time.sleep(0.5)
        return encode(self, text)

    ByteTokenizer.encode = slow
    config = text(folder, seq_length=8, eval_fraction=0)
    prepare_text(config)
    print(open_text(config)[0].tokens.tolist())


def test_two_processes_prepare_the_text_once(folder, tmp_path):
    log, outputs = tmp_path / "log", [tmp_path / "a", tmp_path / "b"]
    processes = [start_process(prepare_slowly, folder, log, out=out) for out in outputs]
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert [json.loads(out.read_text()) for out in outputs] == [TOKENS, TOKENS]
    assert log.read_text().count("encoded") == 2  # the two documents, once


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sun and the moon and the sea"] * 5, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file(folder, tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    assert tokenizer.eos == 0
    assert tokenizer.decode(tokenizer.encode("the sun, the möon")) == "the sun, the möon"
    assert len(tokenizer.encode("the moon")) < len("the moon")
    for name in ("x.txt", "y.txt"):
        (folder / name).write_text("the sea and the moon")
    files = [str(folder / "x.txt"), str(folder / "y.txt")]
    train, _ = open_text(text(files, tokenizer=str(tokenizer_file), seq_length=2, eval_fraction=0))
    one = [*tokenizer.encode("the sea and the moon").tolist(), 0]
    assert train.tokens.tolist() == one * 2
    assert train.tokens.dtype == np.uint16
    assert max(one) < tokenizer.vocab_size


def test_the_bytes_tokenizer_reads_files_that_are_not_utf8(folder, tokenizer_file):
    (folder / "bad.txt").write_bytes(b"\xff\xfe" * 20)
    open_text(text(folder / "bad.txt", seq_length=4))
    with pytest.raises(UserError, match=r"dataset.tokenizer: .*bad.txt is not UTF-8") as error:
        open_text(text(folder, tokenizer=str(tokenizer_file)))
    one_line(error)


@pytest.fixture
def hf(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens on this port
    local = tmp_path / "local"
    local.mkdir()
    return local


def write_rows(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(row["text"] + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_local_hugging_face_folder(hf, kind):
    write_rows(hf / f"train.{kind}", [{"text": "first row"}, {"text": ""}, {"text": "second"}])
    config = TextDataset(name=str(hf), seq_length=3)
    train, evaluation = open_text(config)
    assert train.tokens.tobytes() == b"first row\0second\0"
    assert evaluation[0]["input_ids"].tolist() == list(b"fir")


def test_a_validation_split_is_used_for_evaluation(hf):
    write_rows(hf / "train.jsonl", [{"body": "train", "n": 1}])
    write_rows(hf / "validation.jsonl", [{"body": "validate", "n": 2}])
    keys = {"name": str(hf), "text_column": "body", "seq_length": 4}
    train, evaluation = open_text(TextDataset(**keys))
    assert (train.tokens.tobytes(), evaluation.tokens.tobytes()) == (b"train\0", b"validate\0")
    assert open_text(TextDataset(**keys, eval_fraction=0))[1] is None
    assert open_text(TextDataset(**keys, split="validation", eval_fraction=0))[0].tokens.tobytes() == b"validate\0"
    both = open_text(TextDataset(**{**keys, "seq_length": 2}, split="validation"))
    assert [(windows.path, windows.held_out, windows.holdout_interval) for windows in both] == [
        (both[0].path, False, 100),
        (both[0].path, True, 100),
    ]
    with pytest.raises(
        UserError, match=r"dataset.text_column = 'n': this is not a text column; use one of body"
    ) as error:
        open_text(TextDataset(name=str(hf), text_column="n"))
    one_line(error)
    with pytest.raises(UserError, match=r"dataset.split = 'nope': .*nope.*train") as error:
        open_text(TextDataset(**keys, split="nope"))
    one_line(error)
    with pytest.raises(UserError, match=r"dataset.name = .*: it cannot be loaded: .*other.*default") as error:
        open_text(TextDataset(**keys, config="other"))
    one_line(error)


def test_the_hub_out_of_reach_is_told_at_once(hf, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(
        UserError, match=r"dataset.name = 'wikitext': no such folder is here, and the Hugging Face Hub cannot be"
    ) as error:
        open_text(TextDataset(name="wikitext"))
    one_line(error)
    with pytest.raises(
        UserError, match=r"dataset.tokenizer = 'gpt2': no such folder is here, and the Hugging Face Hub"
    ) as error:
        open_text(TextDataset(tokenizer="gpt2"))
    one_line(error)
    assert sum(waited) < 15


JSON_LINES = '{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n'


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("a.jsonl", JSON_LINES, True),
        ("a.txt", JSON_LINES, True),
        ("a.jsonl", '{"text": "a file with one line"}', True),
        ("a.parquet", "PAR1", True),
        ("package.json", '{"name": "a file of a source tree"}', False),
        ("a.py", "{}\nset()\n", False),
        ("a.json", '{\n "name": "pretty"\n}\n', False),
        ("a.txt", "[1]\n[2]\n", False),
    ],
)
def test_records_are_no_text(tmp_path, name, content, refused):
    (tmp_path / name).write_text(content)
    if not refused:
        prepare_text(text(tmp_path / name))
        return
    with pytest.raises(
        UserError, match=r"dataset\.files: .* a model would learn their syntax; set dataset\.name"
    ) as error:
        prepare_text(text(tmp_path / name))
    if "json" in name:
        assert "dataset.text_column to one of text" in one_line(error)


def test_a_path_is_not_looked_up_on_the_hub(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"is a file; for text set dataset\.name = 'text' and dataset\.files"):
        prepare_text(TextDataset(name=str(tmp_path / "a.txt")))
    for name in (str(tmp_path / "missing"), "missing.jsonl", "./missing"):
        with pytest.raises(UserError, match="no such file or folder; correct the path"):
            prepare_text(TextDataset(name=name))


def test_a_local_file_of_records_is_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "a.jsonl").write_text(JSON_LINES)
    windows, _ = open_text(TextDataset(name=str(tmp_path / "a.jsonl"), seq_length=2, eval_fraction=0))
    assert bytes(windows.tokens) == b"one\0two\0"


@pytest.mark.parametrize(
    ("package", "keys"), [("datasets", {"name": "wikitext"}), ("tokenizers", {"tokenizer": "gpt2"})]
)
def test_a_missing_package_names_the_extra(monkeypatch, package, keys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"dataset\.\w+ = '\w+': this needs the package {package}; .*pip install shoal\[hf\]"
    ):
        open_text(TextDataset(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "text"}, r"dataset.files: missing"),
        ({"name": "stdlib", "files": "x"}, r"dataset.files = 'x': unused with dataset.name = 'stdlib'"),
        ({"files": "x"}, r"dataset.files = 'x': unused"),
        ({"name": "wikitext", "files": "x"}, r"dataset.files = 'x': unused with dataset.name = 'wikitext'"),
        ({"name": "text", "files": "x", "split": "test"}, r"dataset.split = 'test': unused"),
        ({"name": "stdlib", "config": "c"}, r"dataset.config = 'c': unused"),
        ({"name": "stdlib", "text_column": "c"}, r"dataset.text_column = 'c': unused"),
    ],
)
def test_keys_that_the_dataset_does_not_use_are_refused(keys, message):
    with pytest.raises(UserError, match=message) as error:
        TextDataset(**keys)
    one_line(error)


@pytest.mark.parametrize(
    "keys", [{"seq_length": 0}, {"seq_length": "8"}, {"eval_fraction": 0.7}, {"eval_fraction": -1}, {"seq_len": 8}]
)
def test_values_are_typed_and_closed(keys):
    with pytest.raises(ValidationError):
        TextDataset(**keys)


def test_a_resolved_config_can_be_read_again(folder):
    for config in (TextDataset(), text(folder), TextDataset(name="wikitext", split="test")):
        assert TextDataset(**config.model_dump()) == config


def test_missing_files_and_short_texts(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "nothing.txt").touch()
    for keys, message in [
        ({"files": str(tmp_path / "no*.md")}, r"dataset.files = '.*no\*.md': no such file"),
        ({"files": str(empty)}, r"dataset.files = '.*empty': no such file"),
        (
            {"files": str(folder), "tokenizer": "no/such/tokenizer.json"},
            r"dataset.tokenizer = 'no/such.*: this file does not exist",
        ),
        (
            {"files": str(folder), "tokenizer": str(folder / "a.txt")},
            r"dataset.tokenizer = '.*a.txt': it cannot be loaded",
        ),
        (
            {"files": str(folder), "cache_dir": str(folder / "a.txt")},
            r"dataset.cache_dir: the text cannot be prepared in .*Not a directory",
        ),
        (
            {"files": str(tmp_path / "nothing.txt")},
            r"dataset.seq_length = 256: this needs at least 513 tokens.* has 1;",
        ),
        (
            {"files": str(folder), "seq_length": 66, "eval_fraction": 0},
            r"66: this needs at least 67 tokens, but the text has 66",
        ),
        (
            {"files": str(folder), "seq_length": 33},
            r"33: this needs at least 67 tokens .one window to train, one to evaluate., but the text has 66",
        ),
    ]:
        with pytest.raises(UserError, match=message) as error:
            open_text(TextDataset(name="text", **keys))
        one_line(error)


def test_an_empty_dataset_is_refused(hf):
    write_rows(hf / "train.jsonl", [{"text": ""}])
    with pytest.raises(UserError, match=r"dataset.name: the dataset contains no text"):
        open_text(TextDataset(name=str(hf)))


def test_progress_is_shown_only_on_a_terminal(folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        (folder / "a.txt").write_text(f"{shown}" * 20)
        monkeypatch.setattr(sys, "stderr", stream)
        prepare_text(text(folder))
        assert ("tokenising" in stream.getvalue()) is shown
