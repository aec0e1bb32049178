"""Urls that hold a password or a signature are refused, and not repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ucformat
from tests.s3 import CANARY
from tests.storage.seen import TOKEN, WORD, Seen, written
from ucformat.errors import UcformatError, UsageError
from ucformat.storage.clouds import Options
from ucformat.storage.objects import ObjectStore
from ucformat.storage.url import open_store
from ucformat.torch import save

if TYPE_CHECKING:
    from pathlib import Path

URLS = [
    f"s3://AKIA:{CANARY}@bucket/run",
    f"s3://AKIA:{CANARY}/run",
    f"s3://{WORD}@bucket/run",
    f"s3://bucket/run?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Security-Token={TOKEN}",
    f"s3://bucket/run?AWSAccessKeyId=AKIA&Signature={CANARY}",
    f"gs://bucket/run?X-Goog-Signature={CANARY}",
    f"az://container/run?sv=2024&sig={CANARY}",
    f"abfss://container@account.dfs.core.windows.net?sig={CANARY}",
    f"abfss://user:{CANARY}@account.dfs.core.windows.net/run",
    f"https://host/run?token={CANARY}",
    f"https://host?sig={CANARY}",
    f"https://user:{CANARY}@host/run",
    f"http://{WORD}@host:80/run",
    f"sftp://user:{CANARY}@host/run",
    f"ftp://user:{WORD}@host/run",
    f"simplecache::s3://AKIA:{CANARY}@bucket/run",
    f"zip://f::https://user:{CANARY}@host/run.zip",
]


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_urls_that_hold_a_secret_are_refused(
    url: str, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    for act in (
        lambda: open_store(url),
        lambda: ucformat.open(url),
        lambda: ucformat.convert(url, tmp_path / "x"),
        lambda: ucformat.convert(tmp_path, url),
        lambda: save({"w": torch.ones(3)}, url),
    ):
        with pytest.raises(UcformatError) as failure:
            act()
        seen.error(failure.value)
    with pytest.raises(UsageError, match="contains a password or a signature"):
        open_store(url)
    for words in (
        ("show", url),
        ("verify", url),
        ("convert", url, tmp_path / "x"),
        ("register", url),
    ):
        assert seen.run(*words) == 2, seen.texts[-1]
    seen.check(written(tmp_path))


def test_an_endpoint_that_holds_a_password_is_refused(seen: Seen) -> None:
    store = ObjectStore("s3://bucket/run", Options(endpoint=f"https://user:{CANARY}@host"))
    seen.fails(lambda: store.read("f"))
    assert "the endpoint of S3 contains a password" in seen.texts[0]
    seen.check()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a b/what?",
        "s3://bucket/run@7",
        "https://host:8080/run",
        "http://[::1]:80/run",
        "hdfs://host:8020/a:b@c",
    ],
)
def test_other_urls_are_not(url: str) -> None:
    try:
        open_store(url)
    except UsageError as error:
        raise AssertionError(url) from error
    except UcformatError:  # its package is not installed, or the host is not there
        pass
