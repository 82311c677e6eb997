"""The recipe causal_lm: any causal language model of Hugging Face transformers."""

from shoal.recipes.causal_lm.config import CausalLMConfig
from shoal.recipes.causal_lm.recipe import CausalLMRecipe

__all__ = ["CausalLMConfig", "CausalLMRecipe"]
