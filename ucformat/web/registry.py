"""A read-only registry of OCI artifacts: each revision as a manifest of ModelPack over the files of the hub.

Manifests name files by their SHA-256, which nobody knows before all bytes were read once. So they
are read when a manifest is first asked for, and the digests are kept in the user's cache folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from platformdirs import user_cache_path
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ucformat.errors import Conflict, NotFound, UcformatError
from ucformat.format.digest import bytes_digest
from ucformat.jobs.inputs import Input
from ucformat.reading.readable import TRACKERS
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import check_unchanged
from ucformat.web.access import access_of
from ucformat.web.blocking import in_thread
from ucformat.web.hub import content_of
from ucformat.web.library import NoRepository, NoRevision
from ucformat.web.paths import raw_path
from ucformat.web.streaming import RangeResponse

if TYPE_CHECKING:
    from starlette.requests import Request

    from ucformat.web.library import Access, Library, Served, VirtualFile

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.cncf.model.config.v1+json"
_ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
_KINDS = {  # by the ending of a file
    ".safetensors": "application/vnd.cncf.model.weight.v1.raw",
    ".md": "application/vnd.cncf.model.doc.v1.raw",
    ".py": "application/vnd.cncf.model.code.v1.raw",
}
_OTHER = "application/vnd.cncf.model.weight.config.v1.raw"
_STEP = 8 << 20  # bytes that are read at once for a digest
_PATIENCE = 60.0  # seconds for which a client waits for digests
_KEPT = 256  # manifests
#: Of their own, since it may take minutes to read a checkpoint.
_threads = ThreadPoolExecutor(2, "ucformat-digests")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """A manifest and what it names.

    Attributes:
        data: its bytes.
        config: the bytes of the configuration.
        blobs: the names of the files by digest.
    """

    data: bytes
    config: bytes
    blobs: dict[str, str]

    @property
    def digest(self) -> str:
        """Its digest."""
        return bytes_digest(self.data)

    def has(self, digest: str) -> bool:
        """Whether a digest is its own, or of something that it names."""
        return digest in self.blobs or digest in (self.digest, bytes_digest(self.config))


class RegistryError(UcformatError):
    """An answer to a client of a registry."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def registry_routes(library: Library) -> list[Route]:
    """The routes of the registry."""
    return [Route("/v2/{rest:path}", _Registry(library).answer)]


