"""Refuses to resume a run whose files have the names that a checkpoint knows, and other contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.checkpoint.inspect import as_dict
from shoal.checkpoint.latest import changed_keys, is_allowed
from shoal.checkpoint.store import Checkpoint
from shoal.errors import UserError


def check_same_data(
    checkpoint: Checkpoint,
    digests: Mapping[str, Mapping[str, str]],
    config: dict[str, Any],
    allowed: list[str],
    warn: Callable[[str], None],
) -> None:
    """Raises UserError if the files of a run give other samples, to train or to evaluate on, than when a checkpoint was
    saved.

    `digests` are those of `Recipe.data_digests`. Checkpoints of earlier versions have none. If a key of model or data
    was allowed to change, the data may be others, too; of changed files that are allowed `warn` gets a line.
    """
    if any(key.startswith(("model.", "dataset.")) for key, *_ in changed_keys(checkpoint, config)):
        return
    stored = as_dict(checkpoint.manifest.get("data"))
    for key, now in digests.items():
        then = as_dict(stored.get(key))
        changed = [name for name, digest in now.items() if then.get(name, digest) != digest]
        if not changed:
            continue
        said = f"{key}: {', '.join(changed)}: it gives other samples than when {checkpoint.folder} was saved"
        if not is_allowed(key, allowed):
            raise UserError(
                f"{said}, because its records, the tokenizer or the chat template have changed; put them back, choose "
                f"another experiment.output_dir, or list {key} in checkpoint.allow_changed"
            )
        warn(f"{said}; the run goes on with them at the same position")
