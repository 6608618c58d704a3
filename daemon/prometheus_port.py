"""The optional HTTP port that Prometheus scrapes. Loopback only: it knows no passwords and no encryption."""

from __future__ import annotations

import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from deepinfer.stages.admission import EndpointError

IDLE_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS
    """Of a connection that says nothing: it holds a thread."""

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class PrometheusPort:
    """Serves until `close`. Raises EndpointError when the port cannot be had."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        kind = _ServerV6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), kind, _Handler)
        except OSError as error:
            raise EndpointError(f"prometheus_port: cannot listen on {host}, port {port}: {error.strerror}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
