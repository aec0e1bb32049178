"""Urls of clouds, and how they are reached."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from ucformat.errors import UcformatError, UnsafeError, UnsupportedError, UsageError
from ucformat.settings import using
from ucformat.storage import clouds
from ucformat.storage.clouds import Options, UrlParts, connect, parse, shared_connection
from ucformat.storage.objects import BUDGET, ObjectStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No credentials of any cloud in the environment or in files."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "UCP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    clouds.boto_session.cache_clear()
    return monkeypatch


def s3(place: UrlParts, options: Options) -> Any:
    """The client of S3."""
    return connect(place, options)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", UrlParts("s3", "s3://bucket", "bucket", "")),
        ("s3://bucket/", UrlParts("s3", "s3://bucket", "bucket", "")),
        ("s3://bucket/a//b c/", UrlParts("s3", "s3://bucket/a/b c", "bucket", "a/b c")),
        ("S3A://bucket/100%?x", UrlParts("s3", "s3a://bucket/100%?x", "bucket", "100%?x")),
        ("gs://bucket/a", UrlParts("gs", "gs://bucket/a", "bucket", "a")),
        ("az://container/a", UrlParts("az", "az://container/a", "container", "a")),
        (
            "abfss://container@account.dfs.core.windows.net/a/b",
            UrlParts(
                "az",
                "abfss://container@account.dfs.core.windows.net/a/b",
                "container",
                "a/b",
                "account",
            ),
        ),
        ("https://host:80/a/b/", UrlParts("http", "https://host:80/a/b", "host:80", "a/b")),
    ],
)
def test_urls_are_taken_apart(url: str, place: UrlParts) -> None:
    assert parse(url) == place
    assert open_store(url).url == place.root


@pytest.mark.parametrize("url", ["s3://", "gs:///a", "https://"])
def test_a_url_without_a_bucket(url: str) -> None:
    with pytest.raises(UsageError, match="names no bucket"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/../other", "s3://bucket/a/./b", "s3://bucket/a\\b"])
def test_a_path_that_climbs(url: str) -> None:
    with pytest.raises(UnsafeError):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hidden@bucket/a",
        "gs://hidden@bucket/a",
        "https://user:hidden@host/a",
        "https://host/a?X-Amz-Signature=hidden",
        "az://container/a?sig=hidden",
        "abfss://user:hidden@account.dfs.core.windows.net/a",
        "sftp://user:hidden@host/a",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="contains a password") as caught:
        open_store(url)
    assert "hidden" not in str(caught.value) + repr(caught.value.__cause__) + str(caught.value.hint)


def test_a_store_pickles_as_its_url_and_options(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    nobody.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    store = ObjectStore(
        "s3://bucket/a", Options("http://127.0.0.1:9", "eu-central-1", deadline=0.5, retries=0)
    )
    with pytest.raises(UcformatError, match=r"cannot read s3://bucket/a/f"):
        store.info("f")
    data = pickle.dumps(store)
    assert b"hidden" not in data
    other = pickle.loads(data)  # noqa: S301
    assert (other.url, other._options) == (store.url, store._options)
    assert "hidden" not in repr(store)


def test_stores_of_a_bucket_share_a_connection(nobody: pytest.MonkeyPatch) -> None:
    options = Options("http://127.0.0.1:9")
    first = shared_connection(parse("s3://bucket/a"), options)
    assert shared_connection(parse("s3a://bucket/b/c"), options) is first
    assert shared_connection(parse("s3://other/a"), options) is not first
    assert shared_connection(parse("s3://bucket/a"), Options("http://127.0.0.1:8")) is not first
    with pytest.MonkeyPatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 0)
        assert shared_connection(parse("s3://bucket/a"), options) is not first


def test_other_credentials_are_another_connection(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    nobody.setenv("AWS_SECRET_ACCESS_KEY", "one")
    one = shared_connection(parse("s3://bucket"), Options())
    nobody.setenv("AWS_SECRET_ACCESS_KEY", "two")
    assert shared_connection(parse("s3://bucket"), Options()) is not one


def test_roots_of_plain_http_have_connections_of_their_own() -> None:
    one, two = (shared_connection(parse(f"https://host/{p}"), Options()) for p in "ab")
    assert one is not two


def test_settings_say_endpoint_region_and_budget(nobody: pytest.MonkeyPatch) -> None:
    before = BUDGET.requests, BUDGET.nbytes
    try:
        with using(
            endpoint="http://here:1", region="r", requests="3", in_flight="1000", deadline="7"
        ):
            store = open_store("s3://bucket/a")
            assert isinstance(store, ObjectStore)
            assert store._options == Options("http://here:1", "r", 7.0)
            assert (BUDGET.requests, BUDGET.nbytes) == (3, 1000)
    finally:
        BUDGET.set(*before)
    nobody.setenv("UCP_DEADLINE", "0")
    with pytest.raises(UsageError, match="deadline"):
        open_store("s3://bucket/a")


def test_the_endpoint_of_the_environment(nobody: pytest.MonkeyPatch) -> None:
    place = parse("s3://bucket/a")
    nobody.setenv("AWS_ENDPOINT_URL", "http://all:1")
    assert s3(place, Options()).config["endpoint"] == "http://all:1"
    nobody.setenv("AWS_ENDPOINT_URL_S3", "http://three:1")
    assert s3(place, Options()).config["endpoint"] == "http://three:1"
    assert s3(place, Options("http://own:1")).config["endpoint"] == "http://own:1"


def test_a_profile_gives_credentials_and_region(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = AKIA\naws_secret_access_key = hidden\n"
    )
    (tmp_path / "config").write_text("[profile work]\nregion = eu-west-3\n")
    nobody.setenv("AWS_PROFILE", "work")
    client = s3(parse("s3://bucket/a"), Options())
    assert client.config["region"] == "eu-west-3"
    assert client.credential_provider is not None
    assert "hidden" not in repr(client)


@pytest.mark.parametrize("url", ["gs://bucket/a", "az://container/a", "https://host/a"])
def test_other_clouds_are_reached(url: str, nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert connect(parse(url), Options()) is not None


def test_plain_http_is_read_only() -> None:
    store = open_store("https://host/a")
    for act in (
        lambda: store.create("f"),
        lambda: store.put_if_absent("f", b""),
        lambda: store.delete("f"),
    ):
        with pytest.raises(UnsupportedError, match="can be read, but not written to"):
            act()
