"""The data plane: checkpoints under `/v1`, as lists, arrays, tensors and parts of ranks."""

from __future__ import annotations

import asyncio
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

from ucformat.catalog.as_json import entry_data
from ucformat.catalog.search import NEWEST
from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.layout import Layout
from ucformat.reading.indexing import parse_slice
from ucformat.reading.rank import plan_data
from ucformat.schema.values import dumps
from ucformat.web.access import is_guarded
from ucformat.web.blocking import in_thread
from ucformat.web.document import content_of_file, described, schemas_of_document
from ucformat.web.endpoints import Endpoint, EndpointRoute, Parameter, openapi, reserved
from ucformat.web.events import EventStream, Listeners
from ucformat.web.library import MOST_BOXES, NoFile
from ucformat.web.patching import TAR, Patches
from ucformat.web.streaming import RangeResponse
from ucformat.web.tensors import (
    content_of_bytes,
    content_of_chunk,
    content_of_plan,
    content_of_tensor,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.rank import ReadPlan
    from ucformat.web.endpoints import Call
    from ucformat.web.library import Library, Served
    from ucformat.web.streaming import Content

_MAX_LIMIT = 1000
_MAX_NUMBER = 999_999_999
_MAX_RANKS = 1 << 20
_MAX_CHUNKS = 10_000  # that are listed
_BYTES = "application/octet-stream"
_HTML = "text/html"

_REF = Parameter(
    "ref",
    "A reference of the catalog: `run7@latest`, `run7@1000`, `alias:best`, an id; or the name of a place.",
    example="run7@latest",
)
_PLAN_BODY = {
    "type": "object",
    "required": ["layout", "rank"],
    "additionalProperties": False,
    "properties": {
        "layout": {"type": "object", "description": "A layout (docs/layout.md)."},
        "rank": {"type": "integer", "minimum": 0},
        "states": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Only these states; by default all.",
        },
    },
}
_COUNT = {"type": "integer", "minimum": 0}
_PLAN_COUNTS = (
    *("rank", "tensors", "memory", "bytes_needed", "bytes_read", "bytes_unverified"),
    *("bytes_besides", "requests", "zero_filled"),
)
_PLAN = {
    "type": "object",
    "required": [*_PLAN_COUNTS, "files"],
    "properties": dict.fromkeys(_PLAN_COUNTS, _COUNT) | {"files": {"type": "object"}},
}
_LISTED = {
    "type": "object",
    "required": ["checkpoints", "next"],
    "properties": {
        "checkpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "kind", "state", "run", "step"],
                "properties": {
                    "id": {"type": "string"},
                    "run": {"type": ["string", "null"]},
                    "step": {"type": ["integer", "null"]},
                },
            },
        },
        "next": {"type": ["integer", "null"]},
    },
}


class _Json(Response):
    """A JSON value; numbers that are not finite are spelled as in documents of the format."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See Starlette."""
        return dumps(content).encode()


def plane_routes(library: Library, listeners: Listeners) -> list[EndpointRoute]:
    """The routes of the data plane."""
    return [EndpointRoute(endpoint) for endpoint in endpoints_of(library, listeners)]


