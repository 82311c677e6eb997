"""Recipe text_lora: fine-tuning on instructions, packed or not, in every layout, with answers to look at."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import call_shoal
from pool import Pool
from torch import Tensor, nn
from verify.runs import failed, runner_on

from shoal.checkpoint.export import export
from shoal.checkpoint.export_folders import _write_tokenizer
from shoal.checkpoint.same_data import check_same_data
from shoal.cli.data import _coloured
from shoal.config.run import Run, check_run, load_run
from shoal.errors import UserError
from shoal.models.generate import generate_greedily
from shoal.recipes.text_lora import TextLoraRecipe
from shoal.training import train
from shoal.verify.prove import prove

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_tokenizers import save_tokenizer, write_lines

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA = {"model_type": "llama", **SIZES}


def facts(number: int) -> list[dict[str, Any]]:
    names = ("Rome", "Paris", "Madrid", "Oslo", "Bern", "Vienna", "Prague", "Lisbon")
    return [{"instruction": f"Say {i}", "output": " ".join([names[i % 8]] * (1 + i % 3))} for i in range(number)]


def tree(tmp_path: Path, model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Returns the config of a small run on 8 instructions; each of `sections` is added to the section of its name."""
    if not (file := tmp_path / "facts.jsonl").exists():
        write_lines(file, facts(8))
    tokenizer = str(tmp_path / "qwen3")
    if not Path(tokenizer).exists():
        save_tokenizer(tmp_path, "qwen3")
    return {
        "recipe": "text_lora",
        "model": model or {"config": LLAMA},
        "dataset": {
            "train_file": str(file),
            "tokenizer": tokenizer,
            "max_seq_length": 128,
            "cache_dir": str(tmp_path / "cache"),
            **sections.get("dataset", {}),
        },
        "training": {"max_steps": 2, "batch_size": 4, "device": "cpu", **sections.get("training", {})},
        "experiment": {"output_dir": str(tmp_path / "out"), **sections.get("experiment", {})},
        "logging": {"every": 1, "console": "plain", "tensorboard": False},
        "distributed": sections.get("distributed", {}),
    }


def make_recipe(run: Run) -> TextLoraRecipe:
    recipe = run.make_recipe()
    assert isinstance(recipe, TextLoraRecipe)
    recipe.prepare_data()
    return recipe


def assert_refused(message: str, action: Any) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), caught.value


