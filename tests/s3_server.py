"""Moto's server with writes on a condition that are one step, as they are in S3.

    python -m tests.s3_server PORT

Moto looks for the object and then writes it, and lets other requests in between.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_lock = threading.Lock()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """What moto answers."""
    if {"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"} & environ.keys():
        with _lock:
            return list(_moto(environ, start_response))
    answer: Iterable[bytes] = _moto(environ, start_response)
    return answer


if __name__ == "__main__":
    _moto = DomainDispatcherApplication(create_backend_app)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True)
