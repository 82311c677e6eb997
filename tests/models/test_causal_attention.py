"""Attention without masks gives the same logits, and is used only where the mask would be causal."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
import transformers

from shoal.models.causal_attention import NAME, use_causal_attention

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("keys", "used"),
    [
        ({"model_type": "llama", "num_key_value_heads": 2}, True),
        ({"model_type": "qwen3", "head_dim": 4, "num_key_value_heads": 2}, True),
        (
            {"model_type": "mistral", "sliding_window": 4, "num_key_value_heads": 2},
            False,
        ),  # a sliding window is not the causal mask
        ({"model_type": "llama", "attn_implementation": "eager"}, False),  # the user chose another attention
    ],
)
def test_logits_are_the_same_as_with_masks(keys: dict[str, Any], used: bool) -> None:
    torch.manual_seed(0)
    keys = {**SIZES, **keys}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, 50, (2, 9))
    expected = model(input_ids=tokens, use_cache=False).logits
    use_causal_attention(model)
    assert (model.config._attn_implementation == NAME) == used
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
    assert any(hasattr(module, "exchange") for module in model.modules()) == used


def llama() -> Any:
    config = transformers.AutoConfig.for_model("llama", num_key_value_heads=2, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    use_causal_attention(model)
    return model


def test_a_layer_compiles_to_one_graph() -> None:
    model = llama()
    model.model.layers[0].compile(backend="eager", fullgraph=True)
    model(input_ids=torch.randint(0, 50, (2, 9)), use_cache=False).logits.sum().backward()


def test_nothing_is_imported_while_the_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import inside what torch.compile traces may break the graph."""
    model, importers = llama(), set()
    real_import = builtins.__import__

    def note(name: str, globals: Any = None, *rest: Any) -> Any:
        importers.add((globals or {}).get("__name__"))
        return real_import(name, globals, *rest)

    monkeypatch.setattr(builtins, "__import__", note)
    model(input_ids=torch.randint(0, 50, (2, 9)), use_cache=False)
    assert "shoal.models.causal_attention" not in importers
