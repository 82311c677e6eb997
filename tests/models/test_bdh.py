"""Compares BDH with a slow float64 transcription of its formulas, and checks what users expect of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models.bdh import BDH, BDHConfig
from shoal.models.bdh.model import State

TINY = BDHConfig(n_layer=2, n_embd=8, dropout=0.0, n_head=2, mlp_internal_dim_multiplier=4, vocab_size=11)
SHAPES = {
    "embed.weight": (256, 256),
    "encoder": (4, 256, 8192),
    "encoder_v": (4, 256, 8192),
    "decoder": (32768, 256),
    "lm_head": (256, 256),
    "attn.freqs": (1, 1, 1, 8192),
}


def build(config: BDHConfig = TINY, seed: int = 0, scale: float = 1.0) -> BDH:
    torch.manual_seed(seed)
    model = BDH(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def text(*shape: int, vocab: int = TINY.vocab_size, seed: int = 1) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def portable_bf16() -> Iterator[None]:
    """Turns oneDNN off: some virtual machines claim to support AMX, and the process crashes when oneDNN uses it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def naive_norm(v: Tensor) -> Tensor:
    mean = v.sum() / len(v)
    return (v - mean) / (((v - mean) ** 2).sum() / len(v) + 1e-5).sqrt()


def naive_rope(v: Tensor, position: int) -> Tensor:
    turned = []
    for i in range(len(v) // 2):
        angle = 2 * math.pi * position * (2**16) ** (-2 * i / len(v)) / (2 * math.pi)
        turned.append(v[2 * i] * math.cos(angle) - v[2 * i + 1] * math.sin(angle))
        turned.append(v[2 * i + 1] * math.cos(angle) + v[2 * i] * math.sin(angle))
    return torch.stack(turned)


def naive_logits(weights: dict[str, Tensor], tokens: list[int], n_layer: int) -> Tensor:
    """Computes logits one sequence, one position, one head and one pair at a time."""
    heads, neurons = weights["encoder"].shape[0], weights["encoder"].shape[2]
    xs = [naive_norm(weights["embed.weight"][token]) for token in tokens]
    for _ in range(n_layer):
        out = []
        for t, x in enumerate(xs):
            y = torch.zeros_like(x)
            for h in range(heads):
                s = torch.relu(x @ weights["encoder"][h])
                a = torch.zeros_like(x)
                for earlier in range(t):
                    key = naive_rope(torch.relu(xs[earlier] @ weights["encoder"][h]), earlier)
                    a = a + (naive_rope(s, t) @ key) * xs[earlier]
                u = torch.relu(naive_norm(a) @ weights["encoder_v"][h])
                y = y + (s * u) @ weights["decoder"][h * neurons : (h + 1) * neurons]
            out.append(naive_norm(x + naive_norm(y)))
        xs = out
    return torch.stack([x @ weights["lm_head"] for x in xs])


def near(value: Tensor, expected: Tensor, relative: float) -> bool:
    return bool((value - expected).norm() <= relative * expected.norm())


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_logits_loss_and_gradients_follow_the_formulas(dtype: torch.dtype, relative: float, scale: float) -> None:
    model = build(scale=scale).to(dtype)
    tokens, targets = text(2, 7), text(2, 7, seed=2)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.stack([naive_logits(weights, row, TINY.n_layer) for row in tokens.tolist()])
    expected_loss = -expected.log_softmax(-1).gather(-1, targets[..., None]).mean()
    expected_loss.backward()

    logits, loss = model(tokens, targets)
    assert loss is not None
    loss.backward()
    assert logits.shape == (2, 7, TINY.vocab_size)
    assert near(logits.double(), expected, relative)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=relative)
    for name, parameter in model.named_parameters():
        assert near(parameter.grad.double(), weights[name].grad, relative), name


def test_without_targets_there_is_no_loss() -> None:
    assert build()(text(1, 3))[1] is None


def test_the_state_dict_is_that_of_the_reference() -> None:
    with torch.device("meta"):
        model = BDH(BDHConfig())
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == SHAPES
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_296_896
    for level in model.levels:
        assert not [*level.parameters(), *level.buffers()]