class _Registry:
    """Answers the requests of a registry's clients."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._digests = open_store(user_cache_path("ucformat") / "sha256")
        self._manifests: dict[str, asyncio.Future[Manifest]] = {}  # by commit

    async def answer(self, request: Request) -> Response | RangeResponse:
        """Answer a request."""
        path = raw_path(request.scope).removeprefix("/v2/").strip("/")
        try:
            if not path or path == "/v2":
                return JSONResponse({}, headers={"docker-distribution-api-version": "registry/2.0"})
            return await self._answer(path, access_of(request))
        except RegistryError as error:
            body = {"errors": [{"code": error.code, "message": error.message}]}
            headers = {"retry-after": "30"} if error.status == 503 else {}
            return JSONResponse(body, error.status, headers)
        except (NoRepository, NoRevision) as error:
            body = {"errors": [{"code": "NAME_UNKNOWN", "message": error.message}]}
            return JSONResponse(body, 404)

    async def _answer(self, path: str, access: Access) -> Response | RangeResponse:
        if path.endswith("/tags/list"):
            name = unquote(path.removesuffix("/tags/list"))
            return await in_thread(self._tags, name, access)
        for kind in ("manifests", "blobs"):
            name, between, last = path.rpartition(f"/{kind}/")
            if between:
                return await self._object(kind, unquote(name), unquote(last), access)
        raise RegistryError(404, "UNSUPPORTED", "there is no such thing in this registry")

    def _tags(self, name: str, access: Access) -> Response:
        self.library.revision(name, "latest", access)
        tags = ["latest"]
        for entry in self.library.revisions(name, access):
            tags += [self.library.commit(entry), *([] if entry.step is None else [str(entry.step)])]
        return JSONResponse({"name": name, "tags": tags})

    async def _object(
        self, kind: str, name: str, reference: str, access: Access
    ) -> Response | RangeResponse:
        """A manifest or a blob."""
        is_digest = _DIGEST.fullmatch(reference) is not None
        if kind == "manifests" and not is_digest:
            served = await in_thread(self.library.revision, name, reference, access)
            return _sent(await self._manifest(served), _MANIFEST)
        for commit, making in list(self._manifests.items()):
            if not making.done() or making.exception() is not None:
                continue
            manifest = making.result()
            if not manifest.has(reference):
                continue
            try:
                served = await in_thread(self.library.revision, name, commit, access)
                return await in_thread(self._of_manifest, served, manifest, reference)
            except UcformatError:  # another repository or revision may have it, too
                continue
        code = "MANIFEST_UNKNOWN" if kind == "manifests" else "BLOB_UNKNOWN"
        raise RegistryError(
            404, code, f"{name} has no {reference}; ask for the manifest of a tag first"
        )

    def _of_manifest(
        self, served: Served, manifest: Manifest, reference: str
    ) -> Response | RangeResponse:
        """What has a digest."""
        if reference == manifest.digest:
            return _sent(manifest, _MANIFEST)
        if reference == bytes_digest(manifest.config):
            return Response(manifest.config, media_type=_CONFIG, headers=_named(manifest.config))
        headers = {"docker-content-digest": reference}
        content = content_of(served.files[manifest.blobs[reference]])
        return RangeResponse(content, headers, partial(self.library.forget, served))

    async def _manifest(self, served: Served) -> Manifest:
        """The manifest of a revision, once all its digests are known."""
        making = self._manifests.get(served.commit)
        if making is None or (making.done() and making.exception() is not None):
            making = asyncio.get_running_loop().run_in_executor(_threads, self._made, served)
            self._manifests[served.commit] = making
            while len(self._manifests) > _KEPT:
                self._manifests.pop(next(iter(self._manifests))).cancel()
        done, _ = await asyncio.wait([making], timeout=_PATIENCE)
        if not done:
            raise RegistryError(
                503, "UNAVAILABLE", "the digests of the files are still being computed"
            )
        return making.result()

    def _made(self, served: Served) -> Manifest:
        digests = [(self._sha256(file), file) for file in served.files.values()]
        layers = [
            {
                "mediaType": _KINDS.get(file.name[file.name.rfind(".") :], _OTHER),
                "digest": digest,
                "size": file.nbytes,
                "annotations": {
                    "org.opencontainers.image.title": file.name,
                    "org.cncf.model.filepath": file.name,
                },
            }
            for digest, file in digests
        ]
        config = _document(
            {
                "descriptor": {"name": served.checkpoint.id, "version": served.commit},
                "config": {"format": "safetensors"},
                "modelfs": {"type": "layers", "diffIds": [digest for digest, _ in digests]},
            }
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _ARTIFACT,
            "config": {"mediaType": _CONFIG, "digest": bytes_digest(config), "size": len(config)},
            "layers": layers,
        }
        return Manifest(
            _document(manifest), config, {digest: file.name for digest, file in digests}
        )

    def _sha256(self, file: VirtualFile) -> str:
        """The digest of a file, from the cache, else by reading it."""
        with suppress(NotFound):
            text = self._digests.read(file.oid).decode("ascii", "replace")
            if _DIGEST.fullmatch(text):
                return text
        reading = Input(file.source, verify=True, shared=True)
        try:
            digest = hashlib.sha256()
            with reading.task():
                for at in range(0, file.nbytes, _STEP):
                    digest.update(file.ranges.read(reading, at, min(file.nbytes, at + _STEP)).data)
                if reading.verifier is not None:
                    reading.verifier.complete()
                    store, files = file.source.store, reading.verifier.files
                    check_unchanged(store, "its digest is not kept", TRACKERS, files)
        finally:
            reading.close()
        text = f"sha256:{digest.hexdigest()}"
        with suppress(Conflict):  # another server was faster
            self._digests.put_if_absent(file.oid, text.encode())
        return text


def _sent(manifest: Manifest, media_type: str) -> Response:
    return Response(manifest.data, media_type=media_type, headers=_named(manifest.data))


def _named(data: bytes) -> dict[str, str]:
    return {"docker-content-digest": bytes_digest(data)}


def _document(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
