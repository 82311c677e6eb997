"""What a new user does first: `shoal demo`, `shoal init`, `shoal configs`, from an installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_SECONDS, call_shoal

from shoal.cli.init import FILES
from shoal.config import load_run
from shoal.config.shipped import FOLDER, copy_config, shipped_configs

ROOT = Path(__file__).parent.parent
TINY = ["training.max_steps=2", "model.n_layer=1", "dataset.seq_length=32", "training.eval_batches=1"]


@pytest.fixture
def no_recipe_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a test import a project's `recipe`, and forgets it again."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("recipe", None)
    yield
    sys.modules.pop("recipe", None)


def test_demo_trains_in_any_folder_and_says_how_to_go_on(tmp_path: Path) -> None:
    result = call_shoal(tmp_path, "demo", *TINY)
    assert result.returncode == 0, result.stderr
    assert "finished at step 2" in result.stdout
    assert "shoal demo model.n_layer=1" in result.stdout
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "step_00000002").is_dir()


def test_the_clones_configs_are_those_of_the_package() -> None:
    assert (ROOT / "configs").resolve() == FOLDER


def test_every_file_of_the_package_that_is_not_code_is_in_the_wheel() -> None:
    """Looks at the patterns only; the slow test below builds and installs a wheel."""
    package = ROOT / "shoal"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["shoal"]
    listed = {path for pattern in patterns for path in package.glob(pattern)}
    present = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert FOLDER / "demo.yaml" in present <= listed


def test_configs_are_listed_with_what_they_train(tmp_path: Path) -> None:
    result = call_shoal(tmp_path, "configs", "ls")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines.keys() == {path.stem for path in FOLDER.glob("*.yaml")}
    assert "demo" in lines
    assert all(len(description) > 20 for description in lines.values())


@pytest.mark.parametrize("name", shipped_configs())
def test_a_copied_config_is_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call_shoal(tmp_path, "configs", "cp", name)
    assert result.returncode == 0, result.stderr
    assert f"shoal train configs/{name}.yaml" in result.stdout
    renamed = call_shoal(tmp_path, "configs", "cp", name, "a folder/mine.yaml")
    assert renamed.returncode == 0, renamed.stderr
    monkeypatch.chdir(tmp_path)
    original = load_run(FOLDER / f"{name}.yaml").tree()
    assert load_run(f"configs/{name}.yaml").tree() == original
    mine = load_run("a folder/mine.yaml").tree()
    json, copied = (tree["distributed"]["deepspeed"].pop("config_file") for tree in (original, mine))
    assert mine == original
    if json:
        assert Path(json).read_text() == Path(copied).read_text()
        assert Path(copied) == Path("a folder/zero3.json")


def test_a_copy_replaces_nothing_without_force(tmp_path: Path) -> None:
    copy_config("demo", tmp_path)
    copy_config("bdh_stdlib", tmp_path)  # shares its bases with demo: they are there already, and the same
    (tmp_path / "base" / "bdh.yaml").write_text("model: {n_layer: 1}\n")
    (tmp_path / "demo.yaml").unlink()
    refused = call_shoal(tmp_path, "configs", "cp", "demo", ".")
    assert refused.returncode == 2
    assert "base/bdh.yaml exists and is different" in refused.stderr
    assert not (tmp_path / "demo.yaml").exists()
    assert call_shoal(tmp_path, "configs", "cp", "demo", ".", "--force").returncode == 0
    assert (tmp_path / "base" / "bdh.yaml").read_text() == (FOLDER / "base" / "bdh.yaml").read_text()


def test_an_unknown_config_is_refused_with_the_name_that_was_meant(tmp_path: Path) -> None:
    result = call_shoal(tmp_path, "configs", "cp", "dmo")
    assert result.returncode == 2
    assert "'dmo'" in result.stderr
    assert "did you mean 'demo'?" in result.stderr


@pytest.mark.usefixtures("no_recipe_module")
def test_init_writes_a_project_that_trains(tmp_path: Path) -> None:
    result = call_shoal(tmp_path, "init", "spirals")
    assert result.returncode == 0, result.stderr
    assert "cd spirals && shoal train run.yaml" in result.stdout
    folder = tmp_path / "spirals"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert not any("my_project" in path.read_text() for path in folder.iterdir())
    assert len((folder / "recipe.py").read_text().split("class Spirals")[1].splitlines()) <= 40
    trained = call_shoal(folder, "train", "run.yaml", "training.max_steps=20", "training.device=cpu")
    assert trained.returncode == 0, trained.stderr
    assert "points for evaluation are right" in trained.stdout
    assert (folder / "runs" / "spirals" / "checkpoints" / "step_00000020").is_dir()


@pytest.mark.parametrize("name", ["1st", "-x/", "two words", "..", "a" * 101, "dots.in.it"])
def test_init_refuses_bad_names(tmp_path: Path, name: str) -> None:
    result = call_shoal(tmp_path, "init", "--", name)
    assert result.returncode == 2
    assert result.stderr.startswith("shoal: error: NAME = ")
    assert not any(tmp_path.rglob("recipe.py"))


def test_init_keeps_what_a_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "recipe.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        result = call_shoal(tmp_path, "init", name)
        assert (result.returncode, "choose another name" in result.stderr) == (2, True)
    assert (tmp_path / "full" / "recipe.py").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert call_shoal(tmp_path / "empty", "init", ".").returncode == 0
    assert "name: empty" in (tmp_path / "empty" / "run.yaml").read_text()


@pytest.mark.slow
def test_the_test_of_a_new_project_passes_and_can_fail(tmp_path: Path) -> None:
    call_shoal(tmp_path, "init", "spirals")
    folder = tmp_path / "spirals"

    def run_its_test() -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    passed = run_its_test()
    assert "1 passed" in passed.stdout, passed.stdout + passed.stderr
    recipe = folder / "recipe.py"
    recipe.write_text(recipe.read_text().replace('reduction="sum"', 'reduction="mean"'))
    failed = run_its_test()
    assert "1 failed" in failed.stdout, failed.stdout + failed.stderr


@pytest.mark.slow
def test_an_installed_wheel_has_all_it_needs(tmp_path: Path) -> None:
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "shoal", source / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("shoal-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        archive.extractall(installed)
    shipped = [path for path in (ROOT / "shoal").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in shipped} <= names

    def run(*arguments: str) -> str:
        """Runs Python in a folder from where the clone is not seen, with the libraries of this environment."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    imported = run(
        "-c", "import shoal.config.shipped as s, shoal.cli.init as i; print(s.FOLDER, i.TEMPLATE, sep='\\n')"
    )
    assert all(Path(line).is_relative_to(installed) for line in imported.splitlines()), imported
    assert "finished at step 2" in run("-m", "shoal", "demo", *TINY)
    assert (elsewhere / "runs" / "demo" / "checkpoints").is_dir()
    assert "llama_mesh" in run("-m", "shoal", "configs", "ls")
    run("-m", "shoal", "configs", "cp", "zero3_json")
    run("-m", "shoal", "init", "spirals")
    assert sorted(path.name for path in (elsewhere / "spirals").iterdir()) == sorted(FILES)
