"""A bucket behind a proxy that makes faults."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.s3 import Bucket, serving, set_environment
from tests.storage.proxy import Proxy, fine
from tests.storage.seen import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Faulty", "faulty", "faulty_bucket", "seen"]

PART = 8 << 10  # bytes


@dataclass(frozen=True)
class Faulty:
    """A bucket, as it is, and the proxy through which this process's object stores reach it."""

    bucket: Bucket
    proxy: Proxy


@pytest.fixture(scope="session")
def faulty_bucket() -> Iterator[Faulty]:
    """One for the session; moto takes small parts, so that small objects can be uploaded in parts."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch)
        with serving(part=1) as bucket, Proxy(bucket.endpoint) as proxy:
            yield Faulty(bucket, proxy)


@pytest.fixture
def faulty(faulty_bucket: Faulty, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """The same, without faults yet, and with small parts."""
    set_environment(monkeypatch)
    monkeypatch.setenv("UCP_ENDPOINT", faulty_bucket.proxy.endpoint)
    if "UCP_TEST_S3_ENDPOINT" not in os.environ:
        monkeypatch.setattr("ucformat.storage.upload._PART", PART)
    yield faulty_bucket
    faulty_bucket.proxy.choose = fine


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture) -> Seen:
    caplog.set_level(logging.DEBUG)
    for name in ("ucformat", "botocore", "boto3", "urllib3", "obstore"):
        caplog.set_level(logging.DEBUG, name)
    return Seen(caplog)
