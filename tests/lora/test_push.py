"""`export --push`, against a server that answers as the Hugging Face Hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lora.test_lora_run import LORA, save_base, tree_for
from shoal.checkpoint.export import export
from shoal.config import check_run
from shoal.errors import UserError
from shoal.training import train
from shoal.training.push import check_push, push_folder

pytest.importorskip("peft")
hub = pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """Takes the requests of an upload of small files, and keeps them."""

    files: dict[str, bytes]
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "me/adapter", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        if "refused" in self.path:
            self.send_error(403, "no right to write")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append(self.path)
        if self.path.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {"commitUrl": "https://huggingface.co/me/adapter/commit/0", "commitOid": "0" * 40, "success": True}
            )
        else:
            self._answer({"url": "https://huggingface.co/me/adapter", "name": "me/adapter", "id": "me/adapter"})

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OneHub", (Hub,), {"files": {}, "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub.HfApi, "__init__", lambda self: _init(self, endpoint=address, token="no token"))
        yield kind
        server.shutdown()


_init = hub.HfApi.__init__


def test_an_adapter_is_uploaded_with_a_model_card(tmp_path: Path, fake_hub: type[Hub]) -> None:
    tree = tree_for(tmp_path, save_base(tmp_path / "base"), LORA, max_steps=1)
    train(check_run(tree))
    step_dir, out = tmp_path / "out" / "checkpoints" / "step_00000001", tmp_path / "adapter"
    check_push("me/adapter", "peft")
    export(step_dir, out, "peft")
    assert push_folder(step_dir, out, "me/adapter").startswith("https://huggingface.co/me/adapter")
    assert "/api/repos/create" in fake_hub.requests
    assert fake_hub.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert fake_hub.files["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    card = fake_hub.files["README.md"].decode()
    assert 'library_name: "peft"' in card
    assert "base_model" not in card  # a folder of this machine
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/adapter")' in card
    assert "| `r` | `4` |" in card
    with pytest.raises(UserError, match=r"--push me/refused: the upload failed: .*; the export is in"):
        push_folder(step_dir, out, "me/refused")


def test_without_the_hub_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"--push me/model: the Hugging Face Hub cannot be reached; export without it"):
        check_push("me/model", "hf")
    with pytest.raises(UserError, match=r"--push me/model: --to torch writes a file"):
        check_push("me/model", "torch")
