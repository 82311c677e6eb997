"""Causal attention without masks, for transformers models in which every token attends to all earlier tokens.

transformers builds a mask in each forward. To find out that no mask is needed it reads the positions, and the host has
to wait for the GPU. If the configuration already says that the mask is causal, models get this attention instead.

Sequences into which several samples are packed do need something: the positions at which samples begin. They come in
the place of the mask (`shoal.models.packed_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shoal.models.packed_attention import attend_within_samples, has_starts

NAME = "shoal_causal"


def use_causal_attention(model: nn.Module) -> None:
    """Gives a transformers model attention without masks, if the model would use sdpa with a causal mask."""
    from transformers import AttentionInterface

    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    causal = attentions and all(module.is_causal for module in attentions)
    # A second model with the same config object finds our name in it.
    if config._attn_implementation in ("sdpa", NAME) and causal and _attends_to_all_earlier_tokens(config):
        if NAME not in AttentionInterface():
            AttentionInterface.register(NAME, _without_masks(AttentionInterface()["sdpa"]))
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        for module in attentions:
            module.exchange = None  # type: ignore[assignment]


def _attends_to_all_earlier_tokens(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return set(layer_types) == {"full_attention"}
    return not getattr(config, "sliding_window", None) and not getattr(config, "attention_chunk_size", None)


def _without_masks(sdpa: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """Returns the attention function to register. It gets `sdpa` as an argument, because looking it up in the forward
    would need an import, which can break the graph of torch.compile."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Takes (batch, heads, time, size) and returns (batch, time, heads, size)."""
        # Under context parallelism a rank has some of the tokens; it exchanges them for all tokens of some heads.
        exchange = getattr(module, "exchange", None)
        if exchange is not None:
            query, key, value = (exchange.to_heads(tensor) for tensor in (query, key, value))
        if attention_mask is not None and has_starts(attention_mask):
            return attend_within_samples(sdpa, module, query, key, value, attention_mask, **options), None
        output, _ = sdpa(module, query, key, value, attention_mask, **options)
        return output if exchange is None else exchange.to_tokens(output), None

    return attend