def test_weights_of_the_reference_load_strictly() -> None:
    donor, model = build(seed=1), build(seed=2)
    weights = {name: value.clone() for name, value in donor.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    assert torch.equal(model(text(1, 5))[0], donor(text(1, 5))[0])


def test_the_frequencies_are_those_of_the_reference() -> None:
    neurons = TINY.neurons_per_head
    expected = [1 / 65536 ** (j // 2 * 2 / neurons) / (2 * math.pi) for j in range(neurons)]
    torch.testing.assert_close(build().attn.freqs.flatten(), torch.tensor(expected))


def test_every_module_initialises_its_own_parameters() -> None:
    config = replace(TINY, n_embd=64, mlp_internal_dim_multiplier=16)
    freqs = BDH(config).attn.freqs
    with torch.device("meta"):
        model = BDH(config)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    children_first: list[nn.Module] = [module for _, module in model.named_modules()][::-1]
    for module in children_first:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.equal(model.attn.freqs, freqs)
    for name, parameter in model.named_parameters():
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
        assert abs(parameter.mean().item()) < 0.005, name


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, tokens = build(scale=20.0), text(2, 9)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % TINY.vocab_size
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_first_position_attends_to_nothing() -> None:
    """It does not attend to itself either: attention is zero, no gate opens, and the token passes unchanged."""
    model, tokens = build(scale=20.0), text(1, 4)
    x = nn.functional.layer_norm(model.embed(tokens[:, 0]), (TINY.n_embd,))
    torch.testing.assert_close(model(tokens)[0][:, 0], x @ model.lm_head, rtol=1e-3, atol=1e-4)


def test_the_order_of_tokens_matters() -> None:
    model = build(scale=20.0)
    forward, swapped = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(forward)[0][:, -1], model(swapped)[0][:, -1])


def test_dropout_only_while_training() -> None:
    model, tokens = build(replace(TINY, dropout=0.5), scale=20.0), text(2, 6)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    assert torch.equal(model(tokens)[0], build(scale=20.0)(tokens)[0])


@pytest.mark.usefixtures("portable_bf16")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bf16_autocast_is_near_and_keeps_phases_in_float32() -> None:
    model = build(replace(TINY, n_embd=32, mlp_internal_dim_multiplier=8))
    tokens, targets = text(2, 64), text(2, 64, seed=2)
    seen: dict[str, torch.dtype] = {}
    model.attn.register_forward_hook(lambda _, args, tables: seen.update(tables=tables[0].dtype))
    model.levels[0].heads.register_forward_hook(lambda _, args, y: seen.update(heads=y.dtype))
    exact, _ = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(tokens, targets)
    assert loss is not None
    loss.backward()
    assert seen == {"tables": torch.float32, "heads": torch.bfloat16}
    assert near(logits.float(), exact, 0.05)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.usefixtures("portable_bf16")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_bf16_model_keeps_its_frequencies() -> None:
    model = build()
    freqs = model.attn.freqs.clone()
    model.bfloat16()
    assert model.encoder.dtype == torch.bfloat16
    assert torch.equal(model.attn.freqs, freqs)
    assert model(text(1, 5))[0].dtype == torch.bfloat16
    assert model.generate(text(1, 5), 3).shape == (1, 8)


def test_the_heads_add_up_to_the_whole() -> None:
    """A level that gets some of the heads returns their sum; tensor parallelism relies on this."""
    model = build(scale=20.0)
    x, tables = torch.randn(2, 5, TINY.n_embd), model.attn(0, 5)
    heads, half = model.levels[0].heads, TINY.neurons_per_head
    parts = [
        heads(
            x, model.encoder[h : h + 1], model.encoder_v[h : h + 1], model.decoder[h * half : (h + 1) * half], *tables
        )
        for h in range(TINY.n_head)
    ]
    whole = heads(x, model.encoder, model.encoder_v, model.decoder, *tables)
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_generation_with_memory_equals_recomputing(temperature: float) -> None:
    model, tokens = build(scale=10.0).double(), text(3, 4)
    generated = model.generate(tokens, 20, temperature, generator=torch.Generator().manual_seed(3))
    assert torch.equal(generated[:, :4], tokens)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = model(tokens)[0][:, -1]
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            ranked, order = logits.sort(-1, descending=True)
            drawn = torch.multinomial((ranked / temperature).float().softmax(-1), 1, generator=generator)
            chosen = order.gather(-1, drawn)
        tokens = torch.cat((tokens, chosen), dim=1)
    assert torch.equal(generated, tokens)


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 4, 2]])
def test_reading_in_chunks_equals_reading_at_once(chunks: list[int]) -> None:
    model, tokens = build(scale=20.0).double(), text(2, 12)
    state = State(TINY.n_layer)
    with torch.no_grad():
        pieces = [model(chunk, state=state)[0] for chunk in tokens.split(chunks, dim=1)]
        whole = model(tokens)[0]
    assert state.position == 12
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


