"""`shoal chat --device`: a device that torch cannot use here."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.training.chat import Chat


@pytest.mark.parametrize("name", ["gpu", "xpu:99"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"--device {name}: torch cannot use it here; use "):
        Chat(tmp_path, device=name)