def test_a_memorised_model_gives_the_answers_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed, and evaluated on what it was trained on. The answer ends by itself, with the token of the template."""
    dataset = {"packing": True, "eval_file": str(tmp_path / "facts.jsonl")}
    training = {"max_steps": 100, "learning_rate": 1e-2, "batch_size": 2, "lr_scheduler": "constant", "eval_steps": 60}
    outcome = train(check_run(tree(tmp_path, dataset=dataset, training=training)))
    assert capsys.readouterr().out.count("reference: ") == 3  # of step 60; the caller has those of the end
    assert outcome.metrics["eval/loss"] < 0.05
    shown = re.findall(r"prompt: .*?\n?answer: +(.*?)\nreference: +(.*?)(?:\n|$)", outcome.preview, re.S)
    assert len(shown) == 3
    assert "prompt:    user\nSay 0\nassistant\nanswer:    " in outcome.preview  # without the template's tokens
    assert all(answer == reference for answer, reference in shown), outcome.preview
    assert "<|im_end|>" not in outcome.preview
    report = (tmp_path / "out" / "report.txt").read_text()
    row = re.search(r"^data +(\d+) samples an epoch: (.*)$", report, re.M)
    assert row, report
    assert re.match(r"packs, \d\d.\d% full, of 8 samples, \d+ tokens, \d+ counted, 0 truncated, 0 dropped; ", row[2])
    assert row[2].endswith("; format alpaca, loss on answers")


def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path: Path) -> None:
    """A mixture, packed: the losses of an interrupted run are those of an undisturbed one."""
    other = write_lines(tmp_path / "other.jsonl", [{"prompt": f"q{i}", "completion": "a" * i} for i in range(5)])
    tree(tmp_path)
    mixed = [{"file": str(tmp_path / "facts.jsonl"), "weight": 2.0}, {"file": other, "weight": 1.0}]

    def losses(name: str, *ends: int) -> list[float]:
        for end in ends:
            config = tree(
                tmp_path,
                dataset={"train_file": mixed, "packing": True},
                training={"max_steps": end, "lr_scheduler": "constant"},
                experiment={"output_dir": str(tmp_path / name)},
            )
            train(check_run(config))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]

    whole = losses("whole", 6)
    assert len(whole) == 6
    assert losses("parts", 3, 6) == whole
    report = (tmp_path / "whole" / "report.txt").read_text()
    assert re.search(r"facts.jsonl 66.7% \(each sample 1.25 times an epoch\); .*other.jsonl 33.3%", report)


def test_a_run_does_not_resume_with_other_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run_until(end: int, allowed: str = "", **dataset: Any) -> None:
        training = {"max_steps": end, "lr_scheduler": "constant"}
        config = tree(tmp_path, dataset={"eval_fraction": 0.3, **dataset}, training=training)
        train(check_run({**config, "checkpoint": {"allow_changed": [allowed] if allowed else []}}))

    run_until(1)
    lines = (tmp_path / "facts.jsonl").read_text()
    (tmp_path / "facts.jsonl").write_text(lines.replace(", ", ",  "))  # other bytes, and the same samples
    run_until(2)
    write_lines(tmp_path / "facts.jsonl", facts(9)[1:])
    message = r"^dataset.train_file: .*facts.jsonl: it gives other samples than when .*step_00000002 was saved"
    assert_refused(message, lambda: run_until(3))
    run_until(3, "dataset.train_file")
    said = "facts.jsonl: it gives other samples than when .*step_00000002 was saved; the run goes on with them"
    assert re.search(said, capfd.readouterr().out)
    run_until(4)
    run_until(5, "dataset.max_seq_length", max_seq_length=100, too_long="truncate")
    (manifest,) = (tmp_path / "out" / "checkpoints").glob("*5/manifest.json")
    assert [*json.loads(manifest.read_text())["data"]] == ["dataset.train_file"]
    earlier: Any = SimpleNamespace(manifest={"config": {}})  # of a version that stored no digests
    check_same_data(earlier, {"dataset.train_file": {"a.jsonl": "0"}}, {}, [], print)


def train_here(config: dict[str, Any]) -> tuple[str | None, float]:
    outcome = train(check_run(config))
    return outcome.preview, outcome.metrics["eval/loss"]


FOUR_BIT = {"model": {"config": LLAMA, "load_in_4bit": True}, "lora": {"r": 4, "target_modules": "all-linear"}}


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ({"strategy": "fsdp"}, {}),
        pytest.param({"strategy": "ddp"}, {}, marks=pytest.mark.slow),
        pytest.param({"strategy": "ddp"}, FOUR_BIT, marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp"}, FOUR_BIT, marks=pytest.mark.slow),
        pytest.param({"strategy": "deepspeed", "zero_stage": 3}, {}, marks=pytest.mark.slow),
        pytest.param({"strategy": "mesh", "mesh": {"tp": 2}}, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_share_the_prompts_of_a_preview(
    strategy: dict[str, Any], sections: dict[str, Any], tmp_path: Path, pool2: Pool
) -> None:
    """They show the answers that a single process gives. Three prompts: the second rank has one less."""
    if sections:
        pytest.importorskip("bitsandbytes")
    keys: dict[str, Any] = {
        "dataset": {"eval_file": str(tmp_path / "facts.jsonl"), "packing": True},
        "training": {"global_batch_size": 4, "batch_size": 2, "learning_rate": 1e-2},
    }
    alone, loss = train_here({**tree(tmp_path, **keys, experiment={"output_dir": str(tmp_path / "alone")}), **sections})
    assert alone is not None
    assert alone.count("reference: ") == 3
    shared = {**tree(tmp_path, **keys, distributed=strategy), **sections}
    for preview, shared_loss in pool2.run(train_here, shared, init=False):
        assert preview == alone
        assert shared_loss == pytest.approx(loss, rel=1e-5)


def test_each_rank_answers_some_prompts_by_as_many_forwards(tmp_path: Path) -> None:
    recipe = make_recipe(check_run(tree(tmp_path, dataset={"eval_file": str(tmp_path / "facts.jsonl")})))
    torch.manual_seed(0)
    net = Counting(recipe.build_model().eval())

    def texts_of(index: int, parts: int) -> list[str]:
        net.calls = net.sequences = 0
        return recipe.preview_texts(net, index, parts)

    first, second, third = texts_of(0, 1)
    calls = net.calls
    for index, parts, expected in ((0, 2, [first, third]), (1, 2, [second]), (3, 4, [])):
        assert texts_of(index, parts) == expected
        assert net.calls == calls
        assert net.sequences == calls * max(1, len(expected))


def test_answers_of_a_preview_end_with_the_positions_of_the_model(tmp_path: Path) -> None:
    """GPT-2 has learnt positions. The number of forwards is that of the longest prompt on every rank."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    records = [{"prompt": "x" * length, "completion": "y" * 40} for length in (50, 20)]
    dataset = {"eval_file": write_lines(tmp_path / "long.jsonl", records), "max_seq_length": 64}
    recipe = make_recipe(check_run(tree(tmp_path, {"config": gpt2}, dataset=dataset)))
    net = Counting(recipe.build_model().eval())
    for index, parts, texts in ((0, 1, 2), (1, 2, 1)):
        net.calls = 0
        assert len(recipe.preview_texts(net, index, parts)) == texts
        assert net.calls == 64 - 50
    recipe._exchanges[0] = replace(recipe._exchanges[0], prompt=torch.arange(80))
    net.calls = 0
    assert len(recipe.preview_texts(net, 0, 1)) == 2
    assert net.calls == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "layouts"),
    [
        ({"packing": True}, ["ddp", "fsdp", "zero_2", "tp", "tp_sp", "pp"]),
        ({"pad_to_max": True}, ["ddp", "fsdp", "tp_sp", "pp", "cp"]),
        ({}, ["ddp", "fsdp", "zero_3", "tp"]),
    ],
)
def test_layouts_train_alike(dataset: dict[str, Any], layouts: list[str], tmp_path: Path, pool2: Pool) -> None:
    write_lines(tmp_path / "facts.jsonl", facts(24))
    config = tree(tmp_path, dataset=dataset, training={"batch_size": 2, "global_batch_size": 8})
    verdicts = prove(check_run(config), 2, layouts, 2, runner=runner_on(pool2))
    assert {verdict.name: failed(verdict) for verdict in verdicts if failed(verdict)} == {}
    assert len(verdicts) >= len(layouts)


