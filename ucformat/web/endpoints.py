"""Endpoints of the data plane: one table says which requests there are, and what they take and answer.

The routes, the checks of parameters and the OpenAPI document are made from it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, NoMatchFound

from ucformat._version import __version__
from ucformat.errors import UsageError
from ucformat.web.access import access_of
from ucformat.web.paths import raw_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.datastructures import URLPath
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ucformat.web.library import Access

_DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)
_JSON = "application/json"
_ERRORS = {
    400: "The request is not understood; `error` and `hint` say why.",
    401: "The server needs a token.",
    403: "The server may not read the files of the checkpoint.",
    404: "There is nothing of that name that this client may see.",
    405: "Another method is needed; nothing can be written.",
    409: "The files of the checkpoint changed; ask again.",
    413: "The request is too large.",
    414: "The query is too long.",
    416: "There are no such bytes.",
    421: "The server has another name.",
    422: "The checkpoint has it, but it cannot be answered in this form.",
    429: "The client has used up its requests.",
    500: "The checkpoint is damaged, or the catalog cannot be asked.",
}
#: Headers of what is answered by ranges.
_RANGE_HEADERS = {
    "ETag": ("What changes with the bytes.", r'^"[0-9a-f]{40}"$'),
    "Accept-Ranges": ("That parts can be asked for.", "^bytes$"),
    "X-Ucformat-Id": ("The id of the checkpoint.", None),
}
_CONTENT_RANGE = {"Content-Range": ("Which part it is.", r"^bytes \d+-\d+/\d+$")}
_BUSY = {503: "Too many clients are answered; try again later."}


@dataclass(frozen=True)
class Parameter:
    """What a request may say in its path or its query.

    Attributes:
        name: its name.
        text: what it means.
        choices: the only values (default: any).
        most: it is a number, at most this (None: a text).
        default: the value if it is left out (None: it may be left out, and then says nothing).
        required: whether it may not be left out, in a query.
        example: a value, for the document.
    """

    name: str
    text: str
    choices: tuple[str, ...] = ()
    most: int | None = None
    default: str | None = None
    example: str | None = None
    required: bool = False

    def check(self, value: str) -> None:
        """Refuse a value that is none of the parameter's."""
        if self.most is not None and not (_DIGITS.fullmatch(value) and int(value) <= self.most):
            raise UsageError(f"{self.name} is a number from 0 to {self.most}, not {value[:40]!r}")
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{self.name} is not {value[:40]!r}", hint=f"write {' or '.join(self.choices)}"
            )

    def document(self, where: str) -> dict[str, Any]:
        """What the OpenAPI document says of it."""
        schema: dict[str, Any] = {"type": "string"}
        if self.most is not None:
            schema = {"type": "integer", "minimum": 0, "maximum": self.most}
        if self.choices:
            schema["enum"] = list(self.choices)
        if self.default is not None:
            schema["default"] = self.default if self.most is None else int(self.default)
        if self.required or where == "path":
            schema["minLength"] = 1
        example = {} if self.example is None else {"example": self.example}
        required = {"required": True} if self.required or where == "path" else {}
        return {
            "name": self.name,
            "in": where,
            "description": self.text,
            "schema": schema,
            **required,
            **example,
        }


@dataclass(frozen=True)
class Call:
    """A request to an endpoint.

    Attributes:
        request: the request.
        path: the parameters in its path, decoded.
        raw: these as they were sent.
        query: those in its query; those with a default are always there.
        body: the JSON object that it sends; empty if the endpoint takes none.
    """

    request: Request
    path: Mapping[str, str]
    raw: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def access(self) -> Access:
        """What the client may see."""
        return access_of(self.request)


