"""Gives a model its first weights: drawn by name (by_name.py), or read from files (from_files.py, conversion.py)."""

from shoal.weights.materialise import build, materialise, move_buffers, parameters_on_meta

__all__ = ["build", "materialise", "move_buffers", "parameters_on_meta"]
