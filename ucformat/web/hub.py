"""The protocol of the Hugging Face hub, as far as its clients read models with it."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ucformat.errors import UsageError
from ucformat.web.access import access_of
from ucformat.web.blocking import in_thread
from ucformat.web.library import NoFile
from ucformat.web.paths import raw_path
from ucformat.web.streaming import RangeResponse
from ucformat.web.tensors import content_of_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from ucformat.catalog.entries import Entry
    from ucformat.web.library import Library, Served, VirtualFile
    from ucformat.web.streaming import Content

_DEFAULT = "main"
_TYPES = {
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}


def content_of(file: VirtualFile) -> Content:
    """The bytes of a file, which are read when they are sent."""
    ending = file.name[file.name.rfind(".") :]
    media_type = _TYPES.get(ending, "application/octet-stream")
    return content_of_ranges(file.ranges, file.oid, file.source, media_type)


def hub_routes(library: Library) -> list[Route]:
    """The routes of the hub."""
    hub = _Hub(library)
    return [
        Route("/api/whoami-v2", hub.whoami),
        Route("/api/models", hub.models),
        Route("/api/models/{rest:path}", hub.model, methods=["GET", "POST"]),
        Route("/{repository:path}/resolve/{rest:path}", hub.file),
        Route("/{repository:path}/raw/{rest:path}", hub.file),
    ]


class _Hub:
    """Answers the requests of the hub's clients."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._answers: dict[str, Callable[[Request, str, str, list[str]], Response]] = {
            "revision": self._info,
            "tree": self._tree,
            "paths-info": self._paths,
            "refs": self._refs,
            "commits": self._commits,
        }

    async def whoami(self, request: Request) -> Response:
        """Who the client is, which `hf auth login` asks for."""
        return JSONResponse({"type": "user", "name": access_of(request).name, "orgs": []})

    async def models(self, request: Request) -> Response:
        """List the repositories."""
        access = access_of(request)
        search = request.query_params.get("search", "").lower()
        limit = _number(request.query_params.get("limit"), 1000)
        names = await in_thread(lambda: list(self.library.repositories(access)))
        matching = [name for name in names if search in name.lower()][:limit]
        return JSONResponse(
            [{"id": name, "modelId": name, "private": False, "tags": []} for name in matching]
        )

    async def model(self, request: Request) -> Response:
        """Describe a revision, or list its files."""
        return await in_thread(self._model, request, await _asked_paths(request))

    def _model(self, request: Request, paths: list[str] | None) -> Response:
        parts = raw_path(request.scope).removeprefix("/api/models/").split("/")
        for kind, answer in self._answers.items():
            if kind in parts[1:]:
                at = parts.index(kind, 1)
                repository, rest = (
                    unquote("/".join(parts[:at])),
                    [unquote(p) for p in parts[at + 1 :]],
                )
                revision = rest[0] if rest else _DEFAULT
                return answer(
                    request, repository, revision, paths if paths is not None else rest[1:]
                )
        return self._info(request, unquote("/".join(parts)), _DEFAULT, [])

    def _info(self, request: Request, repository: str, revision: str, _: list[str]) -> Response:
        served = self.library.revision(repository, revision, access_of(request))
        return JSONResponse(
            {
                "_id": served.commit[:24],
                "id": repository,
                "modelId": repository,
                "sha": served.commit,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": ["safetensors"],
                "library_name": "transformers",
                "siblings": [
                    {"rfilename": file.name, "size": file.nbytes, "blobId": file.oid}
                    for file in served.files.values()
                ],
                **_described(served),
            },
            headers={"x-repo-commit": served.commit},
        )

    def _tree(self, request: Request, repository: str, revision: str, path: list[str]) -> Response:
        served = self.library.revision(repository, revision, access_of(request))
        folder = "".join(f"{name}/" for name in path if name)
        recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for file in served.files.values():
            if not file.name.startswith(folder):
                continue
            name, slash, _ = file.name[len(folder) :].partition("/")
            if slash and not recursive:
                entries[folder + name] = {
                    "type": "directory",
                    "oid": served.commit,
                    "size": 0,
                    "path": folder + name,
                }
            else:
                entries[file.name] = _listed(file)
        if path and not entries:
            raise NoFile(f"{repository} has no folder {folder!r}")
        return JSONResponse(list(entries.values()), headers={"x-repo-commit": served.commit})

    def _paths(
        self, request: Request, repository: str, revision: str, paths: list[str]
    ) -> Response:
        served = self.library.revision(repository, revision, access_of(request))
        files = [served.files[path] for path in paths if path in served.files]
        return JSONResponse([_listed(file) for file in files])

    def _refs(
        self, request: Request, repository: str, _revision: str, _paths: list[str]
    ) -> Response:
        access = access_of(request)
        newest = self.library.revision(repository, _DEFAULT, access)
        tags = []
        for entry in self.library.revisions(repository, access):
            commit = self.library.commit(entry)
            tags += [
                {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit}
                for name in _names(entry)
            ]
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": newest.commit}
            for name in (_DEFAULT, "latest")
        ]
        return JSONResponse({"branches": branches, "tags": tags, "converts": []})

    def _commits(self, request: Request, repository: str, revision: str, _: list[str]) -> Response:
        access = access_of(request)
        served = self.library.revision(repository, revision, access)
        entries = self.library.revisions(repository, access)
        if not entries and served.entry is not None:
            entries = [self.library.shown(served.entry, access)]
        return JSONResponse(
            [
                {
                    "id": self.library.commit(entry),
                    "title": entry.name,
                    "message": "",
                    "date": entry.created.isoformat(),
                    "authors": [],
                }
                for entry in entries
            ]
        )

    async def file(self, request: Request) -> Response | RangeResponse:
        """Send a file, or a range of it."""
        raw = raw_path(request.scope)
        kind = "/resolve/" if "/resolve/" in raw else "/raw/"
        repository, _, rest = raw.removeprefix("/").partition(kind)
        revision, _, name = rest.partition("/")
        access = access_of(request)

        def look_up() -> tuple[Served, VirtualFile]:
            served = self.library.revision(unquote(repository), unquote(revision), access)
            path = unquote(name)
            if path not in served.files:
                raise NoFile(f"{unquote(repository)} has no file {path!r}")
            file = served.files[path]
            _ = file.ranges  # is planned here, not in the event loop
            return served, file

        served, file = await in_thread(look_up)
        if request.method == "HEAD" and unquote(revision) != served.commit:
            # a client that asks first then reads what it was told of, also if `latest` moves
            below = request.scope.get("root_path", "")
            place = f"{below}/{repository}{kind}{served.commit}/{name}"
            return Response(status_code=307, headers={"location": place})
        headers = {
            "x-repo-commit": served.commit,
            "x-linked-etag": f'"{file.oid}"',
            "x-linked-size": str(file.nbytes),
            "content-disposition": _disposition(file.name.rpartition("/")[2]),
        }
        return RangeResponse(content_of(file), headers, partial(self.library.forget, served))