def test_generation_leaves_the_model_as_it_was() -> None:
    model = build(replace(TINY, dropout=0.5), scale=20.0)
    model.levels[1].eval()
    first, second = (model.generate(text(1, 3), 10, temperature=0) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert model.training
    assert not model.levels[1].training


def test_top_k_draws_only_from_the_k_most_likely() -> None:
    model, tokens = build(scale=5.0), text(1, 4)
    allowed = set(model(tokens)[0][0, -1].topk(3).indices.tolist())
    drawn = model.generate(tokens.expand(200, -1), 1, temperature=5.0, top_k=3)[:, -1]
    assert set(drawn.tolist()) == allowed
    assert torch.equal(model.generate(tokens, 8, top_k=1), model.generate(tokens, 8, temperature=0))
    assert model.generate(tokens, 2, top_k=1000).shape == (1, 6)


def test_generating_no_tokens_or_from_an_empty_prompt() -> None:
    model, tokens = build(), text(1, 4)
    assert torch.equal(model.generate(tokens, 0), tokens)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(tokens[:, :0], 1)
    with pytest.raises(ValueError, match="temperature = -1"):
        model.generate(tokens, 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k = 0"):
        model.generate(tokens, 1, top_k=0)


def test_learns_a_repeated_text() -> None:
    model = build(BDHConfig(n_layer=2, n_embd=32, dropout=0.0, n_head=2, mlp_internal_dim_multiplier=8))
    line = torch.tensor([list(b"the dragon hatches. " * 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(40):
        _, loss = model(line[:, :-1], line[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_a_level_can_be_checkpointed_alone() -> None:
    plain, saving = build(scale=20.0), build(scale=20.0)
    for level in saving.levels:
        level.forward = (lambda inner: lambda *args, **kw: checkpoint(inner, *args, use_reentrant=False, **kw))(
            level.forward
        )
    for model in (plain, saving):
        model(text(2, 6), text(2, 6, seed=2))[1].backward()
    for (name, expected), value in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(value.grad, expected.grad), name


@pytest.mark.slow
def test_a_level_can_be_compiled_alone() -> None:
    plain, compiled = build(scale=20.0), build(scale=20.0)
    for level in compiled.levels:
        level.compile(fullgraph=True)
    for model in (plain, compiled):
        model(text(2, 6), text(2, 6, seed=2))[1].backward()
    for (name, expected), value in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(value.grad, expected.grad, msg=name)
    assert torch.equal(*(model.generate(text(1, 4), 5, temperature=0) for model in (plain, compiled)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"n_layer": -1}, "n_layer = -1: it must be at least 1"),
        ({"n_embd": 0}, "n_embd = 0"),
        ({"n_head": 0}, "n_head = 0"),
        ({"mlp_internal_dim_multiplier": -2}, "mlp_internal_dim_multiplier = -2"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"dropout": -0.1}, "dropout = -0.1"),
        ({"n_head": 3}, r"= 32768: it must be a multiple of 2 \* n_head = 6"),
        ({"n_embd": 4, "mlp_internal_dim_multiplier": 3}, r"= 12: it must be a multiple of 2 \* n_head = 8"),
    ],
)
def test_impossible_configs_are_refused_with_one_line(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        BDHConfig(**bad)
    assert "\n" not in str(error.value)
