"""Draws the pictures in docs/images from real runs: `python scripts/pictures.py`.

It makes a project by `shoal init`, runs commands on it in a terminal, and writes what the terminal shows as SVG.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 104
COMMANDS = {
    "train": ["train", "run.yaml"],
    "verify": ["verify", "run.yaml", "--strategies", "fsdp"],
}
_CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])|(\r?\n)|\r|([^\x1b\r\n]+)")


def screen_of(command: list[str], folder: Path) -> list[str]:
    """Runs a command of shoal in a terminal, and returns the lines that it shows at the end, with their colours."""
    leader, follower = pty.openpty()
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", *command], cwd=folder, env=environment, stdout=follower, stderr=follower
    )
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux: the last process that has the terminal open is gone
            break
        if not piece:
            break
        written += piece
    if process.wait():
        raise SystemExit(f"{command} failed:\n{written.decode()}")
    return shown(written.decode())


def shown(written: str) -> list[str]:
    """Returns the lines of a terminal after a text, with the commands to erase a line and to move up that rich uses."""
    lines, row = [""], 0
    for control, newline, text in _CONTROL.findall(written):
        if newline:
            row += 1
            lines += [""] * (row == len(lines))
        elif control.endswith("A"):
            row -= int(control[2:-1] or 1)
        elif control == "\x1b[2K":
            lines[row] = ""
        elif text or control.endswith("m"):
            lines[row] += text or control
    while lines and not lines[-1]:
        lines.pop()
    return lines


def draw(path: Path, command: list[str], lines: list[str]) -> None:
    """Writes a terminal with a command and its lines as SVG, without the fonts that rich would load from a server."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in ("$ " + " ".join(["shoal", *command]), *lines):
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="shoal", unique_id=f"shoal-{path.stem}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    path.parent.mkdir(exist_ok=True)
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "spirals"
        subprocess.run([sys.executable, "-m", "shoal", "init", folder], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        for name, command in COMMANDS.items():
            draw(IMAGES / f"{name}.svg", command, screen_of(command, folder))
            print(f"docs/images/{name}.svg")
