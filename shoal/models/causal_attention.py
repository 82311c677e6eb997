"""Attention for transformers models in which every token sees all earlier ones and nothing else.

transformers makes a mask for each forward, and to find out that none is needed it looks at the positions, for which the
host waits for the GPU. Where the answer is known beforehand, the models get attention without masks under this name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

NAME = "shoal_causal"


def use_causal_attention(model: nn.Module) -> None:
    """Gives a transformers model attention without masks, if it would have used sdpa with the causal one."""
    from transformers import AttentionInterface

    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    causal = attentions and all(module.is_causal for module in attentions)
    # A second model of the same configuration finds the name in it already.
    if config._attn_implementation in ("sdpa", NAME) and causal and _sees_everything(config):
        if NAME not in AttentionInterface():
            AttentionInterface.register(NAME, _without_masks(AttentionInterface()["sdpa"]))
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        for module in attentions:
            module.exchange = None  # type: ignore[assignment]


def _sees_everything(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not getattr(config, "sliding_window", None) and not getattr(config, "attention_chunk_size", None)


def _without_masks(sdpa: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """The attention that is registered. It knows `sdpa` beforehand: looked up in a forward, it would be an import in
    the midst of what torch.compile traces."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Heads are (batch, head, time, size); what comes back is (batch, time, head, size)."""
        # Under context parallelism ranks have some tokens, and exchange them for some heads.
        exchange = getattr(module, "exchange", None)
        if exchange is not None:
            query, key, value = (exchange.to_heads(tensor) for tensor in (query, key, value))
        output, _ = sdpa(module, query, key, value, attention_mask, **options)
        return output if exchange is None else exchange.to_tokens(output), None

    return attend
