"""Evaluation leaves every module in the mode in which it trains."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ToyRun
from safetensors.torch import load_file
from torch import nn

from shoal.training.modes import evaluation_mode, start_training_mode

FROZEN_BACKBONE = """
class Backbone(nn.Sequential):
    pass


def special_model(hidden):
    backbone = Backbone(nn.Linear(1, hidden), nn.Dropout(0.5)).eval()
    return nn.Sequential(backbone, nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 1))
"""

IN_EVAL_MODE = """
def special_model(hidden):
    return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Dropout(0.5), nn.Linear(hidden, 1)).eval()
"""

FROZEN_NORM = """
class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


def special_model(hidden):
    norm = FrozenNorm(hidden).eval()
    return nn.Sequential(nn.Linear(1, hidden), norm, nn.Dropout(0.5), nn.Linear(hidden, 1))
"""


@pytest.fixture
def use_model(change_recipe: Callable[[str, str], None]) -> Callable[[str], None]:
    """Makes the user's recipe build the model of a piece of code that defines `special_model`."""

    def use(code: str) -> None:
        change_recipe("class Toy", f"{code}\n\nclass Toy")
        line = "        hidden = self.config.model.hidden\n"
        change_recipe(line, f"{line}        return special_model(hidden)\n")

    return use


def losses(toy: ToyRun, name: str, *overrides: str) -> dict[int, float]:
    output = toy.folder / name
    toy.train(f"experiment.output_dir={output}", *overrides)
    return toy.metrics(output=output)


@pytest.mark.parametrize("code", [FROZEN_BACKBONE, IN_EVAL_MODE, FROZEN_NORM], ids=["backbone", "whole", "norm"])
def test_an_evaluation_changes_no_later_step(toy: ToyRun, use_model: Callable[[str], None], code: str) -> None:
    use_model(code)
    assert losses(toy, "often", "training.eval_steps=3") == losses(toy, "never")


def test_an_interrupted_run_trains_in_the_same_modes(toy: ToyRun, use_model: Callable[[str], None]) -> None:
    use_model(FROZEN_BACKBONE)
    whole = losses(toy, "whole", "training.eval_steps=2")
    losses(toy, "parts", "training.eval_steps=2", "checkpoint.keep_last=9")
    for step in (6, 8, 10):
        shutil.rmtree(toy.folder / "parts" / "checkpoints" / f"step_{step:08d}")
    assert losses(toy, "parts", "training.eval_steps=2") == whole
    last = [toy.folder / name / "checkpoints" / "step_00000010" / "model.safetensors" for name in ("whole", "parts")]
    one, other = map(load_file, last)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_in_eval_mode_is_put_into_training_mode(toy: ToyRun, use_model: Callable[[str], None]) -> None:
    use_model(IN_EVAL_MODE)
    in_eval_mode = losses(toy, "eval")
    report = (toy.folder / "eval" / "report.txt").read_text()
    assert "the model came in eval mode and was put into training mode" in report
    text = (toy.folder / "toy_recipe.py").read_text()
    (toy.folder / "toy_recipe.py").write_text(text.replace(").eval()", ")"))
    sys.modules.pop("toy_recipe")
    assert losses(toy, "train") == in_eval_mode
    assert "\nmode " not in (toy.folder / "train" / "report.txt").read_text()


def test_the_report_names_the_modules_in_eval_mode(toy: ToyRun, use_model: Callable[[str], None]) -> None:
    use_model(FROZEN_BACKBONE)
    toy.train("training.max_steps=1")
    report = (toy.output / "report.txt").read_text()
    assert "training; 3 of 7 modules in eval mode (0)" in report


def test_a_preview_that_changes_modes_changes_no_later_step(
    toy: ToyRun, use_model: Callable[[str], None], change_recipe: Callable[[str, str], None]
) -> None:
    use_model(FROZEN_BACKBONE)
    expected = losses(toy, "never")
    change_recipe("    def inputs(", "    def preview(self, model):\n        model.train()\n\n    def inputs(")
    assert losses(toy, "often", "training.eval_steps=3") == expected


def test_a_preview_computes_attention_without_cudnn(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """cuDNN plans each new length of a sequence anew, which takes longer than to generate a token."""
    look = "str(torch.backends.cuda.cudnn_sdp_enabled())"
    change_recipe("    def inputs(", f"    def preview(self, model):\n        return {look}\n\n    def inputs(")
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    outcome = toy.train("training.max_steps=1")
    assert outcome.preview == "False"
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_modes_are_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())

    def evaluate() -> None:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        evaluate()
    assert [module.training for module in model.modules()] == [True, True, False, False]


def test_a_module_whose_train_method_does_more_is_told_that_evaluation_is_over() -> None:
    class Adapter(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Adapter(2, 2), nn.Dropout())
    with evaluation_mode(model):
        assert model[0].merged
    assert not model[0].merged
    assert start_training_mode(model) == ""
