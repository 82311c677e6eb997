"""What to train: model, data, loss."""

from shoal.recipes.base import IGNORED, Recipe, token_loss

__all__ = ["IGNORED", "Recipe", "token_loss"]
