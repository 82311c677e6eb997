"""Files that are wrong in any way end in a UserError of one line, and soon: thousands of them, made at random.

Every input is made from its number alone, so that a failure can be repeated:
`python tests/test_fuzz.py 1234` runs number 1234 and shows what it raises.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from shoal.checkpoint import CheckpointManager, find_best_checkpoint, find_latest_checkpoint, open_checkpoint
from shoal.checkpoint.frozen_base import FrozenBase
from shoal.checkpoint.init_from import weights_for_model
from shoal.checkpoint.inspect import verify
from shoal.checkpoint.manifest import manifest_digest
from shoal.checkpoint.pieces import header_digest
from shoal.cli import checkpoint as commands
from shoal.config import Run, check_run, derive_batches, load_run
from shoal.config.deepspeed_json import fit_json, read_json
from shoal.config.layout import check_layout
from shoal.config.mesh import data_size
from shoal.config.shipped import FOLDER
from shoal.config.yaml import flatten, format_value
from shoal.errors import UserError
from shoal.strategies import from_config
from shoal.training.resume import restore
from shoal.training.session import Session, assemble
from shoal.types import Weights
from shoal.weights.from_files import weight_files

SEED = 20261116
CPU_SECONDS = 5.0
"""An input may take one second of processor time; the rest is for slow machines."""
SMALL = {
    "recipe": "bdh",
    "training": {"max_steps": 4, "batch_size": 2, "device": "cpu"},
    "model": {"n_layer": 1, "n_embd": 8, "n_head": 1, "mlp_internal_dim_multiplier": 2, "vocab_size": 8},
    "dataset": {"seq_length": 4},
}
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1 << 70, 10**90, 10**4000, 0.5, -0.0, 1e308, 5e-324),
    *(float("inf"), float("-inf"), float("nan"), "", " ", "\0", "\n", "\x1b[31m", "é", "\ud800", "~", "null", "1e5"),
    *("x" * 300, "9" * 5000, "../../etc/passwd", "/dev/zero", ".", "..", ":", "a:", ":b", "a.b:c.d", "{}", "*a", "&a"),
    *("float32", "complex128", "qint8", "int4", "model.safetensors", "trainer.json", "step", "mesh", "fsdp", "sgd"),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": None},
        {"a": {"b": 1}},
        {"name": "sgd"},
        [1, 2],
        [0, 0],
        [-1],
        [2**62, 2**62],
        ["a"] * 100,
    ),
]
YAML_PIECES = (
    *(
        "&a ",
        "*a",
        "? ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "!!int ",
        "!!python/name:os.system ",
        "!",
        "%YAML 9\n",
        "---\n",
    ),
    *(
        "...\n",
        "|\n",
        ">\n",
        '"',
        "'",
        "#",
        "\t",
        "\0",
        "\x01",
        "\ufeff",
        "<<: ",
        "\r",
        ",",
        "@",
        "`",
        "1_0",
        "0x_",
        "\n",
    ),
    *("[" * 300, "- " * 300, "a: " * 50, "7" * 5000, "x" * 2000, "&a [*a]", "{? {a: 1} : 2}", "!!timestamp x", "\\"),
)

WORDS = {
    "max_steps": -1,
    "report_to": ["tensorboard"],
    "lr_scheduler_kwargs": {"num_cycles": 0.5},
    "adam_beta1": 0.9,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
    "save_strategy": "steps",
    "greater_is_better": False,
    "fp16": False,
    "gradient_checkpointing": True,
    "dataloader_num_workers": 0,
    "mixed_precision": "bf16",
    "group_by_length": False,
    "resume_from_checkpoint": True,
}
"""Words of Hugging Face's that the ready file does not have."""


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def nasty(rng: Random) -> Any:
    return deep(rng.choice([30, 80, 200])) if rng.random() < 0.03 else copy.deepcopy(rng.choice(NASTY))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every place in nested dicts and lists: the container and the key."""
    for key, value in [
        *(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    ]:
        yield tree, key
        yield from places(value)


def spoil(rng: Random, tree: Any) -> Any:
    """Returns a copy of a tree with a few changes."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        found = [*places(tree)]
        if not found or rng.random() < 0.01:
            return nasty(rng)
        container, key = rng.choice(found)
        change = rng.randrange(6)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, dict):
            name = rng.choice([str(nasty(rng))[:300], f"{key}s", str(key).upper()])
            container[name] = container.pop(key)
        elif change == 2:
            other, other_key = rng.choice(found)
            with contextlib.suppress(LookupError):  # an earlier change may have removed it
                container[key] = copy.deepcopy(other[other_key])
        elif change == 3 and isinstance(container[key], int | float):
            with contextlib.suppress(OverflowError):
                container[key] = container[key] * rng.choice([-1, 0, 2, 0.5, 1 << 62]) + rng.choice([0, 1, -1])
        else:
            container[key] = nasty(rng)
    return tree


