"""Where the weights of a model come from: drawn by name, or read from files."""

from shoal.weights.materialise import build, materialise, move_buffers, parameters_on_meta

__all__ = ["build", "materialise", "move_buffers", "parameters_on_meta"]
