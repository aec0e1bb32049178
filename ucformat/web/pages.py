"""The pages of checkpoints, each with a twin in JSON: a page shows nothing that its twin does not say.

The twin of `/ui/checkpoint/REF` is `/ui/checkpoint.json/REF`: the ending is at the name of the page,
since references and names of tensors may end in anything.
"""

from __future__ import annotations

import json
import math
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ucformat._version import __version__
from ucformat.catalog.filter.syntax import quoted
from ucformat.schema.values import dumps, finite
from ucformat.texts import bytes_text, clean, count, plural, shape_text, shorten
from ucformat.web import drawing
from ucformat.web.access import access_of
from ucformat.web.blocking import in_thread
from ucformat.web.comparing import compare_data, run_data, run_of
from ucformat.web.contents import checkpoint_data, tree_data
from ucformat.web.keeping import preview_data
from ucformat.web.listing import PAGE, completions, list_data
from ucformat.web.one_tensor import tensor_data
from ucformat.web.paths import raw_path
from ucformat.web.planning import rank_data
from ucformat.web.saves import saves_data
from ucformat.web.writing import jobs_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from ucformat.web.library import Access, Library

    Data = dict[str, Any]

#: No script but ours, no style but ours, and nothing of other places.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
_STATIC = {
    "page.css": "text/css; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_LONGEST = 200  # characters of a run's name in a link; a longer one is named by a checkpoint


def page_routes(library: Library) -> list[Route]:
    """The routes of the pages."""
    pages = _Pages(library)
    return [
        Route("/", _home),
        Route("/ui", _home),
        Route("/ui/static/{name}", _static),
        *_both("list", pages.list, "/ui/"),
        *_both("complete", pages.complete),
        *_both("checkpoint", pages.checkpoint, below="/{rest:path}"),
        *_both("tree", pages.tree, below="/{rest:path}"),
        *_both("tensor", pages.tensor, below="/{rest:path}"),
        *_both("plan", pages.plan, below="/{rest:path}"),
        *_both("run", pages.run, below="/{rest:path}"),
        *_both("saves", pages.saves, below="/{rest:path}"),
        *_both("compare", pages.compare),
        *_both("retention", pages.retention),
        *_both("jobs", pages.jobs),
    ]


def _both(
    name: str, page: Callable[[Request], Any], place: str = "", below: str = ""
) -> list[Route]:
    """The routes of a page and of its twin."""
    return [
        Route(place or f"/ui/{name}{below}", page),
        Route(f"/ui/{name}.json{below}", page),
    ]


async def _home(_: Request) -> Response:
    return RedirectResponse("/ui/")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        return Response("there is no such file", 404, media_type="text/plain")
    headers = {"cache-control": "max-age=86400", "x-content-type-options": "nosniff"}
    return Response(_content(name), headers=headers, media_type=_STATIC[name])


@cache
def _content(name: str) -> bytes:
    return files("ucformat.web").joinpath("static", name).read_bytes()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ucformat.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": bytes_text,
        "day": _day,
        "lines": lambda text, most: shorten(clean(text), most),
        "numbers": lambda points: any(math.isfinite(y) for _, y in points),
        "tojson_text": _json_text,
        "count": count,
        "plural": plural,
        "shape": shape_text,
        "clean": clean,
        "shorten": lambda text, width: shorten(clean(text), width),
    }
    drawings = (
        "sparkline",
        "plot",
        "bars",
        "neighbourhood",
        "boxes",
        "heat",
        "swatch",
        "histogram",
    )
    environment.globals |= {name: getattr(drawing, name) for name in drawings}
    environment.globals |= {"link": link, "run_link": run_link, "version": quote(__version__)}
    return environment


def _day(at: str) -> str:
    """A time of the JSON, to the minute."""
    return f"{at[:10]} {at[11:16]}Z"


