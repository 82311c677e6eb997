"""Derives how a transformers model may be divided, from the plans that transformers has for the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

from shoal.lora.adapters import tensor_styles
from shoal.lora.layers import AdaptedLayer
from shoal.quantised import quantised_layers
from shoal.recipes.causal_lm.transformers_private import undivided_classes
from shoal.types import ParallelPlan, TensorStyle

# The tensor-parallel styles that transformers and shoal both have.
_STYLES: dict[str, TensorStyle] = {"colwise": "column", "rowwise": "row"}
# Styles to ignore: embedding and head get their style together, below; norms inside a region need none.
_LEFT_ALONE = ("embedding_rowwise", "replicated_with_grad_allreduce")


def make_plan(model: Any) -> ParallelPlan:
    """Returns the plan of a transformers model."""
    names = {module: name for name, module in model.named_modules()}
    embed, output = (names.get(module) for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    blocks = tuple(_blocks(model)) or ParallelPlan.derive(model).blocks
    head = output if _scores_with_output_layer(model) else None
    order = _order(model, blocks, embed, output)
    is_splittable = blocks and not quantised_layers(model)
    tensor = _tensor_styles(model, embed, head, output) if is_splittable else {}
    return ParallelPlan(blocks, embed, head, order, "input_ids" if order else None, tensor)


def _blocks(model: nn.Module) -> Iterator[str]:
    """Yields the names of the layers that transformers keeps on one device, if they are members of a list."""
    kinds, last = undivided_classes(model), ""
    for name, module in model.named_modules():
        inside = last and name.startswith(f"{last}.")
        if type(module).__name__ in kinds and name.rpartition(".")[2].isdigit() and not inside:
            yield (last := name)


def _scores_with_output_layer(model: Any) -> bool:
    """Returns whether the logits are exactly the output of a linear layer: the model does not scale or cap them."""
    keys = {key for key, value in model.config.get_text_config().to_dict().items() if value is not None}
    if isinstance(model.get_output_embeddings(), AdaptedLayer):
        return False
    # final_logit_softcapping (Gemma), logit_scale (Cohere), logits_scaling (Granite), lm_head_multiplier (Falcon H1)
    changed = "lm_head_multiplier" in keys or any("logit" in k and "attn" not in k and "router" not in k for k in keys)
    return isinstance(model.get_output_embeddings(), nn.Linear) and not changed


def _order(model: Any, blocks: Sequence[str], embed: str | None, output: str | None) -> tuple[str, ...]:
    """Returns the modules that hidden states go through, in the order of the model's pipeline plan: embedding, layers,
    norm, head. Returns nothing if that plan does not name the list of blocks."""
    names = list(getattr(model, "pp_plan", None) or {})
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1 or not lists <= set(names):
        return ()
    middle = [name for name in names if name not in (embed, output)]
    order = [embed, *(part for name in middle for part in (blocks if name in lists else (name,))), output]
    return tuple(name for name in order if name is not None)


def _tensor_styles(model: Any, embed: str | None, head: str | None, output: str | None) -> dict[str, TensorStyle]:
    """Returns the tensor-parallel styles from the model's own plan, or nothing if that plan has a style that shoal
    does not have, such as those for experts."""
    plan = {name: style for name, style in (getattr(model, "tp_plan", None) or {}).items() if style not in _LEFT_ALONE}
    styles = {pattern: _STYLES[style] for pattern, style in plan.items() if style in _STYLES}
    if plan.keys() - styles.keys() - {output} or "column" not in styles.values():
        return {}
    # A module that holds columns and then rows works on shards between them.
    owners = {style: {p.rpartition(".")[0] for p, s in styles.items() if s == style} for style in ("column", "row")}
    styles |= dict.fromkeys(owners["column"] & owners["row"], "region")
    styles |= tensor_styles(model, lambda name: _style_of(name, styles))
    if head is None or embed is None or isinstance(model.get_input_embeddings(), AdaptedLayer):
        return styles
    styles |= {embed: "vocabulary", head: "vocabulary"}
    if not any(hasattr(module, "exchange") for module in model.modules()):
        return styles  # this attention makes masks as long as its input, so sequences cannot be split around it
    planned = [name for name, _ in model.named_modules() if _style_of(name, styles) is not None]
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{other}.") for other in planned)
        if next(module.parameters(recurse=False), None) is not None and not inside:
            styles[name] = "sequence"  # a norm
    return styles


def _style_of(name: str, styles: Mapping[str, TensorStyle]) -> TensorStyle | None:
    """Returns the style of a module, or None. In the patterns of transformers `*` stands for a number."""
    return next((style for pattern, style in styles.items() if _pattern(pattern).fullmatch(name)), None)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
