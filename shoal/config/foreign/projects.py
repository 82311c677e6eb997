"""The projects whose files `shoal translate` reads, and which of them a file belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.foreign.accelerate import ACCELERATE
from shoal.config.foreign.axolotl import AXOLOTL
from shoal.config.foreign.lightning_cli import LIGHTNING
from shoal.config.foreign.llama_factory import LLAMA_FACTORY
from shoal.config.foreign.project import Project, has_key
from shoal.config.foreign.torchtune import TORCHTUNE
from shoal.config.yaml import Tree
from shoal.errors import UserError

PROJECTS: Mapping[str, Project] = {project.name: project for project in (ACCELERATE, AXOLOTL, LLAMA_FACTORY, TORCHTUNE, LIGHTNING)}
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
    found = [
        project
        for project in PROJECTS.values()
        if any(all(has_key(tree, key) for key in group) for group in project.signs)
    ]
    if not found:
        raise UserError(f"{file_name}: not recognised as a file of {names}; if it is one, say so with --from")
    if len(found) > 1:
        choices = " or ".join(project.name for project in found)
        raise UserError(f"{file_name}: it could be a file of {choices}; say which with --from")
    return found[0]
