"""Answers that are lost, uploads that break off, and requests that keep failing."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.storage.conftest import PART
from tests.storage.proxy import answer
from ucformat.errors import Conflict, NotFound, UcformatError, Uncertain
from ucformat.storage import upload
from ucformat.storage.base import content_version
from ucformat.storage.upload import part_size, unit_for
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.storage.conftest import Faulty
    from tests.storage.proxy import Choice, Fault, Request
    from ucformat.storage.base import Store

SMALL_PARTS = pytest.mark.skipif(
    "UCP_TEST_S3_ENDPOINT" in os.environ, reason="only moto takes small parts"
)
LARGE = bytes(range(256)) * (PART // 64)  # four parts


@pytest.fixture
def place(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCP_DEADLINE", "20")
    return faulty.bucket.place()


@pytest.fixture
def store(place: str) -> Store:
    return open_store(place)


def first(fault: Fault | bytes, which: Callable[[Request], bool], times: int = 1) -> Choice:
    """Chooses this fault for the first requests of a kind."""
    left = [fault] * times
    return lambda request: left.pop() if left and which(request) else None


def put(store: Store, key: str, data: bytes = LARGE) -> None:
    with store.create(key) as out:
        out.write(data)


def unfinished(faulty: Faulty, place: str) -> list[str]:
    prefix = place.removeprefix(f"s3://{faulty.bucket.name}/")
    found = faulty.bucket.client.list_multipart_uploads(Bucket=faulty.bucket.name)
    return [u["Key"] for u in found.get("Uploads", ()) if u["Key"].startswith(prefix)]


def is_conditional(request: Request) -> bool:
    return request.conditional


def is_completion(request: Request) -> bool:
    return request.completes


ONCE: tuple[Fault, ...] = ("lost", "lied", "reset", "refused", "busy", "cut", "short")


@pytest.mark.parametrize("fault", ONCE)
def test_what_goes_wrong_once_with_a_put_if_absent_is_no_conflict(
    fault: Fault, faulty: Faulty, store: Store
) -> None:
    faulty.proxy.choose = first(fault, is_conditional)
    assert store.put_if_absent("f", b"mine") == content_version(b"mine")
    assert store.read("f") == b"mine"


@pytest.mark.parametrize("fault", ONCE)
def test_what_goes_wrong_once_with_a_replacement_is_no_conflict(
    fault: Fault, faulty: Faulty, store: Store
) -> None:
    version = store.put_if_absent("f", b"before")
    faulty.proxy.choose = first(fault, is_conditional)
    assert store.replace("f", b"after", version) == content_version(b"after")
    assert store.read("f") == b"after"


@pytest.mark.parametrize("fault", ["lost", "busy", "reset"])
def test_an_object_of_somebody_else_is_a_conflict(
    fault: Fault, faulty: Faulty, place: str, store: Store
) -> None:
    other = open_store(place)
    other.put_if_absent("f", b"same")
    faulty.proxy.choose = first(fault, is_conditional)
    with pytest.raises(Conflict, match="exists already"):
        store.put_if_absent("f", b"same")  # of equal content, and yet not ours
    version = content_version(b"same")
    other.replace("f", b"theirs", version)
    with pytest.raises(Conflict, match="changed by another writer"):
        store.replace("f", b"mine", version)
    assert store.read("f") == b"theirs"


def test_who_replaces_it_between_question_and_answer_wins(
    faulty: Faulty, place: str, store: Store
) -> None:
    version = store.put_if_absent("f", b"before")
    name, other = faulty.bucket.name, place.removeprefix(f"s3://{faulty.bucket.name}/")

    def meanwhile(request: Request) -> None:
        if request.conditional:
            faulty.bucket.client.put_object(Bucket=name, Key=f"{other}/f", Body=b"theirs")

    faulty.proxy.choose = meanwhile
    with pytest.raises(Conflict):
        store.replace("f", b"mine", version)
    assert store.read("f") == b"theirs"


def test_an_object_without_a_write_id_is_somebody_elses(
    faulty: Faulty, place: str, store: Store
) -> None:
    key = place.removeprefix(f"s3://{faulty.bucket.name}/") + "/f"
    faulty.bucket.client.put_object(Bucket=faulty.bucket.name, Key=key, Body=b"x")
    with pytest.raises(Conflict):
        store.put_if_absent("f", b"x")


def test_a_service_that_asks_to_try_again_is_asked_again(faulty: Faulty, store: Store) -> None:
    body = "<Error><Code>ConditionalRequestConflict</Code><Message>Others write it, too.</Message></Error>"
    faulty.proxy.choose = first(answer("409 Conflict", body), is_conditional, times=2)
    store.put_if_absent("f", b"x")
    assert store.read("f") == b"x"


def test_no_answer_at_all_to_a_commit_is_uncertain(
    faulty: Faulty, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_DEADLINE", "0.5")
    store = open_store(place)
    dead = False

    def dies(request: Request) -> Fault | None:
        nonlocal dead
        was, dead = dead, dead or request.conditional
        return "reset" if was else "lost" if dead else None

    faulty.proxy.choose = dies
    with pytest.raises(Uncertain, match=r"it is unknown whether .*/f was written"):
        store.put_if_absent("f", b"x")
    faulty.proxy.choose = first("busy", is_conditional, 0)
    assert store.read("f") == b"x"


@SMALL_PARTS
@pytest.mark.parametrize("fault", ONCE)
def test_a_completion_whose_answer_is_lost_counts_as_done(
    fault: Fault, faulty: Faulty, place: str, store: Store
) -> None:
    faulty.proxy.choose = first(fault, is_completion)
    put(store, "f")
    assert faulty.proxy.done[fault]
    assert store.read("f") == LARGE
    assert unfinished(faulty, place) == []


@SMALL_PARTS
@pytest.mark.parametrize("fault", ["cut", "short", "reset", "busy"])
def test_an_upload_that_cannot_be_begun_at_once_is_begun_again(
    fault: Fault, faulty: Faulty, store: Store
) -> None:
    faulty.proxy.choose = first(fault, lambda r: r.method == "POST", times=2)
    put(store, "f")
    assert store.read("f") == LARGE


FAILING: dict[str, Callable[[Request], bool]] = {
    "begin": lambda r: r.method == "POST" and not r.completes,
    "a part": lambda r: "partNumber=2" in r.target,
    "the last part": lambda r: "partNumber=5" in r.target,
    "complete": is_completion,
}


@pytest.mark.front("busy-a part", "reset-complete")
@SMALL_PARTS
@pytest.mark.parametrize("step", FAILING)
@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_an_upload_that_fails_leaves_nothing(
    step: str, fault: Fault, faulty: Faulty, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_DEADLINE", "0.3")
    store = open_store(place)
    faulty.proxy.choose = lambda r: fault if FAILING[step](r) else None
    with pytest.raises(UcformatError, match=f"cannot write {place}/f"):
        put(store, "f", LARGE + b"end")
    assert list(store.list()) == []
    assert unfinished(faulty, place) == []


@SMALL_PARTS
def test_an_upload_that_is_aborted_leaves_nothing(faulty: Faulty, place: str, store: Store) -> None:
    aborted, forgotten = store.create("f"), store.create("g")
    aborted.write(LARGE)
    aborted.abort()
    forgotten.write(LARGE)
    del forgotten
    assert list(store.list()) == []
    assert unfinished(faulty, place) == []


@SMALL_PARTS
def test_memory_of_parts_is_used_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its bytes are sent, and not before."""
    made: list[int] = []

    class Counted(bytearray):
        def __init__(self, nbytes: int = 0) -> None:
            super().__init__(nbytes)
            made.append(nbytes)

    monkeypatch.setattr(upload, "bytearray", Counted, raising=False)
    data = random.Random(1).randbytes(40 * PART + 5)
    with store.create("f") as out:
        for at in range(0, len(data), 1000):
            scratch = bytearray(data[at : at + 1000])
            out.write(scratch)
            scratch[:] = bytes(len(scratch))
    assert store.read("f") == data
    assert 1 < sum(nbytes > 0 for nbytes in made) <= 7