def spoil_text(rng: Random, text: str, pieces: tuple[str, ...]) -> str:
    for _ in range(rng.choice([1, 1, 2, 4])):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 0, 1, 5, 50]))
        text = (
            text[:start]
            + rng.choice([*pieces, text[start:end] * rng.choice([2, 50]), "", chr(rng.randrange(0x250))])
            + text[end:]
        )
    return text


def spoil_bytes(rng: Random, data: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(data) or 1)
        change = rng.randrange(5)
        if change == 0:
            data = data[:place]
        elif change == 1:
            data = data[:place] + rng.randbytes(rng.choice([1, 4, 100])) + data[place:]
        else:
            data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    return data


class Fuzzer:
    """Makes inputs by number, and gives each to the code that reads it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run: Run = check_run(copy.deepcopy(SMALL) | {"experiment": {"output_dir": str(folder / "run")}})
        self.tree = self.run.tree()
        self.text = self.run.to_yaml()
        self.keys = [*flatten(self.tree)]
        self.guide_text = (FOLDER / "fsdp_qlora_llama7b.yaml").read_text()
        self.guide = {**yaml.safe_load(self.guide_text), "deepspeed": {"enabled": False, "config_file": "ds.json"}}
        self.guide["training"] |= WORDS
        strategy = from_config(self.run.config)
        strategy.setup()
        recipe = self.run.recipe_type(self.run.recipe_config)
        self.session: Session = assemble(recipe, strategy, self.run.config.training, 0)
        self.base = FrozenBase(self.session.model, Weights("init"), {})
        self.source = self._save()
        self.json = {name: json.loads((self.source / f"{name}.json").read_text()) for name in ("manifest", "trainer")}
        self.json["manifest"].pop("digest")
        weights = self.folder / "weights.safetensors"
        save_file({name: t.clone() for name, t in self.session.state().model.items()}, weights)
        self.weights = weights.read_bytes()
        self.with_base = self._with_base(weights)

    def _save(self) -> Path:
        manager = CheckpointManager(self.folder / "good")
        for p in self.session.model.parameters():
            p.grad = torch.zeros_like(p)
        self.session.strategy.step(self.session.optimizer, None)
        about = {"layout": self.session.strategy.layout.as_dict(), "batches": [[0, 2]], "config": self.tree}
        trainer = {"step": 2, "samples": 4, "skipped_steps": 0, "metrics": {"eval/loss": 1.5}}
        manager.save_state(self.session.state(), trainer, about)
        return manager.path_of(2)

    def _with_base(self, weights: Path) -> Any:
        """Returns the manifest with the first tensor of the model in a frozen base."""
        manifest = copy.deepcopy(self.json["manifest"])
        name = next(name for name in manifest["tensors"] if name.startswith("model/"))
        facts, key = manifest["tensors"].pop(name), name.partition("/")[2]
        entry = {"dtype": facts["dtype"], "shape": facts["shape"], "file": str(weights), "key": key}
        entry |= {"file_dtype": facts["dtype"], "sha256": facts["pieces"][0]["sha256"]}
        base = {"files": {str(weights): {"bytes": weights.stat().st_size}}, "tensors": {key: entry}}
        return manifest | {"format": 2, "base": base}

    def spoiled_base(self, rng: Random) -> Any:
        base = spoil(rng, self.with_base["base"])
        return {**self.with_base, "base": base} if rng.random() < 0.8 else spoil(rng, self.with_base)

    def make(self, number: int) -> tuple[str, Any, Callable[[Any], object]]:
        """Returns the kind of an input, the input, and what reads it."""
        rng = Random(f"{SEED}/{number}")
        kinds: list[tuple[str, Callable[[Random], Any], Callable[[Any], object]]] = [
            ("config tree", lambda rng: spoil(rng, self.tree), self.check_tree),
            ("YAML text", lambda rng: spoil_text(rng, self.text, YAML_PIECES), self.load_text),
            ("YAML bytes", lambda rng: spoil_bytes(rng, self.text.encode()), self.load_bytes),
            ("guide", lambda rng: spoil(rng, self.guide), self.load_guide),
            ("guide text", lambda rng: spoil_text(rng, self.guide_text, YAML_PIECES), self.load_text),
            ("override", self.override, lambda override: load_run(self.config_file(self.text.encode()), [override])),
            ("manifest", lambda rng: spoil(rng, self.json["manifest"]), self.open_manifest),
            ("frozen base", self.spoiled_base, self.open_manifest),
            ("manifest text", self.manifest_text, self.open_manifest_text),
            ("trainer.json", lambda rng: spoil(rng, self.json["trainer"]), self.open_trainer),
            ("safetensors header", self.header, self.open_header),
            ("safetensors file", self.safetensors_bytes, self.open_safetensors_bytes),
            ("weight file", lambda rng: spoil_bytes(rng, self.weights), self.open_weight_file),
            ("weight index", lambda rng: spoil(rng, {"weight_map": {"a": "weights.safetensors"}}), self.open_index),
            ("DeepSpeed JSON", lambda rng: spoil(rng, DEEPSPEED), self.fit_deepspeed),
        ]
        name, make, read = kinds[number % len(kinds)]
        return name, make(rng), read

    # What reads a config

    def check_tree(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            return
        run = check_run(tree)
        recipe, launch = run.recipe_type(run.recipe_config), run.config.launch
        layout = check_layout(run.config, recipe, launch.processes, launch.procs_per_node)
        derive_batches(run.config.training, data_size(layout.mesh))
        run.to_yaml()

    def config_file(self, data: bytes) -> Path:
        path = self.folder / "run.yaml"
        path.write_bytes(data)
        return path

    def load_text(self, text: str) -> None:
        self.load_bytes(text.encode("utf-8", errors="surrogatepass"))

    def load_bytes(self, data: bytes) -> None:
        run = load_run(self.config_file(data))
        again = load_run(self.config_file(run.to_yaml().encode()))
        assert again.tree() == run.tree(), "the resolved file is another run"

    def load_guide(self, tree: Any) -> None:
        try:
            text = yaml.safe_dump(tree)
        except (yaml.YAMLError, RecursionError, ValueError):  # it cannot be written
            return
        self.load_text(text)
        run = load_run(self.config_file(text.encode("utf-8", errors="surrogatepass")))
        check_layout(run.config, run.make_recipe(), run.config.launch.processes, run.config.launch.procs_per_node)

    def override(self, rng: Random) -> str:
        key = rng.choice([rng.choice(self.keys), spoil_text(rng, rng.choice(self.keys), (".", "=", "a." * 200))])
        value = nasty(rng)
        with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):  # not every value can be written
            return (
                f"{key}={format_value(value)}" if rng.random() < 0.7 else f"{key}={spoil_text(rng, 'a', YAML_PIECES)}"
            )
        return f"{key}={YAML_PIECES[-1]}"

    # What reads a checkpoint

    def copy_checkpoint(self) -> Path:
        folder = self.folder / "run" / "checkpoints" / "step_00000002"
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        shutil.copytree(self.source, folder)
        return folder

    def sign(self, folder: Path, manifest: Any) -> None:
        """Writes a manifest with its digest, as an attacker can."""
        if isinstance(manifest, dict):
            manifest = manifest | {"digest": manifest_digest(manifest)}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    def read_everything(self, folder: Path) -> None:
        """Does all that a user can do with a checkpoint, and returns the first error when all was tried."""
        output = folder.parents[1]
        find_latest_checkpoint(output)
        find_best_checkpoint(output)
        list(verify(output))
        with contextlib.redirect_stdout(io.StringIO()):
            commands.ls(output)
            commands.ls(output, as_json=True)
        errors = []
        for step in (
            lambda: commands.show(folder),
            lambda: commands.diff(folder, self.source),
            lambda: open_checkpoint(folder).read(),
            lambda: weights_for_model(self.session.model, str(folder), self.base, allows_other_base=True),
            lambda: restore(self.run, self.session, CheckpointManager(output), self.base, lambda warning: None),
        ):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    step()  # type: ignore[no-untyped-call]
            except UserError as error:
                errors.append(error)
            except commands.typer.Exit:
                pass
        if errors:
            raise errors[0]

    def open_manifest(self, manifest: Any) -> None:
        folder = self.copy_checkpoint()
        try:
            self.sign(folder, manifest)
        except (RecursionError, UnicodeError, ValueError):  # it cannot be written as JSON
            return
        self.read_everything(folder)

    def manifest_text(self, rng: Random) -> str:
        text = (self.source / "manifest.json").read_text()
        return spoil_text(rng, text, ("{", "[" * 3000, '"', "NaN", "7" * 5000, "1e999", ",", "null", "\0", '"\\ud800"'))

    def open_manifest_text(self, text: str) -> None:
        folder = self.copy_checkpoint()
        (folder / "manifest.json").write_text(text)
        self.read_everything(folder)

    def open_trainer(self, trainer: Any) -> None:
        folder, manifest = self.copy_checkpoint(), copy.deepcopy(self.json["manifest"])
        try:
            text = json.dumps(trainer)
        except (RecursionError, ValueError):
            return
        (folder / "trainer.json").write_text(text)
        manifest["files"]["trainer.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        self.sign(folder, manifest)
        self.read_everything(folder)

    def header(self, rng: Random) -> bytes:
        """Returns a safetensors file with another header before the same data."""
        data = (self.source / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = json.dumps(spoil(rng, json.loads(data[8 : 8 + length]))).encode()
        size = rng.choice([len(text), len(text), len(text), 0, 1 << 63, len(data) * 2])
        return size.to_bytes(8, "little") + text + data[8 + length :]

    def safetensors_bytes(self, rng: Random) -> bytes:
        return spoil_bytes(rng, (self.source / "model.safetensors").read_bytes())

    def open_header(self, data: bytes) -> None:
        self.open_safetensors_bytes(data)

    def open_safetensors_bytes(self, data: bytes) -> None:
        folder, manifest = self.copy_checkpoint(), copy.deepcopy(self.json["manifest"])
        path = folder / "model.safetensors"
        path.write_bytes(data)
        manifest["files"][path.name] = {"bytes": len(data), "header": header_digest(path)}
        self.sign(folder, manifest)
        self.read_everything(folder)

    # What reads weights of other programs

    def open_weight_file(self, data: bytes) -> None:
        path = self.folder / "other.safetensors"
        path.write_bytes(data)
        weights_for_model(self.session.model, str(path))

    def open_index(self, index: Any) -> None:
        folder = self.folder / "transformers"
        folder.mkdir(exist_ok=True)
        try:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        except (RecursionError, ValueError):
            return
        weight_files(folder, "model.name", "save it again")

    def fit_deepspeed(self, document: Any) -> None:
        path = self.folder / "deepspeed.json"
        try:
            path.write_text(json.dumps(document))
        except (RecursionError, ValueError):
            return
        fit_json(read_json(path), self.run.config.training, 2, "ds.json")

    def try_one(self, number: int) -> None:
        kind, value, read = self.make(number)
        before, problem = time.process_time(), ""
        try:
            read(value)
        except UserError as error:
            if "\n" in str(error):
                problem = f"a message of several lines: {error}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problem = f"{type(error).__name__}: {error}"
            if number in map(int, filter(str.isdigit, sys.argv)):
                raise
        seconds = time.process_time() - before
        if not problem and seconds > CPU_SECONDS:
            problem = f"it took {seconds:.1f} s"
        assert not problem, f"input {number}, {kind}: {problem:.2000}\n{value!r:.5000}"


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
    },
    "aio": {"block_size": 1048576},
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_nothing_but_a_user_error(fuzzer: Fuzzer) -> None:
    for number in range(150):
        fuzzer.try_one(number)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_nothing_but_a_user_error_in_ten_thousand(fuzzer: Fuzzer, thousand: int) -> None:
    for number in range(1000 * thousand, 1000 * thousand + 1000):
        fuzzer.try_one(number)


def test_the_fuzzer_reaches_what_it_is_for(fuzzer: Fuzzer) -> None:
    """Unspoiled inputs are read without an error, and what is spoiled is often noticed."""
    fuzzer.check_tree(fuzzer.tree)
    fuzzer.load_text(fuzzer.text)
    fuzzer.load_guide(fuzzer.guide)
    fuzzer.open_manifest(fuzzer.json["manifest"])
    fuzzer.open_manifest(fuzzer.with_base)
    fuzzer.open_trainer(fuzzer.json["trainer"])
    fuzzer.open_safetensors_bytes((fuzzer.source / "model.safetensors").read_bytes())
    refused = 0
    for number in range(120):
        _, value, read = fuzzer.make(number)
        try:
            read(value)
        except UserError:
            refused += 1
    assert refused > 60


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzzer(Path(folder))
        for argument in map(int, sys.argv[1:]):
            fuzz.try_one(argument)