@dataclass(frozen=True)
class Endpoint:
    """Requests of one kind.

    Attributes:
        method: `GET`, which includes HEAD, or `POST`.
        path: their path: `{name}` is a part without a slash, `{name:path}` the rest. A slash inside
            a part is written `%2F`.
        text: what is answered.
        handler: answers.
        answers: the media types of answers.
        parameters: in the path and the query.
        body: the JSON Schema of what is sent (default: nothing is).
        ranges: whether parts of the answer can be asked for.
        schema: of the answer, if it is JSON.
        headers: what a request may say in its headers.
        few: whether only so many are answered at once, since each takes long.
    """

    method: str
    path: str
    text: str
    handler: Callable[[Call], Awaitable[ASGIApp]]
    answers: Sequence[str] = (_JSON,)
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Any] | None = None
    ranges: bool = False
    schema: Mapping[str, Any] | None = None
    headers: Sequence[Parameter] = ()
    few: bool = False
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the path."""
        pattern = re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", re.escape(self.path).replace("\\", ""))
        object.__setattr__(
            self, "_pattern", re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern), re.DOTALL)
        )

    def match(self, path: str) -> dict[str, str] | None:
        """The parameters in a path, as they were sent; None if it is another endpoint's."""
        match = self._pattern.fullmatch(path)
        return None if match is None else match.groupdict()

    @property
    def in_path(self) -> frozenset[str]:
        """The names of the parameters in the path."""
        return frozenset(self._pattern.groupindex)

    def queried(self, query: bytes) -> dict[str, str]:
        """The parameters in a query.

        Raises:
            UsageError: one is not understood, or given twice.
        """
        accepted = {p.name: p for p in self.parameters if p.name not in self.in_path}
        values = {p.name: p.default for p in accepted.values() if p.default is not None}
        given: set[str] = set()
        try:
            pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=100)
        except ValueError:
            raise UsageError("the query has too many parameters") from None
        for name, value in pairs:
            if name not in accepted:
                listed = ", ".join(accepted)
                raise UsageError(
                    f"there is no parameter {name[:40]!r}",
                    hint=f"there are: {listed}" if listed else "there are none",
                )
            if name in given:
                raise UsageError(f"{name} is given twice")
            given.add(name)
            accepted[name].check(value)
            values[name] = value
        for name, parameter in accepted.items():
            if parameter.required and not values.get(name):
                raise UsageError(f"the query lacks {name!r}", hint=parameter.text)
        return values

    async def sent(self, request: Request) -> Mapping[str, Any]:
        """The JSON object that a request sends.

        Raises:
            UsageError: it sends something else.
        """
        if self.body is None:
            return {}
        # no page of a stranger can send this type without asking the server first
        if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
            raise UsageError(f"the request must be of the type {_JSON}")
        try:
            document = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise UsageError("the body of the request is not JSON") from None
        if not isinstance(document, dict):
            raise UsageError("the body of the request is not a JSON object")
        unknown = document.keys() - self.body["properties"].keys()
        if unknown:
            raise UsageError(
                f"the request has an unknown member {min(unknown)[:40]!r}",
                hint=f"there are: {', '.join(self.body['properties'])}",
            )
        for name in self.body.get("required", ()):
            if name not in document:
                raise UsageError(f"the request lacks {name!r}")
        return document

    def document(self) -> dict[str, Any]:
        """What the OpenAPI document says of it."""
        answers: dict[str, Any] = {"200": {"description": self.text, "content": self._content()}}
        if self.ranges:
            answers["200"]["headers"] = self._documented(_RANGE_HEADERS)
            answers["206"] = {
                "description": "The part that was asked for.",
                "content": {kind: {} for kind in self.answers},
                "headers": self._documented(_RANGE_HEADERS | _CONTENT_RANGE),
            }
            answers["304"] = {"description": "The client has it already."}
        texts = _ERRORS | (_BUSY if self.few else {})
        errors = [s for s in texts if s != 416 or self.ranges]
        out: dict[str, Any] = {
            "operationId": f"{self.method.lower()}_{self.handler.__name__}",
            "summary": self.text,
            "parameters": [
                *(
                    p.document("path" if p.name in self.in_path else "query")
                    for p in self.parameters
                ),
                *(p.document("header") for p in self.headers),
            ],
            "responses": {
                **answers,
                **{
                    str(s): {
                        "description": texts[s],
                        "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
                    }
                    for s in errors
                },
            },
        }
        if self.body is not None:
            out["requestBody"] = {"required": True, "content": {_JSON: {"schema": self.body}}}
        return out

    def _content(self) -> dict[str, Any]:
        """The media types of the answer, with the schema of JSON."""
        schema = {} if self.schema is None else {"schema": self.schema}
        return {kind: schema if kind == _JSON else {} for kind in self.answers}

    def _documented(self, headers: Mapping[str, tuple[str, str | None]]) -> dict[str, Any]:
        """What the OpenAPI document says of headers; listings of folders, in HTML, have none of them."""
        return {
            name: {
                "description": text,
                "required": "text/html" not in self.answers,
                "schema": {"type": "string"} | ({} if pattern is None else {"pattern": pattern}),
            }
            for name, (text, pattern) in headers.items()
        }


class EndpointRoute(BaseRoute):
    """The route of an endpoint, which matches the path as it was sent: a slash in a name is none between names."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette."""
        if scope["type"] != "http":
            return Match.NONE, {}
        path = self.endpoint.match(raw_path(scope))
        if path is None:
            return Match.NONE, {}
        return Match.FULL, {"path_params": path, "endpoint": self.endpoint.handler}

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """See Starlette; routes of the data plane have no names."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        methods = ("GET", "HEAD") if self.endpoint.method == "GET" else (self.endpoint.method,)
        if scope["method"] not in methods:
            error = f"this is asked for by {' or '.join(methods)}"
            response: ASGIApp = JSONResponse({"error": error}, 405, {"allow": ", ".join(methods)})
        else:
            request = Request(scope, receive)
            raw = scope["path_params"]
            call = Call(
                request,
                {name: unquote(value) for name, value in raw.items()},
                raw,
                self.endpoint.queried(scope["query_string"]),
                await self.endpoint.sent(request),
            )
            for parameter in self.endpoint.parameters:
                if parameter.name in call.path:
                    parameter.check(call.path[parameter.name])
            response = await self.endpoint.handler(call)
        await response(scope, receive, send)


def openapi(
    endpoints: Sequence[Endpoint], schemas: Mapping[str, Any], *, guarded: bool
) -> dict[str, Any]:
    """The OpenAPI document of endpoints.

    Args:
        schemas: those that the endpoints refer to, by their names.
        guarded: whether requests need a token.
    """
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = endpoint.document()
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}, "hint": {"type": ["string", "null"]}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "ucformat", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": error, **schemas},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if guarded else [],
    }


def reserved(endpoints: Sequence[Endpoint]) -> Iterator[str]:
    """The first parts of paths that are no reference: no checkpoint can be served by these names."""
    for endpoint in endpoints:
        part = endpoint.path.split("/")[2]
        if not part.startswith("{"):
            yield part
