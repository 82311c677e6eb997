"""What to train: model, data, loss."""

from shoal.recipes.base import IGNORED, Recipe

__all__ = ["IGNORED", "Recipe"]
