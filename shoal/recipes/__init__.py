"""Recipes say what to train: a model, data and a loss."""

from shoal.recipes.recipe import Recipe, token_loss
from shoal.types import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "Recipe", "token_loss"]
