"""The projects whose files `shoal translate` reads, and which of them a file belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.foreign.accelerate import ACCELERATE
from shoal.config.foreign.axolotl import AXOLOTL
from shoal.config.foreign.guide import is_guide
from shoal.config.foreign.lightning_cli import LIGHTNING
from shoal.config.foreign.llama_factory import LLAMA_FACTORY
from shoal.config.foreign.project import Project
from shoal.config.foreign.recognise import recognise
from shoal.config.foreign.torchtune import TORCHTUNE
from shoal.config.yaml import Tree
from shoal.errors import UserError

PROJECTS: Mapping[str, Project] = {
    project.name: project for project in (ACCELERATE, AXOLOTL, LLAMA_FACTORY, TORCHTUNE, LIGHTNING)
}
"""The projects by the name after `--from`."""


def find_project(tree: Tree, file_name: str, name: str | None = None) -> Project:
    """Returns the project with this name, or that which a file is recognised as. Raises UserError if there is none."""
    names = ", ".join(PROJECTS)
    if name is not None and name not in PROJECTS:
        raise UserError(f"--from = {name!r:.100}: shoal translates files of {names}; give one of these")
    if name is not None:
        return PROJECTS[name]
    if "recipe" in tree:
        raise UserError(f"{file_name}: it has the key recipe, so it is a config of shoal; use it as it is")
    found = recognise(tree)
    if not found and is_guide(tree):
        raise UserError(f"{file_name}: it is in Hugging Face's words, which shoal reads as they are; use it as it is")
    if not found:
        raise UserError(f"{file_name}: not recognised as a file of {names}; if it is one, say so with --from")
    if len(found) > 1:
        raise UserError(f"{file_name}: it could be a file of {' or '.join(found)}; say which with --from")
    return PROJECTS[found[0]]
