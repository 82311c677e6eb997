"""A server that answers as the Hugging Face Hub does, for the tests of `export --push`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

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
            url = "https://huggingface.co/me/adapter/commit/0"
            self._answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
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
