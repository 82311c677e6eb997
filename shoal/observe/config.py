"""The section `logging:` of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ConsoleMode = Literal["auto", "rich", "plain", "off"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class WandbConfig(_Section):
    project: str = "shoal"
    entity: str | None = None
    """The team or user; W&B's own default when not given."""
    mode: Literal["online", "offline"] = "online"
    """Offline runs are written below `output_dir/wandb`; `wandb sync` uploads them later."""


class MlflowConfig(_Section):
    tracking_uri: str | None = None
    """A server or database; the folder `output_dir/mlruns` when not given."""
    experiment: str = "shoal"


class ProfileConfig(_Section):
    start: int = Field(ge=1)
    """The first step to profile; steps count from 1."""
    steps: int = Field(default=3, ge=1)


class LoggingConfig(_Section):
    every: int = Field(default=10, ge=1)
    """Metrics are read from the device and written every so many steps."""
    console: ConsoleMode = "auto"
    """auto: a live bar on a terminal, plain lines elsewhere."""
    tensorboard: bool = True
    jsonl: bool = True
    wandb: bool | WandbConfig = False
    mlflow: bool | MlflowConfig = False
    profile: ProfileConfig | None = None
