"""Counts the statements of the package, without docstrings and comments: `python scripts/count_statements.py`."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path


def count(path: Path) -> int:
    """Returns the number of statements in a file; a string that stands alone, such as a docstring, is none."""
    statements = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))
    return sum(not (isinstance(s, ast.Expr) and isinstance(getattr(s.value, "value", None), str)) for s in statements)


package = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "shoal")
by_room: Counter[str] = Counter()
for path in package.rglob("*.py"):
    by_room[path.relative_to(package).parts[0].removesuffix(".py")] += count(path)
for room, statements in by_room.most_common():
    print(f"{statements:>6}  {room}")
print(f"{by_room.total():>6}  in all")