@pytest.mark.front("busy")
@pytest.mark.parametrize("fault", ["busy", "error", "reset", "refused", "lost"])
def test_retries_stop_at_the_deadline(
    fault: Fault, faulty: Faulty, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_DEADLINE", "0.4")
    store = open_store(place)
    faulty.proxy.choose = lambda _: fault
    acts: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("f"),
        "ranges": lambda: store.read("f", 1, 2),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete("f"),
        "put": lambda: store.put_if_absent("f", b"x"),
        "write": lambda: put(store, "f", b"x"),
    }
    faulty.proxy.done.clear()
    for name, act in acts.items():
        with pytest.raises(UcformatError) as failure:
            act()
        assert not isinstance(failure.value, NotFound | Conflict), name
    assert faulty.proxy.done["requests"] >= len(
        acts
    )  # where the machine is slow, no second one fits in


@pytest.mark.front("short", "reset")
@pytest.mark.parametrize("fault", ["cut", "short", "slow", "reset", "busy"])
def test_reads_get_every_byte(fault: Fault, faulty: Faulty, store: Store) -> None:
    put(store, "f", LARGE)

    def gets(request: Request) -> bool:
        return request.method == "GET"

    faulty.proxy.choose = first(fault, gets, 2)
    assert store.read("f") == LARGE
    faulty.proxy.choose = first(fault, gets, 2)
    out = bytearray(len(LARGE) - 1000)
    store.read_into("f", 500, [memoryview(out)[:100], memoryview(out)[100:]])
    assert out == LARGE[500:-500]
    faulty.proxy.choose = first(fault, gets, 2)
    rows = [bytearray(64) for _ in range(40)]
    store.read_rows("f", 3, 700, [memoryview(row) for row in rows])
    assert rows == [LARGE[3 + 700 * k :][:64] for k in range(40)]
    faulty.proxy.choose = first(fault, gets, 2)
    assert [info.key for info in store.list()] == ["f"]


@pytest.mark.parametrize("nbytes", [0, 1, 80 << 30, (80 << 30) + 1, 5 << 40])
def test_no_file_has_more_parts_than_an_object_may_have(nbytes: int) -> None:
    part = part_size(unit_for(nbytes))
    assert -(-nbytes // part) <= 10_000
    assert part < 9 << 20 or nbytes > 80 << 30
