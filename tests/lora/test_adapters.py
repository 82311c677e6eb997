"""Adapters: PEFT's rules, names, forward and gradients; the section `lora:`; first values by name."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.config import check_run
from shoal.errors import UserError
from shoal.lora import LoraConfig
from shoal.lora import dropout as dropout_module
from shoal.lora.adapters import add_adapters, is_adapter_tensor, merge_adapters
from shoal.lora.config import OTHER_NAMES
from shoal.lora.dropout import drop, dropped_product, kept_places
from shoal.lora.peft_folder import config_for_peft, name_in_folder, name_in_model
from shoal.lora.trained_tokens import token_indices
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.transform.kernels import apply_kernels, describe_kernels
from shoal.verify.draws import turn_off_dropout
from shoal.weights import build, materialise

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 64,
}
TOKENS = torch.arange(18).view(2, 9) * 5 % 64
KINDS: dict[str, dict[str, Any]] = {
    "all linear layers": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "patterns": {
        "target_modules": "auto",
        "bias": "lora_only",
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5},
    },
    "an embedding": {"target_modules": ["embed_tokens", "o_proj"], "use_rslora": True, "bias": "all"},
    "some layers": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"], "layers_to_transform": [0, 2]},
    "layers by their list": {"target_modules": ["v_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "a regular expression": {
        "target_modules": r".*\.1\..*_proj",
        "exclude_modules": ["k_proj", "gate_proj"],
        "lora_bias": True,
    },
    "conv1d": {"r": 2, "target_modules": ["c_attn", "c_fc"], "use_dora": True},
    "rows of tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [40, 5, 10]},
    "rows of tokens, tied": {"target_modules": ["v_proj"], "trainable_token_indices": [40, 5, 10]},
    "rows of tokens in the head": {
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"embed_tokens": [0, 5], "lm_head": [63, 10, 5]},
    },
    "rows that Gemma scales": {"target_modules": ["v_proj"], "trainable_token_indices": [40, 0]},
    "experts": {
        "r": 2,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 3},
    },
    "experts, transposed": {
        "r": 2,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "router.weight"],
    },
    "the parameter of a linear layer": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
}


def base_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "conv1d":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dict.fromkeys(DROPOUTS, 0.0)))
    if kind.startswith("experts"):
        sizes = {**TINY, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        if "transposed" in kind:
            return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, head_dim=8, pad_token_id=None))
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    if "Gemma" in kind:
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TINY, head_dim=8))
    tied = "tied" in kind
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY, attention_bias=True, tie_word_embeddings=tied)
    )


DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_forward_gradients_and_names_are_those_of_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    base, lora = base_model(kind), LoraConfig(**KINDS[kind])
    plain = copy.deepcopy(base)
    add_adapters(base, lora)
    config = config_for_peft(plain, lora, None, None, token_indices(base))
    theirs: Any = peft.get_peft_model(plain, peft.LoraConfig(**{**config, "inference_mode": False}))
    mine = trained(base)
    names = {name_in_folder(base, name): name for name in mine}
    saved = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert names.keys() == saved.keys()
    assert all(name_in_model(there) == here for there, here in names.items())
    generator = torch.Generator().manual_seed(1)
    for there, here in names.items():
        drawn = torch.randn(mine[here].shape, generator=generator) / 5
        saved[there] = saved[there] * (1 + drawn.abs()) if "magnitude" in here else saved[there] + drawn
        mine[here].data.copy_(saved[there])
    peft.set_peft_model_state_dict(theirs, saved)
    outputs = [model(input_ids=TOKENS, labels=TOKENS) for model in (base, theirs)]
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-5, atol=1e-6)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == len(mine)
    for name, gradient in gradients.items():
        here = name_in_model(name.replace(".default", "").replace("modules_to_save.", ""))
        torch.testing.assert_close(mine[here].grad, gradient, rtol=1e-4, atol=1e-6)
    if not lora.lora_bias:
        merge_adapters(base)
        assert not any(is_adapter_tensor(name) for name in base.state_dict())
        torch.testing.assert_close(base(input_ids=TOKENS).logits, outputs[0].logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 3])
def test_an_adapted_parameter_that_a_user_compiles(scale: int) -> None:
    """It has its adapter, and that its scale, which inductor drops of torch.add with alpha."""
    torch.compiler.reset()
    model = base_model("dense")
    lora = LoraConfig(r=2, lora_alpha=2 * scale, target_modules=[], target_parameters=["mlp.down_proj.weight"])
    plain = model(input_ids=TOKENS).logits
    add_adapters(model, lora)
    for name, parameter in trained(model).items():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    expected = model(input_ids=TOKENS).logits
    assert not torch.allclose(expected, plain, atol=1e-3)
    torch.testing.assert_close(torch.compile(model)(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_on_the_adapter_alone() -> None:
    base = base_model("llama").train()
    plain = base(input_ids=TOKENS).logits
    add_adapters(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5))
    torch.testing.assert_close(base(input_ids=TOKENS).logits, plain)  # B is zero
    for name, parameter in trained(base).items():
        if ".lora_B." in name:
            nn.init.ones_(parameter)
    first, second = (base(input_ids=TOKENS).logits for _ in range(2))
    assert not torch.equal(first, second)
    base.eval()
    assert torch.equal(base(input_ids=TOKENS).logits, base(input_ids=TOKENS).logits)


def make_recipe(**lora: Any) -> CausalLMRecipe:
    tree = {"model": {"config": {"model_type": "llama", **TINY}}, "lora": lora}
    return CausalLMRecipe(CausalLMRecipe.Config.model_validate(tree))


def first_values(**lora: Any) -> dict[str, Tensor]:
    recipe = make_recipe(**lora)
    model, weights = build(recipe.build_model, recipe.weights(), 3)
    assert weights.kind == "init", weights.reason
    materialise(model, torch.device("cpu"), 3, weights)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_first_values_depend_on_the_name_alone() -> None:
    """A module draws the same values whatever other modules have adapters; so does the frozen base."""
    some, all_ = first_values(target_modules=["v_proj"]), first_values(target_modules="all-linear")
    assert some.keys() < all_.keys()
    assert all(torch.equal(value, all_[name]) for name, value in some.items())
    a = some["model.layers.0.self_attn.v_proj.lora_A.default.weight"]
    assert a.abs().max() <= 32**-0.5  # as nn.Linear draws
    assert not torch.equal(a, some["model.layers.1.self_attn.v_proj.lora_A.default.weight"])
    assert not some["model.layers.0.self_attn.v_proj.lora_B.default.weight"].any()
    gaussian = first_values(target_modules=["v_proj"], init_lora_weights="gaussian", r=4)
    assert abs(gaussian["model.layers.0.self_attn.v_proj.lora_A.default.weight"].std() - 0.25) < 0.08
    both = first_values(target_modules=["v_proj"], init_lora_weights=False)
    assert both["model.layers.0.self_attn.v_proj.lora_B.default.weight"].any()


def test_frozen_weights_may_be_kept_in_half_precision() -> None:
    tree = {
        "model": {"config": {"model_type": "llama", **TINY}, "dtype": "bf16"},
        "lora": {"target_modules": ["q_proj"]},
    }
    model = CausalLMRecipe(CausalLMRecipe.Config.model_validate(tree)).build_model()
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    model(input_ids=TOKENS).logits.float().sum().backward()
    assert all(p.grad is not None for p in trained(model).values())


def test_every_field_of_peft_is_a_key() -> None:
    peft = pytest.importorskip("peft")
    declared = LoraConfig.model_fields.keys() - OTHER_NAMES.keys() - {"lora_plus_ratio"}
    assert {field.name for field in fields(peft.LoraConfig)} == declared


def test_other_spellings() -> None:
    lora = LoraConfig(rank=3, alpha=6, dropout=0.1)
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.rank) == (3, 6, 0.1, None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rank": 3, "r": 4}, "lora: rank = 3 and r = 4 are the same key; give one of them"),
        ({"init_lora_weights": "pissa"}, "lora.init_lora_weights: is not supported: it needs more than"),
        (
            {"target_parameters": ["experts"], "dropout": 0.1},
            "lora_dropout = 0.1: PEFT has it without target_parameters",
        ),
        ({"trainable_token_indices": "new"}, "lora.trainable_token_indices"),
        ({"use_qalora": True}, "lora.use_qalora: is not supported"),
        ({"lora_apha": 3}, "lora.lora_apha is not a key; did you mean lora.lora_alpha?"),
        ({"use_dora": True}, "lora.use_dora = true: its magnitudes start from the weights of the base"),
        ({"layers_to_transform": [1]}, "layers_to_transform is for a list of target_modules"),
        ({"target_modules": "*.q_proj"}, r"lora.target_modules: '\*.q_proj' is not a regular expression"),
        ({"rank_pattern": {"[q": 2}}, r"lora.rank_pattern: '\[q' is not a regular expression"),
        ({"modules_to_save": ["*head"]}, r"lora.modules_to_save: '\*head' is not a regular expression"),
        ({"trainable_token_indices": []}, r"trainable_token_indices = \[\]: it names no token"),
        ({"trainable_token_indices": {"lm_head": []}}, "trainable_token_indices = .*: it names no token"),
    ],
)
def test_wrong_keys_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    tree = {"recipe": "causal_lm", "model": {"config": {"model_type": "llama", **TINY}}, "training": {"max_steps": 1}}
    with pytest.raises(UserError, match=words):
        check_run({**tree, "lora": keys})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"target_modules": ["q_prj", "vproj"]},
            r"lora.target_modules = \[q_prj, vproj\]: no module of the model matches; did you mean q_proj, v_proj\?",
        ),
        ({"target_modules": ["q_prj", "v_proj"]}, "lora.target_modules: 'q_prj' matches no module .* mean q_proj"),
        ({"target_modules": ["zzz"]}, "no module of the model matches; it has q_proj, k_proj, v_proj, o_proj"),
        ({"target_modules": ["norm"]}, "model.norm is a LlamaRMSNorm, which cannot have an adapter"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [7]}, "layers_to_transform leave none of the modules"),
        (
            {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2}},
            "lora.rank_pattern: 'v_proj' matches no module",
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_hed"]}, "no such module; did you mean lm_head"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "lora.bias = all: the model has no such biases"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["proj"]}, "'proj': it is also the end of .*q_proj, which"),
        (
            {"target_modules": "q_proj"},
            r"a text is a regular expression for the whole name .* write a list, \[q_proj\]",
        ),
        ({"target_modules": ["embed_tokens"], "lora_bias": True}, "lora.lora_bias = true is not for the embedding"),
        ({"target_parameters": ["gate_up_prj"]}, "lora.target_parameters = 'gate_up_prj': the model has no such"),
        (
            {"target_parameters": ["embed_tokens.weight"]},
            "embed_tokens.weight is a parameter .* cannot have an adapter",
        ),
        ({"target_parameters": ["q_proj.weight"]}, "q_proj is in lora.target_modules, too; take it out of one of them"),
        ({"trainable_token_indices": [1]}, "trained rows start from those of the base, and model.config has none"),
    ],
)
def test_targets_that_do_not_fit_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_recipe(**keys).build_model()


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([64], "64 is not a token of model.embed_tokens, which has 64"),
        ([1, 1], "a token is named twice"),
        ({"lm_hed": [1]}, "the model has no such module; name model.embed_tokens"),
        ({"q_proj": [1]}, "q_proj is in lora.target_modules, too"),
        ({"o_proj": [1]}, "o_proj is a Linear; name an embedding, or a head without a bias"),
        ({"embed_tokens": [1], "lm_head": [2]}, "model.embed_tokens is tied to lm_head; give both the same tokens"),
        ("added", "model.added_tokens is empty"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(indices: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        add_adapters(base_model("tied"), LoraConfig(target_modules=["q_proj"], trainable_token_indices=indices))


def test_a_tied_module_is_trained_with_its_twin_or_refused() -> None:
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    keys = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    with pytest.raises(UserError, match=r"lm_head is tied to model.embed_tokens, .* lora.ensure_weight_tying: true"):
        add_adapters(transformers.LlamaForCausalLM(config), LoraConfig(**keys))
    model = transformers.LlamaForCausalLM(config)
    add_adapters(model, LoraConfig(**keys, ensure_weight_tying=True))
    assert model.model.embed_tokens.weight.requires_grad
    keys = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    with pytest.raises(UserError, match=r"embed_tokens has an adapter and is tied to lm_head; PEFT would put"):
        add_adapters(transformers.LlamaForCausalLM(config), LoraConfig(**keys))


def test_a_type_for_frozen_weights_needs_some() -> None:
    tree = {"recipe": "causal_lm", "model": {"config": {"model_type": "llama", **TINY}, "dtype": "bf16"}}
    with pytest.raises(UserError, match=r"model.dtype = bf16: it is the type of frozen weights"):
        check_run({**tree, "training": {"max_steps": 1}})


def test_places_are_dropped_independently() -> None:
    """At the right rate, and no row is dropped like a part of another one, nor one adapter like another one."""
    p, shape = 0.5, (64, 96)  # 96 is no power of 2
    one, other = (kept_places(shape, torch.tensor(seed), p) for seed in (2023406814, 2023406815))
    for mask in (one, other):
        assert abs(mask.double().mean().item() - p) < 4 * (p * (1 - p) / mask.numel()) ** 0.5
    for mask in (one, one.mT):
        for shift in range(48):
            left, right = mask[:, shift:], mask[:, : mask.shape[1] - shift]
            same = (left[:, None] == right[None]).double().mean(-1)
            if shift == 0:
                same.fill_diagonal_(0.5)
            if left.shape[1] >= 48:
                assert same.max() < 0.95
    assert abs((one == other).double().mean().item() - 0.5) < 0.03
    assert kept_places(shape, torch.tensor(7), 0.0).all()


def test_fused_adapters_refuse_second_derivatives() -> None:
    """They would lack terms."""
    x, weight = torch.randn(5, 12, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    loss = dropped_product(x, weight, weight.detach(), torch.tensor(5), 0.3, 1.0).square().sum()
    with pytest.raises(RuntimeError, match=r"no second derivatives.* set training.kernels: plain"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_an_adapter_of_an_embedding_is_drawn_as_the_key_says() -> None:
    for init in (True, False):
        drawn = first_values(target_modules=["embed_tokens"], init_lora_weights=init)
        first = next(tensor for name, tensor in drawn.items() if "lora_embedding_A" in name)
        assert bool(first.any()) == (not init)


def test_pairs_of_rows_are_dropped_as_often_as_chance_would() -> None:
    """Rows and columns are hashed apart and then mixed; a weak mix would show in the number of common places."""
    rate, rows, columns = 0.05, 512, 4096
    dropped = ~kept_places((rows, columns), torch.tensor(99), rate)
    for mask in (dropped, dropped.mT):
        common = mask.double() @ mask.double().mT
        common = common[~torch.eye(len(mask), dtype=torch.bool)]
        expected = rate**2 * mask.shape[1]
        assert common.mean() == pytest.approx(expected, rel=0.02)
        assert common.var() == pytest.approx(expected, rel=0.1)  # as a Poisson number


def test_the_fused_dropout_has_the_gradients_of_a_mask() -> None:
    """Also where a layer computes beside its dropped inputs, as DoRA's does; and the operators are as torch wants."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 12, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    seed, p, scaling = torch.tensor(5), 0.3, 0.25
    mask = kept_places(x.shape, seed, p) / (1 - p)
    found = dropped_product(x, weight, weight.detach(), seed, p, scaling)
    expected = scaling * (x * mask) @ weight.mT
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(y, (x, weight), gradient) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(torch.autograd.grad(drop(x, seed, p).sum(), x)[0], mask)
    for input in (x, torch.randn(5, 3, 12).transpose(0, 1).requires_grad_()):
        torch.library.opcheck(
            torch.ops.shoal.dropped_product.default, (input, weight, weight.detach().clone(), seed, p, scaling)
        )
        torch.library.opcheck(torch.ops.shoal.drop.default, (input, seed, p))


