"""A checkpoint as a patch of another one, in one response: a tar of its files, of which the manifest is the last.

Each file is written to a temporary folder, and removed when it was sent: so a patch has no more of
them there than one, whatever the checkpoint has. Nothing is written beside the base, committed, or
told to a catalog, as `jobs.patch` does.
"""

from __future__ import annotations

import asyncio
import logging
import tarfile
import tempfile
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from ucformat.errors import NotFound, UcformatError, UnsupportedError, UsageError
from ucformat.format.commit import unrecorded
from ucformat.format.structure import checked_manifest, sibling_name, sibling_url
from ucformat.jobs.convert import chosen
from ucformat.jobs.increments import open_base
from ucformat.jobs.patch import Patch
from ucformat.jobs.shards import WriteOptions
from ucformat.schema import MANIFEST
from ucformat.schema.manifest import LineageDoc
from ucformat.storage.base import Costs, FileWriter, FlatStore, Info, content_version
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.texts import bytes_text
from ucformat.web.blocking import in_thread
from ucformat.web.library import NoRepository
from ucformat.web.streaming import disconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from typing import BinaryIO

    from starlette.types import ASGIApp, Receive, Scope, Send

    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Bytes, Checksums
    from ucformat.web.library import Access, Library

_log = logging.getLogger("ucformat.web")
TAR = "application/x-tar"
_PATCHES = 2  # that are made at once
_LARGEST = 256 << 20  # bytes of a file of a patch; of tensors there are 64 MiB in one
_UNREAD = 1 << 30  # bytes that are read to compare tensors whose fingerprints are not recorded
_PIECE = 256 << 10  # bytes of a file in memory
_PATIENCE = 60  # seconds for which a client may take nothing
_HOME = "/patches/new"  # in whose folder the bases are, whatever it is
_threads = ThreadPoolExecutor(_PATCHES, "ucformat-patch")


class Patches:
    """The patches of a server, of which few are made at once.

    Attributes:
        count: how many are.
    """

    def __init__(self, library: Library) -> None:
        self.library, self.count = library, 0

    async def response(self, ref: str, base: str, base_name: str | None, access: Access) -> ASGIApp:
        """The response that makes and sends a patch; errors are as of `plan`."""
        if self.count >= _PATCHES:
            error = {"error": f"{_PATCHES} patches are made already", "hint": "try again later"}
            return JSONResponse(error, 503, {"retry-after": "30"})
        self.count += 1
        planning = asyncio.ensure_future(in_thread(self.plan, ref, base, base_name, access))
        try:
            planned = await asyncio.shield(planning)
        except BaseException:
            planning.add_done_callback(self._forget)  # the thread of a cancelled request goes on
            raise
        return _Response(self, planned, limited=self.library.is_limited(access))

    def _forget(self, planning: asyncio.Future[Patch]) -> None:
        self.count -= 1
        if not planning.cancelled():
            planning.exception()  # else asyncio logs that nobody has asked for it

    def plan(self, ref: str, base: str, base_name: str | None, access: Access) -> Patch:
        """Find out what a patch has, which its client will put beside the base.

        Args:
            base_name: the name of the base's folder there (default: its id).

        Raises:
            UnsupportedError: it would take more memory, storage or reading than a server has for it.
        """
        library = self.library
        # not what other responses read, too: all that is read of a file is compared with its checksums
        source, opened = (library.fresh(name, access) for name in (ref, base))
        infos = chosen(source, None)
        alike = open_base(opened, _HOME).compare(infos, source.metadata.fingerprints)
        if (nbytes := sum(info.nbytes for info in alike.unread)) > _UNREAD:
            raise UnsupportedError(
                f"{ref} has no fingerprints of {bytes_text(nbytes)} of its tensors, which would have "
                "to be read before an answer begins",
                hint="`ucp register SRC DST --virtual --checksums` there records them without a copy",
            )
        planned = Patch.of(source, infos, opened, _HOME, WriteOptions(workers=1))
        names = {opened.id: base_name or opened.id}
        if sibling_url(names[opened.id]) is None:
            raise UsageError(f"{base_name!r} is no name of a folder", hint="such as 1000")
        bases = {doc.id: sibling_name(doc.url) for doc in opened.manifest.bases}
        for other in {owner.id for owner in planned.references.owners} - names.keys():
            if library.is_limited(access):  # may not know where it is, and perhaps not that it is
                try:
                    library.entry(other, access)
                except NoRepository:
                    raise NoRepository(f"{base!r} has a base that is no checkpoint here") from None
                bases[other] = None
            names[other] = bases.get(other) or other
        if len({*names.values()}) < len(names):
            raise UsageError(f"{base_name!r} is the name of another base, too")
        _check_sizes(source)
        beside = planned.references.beside(_HOME, names)
        planned = replace(planned, references=beside)
        job = planned.job(_Outbox(Path(), _refused), "0" * 20)
        _check("a file of tensors", max(map(job.nbytes, range(job.count)), default=0))
        return planned


