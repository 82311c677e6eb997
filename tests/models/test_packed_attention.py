"""Packed samples do not see each other: losses and gradients are those of the samples one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.models.causal_attention import NAME, use_causal_attention
from shoal.models.packed_attention import (
    PACKABLE,
    as_mask,
    attend_within_samples,
    block_mask,
    bounds_in_batch,
    has_starts,
    positions_of,
)
from shoal.recipes import token_loss

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
OTHER_KEYS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "mixtral": {**SIZES, "num_local_experts": 2},
    "qwen2_moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SIZES, "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    **{kind: {**SIZES, "head_dim": 8} for kind in ("gemma", "gemma2", "gemma3_text", "qwen3", "glm", "glm4")},
}
WINDOW = 6
"""Shorter than the samples, so that a sliding window matters."""
# Two packs of 24 positions: samples of 10, 9 and 3 tokens with 2 of padding, and of 17 and 7 without.
STARTS = torch.tensor([[0, 10, 19, 22], [0, 17, 24, 24]], dtype=torch.int32)
LENGTH = 24


def build(kind: str, attention: str | None, window: bool = False) -> Any:
    keys = dict(OTHER_KEYS.get(kind, SIZES))
    if window:
        keys |= {"sliding_window": WINDOW}
        known = transformers.CONFIG_MAPPING[kind]().to_dict()
        keys |= {key: value for key, value in (("use_sliding_window", True), ("max_window_layers", 1)) if key in known}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    if attention is None:
        use_causal_attention(model)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (2, LENGTH), generator=generator)
    labels = torch.randint(64, (2, LENGTH), generator=generator)
    labels[0, 22:] = -100
    return tokens, labels


def samples() -> list[tuple[int, slice]]:
    """Returns the row and the positions of each sample."""
    return [(0, slice(0, 10)), (0, slice(10, 19)), (0, slice(19, 22)), (1, slice(0, 17)), (1, slice(17, 24))]


def gradients(model: Any, tokens: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits and the gradients of the summed loss."""
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False, **options).logits
    token_loss(logits, labels).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: Any) -> None:
    tokens, labels = batch()
    options = {"position_ids": positions_of(STARTS, LENGTH)}
    if model.config._attn_implementation == NAME:
        options["attention_mask"] = as_mask(STARTS, LENGTH)
    packed, together = gradients(model, tokens, labels, **options)
    if "attention_mask" in options:  # on CUDA models get the starts instead
        by_starts, _ = gradients(model, tokens, labels, **options | {"attention_mask": STARTS[:, None, None]})
        assert torch.allclose(by_starts, packed, atol=1e-6)
    alone: dict[str, Tensor] = {}
    for row, where in samples():
        logits, one = gradients(model, tokens[row : row + 1, where], labels[row : row + 1, where])
        assert torch.allclose(packed[row, where], logits[0], atol=1e-5), (row, where)
        loss = token_loss(packed[row, where], labels[row, where])
        assert loss.item() == pytest.approx(token_loss(logits[0], labels[row, where]).item(), rel=1e-6)
        alone = {name: alone.get(name, 0) + gradient for name, gradient in one.items()}
    scale = max(gradient.abs().max().item() for gradient in alone.values())
    for name, gradient in together.items():
        assert torch.allclose(gradient, alone[name], atol=1e-6 * scale), name


@pytest.mark.parametrize(
    ("kind", "attention", "window"),
    [("llama", None, False), ("qwen3", None, False), ("gemma3_text", None, True), ("mistral", None, True)],
)
def test_packed_samples_train_as_samples_do(kind: str, attention: str | None, window: bool) -> None:
    model = build(kind, attention, window)
    assert (model.config._attn_implementation == NAME) == (not window)
    check(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention"),
    [(k, a) for k in PACKABLE for a in (None, "sdpa", "eager") if (k, a) != ("gemma2", "sdpa")],
)
def test_every_kind_that_may_be_packed_keeps_samples_apart(kind: str, attention: str | None) -> None:
    check(build(kind, attention))
    if "sliding_window" in transformers.CONFIG_MAPPING[kind]().to_dict():
        check(build(kind, attention, window=True))


def test_a_kind_that_is_not_listed_does_mix_samples() -> None:
    """The list is needed: GPT-OSS takes positions that start again, and attends across samples all the same."""
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert "gpt_oss" not in PACKABLE
    with pytest.raises(AssertionError):
        check(model)


def test_positions_and_masks_of_packs() -> None:
    starts = torch.tensor([[0, 2, 5, 6]], dtype=torch.int32)
    assert positions_of(starts, 6).tolist() == [[0, 1, 0, 1, 2, 0]]
    mask = block_mask(starts, 6)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert not has_starts(as_mask(starts, 6))
    assert bounds_in_batch(STARTS, LENGTH).tolist() == [0, 10, 19, 22, 24, 41, 48, 48, 48]


def test_starts_in_the_place_of_a_mask_give_the_same() -> None:
    """On CUDA the attention gets the starts; where there is no kernel for them it makes the mask itself."""
    model, (tokens, _) = build("llama", None), batch()
    options = {"position_ids": positions_of(STARTS, LENGTH), "use_cache": False}
    by_mask = model(input_ids=tokens, attention_mask=block_mask(STARTS, LENGTH), **options).logits
    assert has_starts(STARTS[:, None, None])
    by_starts = model(input_ids=tokens, attention_mask=STARTS[:, None, None], **options).logits
    assert torch.equal(by_mask, by_starts)


@pytest.mark.slow
@pytest.mark.parametrize("by_starts", [True, False])
def test_a_packed_layer_compiles_to_one_graph(by_starts: bool) -> None:
    model, (tokens, labels) = build("llama", None), batch()
    model.model.layers[0].compile(backend="eager", fullgraph=True)
    mask = STARTS[:, None, None] if by_starts else block_mask(STARTS, LENGTH)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions_of(STARTS, LENGTH), use_cache=False)
    token_loss(logits.logits, labels).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_attention_keeps_samples_apart(key_heads: int) -> None:
    """Outputs and gradients of the variable-length kernel are those of the mask, in bf16."""
    sdpa = transformers.AttentionInterface()["sdpa"]
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // key_heads  # type: ignore[assignment]
    starts, results = STARTS.cuda(), []
    for use_kernel in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)
        query, key, value = (
            torch.randn(2, heads, LENGTH, 32, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
            for heads in (4, key_heads, key_heads)
        )
        if use_kernel:
            mask = as_mask(starts, LENGTH)
            assert has_starts(mask)
            output = attend_within_samples(sdpa, module, query, key, value, mask, scaling=0.2)
        else:
            output, _ = sdpa(module, query, key, value, block_mask(starts, LENGTH), scaling=0.2)
        output.square().sum().backward()
        results.append([output, query.grad, key.grad, value.grad])
    for kernel, masked in zip(*results, strict=True):
        assert torch.allclose(kernel, masked, atol=0.05, rtol=0.05)
