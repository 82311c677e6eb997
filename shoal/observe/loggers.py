"""Loggers for metrics: JSONL, TensorBoard, Weights & Biases, MLflow.

A run that resumes from step k repeats the steps after k. No logger shows such a step twice: for JSONL and TensorBoard
the old records after k are removed; W&B and MLflow only append, so there the first record of a step is kept.
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.config.schema import LoggingConfig, MlflowConfig, WandbConfig
from shoal.errors import UserError, one_line

_warnings = logging.getLogger(__name__)


class RetryingFile:
    """A log file to append to that survives a full disk: training must not stop because a line cannot be written.

    What cannot be written stays in memory and is tried again at the next flush.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._warned = False

    def write(self, data: str | bytes) -> None:
        """Keeps the data in memory until `flush` is called."""
        self._unwritten += data.encode() if isinstance(data, str) else data

    def flush(self) -> None:
        """Writes what is in memory. If that fails, warns once and keeps the rest."""
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            self._warned = False
        except OSError as error:
            if not self._warned:
                _warnings.warning("%s cannot be written and will be tried again: %s", self.path, error.strerror)
            self._warned = True

    def close(self) -> None:
        self.flush()
        self._file.close()


class Logger(Protocol):
    """Records the metrics and texts of a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records numbers by name."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Records a text, such as a sample that the model generated."""

    def close(self) -> None:
        """Writes what is left and closes the file or the connection."""


class Loggers:
    """All loggers of a run as one. A logger that fails is dropped with a warning, and training continues."""

    def __init__(self, loggers: Sequence[Logger] = ()):
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._for_each(f"step {step}", lambda logger: logger.log(step, metrics))

    def text(self, step: int, tag: str, text: str) -> None:
        self._for_each(f"step {step}", lambda logger: logger.text(step, tag, text))

    def histogram(self, step: int, tag: str, histogram: Mapping[str, Any]) -> None:
        """Records a histogram where loggers can show one: in TensorBoard."""
        for logger in self._loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.histogram(step, tag, histogram)

    def close(self) -> None:
        self._for_each("the end", lambda logger: logger.close())
        self._loggers.clear()

    def _for_each(self, when: str, call: Callable[[Logger], None]) -> None:
        for logger in tuple(self._loggers):
            try:
                call(logger)
            except Exception as error:
                self._loggers.remove(logger)
                _warnings.warning(
                    "%s failed at %s and is off; training continues: %s", type(logger).__name__, when, one_line(error)
                )