def _check(what: str, nbytes: int) -> None:
    if nbytes > _LARGEST:
        raise UnsupportedError(
            f"{what} has {bytes_text(nbytes)}, and a server writes no file of more than "
            f"{bytes_text(_LARGEST)} for a patch",
            hint="run `ucp patch` where the checkpoints are",
        )


def _check_sizes(source: Checkpoint) -> None:
    """Refuse a checkpoint of which another file than those of tensors is too large."""
    if source.universal is None:
        for name in source.assets:
            _check(f"the file {name}", source.store.info(name).size)
        return
    manifest = source.universal.manifest
    for name, doc in manifest.assets.items():
        _check(f"the file {name}", doc.nbytes)
    if manifest.objects is not None:
        _check("the file of objects", manifest.objects.nbytes)
    for file in () if manifest.per_rank is None else manifest.per_rank.files:
        _check("a file of the values of ranks", file.nbytes)


def _refused(path: Path, key: str) -> None:
    raise AssertionError(path, key)


class _Outbox(FlatStore):
    """A store that has each file until it was delivered.

    Args:
        folder: where one is until then.
        deliver: sends a file by its path and its key, and returns when it was sent.
    """

    url, costs = "the patch", Costs()

    def __init__(self, folder: Path, deliver: Callable[[Path, str], None]) -> None:
        self._folder, self._deliver = folder, deliver
        self._infos: dict[str, Info] = {}

    def create(self, key: str, unit: int = 1) -> FileWriter:  # noqa: ARG002 - nothing is uploaded
        """Write a file, which is delivered when it is closed."""
        path = self._folder / f"{len(self._infos)}-{time.monotonic_ns()}"
        return _Outgoing(path, partial(self._finish, path, key))

    def _finish(self, path: Path, key: str) -> None:
        try:
            size = path.stat().st_size
            self._infos[key] = Info(key, size, str(size))
            self._deliver(path, key)
        finally:
            path.unlink()

    def info(self, key: str) -> Info:
        """Size of a file that was delivered."""
        if key not in self._infos:
            raise NotFound(f"{key} was not written")
        return self._infos[key]

    def put_if_absent(self, key: str, data: bytes) -> str:  # noqa: ARG002 - a record of what is done
        """Forget a record: who continues begins anew."""
        return content_version(data)

    def delete(self, key: str) -> None:
        """Do nothing: what was sent stays."""

    def delete_prefix(self, prefix: str) -> None:
        """Do nothing: there are no records."""

    def list(self, prefix: str = "") -> Iterator[Info]:
        """The files that were sent."""
        folder = f"{prefix}/" if prefix else ""
        return (info for key, info in self._infos.items() if key.startswith(folder))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:  # noqa: ARG002
        """Refuse: no file is kept."""
        raise NotFound(f"{key} was sent, and is not here")

    def read_into(
        self,
        key: str,
        offset: int,  # noqa: ARG002
        buffers: Sequence[memoryview],  # noqa: ARG002
        crcs: Checksums | None = None,  # noqa: ARG002
    ) -> None:
        """Refuse, as `read`."""
        self.read(key)

    def replace(self, key: str, data: bytes, version: str) -> str:  # noqa: ARG002
        """Refuse, as `read`."""
        raise NotFound(f"{key} was sent, and is not here")


