from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from shoal.observe.config import LoggingConfig, ProfileConfig, WandbConfig


def test_a_service_is_switched_on_or_configured() -> None:
    assert LoggingConfig(wandb=True).wandb is True
    configured = LoggingConfig.model_validate({"wandb": {"mode": "offline"}, "profile": {"start": 5}})
    assert configured.wandb == WandbConfig(mode="offline")
    assert configured.profile == ProfileConfig(start=5, steps=3)


@pytest.mark.parametrize(
    "section",
    [{"every": 0}, {"every": "10"}, {"evry": 10}, {"console": "fancy"}, {"wandb": {"team": "x"}}, {"profile": {}}],
)
def test_mistakes_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoggingConfig.model_validate(section)


def test_the_schema_does_not_import_torch() -> None:
    code = "import sys, shoal.observe.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
