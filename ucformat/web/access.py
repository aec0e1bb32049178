"""Who may see what: tokens with scopes, hosts that may be asked for, limits, and the log of requests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import time
import tomllib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from ucformat.errors import PermissionDenied, UsageError
from ucformat.web.library import Access

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import HTTPConnection
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("ucformat.web")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_BODY = 1 << 20  # bytes of a request
_MAX_QUERY = 16 << 10


@dataclass(frozen=True)
class Token:
    """A token that clients send.

    Attributes:
        name: of whom, for the log.
        sha256: the hexadecimal SHA-256 of the token; the token itself is nowhere.
        scope: a filter of the catalog; empty: all checkpoints.
        expires: seconds since 1970 (None: never).
        rate: requests in a second, on average over ten (None: any number).
    """

    name: str
    sha256: str
    scope: str = ""
    expires: float | None = None
    rate: float | None = None


def load_tokens(path: str) -> list[Token]:
    """Load a file of tokens: TOML, with a table `[[token]]` for each.

    Raises:
        UsageError: the file says something else.
    """
    from ucformat.catalog.filter.parse import parse

    try:
        tables = tomllib.loads(Path(path).read_text()).get("token", [])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: {error}", hint="docs/guides/serve.md shows such a file"
        ) from None
    if not tables or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError(
            f"{path} has no token, which is a table [[token]]",
            hint="docs/guides/serve.md shows such a file",
        )
    tokens = []
    for number, table in enumerate(tables, 1):
        unknown = set(table) - {"name", "sha256", "where", "expires", "rate"}
        if unknown or not isinstance(table.get("name"), str):
            what = f"has no {min(unknown)!r}" if unknown else "needs a name"
            raise UsageError(f"{path}: token {number} {what}")
        if not _HASH.fullmatch(str(table.get("sha256", ""))):
            raise UsageError(
                f"{path}: token {table['name']!r} needs `sha256`, the hexadecimal digest of the token",
                hint="printf %s TOKEN | sha256sum",
            )
        whose = f"{path}: token {table['name']!r}"
        scope = table.get("where", "")
        if not isinstance(scope, str):
            raise UsageError(f"{whose} needs a filter as `where`, a text")
        if scope:
            parse(scope)
            parse(f"({scope}) and id = ''")  # there is room for conditions
        expires, rate = table.get("expires"), table.get("rate")
        if expires is not None and not (isinstance(expires, datetime) and expires.tzinfo):
            raise UsageError(
                f"{whose} needs a time with its zone as `expires`, without quotes",
                hint="write expires = 2027-01-01T00:00:00Z",
            )
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 < rate < math.inf):
            raise UsageError(
                f"{whose} needs a number above 0 as `rate`, of requests in a second",
                hint="write rate = 50, or rate = 0.1 for one in ten seconds",
            )
        tokens.append(
            Token(
                table["name"],
                table["sha256"],
                scope,
                None if expires is None else expires.timestamp(),
                rate,
            )
        )
    return tokens


def access_of(connection: HTTPConnection) -> Access:
    """What the client of a request may see."""
    access: Access = connection.scope["state"]["access"]
    return access


def is_guarded(connection: HTTPConnection) -> bool:
    """Whether a request needs a token."""
    guarded: bool = connection.scope["state"]["guarded"]
    return guarded


class Gate:
    """Lets through only what is allowed to pass, and logs it.

    Args:
        tokens: one of which a request must have; empty: requests need none.
        open_to_all: whether any host name is right although there are no tokens; else only those of
            this machine are, since a page of a stranger may let a browser ask for others.
    """

    def __init__(
        self, app: ASGIApp, tokens: Sequence[Token] = (), *, open_to_all: bool = False
    ) -> None:
        self.app, self.tokens, self.open_to_all = app, tokens, open_to_all
        self._rates: dict[
            str, tuple[float, float]
        ] = {}  # of tokens: allowance, and when it was computed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on a request; see ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, sent = time.perf_counter(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
                if access is not None and access.is_over and message.get("more_body"):
                    # an answer that is not completed closes the connection
                    raise PermissionDenied("the token has expired meanwhile")
            await send(message)

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        access: Access | None = None
        try:
            refused = self._refusal(scope, headers)
            access = None if refused is not None else self._access(headers)
            if refused is None and access is None:
                refused = JSONResponse(
                    {"error": "this server needs a token"},
                    401,
                    {
                        "www-authenticate": _challenge(scope["path"]),
                        "x-error-message": "this server needs a token",
                    },
                )
            if refused is None and access is not None and not self._in_rate(access):
                refused = JSONResponse({"error": "too many requests"}, 429, {"retry-after": "1"})
            if refused is not None:
                await refused(scope, receive, counted)
                return
            scope.setdefault("state", {}).update(access=access, guarded=bool(self.tokens))
            await self.app(scope, _limited(receive), counted)
        finally:
            _log.info(
                "%s %s %r %d %d bytes %.0f ms",
                access.name if access else "-",
                scope["method"],
                scope["path"],
                status,
                sent,
                1000 * (time.perf_counter() - begun),
            )

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> JSONResponse | None:
        """The answer to a request that nobody may make."""
        if scope["method"] not in ("GET", "HEAD", "POST", "OPTIONS"):
            return JSONResponse(
                {"error": "nothing can be written here"}, 405, {"allow": "GET, HEAD"}
            )
        if len(scope["query_string"]) > _MAX_QUERY:
            return JSONResponse({"error": "the query is too long"}, 414)
        if int(headers.get("content-length", "0") or 0) > _MAX_BODY:
            return JSONResponse({"error": "the request is too large"}, 413)
        host = re.sub(r":\d+$", "", headers.get("host", "")).lower()
        if not self.tokens and not self.open_to_all and not is_loopback(host):
            return JSONResponse({"error": "this server has another name"}, 421)
        return None

    def _access(self, headers: Mapping[str, str]) -> Access | None:
        """What the token of a request allows to see; None if it has none that is valid."""
        if not self.tokens:
            return Access()
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":  # as browsers send what was typed as the password
            given = _password(given)
        elif kind.lower() != "bearer":
            return None
        digest = hashlib.sha256(given.strip().encode("latin-1", "replace")).hexdigest()
        matching = None
        for token in self.tokens:  # all of them, so that the time tells nothing
            if hmac.compare_digest(token.sha256, digest):
                matching = token
        if matching is None:
            return None
        access = Access(matching.name, matching.scope, matching.rate, matching.expires)
        return None if access.is_over else access

    def _in_rate(self, access: Access) -> bool:
        """Whether a client has not used up its requests."""
        if access.rate is None:
            return True
        now = time.monotonic()
        most = max(1.0, 10 * access.rate)
        left, since = self._rates.get(access.name, (most, now))
        left = min(most, left + (now - since) * access.rate)
        self._rates[access.name] = (max(0.0, left - 1), now)
        return left >= 1


def _limited(receive: Receive) -> Receive:
    """The body of a request, up to what is allowed."""
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > _MAX_BODY:
            raise ValueError("the request is too large")
        return message

    return limited


def _challenge(path: str) -> str:
    """How a token may be sent; a browser that asks for a page lets its user type it as a password."""
    is_page = path in ("/", "/ui") or path.startswith("/ui/")
    return 'Basic realm="a token of this server, as the password"' if is_page else "Bearer"


def _password(given: str) -> str:
    """The password of credentials in base64; empty if they are none."""
    try:
        return base64.b64decode(given, validate=True).decode("latin-1").partition(":")[2]
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host in _LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