def test_layouts_that_would_cut_samples_are_refused(tmp_path: Path) -> None:
    def check(sides: dict[str, int], **dataset: Any) -> None:
        mesh = {"strategy": "mesh", "mesh": sides}
        check_run(tree(tmp_path, dataset=dataset, distributed=mesh))

    cp = "dataset.packing = true: distributed.mesh.cp = 2 splits sequences over ranks"
    assert_refused(cp, lambda: check({"cp": 2}, packing=True))
    assert_refused(
        "distributed.mesh.cp = 2 needs sequences of one length; set dataset.pad_to", lambda: check({"cp": 2})
    )
    assert_refused("distributed.mesh.pp = 2 needs .*pad_to_max: true or dataset.packing", lambda: check({"pp": 2}))
    check({"cp": 2}, pad_to_max=True)
    check({"pp": 2}, packing=True)


def test_models_that_would_mix_packed_samples_are_refused(tmp_path: Path) -> None:
    opt = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    run = check_run(tree(tmp_path, {"config": opt}, dataset={"packing": True}))
    assert_refused("packing = true: a opt is not among the models that are proved", lambda: make_recipe(run))


def test_settings_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    long = check_run(tree(tmp_path, dataset={"max_seq_length": 512}))
    refusal = "dataset.max_seq_length = 512: the model has max_position_embeddings = 256; raise"
    assert_refused(refusal, lambda: make_recipe(long))
    assert_refused(refusal, lambda: long.make_recipe().view_data(1))  # what shoal data calls
    small = check_run(tree(tmp_path, {"config": {**LLAMA, "vocab_size": 100}}))
    assert_refused("model.config.vocab_size = 100, but dataset.tokenizer = ", lambda: make_recipe(small))
    config = tree(tmp_path)
    del config["dataset"]["train_file"]
    assert_refused("dataset.train_file is missing", lambda: check_run(config))
    assert_refused("dataset.train_fil is not a key; did you mean dataset.train_file", lambda: check_run(
        {**tree(tmp_path), "dataset": {"train_fil": "a"}}
    ))  # fmt: skip


