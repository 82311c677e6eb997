"""The pictures in docs/images are what a terminal shows, and load nothing from other servers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.observe.console import Console

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from pictures import COMMANDS, draw, shown  # noqa: E402


def words(path: Path) -> str:
    """Returns the text in a picture."""
    return " ".join(" ".join(ElementTree.parse(path).getroot().itertext()).replace("\xa0", " ").split())


def test_a_picture_has_the_last_state_of_the_console(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with Console("rich", 0, 10, terminal) as console:
        for step in range(1, 11):
            console.metrics(step, {"train/loss": 1 / step})
            console.advance(step)
        console.line("a remark")
    lines = shown(terminal.getvalue().replace("\n", "\r\n"))
    draw(tmp_path / "picture.svg", ["train", "run.yaml"], lines)
    text = words(tmp_path / "picture.svg")
    assert "$ shoal train run.yaml" in text
    assert text.index("a remark") < text.index("step 10/10 loss 0.1000")
    assert "step 1/10" not in text
    assert "url(http" not in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_pictures_show_their_commands(name: str) -> None:
    path = ROOT / "docs" / "images" / f"{name}.svg"
    assert " ".join(["$ shoal", *COMMANDS[name]]) in words(path)
    assert "url(http" not in path.read_text()
    assert path.stat().st_size < 40_000
