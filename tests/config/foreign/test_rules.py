"""One pure function turns a tree in the words of another program into ours, and loses nothing."""

from __future__ import annotations

import pytest

from shoal.config.foreign.rules import Idle, Refused, Rule, idle, translate
from shoal.errors import UserError

RULES = {
    "lr": Rule("training.learning_rate"),
    "learning_rate": Rule("training.learning_rate"),
    "half": Rule("training.mixed_precision", lambda value, section: "bf16" if value else Idle("fp32 is the default")),
    "best": Rule(
        ("checkpoint.keep_best", "checkpoint.load_best_model_at_end"),
        lambda value, section: {"checkpoint.keep_best": 1, "checkpoint.load_best_model_at_end": value},
    ),
    "beta1": Rule("training.optimizer.betas", lambda value, section: [value, section.get("beta2", 0.999)]),
    "beta2": Rule("training.optimizer.betas", lambda value, section: [section.get("beta1", 0.9), value]),
    "kind": Rule(
        "training.optimizer.name", lambda value, section: Refused("it needs a GPU") if value == "x" else value
    ),
    "optimizer": Rule("training.optimizer"),
    "magic": Rule(why="shoal has no magic"),
    "verbose": idle("the log shows it"),
    "net.*": Rule("model.*"),
    "net.size": Rule("model.config.hidden_size"),
}
SOURCES = {key: f"theirs.yaml:{line}" for line, key in enumerate((*RULES, "net.depth", "other.key", "typo"), 1)}


def refuse(tree: dict[str, object]) -> str:
    with pytest.raises(UserError) as caught:
        translate(tree, SOURCES, RULES)
    return str(caught.value)


def test_values_keep_their_line_and_the_key_that_was_written() -> None:
    result = translate({"lr": 1e-4, "net": {"size": 8, "depth": {"n": 2}, "name": "x"}}, SOURCES, RULES)
    assert result.tree == {
        "training": {"learning_rate": 1e-4},
        "model": {"config": {"hidden_size": 8}, "depth": {"n": 2}, "name": "x"},
    }
    assert result.sources["training.learning_rate"] == "theirs.yaml:1, written there as lr"
    assert result.sources["model.depth.n"] == "written there as net.depth.n"
    assert translate({"model": {"name": "x"}}, {"model.name": "f:1"}, {"model.*": Rule("model.*")}).sources == {
        "model.name": "f:1"
    }


def test_a_rule_may_set_several_keys_and_look_at_its_section() -> None:
    assert translate({"best": True}, {}, RULES).tree == {"checkpoint": {"keep_best": 1, "load_best_model_at_end": True}}
    assert translate({"beta1": 0.8}, {}, RULES).tree == {"training": {"optimizer": {"betas": [0.8, 0.999]}}}
    both = translate({"beta1": 0.8, "beta2": 0.9, "kind": "adam"}, {}, RULES)
    assert both.tree == {"training": {"optimizer": {"betas": [0.8, 0.9], "name": "adam"}}}


def test_two_spellings_are_accepted_if_they_are_equal() -> None:
    assert translate({"lr": 1, "learning_rate": 1.0}, {}, RULES).tree == {"training": {"learning_rate": 1}}
    assert refuse({"lr": 1, "learning_rate": 2}) == (
        "lr (theirs.yaml:1) = 1 and learning_rate (theirs.yaml:2) = 2 both set training.learning_rate; leave one of "
        "them out"
    )
    assert "both set" in refuse({"lr": 1, "learning_rate": True})


@pytest.mark.parametrize("tree", [{"optimizer": "sgd", "kind": "adam"}, {"kind": "adam", "optimizer": "sgd"}])
def test_a_section_and_a_key_inside_of_it_contradict(tree: dict[str, object]) -> None:
    assert "both set training.optimizer" in refuse(tree)


def test_what_has_no_counterpart_is_returned_with_the_reason() -> None:
    tree = {"magic": 3, "typo": 1, "kind": "x", "other": {"key": [1]}, "half": False, "verbose": 1, "lr": 2}
    result = translate(tree, SOURCES, RULES)
    assert result.tree == {"training": {"learning_rate": 2}}
    assert [str(remark) for remark in result.refused] == [
        "magic (theirs.yaml:9) = 3: shoal has no magic",
        "typo (theirs.yaml:15) = 1: shoal does not know it",
        "kind (theirs.yaml:7) = 'x': it needs a GPU",
        "other.key (theirs.yaml:14) = [1]: shoal does not know it",
    ]
    assert [(remark.key, remark.why) for remark in result.idle] == [
        ("half", "fp32 is the default"),
        ("verbose", "the log shows it"),
    ]


def test_null_is_a_key_that_is_not_set() -> None:
    assert translate({"half": None, "lr": None, "magic": None}, {}, RULES) == translate({}, {}, RULES)
    assert translate({"net": {"name": None}}, {}, RULES).tree == {"model": {"name": None}}, "our own null is a value"


def test_a_section_in_place_of_a_value_is_passed_on_whole() -> None:
    """Our validation then refuses it by name."""
    assert translate({"lr": {"a": 1}}, {}, RULES).tree == {"training": {"learning_rate": {"a": 1}}}
    assert translate({"net": 5}, {}, RULES).tree == {"model": 5}