@pytest.mark.parametrize("attention", [None, "eager"])
def test_packed_batches_are_counted_and_scored_as_samples(tmp_path: Path, attention: str | None) -> None:
    """Every counted token weighs the same: the sums over packs are the sums over samples."""
    model = {"config": LLAMA, **({"attn_implementation": attention} if attention else {})}
    packed = make_recipe(check_run(tree(tmp_path, model, dataset={"packing": True})))
    plain = make_recipe(check_run(tree(tmp_path, model)))
    torch.manual_seed(0)
    net: Any = packed.build_model().eval()

    def score(recipe: TextLoraRecipe) -> tuple[float, int, int]:
        data = recipe.train_data()
        batch = recipe.collate([data[i] for i in range(len(data))])
        with torch.no_grad():
            total = recipe.loss(net(**recipe.inputs(batch)), batch)
        return float(total), int(recipe.count(batch)), len(batch["input_ids"])

    loss, count, rows = score(packed)
    expected, expected_count, samples = score(plain)
    assert (count, samples) == (expected_count, 8)
    assert rows < samples
    assert loss == pytest.approx(expected, rel=1e-5)


class Counting(nn.Module):
    """Counts the calls of a model, and the sequences in all of them."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.config, self.calls, self.sequences = model, model.config, 0, 0
        self.set_attn_implementation = model.set_attn_implementation

    def forward(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        self.calls += 1
        self.sequences += len(input_ids)
        return self.model(input_ids=input_ids, position_ids=position_ids, **options)


def test_generation_by_a_cache_of_several_prompts_is_that_of_each(tmp_path: Path) -> None:
    recipe = make_recipe(check_run(tree(tmp_path)))
    torch.manual_seed(0)
    net: Any = recipe.build_model().eval()
    prompts = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([30])]
    counting = Counting(net)
    together = generate_greedily(counting, prompts, 6, filler=0)
    assert counting.calls == 6
    for prompt, answer in zip(prompts, together, strict=True):
        tokens = prompt
        for _ in range(6):
            tokens = torch.cat([tokens, net(input_ids=tokens[None]).logits[0, -1:].argmax(-1)])
        assert answer.tolist() == tokens[len(prompt) :].tolist()


def test_shoal_data_shows_samples_and_figures(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree(tmp_path, dataset={"eval_fraction": 0.2})))
    shown = call_shoal(tmp_path, "data", str(config), "-n", "2")
    assert shown.returncode == 0, shown.stderr
    assert "Say 0<|im_end|>\n<|im_start|>assistant\n⟦<think>" in shown.stdout
    assert "Rome<|im_end|>⟧" in shown.stdout
    assert shown.stdout.count("⟧") == 2
    assert re.search(r"^samples +\d an epoch", shown.stdout, re.M)
    assert re.search(r"^tokens +\d+ an epoch, \d+ of them counted \(\d\d.\d%\)", shown.stdout, re.M)
    assert re.search(r"^packing +off; it would make \d packs of 128 tokens, \d\d.\d% full$", shown.stdout, re.M)
    assert re.search(r"^too long +0 truncated, 0 dropped \(too_long: truncate\)", shown.stdout, re.M)
    assert re.search(r"^ *\d+–\d+  █+ +\d+$", shown.stdout, re.M)
    assert not (tmp_path / "out").exists()


def test_markers_that_are_no_tokens_are_warned_of(tmp_path: Path) -> None:
    """A template of another model: its markers would be learnt as several tokens each."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree(tmp_path, training={"max_steps": 1})))
    warning = "warning: dataset.chat_template = gemma: .* splits <start_of_turn>, <end_of_turn> into pieces, because"
    for command in ("data", "train"):
        shown = call_shoal(tmp_path, command, str(config), "dataset.chat_template=gemma")
        assert shown.returncode == 0, shown.stderr
        assert re.search(warning, shown.stdout + shown.stderr)
    assert f"chat {tmp_path}/out" in shown.stdout  # how to talk to it
    for fitting in ("dataset.chat_template=chatml", "dataset.format=alpaca"):
        assert "warning" not in call_shoal(tmp_path, "data", str(config), fitting).stderr