def endpoints_of(library: Library, listeners: Listeners) -> list[Endpoint]:
    """The table of the data plane.

    Raises:
        UsageError: a place has the name of something else there.
    """
    plane = _Plane(library, listeners)
    table = [
        Endpoint(
            "GET", "/v1/openapi.json", "This document.", plane.document, schema={"type": "object"}
        ),
        Endpoint(
            "GET",
            "/v1/checkpoints",
            "The checkpoints of the catalog that match a filter.",
            plane.checkpoints,
            schema=_LISTED,
            parameters=(
                Parameter("where", "A filter (docs/filters.md); by default all."),
                Parameter("sort", "The order, such as `-metric.loss`.", default=NEWEST),
                Parameter("limit", "How many.", most=_MAX_LIMIT, default="100"),
                Parameter("offset", "How many to pass over.", most=_MAX_NUMBER, default="0"),
            ),
        ),
        Endpoint(
            "GET",
            "/v1/events",
            "What an alias, or the newest checkpoint of a run, is by now, as server-sent events.",
            plane.events,
            ("text/event-stream",),
            headers=(
                Parameter(
                    "Last-Event-ID", "The `id` of the last event; what came after it follows."
                ),
            ),
            few=True,
        ),
        Endpoint(
            "GET",
            "/v1/{ref}",
            "A checkpoint: its tensors, and what the catalog has of it.",
            plane.checkpoint,
            parameters=(_REF,),
            schema={"$ref": "#/components/schemas/Checkpoint"},
            ranges=True,
        ),
        Endpoint(
            "GET",
            "/v1/{ref}/files/{id}/{file:path}",
            "Bytes that the document of the checkpoint names.",
            plane.file,
            (_BYTES,),
            (
                _REF,
                Parameter("id", "The id of the checkpoint that is meant."),
                Parameter("file", "A `file` of its document."),
            ),
            ranges=True,
        ),
        Endpoint(
            "GET",
            "/v1/{ref}/zarr/{key:path}",
            "A key of the checkpoint as a Zarr v3 group, or a listing of a folder.",
            plane.zarr,
            ("application/json", _BYTES, _HTML),
            (
                _REF,
                Parameter("key", "A key, such as `zarr.json`.", example="zarr.json"),
            ),
            ranges=True,
        ),
        Endpoint(
            "GET",
            "/v1/{ref}/tensor/{name:path}",
            "A tensor, or a slice of one.",
            plane.tensor,
            (_BYTES,),
            (
                _REF,
                Parameter("name", "The tensor's name or alias."),
                Parameter("state", "Its state; by default `weight`, else `master`."),
                Parameter("slice", "A slice in NumPy's syntax, without steps: `0:512,128:`."),
                Parameter("format", "How it is sent.", choices=("npy", "raw"), default="npy"),
            ),
            ranges=True,
        ),
        Endpoint(
            "GET",
            "/v1/{ref}/patch",
            "The checkpoint as a patch of another one, a tar of its files.",
            plane.patch,
            (TAR,),
            (
                _REF,
                Parameter(
                    "base",
                    "A reference of the checkpoint that the client has.",
                    example="run7@latest",
                    required=True,
                ),
                Parameter(
                    "base_name",
                    "The name of its folder, beside which the patch will be; by default its id.",
                ),
            ),
            few=True,
        ),
        Endpoint(
            "POST",
            "/v1/{ref}/plan",
            "What a rank of a layout reads of the checkpoint.",
            plane.plan,
            parameters=(_REF,),
            schema=_PLAN,
            body=_PLAN_BODY,
        ),
        Endpoint(
            "POST",
            "/v1/{ref}/part",
            "All that a rank of a layout reads, as a safetensors file of its buffers.",
            plane.part,
            (_BYTES,),
            (_REF,),
            body=_PLAN_BODY,
            ranges=True,
        ),
    ]
    plane.endpoints = table
    if taken := set(reserved(table)) & library.places.keys():
        raise UsageError(
            f"no checkpoint can be served as {min(taken)!r}", hint="name it otherwise: NAME=REF"
        )
    return table


