"""What to train: model, data, loss."""

from shoal.recipes.recipe import Recipe, token_loss
from shoal.types import IGNORED

__all__ = ["IGNORED", "Recipe", "token_loss"]