@pytest.mark.parametrize("dora", [False, True])
def test_fused_adapters_drop_in_training_alone(dora: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    add_adapters(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["0"], use_dora=dora))
    torch.nn.init.normal_(model.get_parameter("0.lora_B.default.weight"), std=0.3)
    if dora:
        torch.nn.init.ones_(model.get_parameter("0.lora_magnitude_vector.default.weight"))
    assert len(apply_kernels(model, "fused", torch.device("cpu"))) == 1
    x = torch.randn(64, 32)
    model.train()
    trained = [model(x) for _ in range(2)]
    assert not torch.equal(*trained)
    mean = torch.stack([model(x) for _ in range(400)]).mean(0)
    model.eval()
    assert torch.equal(model(x), model(x))
    assert (mean - model(x)).norm() < 0.2 * (trained[0] - model(x)).norm()


def test_fused_kernels_need_a_dropout() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    add_adapters(model, LoraConfig(r=4, target_modules=["0"]))
    with pytest.raises(UserError, match=r"training.kernels = fused: .* adapters with lora.lora_dropout above 0"):
        apply_kernels(model, "fused", torch.device("cpu"))


@pytest.mark.parametrize("lora_bias", [False, True])
def test_a_proof_without_dropout_computes_by_the_operator(lora_bias: bool) -> None:
    """`shoal verify` sets p to 0; it must prove what a run computes by, and draw nothing for it.

    The operator scales the outputs of A, but not if B has a bias, which is scaled, too.
    """
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    lora = {"r": 4, "lora_alpha": 7, "lora_dropout": 0.5, "target_modules": ["0"], "lora_bias": lora_bias}
    add_adapters(model, LoraConfig(**lora, init_lora_weights=False))
    if lora_bias:
        torch.nn.init.normal_(model.get_parameter("0.lora_B.default.bias"))
    x = torch.randn(8, 32)
    expected = model.eval()(x)
    apply_kernels(model.train(), "fused", torch.device("cpu"))
    turn_off_dropout(model)
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        found = model(x)
    assert torch.ops.shoal.dropped_product in counter.get_flop_counts()["Global"]
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_forward_costs_is_counted_with_adapters() -> None:
    """On the meta device, for which torch has no autocast."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with FlopCounterMode(display=False) as plain:
        model(input_ids=TOKENS.to("meta"))
    add_adapters(model, LoraConfig(r=4, target_modules="all-linear"))
    with FlopCounterMode(display=False) as adapted:
        model.to("meta")(input_ids=TOKENS.to("meta"))
    assert adapted.get_total_flops() > plain.get_total_flops()


def test_auto_fuses_only_where_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the operators are PyTorch, which takes longer than plain code; and the report names every way."""
    monkeypatch.setattr(dropout_module, "why_no_triton", lambda device: None)
    model = torch.nn.Sequential(torch.nn.Linear(400, 16), torch.nn.Linear(16, 400))
    keys = {"target_modules": ["0", "1"], "r": 8, "rank_pattern": {"1": 200}}
    add_adapters(model, LoraConfig(lora_dropout=0.1, **keys))
    device = torch.device("cuda")
    assert apply_kernels(model, "auto", device, torch.float32) == []
    assert apply_kernels(model, "auto", device, torch.bfloat16) == ["0.lora_dropout.default"]
    names = apply_kernels(model, "fused", device, torch.bfloat16)
    ways = describe_kernels((model.get_submodule(name) for name in names), device, torch.bfloat16)
    assert ways == "in Triton; in PyTorch: the kernels compute ranks up to 128, and this one is 200"
