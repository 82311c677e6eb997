"""Names that are looked up on the Hugging Face Hub, and what is said about those that cannot be had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.data.hub import snapshot
from shoal.data.local_files import looks_like_path, near_names
from shoal.errors import UserError

hub = pytest.importorskip("huggingface_hub")


class Gated(BaseHTTPRequestHandler):
    """Answers as the Hub does for a model whose licence has not been accepted."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def gated_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gated) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


@pytest.mark.usefixtures("gated_hub")
def test_a_licence_that_was_not_accepted_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    start = hub.HfApi.__init__
    endpoint = hub.constants.ENDPOINT
    monkeypatch.setattr(hub.HfApi, "__init__", lambda self, **keys: start(self, **{**keys, "endpoint": endpoint}))
    message = r"^model.name = 'me/model': a licence has to be accepted .* page of me/model .* then run `hf auth login`$"
    with pytest.raises(UserError, match=message):
        snapshot("model.name", "me/model", None, ["*.json"], local_only=False)


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "a/", "a\\b", "my model"])
def test_what_can_only_be_a_path(name: str) -> None:
    assert looks_like_path(name)
    for local_only in (True, False):
        with pytest.raises(UserError, match=r"^model.name = .*: there is no such file or folder; correct the path, or"):
            snapshot("model.name", name, None, [], local_only=local_only)


def test_what_can_be_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(map(looks_like_path, ("gpt2", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama31").mkdir()
    assert near_names("models/llama32") == " (did you mean models/llama31?)"
    assert near_names("modls") == " (did you mean models?)"
    assert near_names("elsewhere/llama31") == near_names("gpt2") == ""
