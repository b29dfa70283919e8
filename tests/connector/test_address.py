"""An engine is ready when its HTTP server is, and says where that is, not where something else listens (R17)."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from kvbus_connector import address
from kvbus_connector.address import serving_address
from support import certificates


class Health(BaseHTTPRequestHandler):
    """Answers ``/health`` with its server's status."""

    def do_GET(self) -> None:
        self.send_response(getattr(self.server, "status", 200) if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class IPv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def serving(host: str, *, tls: Path | None = None) -> Iterator[ThreadingHTTPServer]:
    server = (IPv6Server if ":" in host else ThreadingHTTPServer)((host, 0), Health)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def child() -> Iterator[int]:
    process = psutil.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.0.0.1"), ("::1", "[::1]"), ("::", "10.0.0.1")]
)
def test_the_http_server_is_found_among_the_ancestors_sockets(child: int, host: str, shown: str) -> None:
    with serving(host) as server:
        assert serving_address(child, "10.0.0.1") == f"{shown}:{server.server_address[1]}"
    assert serving_address(child, "10.0.0.1") == ""


@pytest.mark.slow
def test_what_listens_and_is_not_the_http_server_is_not_taken_for_it(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server of data parallel ranks listens for them long before it serves; one socket is deaf, one rude."""
    monkeypatch.setattr(address, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0)) as rude:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with rude.accept()[0] as connection:
                        connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert serving_address(child, "") == ""
            with serving("127.0.0.1") as server:
                assert serving_address(child, "") == f"127.0.0.1:{server.server_address[1]}"
                server.status = 401  # type: ignore[attr-defined]
                assert serving_address(child, ""), "it serves those it knows"
                server.status = 503  # type: ignore[attr-defined]
                assert serving_address(child, "") == "", "it serves nobody yet"
        finally:
            rude.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_server_with_tls_is_found(child: int, tmp_path: Path) -> None:
    certificates.make(tmp_path)
    with serving("127.0.0.1", tls=tmp_path) as server:
        assert serving_address(child, "") == f"127.0.0.1:{server.server_address[1]}"


def test_a_supervisor_that_serves_is_not_the_engine() -> None:
    """A grandparent's server must not be taken for the API server, which is still to come."""
    with psutil.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        try:
            with serving("127.0.0.1"):
                assert serving_address(grandchild, "") == ""
        finally:
            psutil.Process(grandchild).kill()
