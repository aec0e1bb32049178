"""What file systems of fsspec say repeats no secret."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.s3 import CANARY
from ucformat.errors import UcformatError
from ucformat.redacted import redacted
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable


class Telling(MemoryFileSystem):
    """Fails, and tells what it was given."""

    protocol = "telling"
    cachable = False
    failure: Exception

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        raise self.failure

    info = find = ls = cat_file


SPELLED = [
    f"401, message='no', url='https://h/f?sv=1&x={CANARY}'",
    f"https://user:{CANARY}@host/f is not there",
    f"https://{CANARY}@host/f is not there",
    f"Authorization: Bearer {CANARY}",
    f"{{'headers': {{'Authorization': 'Basic {CANARY}'}}}}",
    f'{{"access_token": "{CANARY}"}}',
    f"token={CANARY}&more",
    f"aws_secret_access_key: {CANARY}",
    f"password='{CANARY} with blanks'",
    f"X-Amz-Signature={CANARY}, sig={CANARY}; api-key {{key: {CANARY}}}",
]


@pytest.mark.parametrize("text", SPELLED)
def test_what_looks_like_a_secret_is_left_out(text: str) -> None:
    assert CANARY not in redacted(text)


@pytest.mark.parametrize(
    "of", [OSError, PermissionError, FileNotFoundError, ValueError, RuntimeError, KeyError]
)
def test_no_error_of_a_store_repeats_one(of: type[Exception]) -> None:
    for text in (*SPELLED, f"it is {CANARY}"):
        _check_errors(of, text)


def _check_errors(of: type[Exception], text: str) -> None:
    options = {"token": CANARY, "client_kwargs": {"headers": [("x", f"Bearer {CANARY}")]}}
    fs = Telling(**options)
    fs.failure = of(text)
    store = FsspecStore("telling://bucket/run", fs)
    acts: list[Callable[[], object]] = [
        lambda: store.read("f"),
        lambda: store.read_into("f", 0, [memoryview(bytearray(3))]),
        lambda: store.info("f"),
    ]
    if of is not FileNotFoundError:  # a folder that is not there has no files
        acts.append(lambda: list(store.list()))
    for act in acts:
        with pytest.raises(UcformatError) as failure:
            act()
        shown = "".join(traceback.format_exception(failure.value))
        assert CANARY not in shown, text
        assert "telling://bucket/run" in str(failure.value)


def test_what_opening_says_repeats_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError, RuntimeError):

        def fail(*_: Any, error: type[Exception] = error, **__: Any) -> None:
            raise error(f"no {SPELLED[0]}")

        monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
        with pytest.raises(UcformatError) as failure:
            open_store("ftp://host/run")
        assert CANARY not in "".join(traceback.format_exception(failure.value))


def test_messages_stay_as_they_are_otherwise() -> None:
    assert (
        redacted("hdfs://h:8020/a b@c: no such file (2)") == "hdfs://h:8020/a b@c: no such file (2)"
    )