def test_a_template_that_ends_no_answer_is_warned_of(tmp_path: Path) -> None:
    """Where the template is used: records of plain prompts and completions end with the end-of-text token."""
    turn = "{{ m.role + ': ' + m.content + '\n' }}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    config, warning = tree(tmp_path, training={"max_steps": 1}, dataset={"chat_template": template}), "warning: "
    warning += (
        r"dataset.chat_template = given as text: no special token ends an answer \(the template writes '\\n' after"
    )
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    for command in ("data", "train"):
        shown = call_shoal(tmp_path, command, "run.yaml")
        assert shown.returncode == 0, shown.stderr
        assert len(re.findall(warning, shown.stdout + shown.stderr)) == 1
    turns = {side: [{"role": role, "content": "a"}] for side, role in (("prompt", "user"), ("completion", "assistant"))}
    for record, warns in (({"prompt": "a", "completion": "b"}, False), (turns, True)):
        file = write_lines(tmp_path / "pairs.jsonl", [record])
        assert (
            "no special token" in call_shoal(tmp_path, "data", "run.yaml", f"dataset.train_file={file}").stderr
        ) == warns


def test_counted_tokens_are_coloured_on_a_terminal() -> None:
    text = _coloured([("ask ", False), ("answer", True)], is_terminal=True)
    assert text.plain == "ask answer"
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == "green"] == ["answer"]


def test_shoal_data_shows_plain_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the quick brown fox " * 40)
    dataset = {"name": "text", "files": "book.txt", "seq_length": 16, "cache_dir": str(tmp_path)}
    (tmp_path / "run.yaml").write_text(json.dumps({"recipe": "bdh", "dataset": dataset, "training": {"max_steps": 1}}))
    shown = call_shoal(tmp_path, "data", "run.yaml", "-n", "1")
    assert shown.returncode == 0, shown.stderr
    assert "⟦" in shown.stdout
    assert "all counted; 16 in each sample" in shown.stdout


def test_shoal_data_refuses_recipes_that_show_nothing(toy: Any) -> None:
    shown = toy.call("data", str(toy.config))
    assert shown.returncode == 2
    assert "recipe Toy: it has no view_data(self, number)" in shown.stderr


def test_samples_from_all_over_each_file_are_shown(tmp_path: Path) -> None:
    more = write_lines(tmp_path / "more.jsonl", facts(20))
    both = tree(tmp_path, dataset={"train_file": [str(tmp_path / "facts.jsonl"), more]})
    titles = check_run(both).make_recipe().view_data(4).titles
    assert [title.partition(",")[0] for title in titles] == [f"sample {index}" for index in (0, 7, 14, 21)]
    weighted = [{"file": str(tmp_path / "facts.jsonl"), "weight": 1}, {"file": more, "weight": 2}]
    view = check_run(tree(tmp_path, dataset={"train_file": weighted})).make_recipe().view_data(3)
    names = [title.replace(f"{tmp_path}/", "").partition(",")[0] for title in view.titles]
    assert names == ["sample 0 of facts.jsonl", "sample 4 of facts.jsonl", "sample 0 of more.jsonl"]
    assert len(view.samples) == 3