class _Plane:
    """Answers the requests of the data plane."""

    def __init__(self, library: Library, listeners: Listeners) -> None:
        self.library, self._listeners = library, listeners
        self._patches = Patches(library)
        self.endpoints: list[Endpoint] = []

    async def document(self, call: Call) -> ASGIApp:
        """The OpenAPI document."""
        guarded = is_guarded(call.request)
        return _Json(openapi(self.endpoints, schemas_of_document(), guarded=guarded))

    async def checkpoints(self, call: Call) -> ASGIApp:
        """List checkpoints of the catalog."""
        limit, offset = int(call.query["limit"]), int(call.query["offset"])

        def look_up() -> dict[str, Any]:
            entries = self.library.entries(
                call.access,
                call.query.get("where", ""),
                sort=call.query["sort"],
                limit=limit + 1,
                offset=offset,
            )
            return {
                "checkpoints": [entry_data(entry) for entry in entries[:limit]],
                "next": offset + limit if len(entries) > limit else None,
            }

        return _Json(await in_thread(look_up))

    async def events(self, call: Call) -> ASGIApp:
        """Tell what moves."""
        last = call.request.headers.get("last-event-id", "")
        return await in_thread(EventStream, self._listeners, call.access, last)

    async def checkpoint(self, call: Call) -> ASGIApp:
        """Describe a checkpoint."""

        def look_up() -> tuple[Served, Content]:
            ref = call.path["ref"]
            served = self.library.reference(ref, call.access)
            data = dumps(described(served, ref, self.library, call.access)).encode()
            return served, content_of_bytes(data, served.checkpoint)

        return self._sent(*await in_thread(look_up))

    async def file(self, call: Call) -> ASGIApp:
        """Send bytes that the document of a checkpoint names."""

        def look_up() -> tuple[Served, Content]:
            served = self.library.reference(call.path["ref"], call.access)
            return served, content_of_file(served, call.path["id"], call.path["file"])

        return self._sent(*await in_thread(look_up))

    async def zarr(self, call: Call) -> ASGIApp:
        """Send the value of a key, or list a folder."""
        key = call.path["key"]

        def look_up() -> tuple[Served, Content | None]:
            served = self.library.reference(call.path["ref"], call.access)
            arrays = served.arrays  # or an error, if zarr-python is not here
            from ucformat.zarr_store.store import TensorArray

            # folders of arrays have percent signs in their names, which some clients encode again
            values = {k: arrays.find(k) for k in (key, call.raw["key"])}
            if None not in values.values() and len(values) > 1:
                raise UsageError(
                    f"{call.raw['key']!r} may be either of two keys, since clients differ in how they "
                    "encode a percent sign",
                    hint="give one of the two tensors another name by a view",
                )
            value = next((v for v in values.values() if v is not None), None)
            if value is None:
                return served, None
            if isinstance(value, bytes):
                return served, content_of_bytes(value, served.checkpoint)
            array, index = value
            assert isinstance(array, TensorArray)  # noqa: S101 - those of a checkpoint are
            return served, content_of_chunk(served.checkpoint, array, index)

        served, content = await in_thread(look_up)
        if content is not None:
            return self._sent(served, content)
        folder = key.strip("/")
        names = await in_thread(_children, served, folder)
        if not names:
            raise NoFile(f"{call.path['ref']} has no array, and no chunk, at {key!r}")
        path = call.request.scope.get("root_path", "") + "/".join(
            [
                "/v1",
                quote(call.path["ref"], safe="@:"),
                "zarr",
                *([quote(folder)] if folder else []),
            ]
        )
        links = [
            f'<li><a href="{escape(f"{path}/{quote(name)}")}">{escape(name)}</a></li>'
            for name in names
        ]
        return HTMLResponse(f"<!doctype html><title>Zarr</title><ul>{''.join(links)}</ul>")

    async def tensor(self, call: Call) -> ASGIApp:
        """Send a tensor, or a slice of one."""

        def look_up() -> tuple[Served, Content, str]:
            served = self.library.reference(call.path["ref"], call.access)
            name, state = call.path["name"], call.query.get("state")
            tensor = served.checkpoint[name if state is None else (name, state)]
            text = call.query.get("slice")
            index = (...,) if text is None else parse_slice(text)
            content = content_of_tensor(served.checkpoint, tensor.info, index, call.query["format"])
            return served, content, tensor.info.dtype

        served, content, dtype = await in_thread(look_up)
        return self._sent(served, content, {"x-ucformat-dtype": dtype})

    async def patch(self, call: Call) -> ASGIApp:
        """Send a checkpoint as a patch of another one."""
        query = call.query
        return await self._patches.response(
            call.path["ref"], query["base"], query.get("base_name"), call.access
        )

    async def plan(self, call: Call) -> ASGIApp:
        """Say what a rank reads."""

        def look_up() -> dict[str, Any]:
            served = self.library.reference(call.path["ref"], call.access)
            _, plan = _planned(served, call)
            return plan_data(plan)

        return _Json(await in_thread(look_up))

    async def part(self, call: Call) -> ASGIApp:
        """Send what a rank reads."""

        def look_up() -> tuple[Served, Content]:
            served = self.library.reference(call.path["ref"], call.access)
            return served, content_of_plan(*_planned(served, call))

        return self._sent(*await in_thread(look_up))

    def _sent(
        self, served: Served, content: Content, headers: dict[str, str] | None = None
    ) -> RangeResponse:
        return RangeResponse(
            content,
            {"x-ucformat-id": served.checkpoint.id, **(headers or {})},
            partial(self.library.forget, served),
        )


def _children(served: Served, folder: str) -> list[str]:
    """The names in a folder of arrays.

    Raises:
        UnsupportedError: they are chunks, and too many for a page.
    """

    async def listed() -> list[str]:
        names: list[str] = []
        async for name in served.arrays.list_dir(folder):
            names.append(name)
            if len(names) > _MAX_CHUNKS and folder.count("/") > 1:  # below an array
                raise UnsupportedError(
                    f"there are more than {_MAX_CHUNKS:,} chunks here",
                    hint="ask for the chunks, whose numbers follow from the shapes in zarr.json",
                )
        return names

    return asyncio.run(listed())


def _planned(served: Served, call: Call) -> tuple[Checkpoint, ReadPlan]:
    """The plan of the rank in the body of a request, and the checkpoint, through the layout's view, that it reads."""
    document, rank, states = (call.body.get(name) for name in ("layout", "rank", "states"))
    if not isinstance(document, dict):
        raise UsageError("`layout` is a JSON object", hint="docs/layout.md")
    if isinstance(rank, float) and rank.is_integer():  # JSON has one kind of numbers
        rank = int(rank)
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise UsageError("`rank` is an integer")
    if states is not None and not (
        isinstance(states, list) and all(isinstance(state, str) for state in states)
    ):
        raise UsageError("`states` is a list of strings")
    layout, checkpoint = Layout.parse(document), served.checkpoint
    if layout.mesh.size > _MAX_RANKS:
        raise UsageError(f"a layout has at most {_MAX_RANKS:,} ranks here")
    if layout.view:
        checkpoint = checkpoint.view(layout)
        layout = Layout.parse({name: part for name, part in document.items() if name != "view"})
    return checkpoint, checkpoint.plan(layout, rank, states, most_boxes=MOST_BOXES)