def _json_text(value: Any, indent: int | None = None) -> str:
    """JSON that is shown as text: characters of other scripts are themselves."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False)


def link(page: str, ref: str, name: str | None = None, **query: Any) -> str:
    """The address of a page.

    A browser takes the segments `.` and `..` of a path for folders, even if they are encoded, so
    names that have them are in the query.
    """
    asked = {key: value for key, value in query.items() if value not in (None, "")}
    parts = [ref] if name is None else [ref, name]
    if any(part.strip(".") == "" for part in parts):
        asked |= {"ref": ref} if name is None else {"ref": ref, "name": name}
        path = f"/ui/{page}/"
    else:
        path = f"/ui/{page}/" + "/".join(quote(part, safe="@:") for part in parts)
    return f"{path}?{urlencode(asked)}" if asked else path


def run_link(row: Mapping[str, Any], page: str = "run") -> str:
    """The address of a page of a checkpoint's run."""
    name = row["run"]
    return link(page, name) if len(name) <= _LONGEST else f"/ui/{page}/?checkpoint={row['id']}"


class _Pages:
    """Answers the requests of the pages."""

    def __init__(self, library: Library) -> None:
        self.library = library

    async def list(self, request: Request) -> Response:
        """The checkpoints that match a filter."""
        asked = dict(request.query_params)

        def data(access: Access) -> Data:
            return list_data(self.library, access, asked)

        def context(data: Data) -> Data:
            kept = {k: v for k, v in {"where": data["where"], **data["asked"]}.items() if v}
            address = partial(_address, "/ui/", kept)
            offset, more = data["offset"], data["more"]
            return {
                "narrowed": lambda name, value: address(
                    where=_and(data["where"], f"{name} = {quoted(value)}")
                ),
                "previous": address(offset=max(0, offset - PAGE) or "") if offset else "",
                "next": address(offset=offset + PAGE) if more else "",
                "drawn": set(),
            }

        return await _answer(request, "list.html", data, context)

    async def complete(self, request: Request) -> Response:
        """Filters that continue one."""
        text = request.query_params.get("where", "")

        def data(access: Access) -> Data:
            return {"where": text, "offers": completions(self.library, access, text)}

        return await _answer(request, "complete.html", data)

    async def checkpoint(self, request: Request) -> Response:
        """One checkpoint."""
        ref = _named(request, "ref")
        return await _answer(
            request, "checkpoint.html", lambda access: checkpoint_data(self.library, access, ref)
        )

    async def tree(self, request: Request) -> Response:
        """A part of the tree of a checkpoint's parameters."""
        ref, prefix = _named(request, "ref"), request.query_params.get("prefix", "")
        is_part = request.headers.get("hx-request") == "true"
        return await _answer(
            request,
            "_tree.html" if is_part else "tree.html",
            lambda access: tree_data(self.library, access, ref, prefix),
        )

    async def tensor(self, request: Request) -> Response:
        """One tensor."""
        query = request.query_params
        ref, name = query.get("ref"), query.get("name")
        in_query = ref is not None and name is not None
        if not in_query:
            ref, *parts = raw_names(request)
            name = "/".join(parts)
        assert ref is not None  # noqa: S101 - from the path, if not from the query
        assert name is not None  # noqa: S101
        asked = dict(query)

        def context(data: Data) -> Data:
            named = {"ref": data["ref"], "name": data["name"]} if in_query else {}
            points = [] if data["along"] is None else data["along"]["points"]
            curve = [[p["step"], p["norm"]] for p in points if p["norm"] is not None]
            return {"form": {**named, "state": data["state"]}, "curve": curve}

        return await _answer(
            request,
            "tensor.html",
            lambda access: tensor_data(self.library, access, ref, name, asked),
            context,
        )

    async def plan(self, request: Request) -> Response:
        """What a rank of a layout reads of a checkpoint."""
        ref, asked = _named(request, "ref"), dict(request.query_params)

        def context(data: Data) -> Data:
            query = {name: data[name] for name in ("layout", "rank", "state")}
            return {
                "form": {"ref": data["ref"]} if "ref" in asked else {},
                "planned": lambda **changed: link("plan", data["ref"], **{**query, **changed}),
            }

        return await _answer(
            request,
            "plan.html",
            lambda access: rank_data(self.library, access, ref, asked),
            context,
        )

    async def run(self, request: Request) -> Response:
        """One run."""

        def context(data: Data) -> Data:
            newest = {"run": data["name"], "id": data["steps"][-1]["id"]}
            return {
                "all": _address("/ui/", {"where": f"run = {quoted(data['name'])}"}),
                "saves": run_link(newest, "saves"),
            }

        return await self._of_run(request, "run.html", run_data, context)

    async def saves(self, request: Request) -> Response:
        """How long the ranks of a run wrote."""

        def context(data: Data) -> Data:
            curves = {
                "longest stall of a rank, in seconds": ("stall", 1),
                "seconds of the slowest rank": ("seconds", 1),
                "GB in a second": ("bytes_per_second", 1e9),
            }
            stepped = [save for save in data["saves"] if save["step"] is not None]
            return {
                "run_page": run_link({"run": data["name"], "id": data["newest"]}),
                "curves": {
                    title: [[s["step"], s[member] / unit] for s in stepped if s[member] is not None]
                    for title, (member, unit) in curves.items()
                },
            }

        return await self._of_run(request, "saves.html", saves_data, context)

    async def _of_run(
        self,
        request: Request,
        template: str,
        of_run: Callable[[Library, Access, str], Data],
        context: Callable[[Data], Data],
    ) -> Response:
        """Answer with a page of a run, which is named by itself or by one of its checkpoints."""
        name, checkpoint = _named(request, "ref"), request.query_params.get("checkpoint")

        def data(access: Access) -> Data:
            run = name if checkpoint is None else run_of(self.library, access, checkpoint)
            return of_run(self.library, access, run)

        return await _answer(request, template, data, context)

    async def compare(self, request: Request) -> Response:
        """Two checkpoints beside each other."""
        query = request.query_params
        refs = [query[side] for side in ("a", "b") if side in query] or query.getlist("of")

        def context(_: Data) -> Data:
            return {"link_compare": lambda **asked: _address("/ui/compare", asked)}

        return await _answer(
            request,
            "compare.html",
            lambda access: compare_data(
                self.library, access, refs, with_values=bool(query.get("values"))
            ),
            context,
        )

    async def retention(self, request: Request) -> Response:
        """What a policy would keep, thin and delete."""
        policy = request.query_params.get("policy", "")
        return await _answer(
            request, "retention.html", lambda access: preview_data(self.library, access, policy)
        )

    async def jobs(self, request: Request) -> Response:
        """What is being written."""
        return await _answer(request, "jobs.html", lambda access: jobs_data(self.library, access))


