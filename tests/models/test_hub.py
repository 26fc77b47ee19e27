"""The question to the hub is answered in bounded time, whatever the hub does. The servers here are real ones."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvos.models.hub import Reach, reach_hub


@contextmanager
def hub_that_answers(status: int, body: object, headers: dict[str, str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_known_model_is_available() -> None:
    with hub_that_answers(200, {"id": "a/b", "siblings": [], "tags": []}) as endpoint:
        assert reach_hub("a/b", offline=False, endpoint=endpoint).reach is Reach.AVAILABLE


@pytest.mark.parametrize("code", ["RepoNotFound", "GatedRepo"])
def test_an_unknown_or_gated_model_is_refused(code: str) -> None:
    with hub_that_answers(404 if code == "RepoNotFound" else 403, {"error": "no"}, {"X-Error-Code": code}) as endpoint:
        answer = reach_hub("a/b", offline=False, endpoint=endpoint)
    assert answer.reach is Reach.REFUSED
    assert "private or gated" in answer.detail


def test_what_is_no_id_is_refused_without_asking() -> None:
    answer = reach_hub("not an id!", offline=False, endpoint="http://127.0.0.1:9")
    assert answer.reach is Reach.REFUSED
    assert "no hub id" in answer.detail


def test_a_closed_port_is_unreachable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and not listening
        answer = reach_hub("a/b", offline=False, endpoint=f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert answer.reach is Reach.UNREACHABLE
    assert answer.detail


def test_a_hub_that_never_answers_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answer = reach_hub("a/b", offline=False, endpoint=endpoint, deadline_seconds=0.2)
    assert answer.reach is Reach.UNREACHABLE
    assert "no answer within 0.2 s" in answer.detail


def test_offline_asks_nobody() -> None:
    answer = reach_hub("a/b", offline=True, endpoint="http://127.0.0.1:9")
    assert answer.reach is Reach.UNREACHABLE
    assert "offline" in answer.detail
