"""Imports between rooms point one way."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "shoal"
BASE = {"types", "errors", "forward", "operators", "seeding", "tensors", "torch_private"}
ALLOWED: dict[str, set[str]] = {
    "config": BASE,
    "configs": set(),
    "familiar": BASE | {"checkpoint", "config", "data", "launch", "parallel", "processes", "strategies", "weights"},
    "project_template": {"config", "recipes", "verify"},
    "data": BASE | {"config"},
    "observe": BASE | {"config"},
    "lora": BASE | {"config", "weights"},
    "models": set(),
    "quantised": BASE | {"weights"},
    "callbacks": BASE | {"config", "parallel", "strategies"},
    "recipes": BASE | {"callbacks", "models", "data", "lora", "quantised", "weights"},
    "processes": BASE,
    "weights": BASE,
    "parallel": BASE | {"config"},
    "transform": BASE | {"config", "parallel"},
    "checkpoint": BASE | {"config", "lora", "parallel", "quantised", "weights"},
    "strategies": BASE | {"checkpoint", "config", "parallel", "processes", "quantised", "transform", "weights"},
    "launch": BASE | {"callbacks", "checkpoint", "config", "processes", "training"},
    "training": BASE
    | {"callbacks", "checkpoint", "config", "data", "lora", "observe", "parallel", "processes", "quantised"}
    | {"strategies", "transform", "weights"},
    "verify": BASE
    | {"callbacks", "checkpoint", "config", "data", "launch", "observe", "parallel", "processes", "strategies"}
    | {"lora", "quantised", "training"}
    | {"transform", "weights"},
    "doctor": BASE | {"config", "launch", "parallel", "processes", "strategies", "training", "weights"},
    "cli": BASE | {"api", "checkpoint", "config", "doctor", "launch", "observe", "processes", "training", "verify"},
}


def rooms_imported(path: Path) -> set[str]:
    """Returns the rooms that a file imports, other than when it is run as a script."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))]
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("shoal.")}
    return found


def test_imports_point_one_way() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ALLOWED)
    for room, allowed in ALLOWED.items():
        for path in (PACKAGE / room).rglob("*.py"):
            assert rooms_imported(path) <= allowed | {room}, path


def test_private_torch_is_touched_in_one_file() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("torch_private.py", "quiet.py"):  # which names a logger
            assert not re.search(r"\btorch(\.\w+)*\._(?!_)", path.read_text()), path


def test_the_compiler_of_torch_is_imported_where_it_is_needed() -> None:
    """It takes seconds, also in runs that compile nothing. These modules of torch import it."""
    compiler = re.compile(r"^(from|import) torch\.(_dynamo|_inductor|nn\.attention\.(varlen|flex_attention))", re.M)
    for path in PACKAGE.rglob("*.py"):
        assert not compiler.search(path.read_text()), path


def test_models_are_plain_single_device_code() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        assert "torch.distributed" not in path.read_text(), path


LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|NODE_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SHOAL_LAUNCHER|(TORCHELASTIC|SLURM)_\w+"
)


def test_launcher_variables_are_read_in_one_place() -> None:
    """Other files may name them to write them for their children: as keys of a dict, or in `os.environ[name] = …`."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE / "processes" and path.name in ("detect.py", "environments.py", "slurm_lists.py"):
            continue
        tree = ast.parse(path.read_text())
        keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
        stores = [
            node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        ]
        read = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and LAUNCHER_VARIABLES.fullmatch(node.value)
            and node not in keys
            and node not in stores
        ]
        assert not read, path


MISSING_ELSEWHERE = {"fcntl", "resource", "termios", "pwd", "grp", "SIGUSR1", "SIGKILL", "setpgid", "killpg", "setsid"}
"""Modules and names that only POSIX systems have."""


def test_nothing_that_only_posix_has_is_used_at_import() -> None:
    """`tests/launch/test_without_posix.py` takes them away and trains."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = {id(node) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in ast.walk(one)}
        for node in ast.walk(tree):
            if id(node) not in inside:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.attr] if isinstance(node, ast.Attribute) else []
                assert not MISSING_ELSEWHERE & {*names}, path


def imported_at_once(module: str) -> set[str]:
    """Returns the modules that a module of shoal imports when it is imported, not those that its functions import."""
    path = PACKAGE.parent / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    statements = [*ast.parse(path.read_text()).body] if path.exists() else []
    names = {module.rpartition(".")[0]}
    for node in statements:
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names - {""}


def test_a_launcher_imports_neither_the_training_loop_nor_the_strategies() -> None:
    """A launcher only checks the config and starts processes; importing the rest takes a second of every start."""
    seen: set[str] = set()
    to_do = {"shoal.config", "shoal.launch.launcher", "shoal.launch.mistakes", "shoal.training.preflight"}
    while to_do - seen:
        module = (to_do - seen).pop()
        seen.add(module)
        to_do |= {name for name in imported_at_once(module) if name.startswith(("shoal", "torch.distributed"))}
    assert "shoal.processes.board" in seen
    heavy = ("shoal.training.loop", "shoal.training.session", "shoal.strategies", "torch.distributed.elastic")
    assert not [name for name in seen if name.startswith(heavy)]
