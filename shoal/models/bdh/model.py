"""BDH, the Dragon Hatchling, from arXiv:2509.26507.

All levels apply the same weights. A level maps each token to a large, sparse, positive vector of neurons. Attention
between these vectors is linear (no softmax, no scaling) and covers only earlier tokens. Its output gates the neurons,
and the gated neurons are mapped back. Parameter names and shapes are those of the public reference implementation.

Shapes: tokens (batch, time), x (batch, time, embd), everything per head (heads, batch, time, ...). Heads come first so
that the weights, which are per head, are used in their memory layout and not copied for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02
ROPE_THETA = 2**16
CHUNK = 512
LONGEST_AT_ONCE = 2048
"""Longer sequences are computed in chunks: above it, all pairs of tokens take more products than chunks and sums."""


@dataclass(frozen=True)
class BDHConfig:
    """The sizes of a BDH."""

    n_layer: int = 6
    n_embd: int = 256
    dropout: float = 0.1
    n_head: int = 4
    mlp_internal_dim_multiplier: int = 128
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_embd", "n_head", "mlp_internal_dim_multiplier", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: it must be at least 0 and below 1")
        neurons = self.mlp_internal_dim_multiplier * self.n_embd
        if neurons % (2 * self.n_head):
            raise ValueError(
                f"mlp_internal_dim_multiplier * n_embd = {neurons}: it must be a multiple of 2 * n_head = "
                f"{2 * self.n_head}, because each head rotates pairs of its neurons; change one of the three"
            )

    @property
    def neurons_per_head(self) -> int:
        return self.mlp_internal_dim_multiplier * self.n_embd // self.n_head


def norm(x: Tensor) -> Tensor:
    """Applies layer norm over the last dimension, without parameters."""
    return F.layer_norm(x, x.shape[-1:])


class Embedding(nn.Embedding):
    """An embedding with the initialisation of BDH."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Rotary(nn.Module):
    """Computes the rotation angle of each pair of neurons at each position (RoPE).

    The unit of `freqs` is full turns per position. Each value is stored twice, once for each neuron of a pair.
    """

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.freqs = nn.Buffer(torch.empty(1, 1, 1, neurons))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Always on the CPU: powers differ in the last bit between devices, and positions multiply that difference.
        neurons = self.freqs.shape[-1]
        even = torch.arange(neurons, dtype=torch.float32, device="cpu") // 2 * 2
        self.freqs.copy_((1.0 / ROPE_THETA ** (even / neurons) / (2 * math.pi)).view(1, 1, 1, -1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        # model.bfloat16() is meant for weights. With frequencies of 8 bits the phases would be noise after a few
        # hundred positions, also in later checkpoints. So this buffer moves with the model but stays in float32.
        super()._apply(fn, recurse)
        if self.freqs.dtype in (torch.bfloat16, torch.float16):
            self.freqs = nn.Buffer(self.freqs.float())
            self.reset_parameters()
        return self

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin for positions start … start + length - 1, each (time, pairs), in float32 even under
        autocast."""
        freqs = self.freqs[0, 0, :, ::2]
        positions = torch.arange(start, start + length, dtype=freqs.dtype, device=freqs.device)
        phases = (positions[:, None] * freqs) % 1 * (2 * math.pi)
        return phases.cos(), phases.sin()


def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (v[2i], v[2i+1]) by their angles.

    cos and sin are converted to v's type only here: rounding a phase would give a wrong angle, but rounding a cosine is
    no worse than the rounding of v. v is not converted to float32, because tensors over neurons are the largest ones.
    """
    cos, sin = cos.to(v.dtype), sin.to(v.dtype)
    even, odd = v.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class Memory:
    """What one level stores about earlier tokens: the sum over them of rope(s)ᵀ x, (heads, batch, neurons, embd).

    Because there is no softmax, attention to earlier tokens is a product with this sum, so the cost of a token does not
    depend on how many came before. The sum is stored in at least float32: in bf16, adding small terms to a large sum
    would have no effect.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def recall(self, keys: Tensor) -> Tensor | float:
        """Returns what the tokens before this chunk contribute to it: (heads, batch, time, embd)."""
        return 0.0 if self.total is None else keys @ self.total.to(keys.dtype)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Adds the tokens of this chunk."""
        added = keys.mT @ values
        added = added.to(torch.promote_types(added.dtype, torch.float32))
        self.total = added if self.total is None else self.total + added


def attend(keys: Tensor, values: Tensor, memory: Memory | None = None) -> Tensor:
    """Returns the sum over earlier tokens of (key · earlier key) · earlier value, (heads, batch, time, embd).

    With a memory, the tokens that it has stored are earlier ones, and it stores these. Long sequences are computed
    chunk by chunk, each with a memory of those before it, so that the cost of a token does not grow with their length.
    """
    length = keys.shape[-2] if keys.shape[-2] <= LONGEST_AT_ONCE else CHUNK
    before, parts = memory or Memory(), []
    chunks = [*zip(keys.split(length, -2), values.split(length, -2), strict=True)]
    for i, (keys, values) in enumerate(chunks, 1):
        parts.append((keys @ keys.mT).tril(-1) @ values + before.recall(keys))
        if memory is not None or i < len(chunks):
            before.store(keys, values)
    return torch.cat(parts, -2)


class State:
    """The state of a sequence: how many tokens the model has read, and the memory of each level."""

    def __init__(self, num_levels: int) -> None:
        self.position = 0
        self.memories = [Memory() for _ in range(num_levels)]


class Heads(nn.Module):
    """Computes the part of a level that is a sum over heads. If it gets only some heads of each weight, it returns the
    sum over these heads; tensor parallelism uses this."""

    def __init__(self, config: BDHConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.num_embd, self.num_neurons = config.n_embd, config.neurons_per_head

    def use_fused_kernels(self) -> None:
        """Makes one autograd function of the forward and the backward (`training.kernels: fused`)."""
        from shoal.models.bdh.fused import FusedHeads  # a subclass

        self.__class__ = FusedHeads

    def prepare(self, x: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """Returns what all levels need of the shared tensors besides them. They get it after the shared tensors."""
        return ()

    def forward(
        self,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        cos: Tensor,
        sin: Tensor,
        *prepared: Tensor,
        memory: Memory | None = None,
    ) -> Tensor:
        num_heads = encoder.shape[0]
        x = x.expand(num_heads, *x.shape)
        neurons = torch.einsum("hbtd,hdn->hbtn", x, encoder).relu()
        attended = attend(rotate(neurons, cos, sin), x, memory)  # the queries are the keys
        gates = torch.einsum("hbtd,hdn->hbtn", norm(attended), encoder_v).relu()
        gated = self.dropout(neurons * gates)
        # The sum over heads is outside the einsum: inside, einsum would copy the gated neurons to make them contiguous.
        return torch.einsum("hbtn,hnd->hbtd", gated, decoder.unflatten(0, (num_heads, -1))).sum(0)


class Level(nn.Module):
    """One level. It has no parameters: it gets the shared weights as arguments, so that it can be compiled or
    checkpointed (activations) separately."""

    def __init__(self, config: BDHConfig) -> None:
        super().__init__()
        self.heads = Heads(config)

    def forward(self, x: Tensor, *shared: Tensor, memory: Memory | None = None) -> Tensor:
        """Returns the hidden states of the next level. `shared` is encoder, encoder_v, decoder, cos, sin, and what
        `Heads.prepare` made of them."""
        return norm(x + norm(self.heads(x, *shared, memory=memory)))


class Readout(nn.Module):
    """Computes logits from hidden states. It is a module without parameters, so that a chunked loss can replace it."""

    def forward(self, x: Tensor, lm_head: Tensor) -> Tensor:
        return x @ lm_head


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draws one token per sequence: (batch, vocab) → (batch, 1). Temperature 0 takes the most likely token."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    vocab = logits.shape[-1]
    values, tokens = logits.float().topk(min(top_k or vocab, vocab))  # exactly k, even if logits are equal
    drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, drawn)


class BDH(nn.Module):
    """A language model: embedding, levels that share their weights, and a linear head."""

    def __init__(self, config: BDHConfig) -> None:
        super().__init__()
        self.config = config
        heads, embd, neurons = config.n_head, config.n_embd, config.neurons_per_head
        self.embed = Embedding(config.vocab_size, embd)
        self.encoder = nn.Parameter(torch.empty(heads, embd, neurons))
        self.encoder_v = nn.Parameter(torch.empty(heads, embd, neurons))
        self.decoder = nn.Parameter(torch.empty(heads * neurons, embd))
        self.lm_head = nn.Parameter(torch.empty(embd, config.vocab_size))
        self.attn = Rotary(neurons)
        self.levels = nn.ModuleList(Level(config) for _ in range(config.n_layer))
        self.head = Readout()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters of this module; `embed` and `attn` initialise theirs."""
        for parameter in (self.encoder, self.encoder_v, self.decoder, self.lm_head):
            nn.init.normal_(parameter, std=INIT_STD)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns logits (batch, time, vocab) and, if there are targets, the mean cross-entropy.

        With a state, the tokens continue the sequence of that state, and the state is updated.
        """
        length = tokens.shape[1]
        shared = (self.encoder, self.encoder_v, self.decoder, *self.attn(state.position if state else 0, length))
        x = norm(self.embed(tokens))
        if state is None:
            shared += self.levels[0].heads.prepare(x, *shared)  # type: ignore[operator, union-attr]
        for i, level in enumerate(self.levels):
            x = level(x, *shared, memory=state.memories[i] if state else None)
        if state:
            state.position += length
        logits = self.head(x, self.lm_head)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt_tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns the prompt (batch, time ≥ 1) followed by new tokens. The cost of a new token does not depend on the
        length of the text."""
        if prompt_tokens.shape[1] == 0:
            raise ValueError("the prompt is empty; generation needs at least one token")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"temperature = {temperature}, top_k = {top_k}: temperature must be at least 0, and top_k at least 1"
            )
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        state, tokens = State(len(self.levels)), [prompt_tokens]
        try:
            for _ in range(max_new_tokens):
                logits, _ = self(tokens[-1], state=state)
                tokens.append(sample(logits[:, -1], temperature, top_k, generator))
        finally:
            for module, mode in modes:
                module.training = mode
        return torch.cat(tokens, dim=1)