class _Outgoing(FileWriter):
    """A file of an outbox."""

    def __init__(self, path: Path, finish: Callable[[], None]) -> None:
        self._path, self._finish = path, finish
        self._file: BinaryIO = path.open("xb")

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        with mapping_os_errors("write", str(self._path)):
            self._file.write(data)

    def close(self) -> None:
        """Deliver the file."""
        if not self._file.closed:
            with mapping_os_errors("write", str(self._path)):
                self._file.close()
            self._finish()

    def abort(self) -> None:
        """Remove what was written."""
        if not self._file.closed:
            self._file.close()
            self._path.unlink()


class _Response:
    """Sends a patch as a tar, and makes it meanwhile.

    Args:
        planned: what it has.
        limited: whether the client must not be told where the checkpoints are.
    """

    def __init__(self, patches: Patches, planned: Patch, *, limited: bool) -> None:
        self._patches, self._planned, self._limited = patches, planned, limited
        self._attempt = unrecorded(planned.document)
        self._lock = threading.Lock()  # of the connection, in the threads that write files
        self._sending: Future[None] | None = None
        self._has_begun = self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; see ASGI."""
        self._send, self._loop = send, asyncio.get_running_loop()
        self._gone = asyncio.ensure_future(disconnected(receive))
        try:
            if scope["method"] == "HEAD":
                await self._begin()
                await send({"type": "http.response.body", "body": b""})
            else:
                await self._run(scope["path"])
        finally:
            self._gone.cancel()
            self._patches.count -= 1

    async def _run(self, path: str) -> None:
        """Make and send it."""
        made = self._loop.run_in_executor(_threads, copy_context().run, self._make)
        try:
            await asyncio.shield(made)
            await self._body(bytes(2 * tarfile.BLOCKSIZE))
            await self._send({"type": "http.response.body", "body": b""})
        except UcformatError as error:
            if not self._has_begun:
                raise
            # a response that is not completed closes the connection
            _log.error("%s: the patch was broken off: %s", path, error)
        finally:
            self._is_over = True
            if self._sending is not None:
                self._sending.cancel()
            await asyncio.wait([made])  # which has a folder to remove

    # --- in a thread

    def _make(self) -> None:
        """Write the files, the manifest last."""
        with tempfile.TemporaryDirectory(prefix="ucp-patch-") as folder:
            store = _Outbox(Path(folder), self._deliver)
            manifest, _ = self._planned.write(store, self._attempt)
            data, _ = checked_manifest(self._told(manifest))
            with store.create(MANIFEST) as out:
                out.write(data)

    def _told(self, manifest: Manifest) -> Manifest:
        """The manifest as the client may see it."""
        if not self._limited:
            return manifest
        source = self._planned.source
        lineage = LineageDoc(kind=manifest.lineage[0].kind, url=source.id, id=source.id)
        return manifest.model_copy(update={"lineage": (lineage,), "launch": None})

    def _deliver(self, path: Path, key: str) -> None:
        with self._lock:
            member = self._member(path, key)
            self._sending = asyncio.run_coroutine_threadsafe(member, self._loop)
            if self._is_over:  # also if it is since this was asked for
                self._sending.cancel()
            try:
                self._sending.result()
            except (CancelledError, TimeoutError):
                raise UcformatError("the client is gone, or takes nothing") from None

    # --- in the loop

    async def _member(self, path: Path, key: str) -> None:
        """Send a file as a member of the tar."""
        if not self._has_begun:
            await self._begin()
        member = tarfile.TarInfo(key)
        member.size, member.mtime = path.stat().st_size, time.time()
        await self._body(member.tobuf(tarfile.PAX_FORMAT))
        with path.open("rb") as file:
            while piece := await in_thread(file.read, _PIECE):
                await self._body(piece)
        if rest := -member.size % tarfile.BLOCKSIZE:
            await self._body(bytes(rest))

    async def _begin(self) -> None:
        self._has_begun = True
        headers = {
            "content-type": TAR,
            "content-disposition": f'attachment; filename="{self._attempt.keeps}.tar"',
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "x-ucformat-id": str(self._attempt.keeps),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._taken({"type": "http.response.start", "status": 200, "headers": raw})

    async def _body(self, data: bytes) -> None:
        await self._taken({"type": "http.response.body", "body": data, "more_body": True})

    async def _taken(self, message: dict[str, object]) -> None:
        """Send a part, to a client that takes it."""
        if self._gone.done():
            raise UcformatError("the client is gone")
        async with asyncio.timeout(_PATIENCE):
            await self._send(message)