def open_loggers(
    config: LoggingConfig,
    output_dir: Path,
    name: str,
    settings: Mapping[str, Any],
    resume_step: int,
    evaluates_again: bool = False,
) -> Loggers:
    """Opens the loggers that `config` chooses. Call it on rank 0 only.

    `settings` is the resolved config, which is recorded with the run. Records up to `resume_step` are kept; 0 starts
    every logger from the beginning. With `evaluates_again` the checkpoint of `resume_step` knows of no evaluation, so
    that one which was logged there will be made again if it is due, and is not kept.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    services: Any = ((config.wandb, WandbConfig, WandbLogger), (config.mlflow, MlflowConfig, MlflowLogger))
    files = ((config.jsonl, JsonlLogger), (config.tensorboard, TensorBoardLogger))
    loggers: list[Logger] = [  # services first: if one cannot be reached, the run stops before any file has changed
        logger(defaults() if service is True else service, output_dir, name, settings, resume_step)
        for service, defaults, logger in services
        if service
    ]
    try:
        loggers += [logger(output_dir, resume_step, evaluates_again) for chosen, logger in files if chosen]
    except OSError as error:
        raise UserError(
            f"experiment.output_dir = {str(output_dir)!r}: log files cannot be written there: {error.strerror}; use "
            "another folder"
        ) from None
    return Loggers(loggers)


class JsonlLogger:
    """Writes `metrics.jsonl`, one object per line. NaN and infinities become the strings "nan", "inf" and "-inf".

    Strict JSON has no such numbers, and `float(value)` reads both numbers and these strings.
    """

    def __init__(self, output_dir: Path, resume_step: int, evaluates_again: bool = False):
        path = output_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if resume_step and path.exists() else []
        replace_file(path, b"".join(line for line in lines if _is_kept(line, resume_step, evaluates_again)))
        self._file = RetryingFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._write({"step": step, **values})

    def text(self, step: int, tag: str, text: str) -> None:
        self._write({"step": step, tag: text})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def _is_kept(line: bytes, resume_step: int, evaluates_again: bool) -> bool:
    """Returns whether a line is complete and will not be written again. A process that was killed while it wrote leaves
    an incomplete line."""
    try:
        row = json.loads(line)
        return line.endswith(b"\n") and not _is_repeated(row["step"], row, resume_step, evaluates_again)
    except (ValueError, KeyError, TypeError):
        return False


def _is_repeated(step: int, names: Iterable[str], resume_step: int, evaluates_again: bool) -> bool:
    """Returns whether a run that resumes from `resume_step` will write this record again."""
    if step == resume_step and evaluates_again:
        return any(name.startswith(("eval/", "preview")) for name in names)
    return step > resume_step


def replace_file(path: Path, content: bytes | bytearray) -> None:
    """Replaces a file atomically, so that a process that is killed leaves the old file or the new one."""
    temporary = path.with_name("rewritten")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class TensorBoardLogger:
    """Writes event files into `tensorboard/`."""

    def __init__(self, output_dir: Path, resume_step: int, evaluates_again: bool = False):
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = output_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob("*tfevents*"))
        for path in files:
            _drop_repeated_events(resume_step, evaluates_again, path)
        # TensorBoard reads the files of a folder in the order of their names, so the new one has to be the last, also
        # if the clock was set back since the others were made.
        stamps = [int(stamp) for path in files if (stamp := path.name.split("tfevents.")[-1].split(".")[0]).isdigit()]
        self._wall_time = max([time.time(), *(stamp + 1.0 for stamp in stamps)])
        name = f"events.out.tfevents.{self._wall_time:010.0f}.{socket.gethostname()}.{os.getpid()}.{len(files)}"
        self._records = RecordWriter(RetryingFile(folder / name))
        # START makes an open TensorBoard drop what it has read from this step on; step 0 drops all of an earlier run.
        self._write(0, file_version="brain.Event:2")
        self._write(resume_step + 1 if resume_step else 0, session_log={"status": "START"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, summary={"value": [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]})

    def text(self, step: int, tag: str, text: str) -> None:
        from torch.utils.tensorboard.summary import text as summary_of

        self._write(step, summary=summary_of(tag, text))

    def histogram(self, step: int, tag: str, histogram: Mapping[str, Any]) -> None:
        """`histogram` has the fields of TensorBoard's HistogramProto."""
        self._write(step, summary={"value": [{"tag": tag, "histo": histogram}]})

    def close(self) -> None:
        self._records.close()

    def _write(self, step: int, **content: Any) -> None:
        """Writes an event to disk immediately, so that a step is logged before its checkpoint is saved."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._wall_time = max(self._wall_time, time.time())
        self._records.write(Event(step=step, wall_time=self._wall_time, **content).SerializeToString())
        self._records.flush()


def _drop_repeated_events(resume_step: int, evaluates_again: bool, path: Path) -> None:
    """Removes from an event file what the resumed run will write again, and an incomplete event at its end.

    TensorBoard's `purge_step` is not enough: not every reader knows it, and no reader applies it to texts.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    data = path.read_bytes()
    kept, start = bytearray(), 0
    try:
        # 16 bytes surround an event: its length (8), a checksum of the length (4), and a checksum after the event (4).
        while (end := start + 16 + int.from_bytes(data[start : start + 8], "little")) <= len(data):
            event = Event.FromString(data[start + 12 : end - 4])
            tags = (value.tag for value in event.summary.value)
            if not event.HasField("summary") or not _is_repeated(event.step, tags, resume_step, evaluates_again):
                kept += data[start:end]
            start = end
    except DecodeError:  # another program wrote this file; readers stop there too
        return
    if kept and kept != data:
        replace_file(path, kept)


