from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS

from shoal.config.schema import LoggingConfig, MlflowConfig, WandbConfig
from shoal.errors import UserError
from shoal.observe.loggers import JsonlLogger, Loggers, MlflowLogger, TensorBoardLogger, WandbLogger, open_loggers

SETTINGS = {"experiment": {"name": "tiny"}, "training": {"learning_rate": 1e-3, "max_steps": 4}}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")


# JSONL


def read_jsonl(output_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_jsonl_line_is_written_immediately_with_the_step_first(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, 0)
    logger.log(1, {"train/loss": 2.5, "train/grad_norm": 1.0})
    logger.text(1, "preview", "to be\nor not")
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1, "train/loss": 2.5, "train/grad_norm": 1.0}',
        '{"step": 1, "preview": "to be\\nor not"}',
    ]
    logger.close()


def test_jsonl_writes_nan_and_infinities_as_text(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, 0)
    logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    logger.close()
    (record,) = read_jsonl(tmp_path)
    assert math.isnan(float(record["a"]))
    assert (float(record["b"]), float(record["c"])) == (math.inf, -math.inf)


@pytest.mark.parametrize("incomplete", [b'{"step": 2, "train/lo\xff', b'{"step": 2, "train/loss": 2.5}'])
def test_resuming_jsonl_drops_repeated_steps_and_an_incomplete_line(tmp_path: Path, incomplete: bytes) -> None:
    logger = JsonlLogger(tmp_path, 0)
    for step in range(1, 6):
        logger.log(step, {"train/loss": float(step)})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(incomplete)  # as if killed while writing
    logger = JsonlLogger(tmp_path, 3)
    assert [record["step"] for record in read_jsonl(tmp_path)] == [1, 2, 3]
    logger.log(4, {"train/loss": 40.0})
    logger.close()
    assert [record["train/loss"] for record in read_jsonl(tmp_path)] == [1.0, 2.0, 3.0, 40.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_starts_from_the_beginning_without_resume(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = JsonlLogger(tmp_path, 0)
        logger.log(1, {"train/loss": value})
        logger.close()
    assert read_jsonl(tmp_path) == [{"step": 1, "train/loss": 2.0}]


# TensorBoard


def read_tensorboard(output_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(output_dir / "tensorboard")).Reload()


def test_tensorboard_is_readable_before_it_is_closed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    logger.log(7, {"train/loss": 2.5})
    scalars = read_tensorboard(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [(7, 2.5)]
    logger.text(7, "preview", "to be")
    events = read_tensorboard(tmp_path)
    assert events.Tensors("preview/text_summary")[0].tensor_proto.string_val == [b"to be"]
    logger.close()


@pytest.mark.parametrize(("resume_step", "kept_steps"), [(2, [0, 1, 2]), (0, [])])
def test_tensorboard_drops_repeated_steps(tmp_path: Path, resume_step: int, kept_steps: list[int]) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in range(5):
        logger.log(step, {"train/loss": float(step)})
    logger.close()
    logger = TensorBoardLogger(tmp_path, resume_step)
    logger.log(3, {"train/loss": 30.0})
    logger.close()
    scalars = read_tensorboard(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [
        *((step, float(step)) for step in kept_steps),
        (3, 30.0),
    ]


def test_tensorboard_drops_repeated_texts_and_an_incomplete_event(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in (1, 2, 3, 4):
        logger.log(step, {"train/loss": float(step)})
        logger.text(step, "preview", f"text {step}")
    logger.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-3])  # as if killed while writing the last event
    other_file = tmp_path / "tensorboard" / "events.out.tfevents.0.elsewhere"
    other_file.write_bytes(b"not an event" * 9)
    logger = TensorBoardLogger(tmp_path, 2)
    logger.log(3, {"train/loss": 30.0})
    logger.text(3, "preview", "another text")
    events = read_tensorboard(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    texts = [event.tensor_proto.string_val[0] for event in events.Tensors("preview/text_summary")]
    assert texts == [b"text 1", b"text 2", b"another text"]
    assert other_file.read_bytes() == b"not an event" * 9
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 3


def test_a_repeated_evaluation_appears_once_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0)
    for step in (1, 2):
        logger.log(step, {"train/loss": 1.0})
        logger.log(step, {"eval/loss": 2.0})
    logger.close()
    logger = TensorBoardLogger(tmp_path, 2, evaluates_again=True)
    logger.log(2, {"eval/loss": 2.0})
    events = read_tensorboard(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert [event.step for event in events.Scalars("eval/loss")] == [1, 2]


# A disk that is full and then has space again


def test_records_for_a_full_disk_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loggers = Loggers([JsonlLogger(tmp_path, 0), TensorBoardLogger(tmp_path, 0)])
    loggers.log(1, {"train/loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for step in (2, 3, 4):
                loggers.log(step, {"train/loss": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.messages) == 2  # once for each file
    assert all("cannot be written and will be tried again: File too large" in message for message in caplog.messages)
    loggers.log(5, {"train/loss": 5.0})
    assert [record["train/loss"] for record in read_jsonl(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [event.value for event in read_tensorboard(tmp_path).Scalars("train/loss")] == [1.0, 2.0, 3.0, 4.0, 5.0]


# Weights & Biases


def read_wandb(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Reads the run record and the history of an offline run: a LevelDB log of W&B's protobuf records.

    These tests fit into one block of 32 KiB, in which no record is split: checksum (4), length (2), type (1), data.
    """
    from wandb.proto import wandb_internal_pb2

    file = next(folder.glob("run-*.wandb"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while file.stat().st_size <= 7 and time.monotonic() < deadline:  # W&B's own process writes after `finish` returned
        time.sleep(0.05)
    data = file.read_bytes()
    position, run, history = 7, None, []  # after the file's header
    while position < len(data):
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        assert data[position + 6] == 1, "a record over several blocks"
        record = wandb_internal_pb2.Record.FromString(data[position + 7 : position + 7 + size])
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            items = record.history.item
            history.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        position += 7 + size
    return run, history


def test_wandb_offline_and_the_same_run_after_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    config = WandbConfig(project="fish", entity="school", mode="offline")
    for resume_step in (0, 1):
        logger = WandbLogger(config, tmp_path, "tiny", SETTINGS, resume_step)
        logger.log(resume_step + 1, {"train/loss": 2.5})
        logger.log(resume_step + 1, {"eval/loss": math.inf})
        logger.text(resume_step + 1, "preview", "<to be>")
        logger.close()
        if resume_step == 0:
            time.sleep(1)  # W&B names the folder of each attempt by the time in seconds
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert first.name.rsplit("-", 1)[1] == second.name.rsplit("-", 1)[1] == (tmp_path / "wandb_run_id").read_text()
    assert [row["_step"] for row in read_wandb(second)[1]] == [2]

    run, history = read_wandb(first)
    assert (run.entity, run.project, run.display_name) == ("school", "fish", "tiny")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["training"] == SETTINGS["training"]
    (row,) = history  # everything that is logged at one step is one row
    assert (row["_step"], row["train/loss"], row["eval/loss"]) == (1, 2.5, math.inf)
    assert row["preview/_type"] == "html-file"
    assert capfd.readouterr() == ("", "")


def test_wandb_new_run_without_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    opened: list[str] = []
    logged: list[int] = []
    run = types.SimpleNamespace(step=11, log=lambda values, step: logged.append(step))
    monkeypatch.setattr(wandb, "init", lambda **options: opened.append(options["id"]) or run)
    for resume_step in (0, 0, 5):
        logger = WandbLogger(WandbConfig(), tmp_path, "tiny", {}, resume_step)
    assert opened[0] != opened[1] == opened[2]
    for step in (9, 10, 11, 12):
        logger.log(step, {"train/loss": 1.0})
    assert logged == [11, 12], "a step that W&B already has is refused by it with a warning each time"


def test_a_failing_start_of_wandb_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def fail(**options: object) -> None:
        raise wandb.errors.UsageError("no API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"^logging\.wandb\.mode = online: no API key configured; .*offline$"):
        open_loggers(LoggingConfig(wandb=True), tmp_path, "tiny", {}, 0)
    assert list(tmp_path.iterdir()) == []


# MLflow


def test_mlflow_folder_and_the_same_run_after_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    many = {"model": {f"key_{i}": i for i in range(150)}}
    config = MlflowConfig(experiment="fish")
    logger = MlflowLogger(config, tmp_path, "tiny", SETTINGS | many, 0)
    for step in (1, 2, 3):
        logger.log(step, {"train/loss": float(step), "train/grad_norm": math.nan})
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    logger = MlflowLogger(config, tmp_path, "tiny", SETTINGS, 2)
    assert client.get_run((tmp_path / "mlflow_run_id").read_text()).info.status == "RUNNING"
    for step in (3, 4):
        logger.log(step, {"train/loss": float(step)})
    logger.log(3, {"eval/loss": 9.0})  # the first attempt was killed before it evaluated
    logger.text(4, "preview", "to be")
    logger.close()

    (run,) = client.search_runs([client.get_experiment_by_name("fish").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params["training.learning_rate"] == "0.001"
    assert len(run.data.params) == 153
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert math.isnan(run.data.metrics["train/grad_norm"])
    assert run.data.metrics["eval/loss"] == 9.0
    (text,) = tmp_path.glob("mlruns/*/*/artifacts/preview/step_00000004.txt")
    assert text.read_text() == "to be"


def test_an_mlflow_server_that_fails_later_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    logger = MlflowLogger(MlflowConfig(), tmp_path, "tiny", {}, 0)
    loggers = Loggers([logger])

    def down(*args: object, **options: object) -> None:
        raise ConnectionError("server is gone")

    logger._client.log_batch = down
    loggers.log(1, {"train/loss": 1.0})
    loggers.close()
    assert "MlflowLogger failed at the end and is off; training continues: server is gone" in caplog.text


def test_a_failing_start_of_mlflow_is_a_one_line_error(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    config = LoggingConfig(mlflow=MlflowConfig(tracking_uri="ftp://nowhere"))
    with pytest.raises(UserError, match=r"^logging\.mlflow\.tracking_uri = ftp://nowhere: ") as caught:
        open_loggers(config, tmp_path, "tiny", {}, 0)
    assert "\n" not in str(caught.value)


# All of them


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it now raises ImportError
    config = LoggingConfig.model_validate({package: True})
    with pytest.raises(UserError, match=rf"^logging\.{package} is on, .*; run `pip install shoal\[{package}\]`$"):
        open_loggers(config, tmp_path, "tiny", {}, 0)


def test_open_loggers_opens_the_loggers_of_the_config(tmp_path: Path) -> None:
    for asked in ({"jsonl"}, {"tensorboard"}, {"jsonl", "tensorboard"}, set()):
        folder = tmp_path / "-".join(sorted(asked) or ["none"]) / "run"
        config = LoggingConfig(jsonl="jsonl" in asked, tensorboard="tensorboard" in asked)
        loggers = open_loggers(config, folder, "tiny", SETTINGS, 0)
        loggers.log(1, {"train/loss": 2.5})
        loggers.text(1, "preview", "to be")
        loggers.close()
        assert (folder / "metrics.jsonl").exists() == ("jsonl" in asked)
        assert (folder / "tensorboard").exists() == ("tensorboard" in asked)


class Broken:
    calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("network\nis down")

    def text(self, step: int, tag: str, text: str) -> None:
        self.log(step, {})

    def close(self) -> None:
        self.log(0, {})


def test_a_failing_logger_warns_once_and_the_others_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    loggers = Loggers([broken, JsonlLogger(tmp_path, 0)])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            loggers.log(step, {"train/loss": 1.0})
            loggers.text(step, "preview", "to be")
        loggers.close()
    assert [record["step"] for record in read_jsonl(tmp_path)] == [1, 1, 2, 2]
    assert caplog.messages == ["Broken failed at step 1 and is off; training continues: network is down"]
    assert broken.calls == 1


def test_a_repeated_evaluation_appears_once_in_jsonl(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, 0)
    for step in (1, 2):
        logger.log(step, {"train/loss": 1.0})
        logger.log(step, {"eval/loss": 2.0})
        logger.text(step, "preview", "words")
    logger.close()
    JsonlLogger(tmp_path, 2, evaluates_again=True).close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], [*row][1]) for row in rows] == [
        (1, "train/loss"),
        (1, "eval/loss"),
        (1, "preview"),
        (2, "train/loss"),
    ]
