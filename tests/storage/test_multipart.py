"""Uploads of which several processes put parts, on a real HTTP endpoint."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.storage.proxy import answer, fine
from ucformat.errors import PermissionDenied, UcformatError, UsageError
from ucformat.storage import objects
from ucformat.storage.clouds import Options, boto_client
from ucformat.storage.in_place import PartsWriter, way_of
from ucformat.storage.objects import ObjectStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import PrefixStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.storage.conftest import Faulty
    from tests.storage.proxy import Fault, Request
    from tests.storage.seen import Seen

SIZE = 3 * 1000 + 17


@pytest.mark.front("1")
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_several_processes_in_any_order(seed: int, faulty: Faulty) -> None:
    chance = random.Random(seed)
    data, place = chance.randbytes(SIZE), faulty.bucket.place()
    stores = [open_store(place) for _ in range(3)]
    ways = [way_of(store) for store in stores]
    assert {way for way, _ in ways} == {"parts"}
    uploads = ways[0][1]
    assert uploads is not None
    upload = uploads.begin("a/b")
    writers = [PartsWriter(store, [("a/b", SIZE)], "parts", [upload]) for store in stores]
    for part in chance.sample(range(4), 4):
        with writers[part % 3] as out:
            out.write(0, part, part * 1000, data[part * 1000 : part * 1000 + 1000])
    assert list(stores[0].list()) == []  # nothing is visible
    etags = {part: tag for out in writers for (_, part), tag in out.etags.items()}
    uploads.complete("a/b", upload, [etags[n] for n in range(4)], SIZE)
    assert stores[1].read("a/b") == data


@pytest.mark.matrix
def test_a_completion_is_believed_only_if_the_object_is_there(faulty: Faulty) -> None:
    _, uploads = way_of(open_store(faulty.bucket.place()))
    assert uploads is not None
    upload = uploads.begin("f")
    tag = uploads.put("f", upload, 0, b"abc")
    with pytest.raises(UcformatError, match=r"cannot write .*/f: InvalidPart"):
        uploads.complete("f", upload, ["0" * 32], 3)
    gone = answer(
        "404 Not Found", "<Error><Code>NoSuchUpload</Code><Message>gone</Message></Error>"
    )
    faulty.proxy.choose = lambda r: gone if r.completes else None
    with pytest.raises(UcformatError, match="NoSuchUpload: gone"):
        uploads.complete("f", upload, [tag], 3)
    said: Iterator[Fault | bytes] = iter(["lost"])
    faulty.proxy.choose = lambda r: next(said, gone) if r.completes else None
    uploads.complete("f", upload, [tag], 3)
    with pytest.raises(UcformatError, match="NoSuchUpload: gone"):  # the object has another size
        uploads.complete("f", upload, [tag], 4)
    faulty.proxy.choose = fine
    with pytest.raises(UcformatError, match="cannot write"):
        uploads.put("f", "unknown", 0, b"abc")


@pytest.mark.front("reset")
@pytest.mark.parametrize("fault", ["busy", "error", "reset", "lost", "lied"])
def test_requests_are_repeated(fault: Fault, faulty: Faulty) -> None:
    """Also one that was executed, of which the answer says nothing, or that it failed."""
    seen: set[tuple[str, str]] = set()

    def first(request: Request) -> Fault | None:
        if (request.method, request.target) in seen:
            return None
        seen.add((request.method, request.target))
        return fault

    store = open_store(faulty.bucket.place())
    faulty.proxy.choose = first
    _, uploads = way_of(store)
    assert uploads is not None
    upload = uploads.begin("f")
    tags = [uploads.put("f", upload, n, data) for n, data in enumerate((b"abc", b"de"))]
    uploads.complete("f", upload, tags, 5)
    faulty.proxy.choose = fine
    assert store.read("f") == b"abcde"


def test_an_aborted_upload_leaves_nothing(faulty: Faulty) -> None:
    store = open_store(faulty.bucket.place())
    _, uploads = way_of(store)
    assert uploads is not None
    upload = uploads.begin("f")
    uploads.put("f", upload, 0, b"abc")
    uploads.abort("f", upload)
    left = faulty.bucket.client.list_multipart_uploads(Bucket=faulty.bucket.name).get("Uploads", ())
    assert upload not in {u["UploadId"] for u in left}
    assert list(store.list()) == []


def test_errors_show_no_secrets(faulty: Faulty, seen: Seen) -> None:
    body = "<Error><Code>AccessDenied</Code><Message>no</Message><StringToSign>canary/Zq7</StringToSign></Error>"
    faulty.proxy.choose = lambda _: answer("403 Forbidden", body)
    _, uploads = way_of(open_store(faulty.bucket.place()))
    assert uploads is not None
    with pytest.raises(PermissionDenied, match="AccessDenied: no") as caught:
        uploads.begin("f")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "canary" not in str(caught.value)
    assert seen is not None


def test_a_redirect_to_another_host_is_not_followed(faulty: Faulty) -> None:
    asked: list[str] = []

    def choose(request: Request) -> bytes:
        asked.append(request.target)
        return b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://localhost:1/x\r\nContent-Length: 0\r\n\r\n"

    faulty.proxy.choose = choose
    _, uploads = way_of(open_store(faulty.bucket.place()))
    assert uploads is not None
    with pytest.raises(UcformatError, match="cannot write"):
        uploads.begin("f")
    assert asked


def test_ranks_that_differ_are_told_so(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(faulty.bucket.place())
    monkeypatch.setattr(objects, "boto_client", lambda _: None)
    assert way_of(store) == ("whole", None)
    with (
        pytest.raises(UsageError, match="this rank cannot write parts of uploads"),
        PartsWriter(store, [("f", 3)], "parts", ["id"]) as out,
    ):
        out.write(0, 0, 0, b"abc")


def test_files_are_written_whole_one_after_the_other(faulty: Faulty) -> None:
    store = open_store(faulty.bucket.place())
    with PartsWriter(store, [("a", 4), ("b", 2)], "whole") as out:
        out.write(0, 0, 0, b"ab")
        out.write(0, 1, 2, b"cd")
        assert list(store.list()) == []
        out.write(1, 0, 0, b"ef")
    assert [store.read(i.key) for i in store.list()] == [b"abcd", b"ef"]
    stopped = PartsWriter(store, [("c", 4)], "whole")
    stopped.write(0, 0, 0, b"ab")
    stopped.__exit__(ValueError, ValueError(), None)
    assert [i.key for i in store.list()] == ["a", "b"]


def test_wrappers(faulty: Faulty) -> None:
    store = open_store(faulty.bucket.place())
    assert way_of(WrappedStore(store))[0] == "parts"
    assert way_of(PrefixStore(store, "x"))[0] == "whole"  # the keys are others
    assert way_of(ObjectStore("gs://bucket"))[0] == "whole"


def test_the_client_reaches_what_obstore_reaches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nendpoint_url = http://elsewhere.invalid\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://here.invalid")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert boto_client(Options()).meta.endpoint_url == "http://here.invalid"
    assert (
        boto_client(Options(endpoint="http://there.invalid")).meta.endpoint_url
        == "http://there.invalid"
    )
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    client = boto_client(Options(region="eu-west-1"))
    assert (
        client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    )  # obstore does not read the file
    assert client.meta.config.s3["addressing_style"] == "path"
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    assert boto_client(Options()).meta.config.s3["addressing_style"] == "virtual"
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key")
    assert boto_client(Options()) is None