class WandbLogger:
    """Sends metrics to Weights & Biases, or writes an offline run."""

    def __init__(self, config: WandbConfig, output_dir: Path, name: str, settings: Mapping[str, Any], resume_step: int):
        wandb = _import("wandb")
        id_file = output_dir / "wandb_run_id"
        run_id = _known_run(id_file, resume_step) or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                mode=config.mode,
                name=name,
                id=run_id,
                resume="allow",
                dir=str(output_dir),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),  # the terminal belongs to shoal's console
            )
        except Exception as error:
            raise UserError(
                f"logging.wandb.mode = {config.mode}: {one_line(error)}; run `wandb login`, or set "
                "logging.wandb.mode=offline"
            ) from error
        id_file.write_text(run_id)
        self._html = wandb.Html
        self._first_new_step = self._run.step  # W&B refuses steps it already has

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step >= self._first_new_step:
            self._run.log(dict(metrics), step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        self.log(step, {tag: self._html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """Sends metrics to MLflow from a separate thread, so that a slow or dead server does not delay training."""

    def __init__(
        self, config: MlflowConfig, output_dir: Path, name: str, settings: Mapping[str, Any], resume_step: int
    ):
        mlflow = _import("mlflow")
        # MLflow 3 refuses folders in favour of databases, but mlflow-skinny brings no database driver.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = config.tracking_uri or (output_dir / "mlruns").resolve().as_uri()
        id_file = output_dir / "mlflow_run_id"
        self._last_steps: dict[str, int] = {}
        try:
            self._client = client = mlflow.MlflowClient(tracking_uri=uri)
            if known := _known_run(id_file, resume_step):
                self._run_id = known
                for metric in client.get_run(known).data.metrics:
                    self._last_steps[metric] = max(m.step for m in client.get_metric_history(known, metric))
                client.update_run(known, status="RUNNING")
            else:
                experiment = client.get_experiment_by_name(config.experiment)
                experiment_id = experiment.experiment_id if experiment else client.create_experiment(config.experiment)
                self._run_id = client.create_run(experiment_id, run_name=name).info.run_id
                params = [mlflow.entities.Param(key, str(value)) for key, value in _flatten(settings)]
                for start in range(0, len(params), 100):  # MLflow's limit per call
                    client.log_batch(self._run_id, params=params[start : start + 100])
        except Exception as error:
            raise UserError(
                f"logging.mlflow.tracking_uri = {uri}: {one_line(error)}; use the address of a server, or of a "
                "database that the full mlflow package can open"
            ) from error
        id_file.write_text(self._run_id)
        self._metric = mlflow.entities.Metric
        self._error: Exception | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [
            self._metric(name, value, now, step)
            for name, value in metrics.items()
            if step > self._last_steps.get(name, -1)
        ]
        self._enqueue(lambda: self._client.log_batch(self._run_id, metrics=batch))

    def text(self, step: int, tag: str, text: str) -> None:
        self._enqueue(lambda: self._client.log_text(self._run_id, text, f"{tag}/step_{step:08d}.txt"))

    def close(self) -> None:
        self._enqueue(lambda: self._client.set_terminated(self._run_id))
        self._calls.put(None)
        self._sender.join(timeout=60)
        if self._error or self._sender.is_alive():
            raise self._error or TimeoutError("the last metrics could not be sent within 60 seconds")

    def _enqueue(self, call: Callable[[], object]) -> None:
        if self._error:
            raise self._error
        self._calls.put(call)

    def _send(self) -> None:
        try:
            while call := self._calls.get():
                call()
        except Exception as error:  # the next call raises it in the main thread
            self._error = error


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"logging.{package} is on, but the package {package} is not installed; run `pip install shoal[{package}]`"
        ) from None


def _known_run(id_file: Path, resume_step: int) -> str | None:
    """Returns the id that the service gave to this run before, if the run resumes."""
    return id_file.read_text().strip() if resume_step and id_file.exists() else None


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested sections by dotted names, such as `training.learning_rate`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