async def _asked_paths(request: Request) -> list[str] | None:
    """The paths in the body of a request for the description of some files."""
    if request.method != "POST":
        return None
    body = await request.body()
    if request.headers.get("content-type", "").startswith("application/json"):
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise UsageError("the body of the request is not JSON") from None
        paths = document.get("paths") if isinstance(document, dict) else None
    else:
        paths = parse_qs(body.decode("utf-8", "replace")).get("paths")
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _disposition(name: str) -> str:
    """The header that names a file, whatever characters its name has."""
    plain = re.sub(r"[^\w. -]", "_", name, flags=re.ASCII)
    return f"inline; filename*=UTF-8''{quote(name, safe='')}; filename=\"{plain}\";"


def _names(entry: Entry) -> list[str]:
    """The names of a revision."""
    steps = [] if entry.step is None else [str(entry.step)]
    own = f"{entry.run}/"
    return [*steps, *(alias.removeprefix(own) for alias in entry.aliases)]


def _listed(file: VirtualFile) -> dict[str, Any]:
    return {"type": "file", "oid": file.oid, "size": file.nbytes, "path": file.name}


def _described(served: Served) -> dict[str, Any]:
    """When the checkpoint was made."""
    if served.entry is None:
        return {}
    created = served.entry.created.isoformat().replace("+00:00", "Z")
    return {"createdAt": created, "lastModified": created}


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 9 else default
