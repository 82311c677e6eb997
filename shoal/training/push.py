"""Uploads an exported folder to the Hugging Face Hub, with a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.checkpoint.inspect import as_dict, open_step_folder
from shoal.checkpoint.trained_model import recipe_sections
from shoal.data.hub import hub
from shoal.errors import UserError, one_line
from shoal.lora.peft_folder import is_adapter_folder

_KEY = "--push"


def check_push(repository: str, to: str) -> None:
    """Raises UserError before anything is exported if the upload cannot work."""
    if to not in ("hf", "peft"):
        raise UserError(f"{_KEY} {repository}: --to {to} writes a file and no folder for the Hub; use --to hf or peft")
    with hub(_KEY, repository, "huggingface_hub", local=False) as library:
        if library.constants.HF_HUB_OFFLINE:
            raise UserError(
                f"{_KEY} {repository}: the Hugging Face Hub cannot be reached; export without it, and upload the "
                "folder elsewhere by `hf upload`"
            )
        library.utils.validate_repo_id(repository)


def push_folder(step_dir: Path, folder: Path, repository: str) -> str:
    """Writes a model card into an exported folder, uploads it, and returns its address."""
    (folder / "README.md").write_text(_model_card(step_dir, folder, repository), encoding="utf-8")
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Exported by shoal"))
    except Exception as error:  # the library raises many kinds, for tokens, names and networks
        raise UserError(
            f"{_KEY} {repository}: the upload failed: {one_line(error)}; the export is in {folder}, and `hf upload` "
            "sends it later"
        ) from error


def _model_card(step_dir: Path, folder: Path, repository: str) -> str:
    """Returns the text of a model card: what it was made from, how it was trained, how to load it."""
    checkpoint = open_step_folder(step_dir)
    sections = recipe_sections(checkpoint)
    base, step = as_dict(sections.get("model")).get("name"), checkpoint.trainer.get("step")
    is_adapter = is_adapter_folder(folder)
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "pipeline_tag": "text-generation"}
    if base and not Path(str(base)).expanduser().exists():  # a folder of this machine means nothing elsewhere
        head["base_model"] = base
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", "", f"# {repository}", ""]
    trained = "An adapter" if is_adapter else "A model"
    lines.append(
        f"{trained} trained by shoal, recipe {as_dict(checkpoint.manifest.get('config')).get('recipe')}, {step} steps."
    )
    if lora := sections.get("lora"):
        used = {key: value for key, value in lora.items() if value not in (None, {}, [], False)}
        lines += ["", "| lora | |", "| --- | --- |", *(f"| `{key}` | `{value}` |" for key, value in used.items())]
    load = (
        f'AutoPeftModelForCausalLM.from_pretrained("{repository}")'
        if is_adapter
        else f'AutoModelForCausalLM.from_pretrained("{repository}")'
    )
    package = "peft" if is_adapter else "transformers"
    lines += ["", "```python", f"from {package} import {load.partition('.')[0]}", "", f"model = {load}", "```", ""]
    return "\n".join(lines)