def test_samples_that_may_be_truncated_are_marked(tmp_path: Path) -> None:
    long = {"instruction": "Say", "output": "word " * 100}
    file = write_lines(tmp_path / "long.jsonl", [facts(1)[0], long])
    titles = check_run(tree(tmp_path, dataset={"train_file": file})).make_recipe().view_data(2).titles
    assert "truncated" not in titles[0]
    assert titles[1] == "sample 1, 128 tokens, probably truncated: dataset.max_seq_length"


def test_the_examples_in_the_docs_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    examples = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert len(examples) > 1
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example)
        loaded = load_run(path)
        path.write_text(loaded.to_yaml())
        assert load_run(path).recipe_config == loaded.recipe_config
    (record,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    config = tree(tmp_path, dataset={"train_file": str(tmp_path / "record.jsonl")})
    (tmp_path / "record.jsonl").write_text(record)
    assert len(make_recipe(check_run(config)).train_data()) == 1


def test_the_tokenizer_is_exported_with_its_template(tmp_path: Path) -> None:
    recipe = make_recipe(check_run(tree(tmp_path, dataset={"chat_template": "alpaca"})))
    for tool_template in (None, "{{ tools }}"):
        recipe.tokenizer.tool_template = tool_template
        (tmp_path / "hf").mkdir(exist_ok=True)
        assert _write_tokenizer(transformers, recipe, tmp_path / "hf") == ()
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
        several = {"default": recipe.tokenizer.template, "tool_use": tool_template}
        assert exported.chat_template == (several if tool_template else recipe.tokenizer.template)


@pytest.mark.slow
def test_an_export_has_the_chat_template_that_was_trained_with(tmp_path: Path) -> None:
    config = tree(tmp_path, dataset={"chat_template": "chatml"}, training={"max_steps": 1})
    train(check_run(config))
    (step_dir,) = (tmp_path / "out" / "checkpoints").glob("step_*")
    export(step_dir, tmp_path / "hf", "hf")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    message = {"role": "user", "content": "Say 0"}
    text = exported.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nSay 0<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_adapters_memorise_packed_instructions_and_shoal_chat_gives_the_answers(tmp_path: Path) -> None:
    from shoal.training.chat import Chat

    training = {"max_steps": 120, "learning_rate": 1e-2, "batch_size": 2, "lr_scheduler": "constant"}
    model = {"config": {**LLAMA, "initializer_range": 0.3}}  # the usual small weights could not tell tokens apart
    config = tree(tmp_path, model, dataset={"packing": True}, training=training)
    config["lora"] = {"r": 16, "alpha": 32, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    train(check_run(config))
    for record in facts(3):
        chat = Chat(tmp_path / "out", temperature=0, max_new_tokens=60)
        assert chat.answer(record["instruction"], lambda piece: None).endswith(f"\n{record['output']}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama31", "qwen3", "gemma", "mistral"])
def test_a_memorised_model_stops_by_itself_in_every_template(kind: str, tmp_path: Path) -> None:
    """With the token that ends a turn, which for Gemma is another than the one that ends a text."""
    from shoal.training.chat import Chat

    dataset = {"tokenizer": save_tokenizer(tmp_path, kind), "max_seq_length": 192}
    training = {"max_steps": 250, "learning_rate": 5e-3, "batch_size": 8, "lr_scheduler": "constant"}
    train(check_run(tree(tmp_path, dataset=dataset, training=training)))
    for record in facts(3):
        chat = Chat(tmp_path / "out", temperature=0, max_new_tokens=60)
        answer = chat.answer(record["instruction"], lambda piece: None)
        assert answer.removeprefix("<think>\n\n</think>\n\n").strip() == record["output"]