def _named(request: Request, parameter: str) -> str:
    """What a page is about: all of the path below its name, or a parameter of the query."""
    return request.query_params.get(parameter) or "/".join(raw_names(request))


def _address(path: str, kept: Mapping[str, Any], **changed: Any) -> str:
    query = {key: value for key, value in {**kept, **changed}.items() if value != ""}
    return f"{path}?{urlencode(query)}" if query else path


def _and(where: str, condition: str) -> str:
    """A filter that is narrowed by a condition."""
    if not where or where == condition:
        return condition
    return f"({where}) and {condition}" if " or " in where.lower() else f"{where} and {condition}"


async def _answer(
    request: Request,
    template: str,
    data: Callable[[Access], Data],
    context: Callable[[Data], Data] = lambda _: {},
) -> Response:
    """Answer with a page, or with its twin."""
    page, _, _ = request.url.path.removeprefix("/ui/").partition("/")
    access = access_of(request)
    if page.endswith(".json"):
        values = await in_thread(data, access)  # an error is answered as those of all JSON
        status = 400 if values.get("error") else 200
        return Response(dumps(values), status, _HEADERS, "application/json")
    query = f"?{request.url.query}" if request.url.query else ""
    below = below_page(request)
    twin = f"/ui/{page or 'list'}.json{'/' + below if below else ''}{query}"

    request.scope["state"]["is_page"] = True

    def render() -> Response:
        values = data(access)  # with an error it is the form that shows it
        return _page(template, {**values, **context(values), "twin": twin}, 200)

    return await in_thread(render)


def error_page(request: Request, shown: Mapping[str, str | None], status: int) -> Response | None:
    """The answer to a request for a page that failed; None if it was for something else."""
    if not request.scope.get("state", {}).get("is_page"):
        return None
    return _page("error.html", {"error": shown, "status": status, "twin": ""}, status)


def _page(template: str, values: Data, status: int) -> Response:
    return HTMLResponse(_environment().get_template(template).render(values), status, _HEADERS)


def below_page(request: Request) -> str:
    """The path below a page's own, as it was sent."""
    return raw_path(request.scope).removeprefix("/ui/").partition("/")[2]


def raw_names(request: Request) -> list[str]:
    """The names below a page's own, in which a slash of a name is told from one between names."""
    return [unquote(part) for part in below_page(request).split("/")]
