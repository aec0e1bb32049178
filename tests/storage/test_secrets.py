"""Secrets are in no log, error, manifest, object, catalog row or output."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

import ucformat
from tests.s3 import CANARY
from tests.storage.fault_runs import source
from tests.storage.proxy import Request, answer, fine
from tests.storage.seen import TOKEN, Seen, written
from ucformat.errors import UcformatError
from ucformat.storage.url import open_store
from ucformat.torch import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.conftest import Faulty

pytestmark = pytest.mark.skipif(
    "UCP_TEST_S3_ENDPOINT" in os.environ, reason="its credentials are real"
)


@pytest.fixture
def place(faulty: Faulty, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A url, where requests carry both secrets, and a catalog listens."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("UCP_DEADLINE", "0.3")
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    monkeypatch.setenv("COLUMNS", "400")
    return faulty.bucket.place()


def stored(faulty: Faulty, place: str) -> str:
    """All that is in the bucket at that place."""
    client, name = faulty.bucket.client, faulty.bucket.name
    out = []
    for key in faulty.bucket.keys(place.removeprefix(f"s3://{name}/")):
        found = client.get_object(Bucket=name, Key=key)
        out.append(f"{key} {found['Metadata']} {found['Body'].read().decode('latin-1')}")
    assert out
    return "\n".join(out)


def test_what_succeeds_shows_no_secret(
    faulty: Faulty, place: str, seen: Seen, tmp_path: Path
) -> None:
    told: list[bytes] = []

    def note(request: Request) -> None:
        told.append(request.headers.get(b"x-amz-security-token", b""))

    faulty.proxy.choose = note
    src = source(tmp_path)
    ck = ucformat.convert(src, f"{place}/a", chunk_bytes=1024, run="run7")
    assert set(told) == {TOKEN.encode()}
    seen.texts += [repr(ck), repr(ck.source.store), str(ck.manifest), repr(open_store(place))]
    assert ucformat.verify(f"{place}/a")
    done = save({"w": torch.ones(3), "note": "x"}, f"{place}/b", step=3, run="run7")
    seen.texts.append(repr(done))
    assert seen.run("convert", src, f"{place}/c", "--run", "run8") == 0
    for words in (
        ("ls",),
        ("ls", "--json"),
        ("show", f"{place}/a"),
        ("show", "run7@3", "--json"),
        ("verify", f"{place}/b"),
        ("verify", "run7@5", "--json"),
        ("register", f"{place}/b"),
        ("sql", "select * from location"),
    ):
        assert seen.run(*words) == 0, (words, seen.texts[-3:])
    assert place in "".join(seen.texts)
    assert place in written(tmp_path)
    seen.check(stored(faulty, place), written(tmp_path))


def echo(status: str, form: str) -> Callable[[Request], bytes]:
    """Answers as services do that could not verify a signature: with all that they were sent, and more."""

    def choose(request: Request) -> bytes:
        sent = "\n".join(f"{k.decode()}:{v.decode()}" for k, v in request.headers.items())
        secret = f"{sent}\nx-amz-security-token:{TOKEN}\nAWS4{CANARY}"
        if form == "xml":
            body = (
                "<Error><Code>SignatureDoesNotMatch</Code><Message>The request signature we calculated does not match "
                f"the signature you provided.</Message><StringToSign>AWS4-HMAC-SHA256\n{secret}</StringToSign>"
                f"<CanonicalRequest>{request.method}\n{secret}</CanonicalRequest><Token-0>{TOKEN}</Token-0></Error>"
            )
        elif form == "json":
            body = json.dumps({"error": {"message": f"bad token {TOKEN}", "details": secret}})
        else:
            body = f"bad token {TOKEN}, secret {CANARY}"
        return answer(status, body)

    return choose


@pytest.mark.front("40*", "500 Internal Server Error-xml", "200*", "412*")
@pytest.mark.parametrize("form", ["xml", "json", "text"])
@pytest.mark.parametrize(
    "status",
    [
        "403 Forbidden",
        "401 Unauthorized",
        "400 Bad Request",
        "500 Internal Server Error",
        "200 OK",
        "412 No",
        "409 No",
    ],
)
def test_what_fails_shows_no_secret(
    status: str, form: str, faulty: Faulty, place: str, seen: Seen, tmp_path: Path
) -> None:
    faulty.proxy.choose = echo(status, form)
    store = open_store(place)
    acts: list[Callable[[], object]] = [
        lambda: store.read_into("f", 3, [memoryview(bytearray(10))]),
        lambda: list(store.list()),
        lambda: store.put_if_absent("f", b"x"),
        lambda: store.delete_prefix("f"),
        lambda: ucformat.open(place),
    ]
    if (status, form) == ("403 Forbidden", "xml"):
        src = source(tmp_path)
        acts += [
            lambda: ucformat.convert(src, place),
            lambda: ucformat.verify(place),
            lambda: save({"w": torch.ones(3)}, place),
            lambda: store.create("f").close(),
        ]
        for words in (
            ("materialize", place),
            ("show", place),
            ("verify", place),
            ("convert", src, place),
            ("register", place),
        ):
            assert seen.run(*words) != 0
        assert "SignatureDoesNotMatch" in "".join(seen.texts)
    for act in acts:
        if status == "200 OK":  # some do not look at what is answered
            try:
                act()
            except UcformatError as error:
                seen.error(error)
        else:
            seen.fails(act)
    faulty.proxy.choose = fine
    seen.check(written(tmp_path))


def test_failures_in_the_midst_show_no_secret(
    faulty: Faulty, place: str, seen: Seen, tmp_path: Path
) -> None:
    src = source(tmp_path)
    refused = echo("403 Forbidden", "xml")
    for number in range(0, 30, 7):
        left = [None] * number
        faulty.proxy.choose = lambda r, left=left: left.pop() if left else refused(r)  # type: ignore[misc]
        seen.fails(lambda: ucformat.convert(src, place, chunk_bytes=1024))
    faulty.proxy.choose = fine
    seen.fails(lambda: ucformat.convert(src, "s3://no-such-bucket-here/x"))
    seen.run("convert", src, "s3://no-such-bucket-here/x")
    assert "there is no such bucket" in "".join(seen.texts)
    seen.check(stored(faulty, place), written(tmp_path))
