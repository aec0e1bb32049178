"""`ucformat.doctor`: what each store can do, what liars cannot hide, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.interrupts import interruptions
from tests.jobs.conftest import universal
from tests.patience import PATIENCE, wait_until
from tests.s3 import CANARY
from tests.storage.faulty import FaultyStore
from ucformat.errors import UsageError
from ucformat.jobs import doctor as doctoring
from ucformat.jobs import probes
from ucformat.storage import folders, local
from ucformat.storage.base import content_version
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from tests.s3 import Bucket
    from ucformat.jobs.doctor import Diagnosis
    from ucformat.storage.base import Checksums, Info, Store

ROOT = Path(__file__).parents[2]
ALL = ["write", "list", "read after write", "parts", "ranges", "put if absent", "replace", "delete"]


def bad(found: Diagnosis) -> dict[str, str]:
    return {p.name: p.status for p in found.probes if p.status != "ok"}


class TestWholePlaces:
    def check(self, found: Diagnosis) -> None:
        assert bad(found) == {}
        assert [p.name for p in found.probes] == ALL
        assert found
        assert (found.can_read, found.can_save, found.can_overwrite) == (True, True, True)
        assert found.latency_ms is not None
        assert found.latency_ms > 0
        assert found.mb_per_s is not None
        assert found.mb_per_s > 0

    def test_a_folder_that_is_not_there_yet_is_not_there_afterwards(self, tmp_path: Path) -> None:
        self.check(ucformat.doctor(tmp_path / "a" / "b"))
        assert list(tmp_path.iterdir()) == []

    def test_what_lies_there_stays(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file").write_text("x")
        (tmp_path / "empty").mkdir()
        self.check(ucformat.doctor(str(tmp_path)))
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["empty", "file", "mine"]

    def test_memory(self) -> None:
        store = MemoryStore("doctor")
        self.check(ucformat.doctor("memory://doctor"))
        assert list(store.list()) == []

    def test_an_object_store(self, bucket: Bucket) -> None:
        place = bucket.place()
        found = ucformat.doctor(place)
        self.check(found)
        assert found.access.endpoint == bucket.endpoint
        assert found.access.region
        assert found.access.credentials == "environment (AWS_ACCESS_KEY_ID)"
        assert bucket.keys(place.removeprefix(f"s3://{bucket.name}/")) == []
        assert CANARY not in repr(found)


class TestReadOnly:
    def test_nothing_is_written(self, tmp_path: Path) -> None:
        ck = universal(tmp_path / "a")
        store = FaultyStore(LocalStore(tmp_path / "a"))
        found = ucformat.doctor(store, read_only=True)
        assert store.writes == 0
        assert found
        assert (found.can_read, found.can_save, found.can_overwrite) == (True, None, None)
        assert found.latency_ms is not None
        assert ucformat.verify(ck)

    def test_where_nothing_lies_nobody_knows(self, tmp_path: Path) -> None:
        found = ucformat.doctor(tmp_path, read_only=True)
        assert not found
        assert found.can_read is None
        assert bad(found) == {"ranges": "missing"}

    def test_a_file_that_is_no_checkpoint_does(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(bytes(range(256)))
        assert ucformat.doctor(tmp_path, read_only=True)

    def test_a_place_to_read_from_only(self, tmp_path: Path) -> None:
        universal(tmp_path / "a")
        found = ucformat.doctor(FsspecStore(f"local://{tmp_path / 'a'}"))
        assert not found
        assert bad(found) == {"write": "missing"}
        assert (found.can_read, found.can_save, found.can_overwrite) == (True, False, False)

    def test_plain_http(self, bucket: Bucket) -> None:
        place = bucket.place()
        universal(place)
        bucket.client.put_bucket_acl(Bucket=bucket.name, ACL="public-read")
        found = ucformat.doctor(place.replace("s3://", f"{bucket.endpoint}/"))
        assert not found
        assert {p.name: p.status for p in found.probes}["write"] == "missing"
        assert found.can_save is False
        assert found.access.credentials == "none"


class Liar(WrappedStore):
    """Says that all went well."""


class PutsAnyway(Liar):
    def put_if_absent(self, key: str, data: bytes) -> str:
        with self.inner.create(key) as out:
            out.write(data)
        return content_version(data)


class LooksThenPuts(Liar):
    looked = threading.Barrier(probes._WRITERS)

    def put_if_absent(self, key: str, data: bytes) -> str:
        there = any(i.key == key for i in self.inner.list(key.rpartition("/")[0]))
        if "/race-" in key:
            self.looked.wait(PATIENCE)  # all have, before one of them puts
        return (
            self.inner.put_if_absent(key, data)
            if there
            else PutsAnyway.put_if_absent(self, key, data)  # type: ignore[arg-type]
        )


class ReplacesAnyway(Liar):
    def replace(self, key: str, data: bytes, version: str) -> str:
        return self.inner.replace(key, data, self.inner.read_versioned(key)[1])


class ListsLate(Liar):
    def list(self, prefix: str = "") -> Iterator[Info]:
        return iter(list(self.inner.list(prefix))[:-1])


class ReadsShort(Liar):
    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        size = self.inner.info(key).size
        if offset + sum(b.nbytes for b in buffers) <= size:
            self.inner.read_into(key, offset, buffers, crcs)


class DeletesNothing(Liar):
    def delete(self, key: str) -> None:
        pass


LIARS = {
    PutsAnyway: ("put if absent", True, False, False),
    LooksThenPuts: ("put if absent", True, False, False),
    ReplacesAnyway: ("replace", True, True, False),
    ListsLate: ("list", True, False, False),
    ReadsShort: ("ranges", False, False, False),
    DeletesNothing: ("delete", True, True, False),
}


@pytest.mark.parametrize("liar", LIARS)
def test_what_a_place_only_says_it_does(liar: type[Liar], tmp_path: Path) -> None:
    name, *means = LIARS[liar]
    found = ucformat.doctor(liar(LocalStore(tmp_path)))
    assert name in bad(found)
    assert set(bad(found).values()) == {"failed"}
    assert [found.can_read, found.can_save, found.can_overwrite] == means
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_whichever_write_fails(tmp_path: Path) -> None:
    counting = FaultyStore(LocalStore(tmp_path))
    assert ucformat.doctor(counting)
    for step in range(1, counting.writes + 1, 3):
        store = FaultyStore(LocalStore(tmp_path), fail_write=step)
        found = ucformat.doctor(store)
        left = [p.text for p in found.probes if p.name == "clean up"]
        if left:
            (folder,) = tmp_path.iterdir()
            assert f"remove {folder} by hand" in left[0]
            LocalStore(tmp_path).delete_prefix(folder.name)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [1, 2, 9, 30, 60])
def test_ctrl_c_in_the_middle_leaves_nothing(step: int, tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), fail_write=step, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ucformat.doctor(store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.front("modules0-5")
@pytest.mark.parametrize(
    ("modules", "step"), [((doctoring,), 5), ((doctoring, probes, local, folders), 89)]
)
def test_ctrl_c_at_any_instant(
    modules: tuple[ModuleType, ...], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_SIZE", (1 << 20) + 17)
    instants = 0
    for _ in interruptions(lambda: ucformat.doctor(tmp_path / "x" / "y"), modules, step):
        assert list(tmp_path.iterdir()) == []
        instants += 1
    assert list(tmp_path.iterdir()) == []
    assert instants > 100


def test_ctrl_c_in_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ucformat.cli", "doctor", str(tmp_path / "x")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        wait_until(lambda: process.poll() is not None or (tmp_path / "x").exists())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 130)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    found = ucformat.doctor("s3://there-is-no-such-bucket-here/run7")
    assert not found
    assert bad(found) == {"write": "failed", "list": "failed"}
    assert "no such bucket" in found.probes[0].text


def test_an_endpoint_that_does_not_answer(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_ENDPOINT", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("UCP_DEADLINE", "0.5")
    found = ucformat.doctor("s3://bucket/run7")
    assert bad(found) == {"write": "failed", "list": "failed"}
    assert found.access.endpoint == "http://127.0.0.1:9"
    assert "hunter2" not in repr(found)


def test_where_the_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucformat.jobs.doctor import access_to

    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("UCP_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    forget()
    assert access_to("s3://b/x").credentials == "none"
    assert access_to("s3://b/x").endpoint == "Amazon's"
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = AKIA\naws_secret_access_key = {CANARY}\n"
    )
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    forget()
    found = access_to("s3://b/x")
    assert found.credentials == "chain (shared-credentials-file, profile team)"
    assert found.region == "eu-west-3"
    assert CANARY not in repr(found)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")
    assert access_to("gs://b/x").credentials == "environment (GOOGLE_APPLICATION_CREDENTIALS)"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", CANARY)
    assert access_to("az://b/x").credentials == "environment (AZURE_STORAGE_ACCOUNT_KEY)"
    assert access_to("/a/path") == access_to("memory://x")
    forget()


def forget() -> None:
    from ucformat.storage.clouds import boto_session

    clear = getattr(boto_session, "cache_clear", None)
    if clear is not None:
        clear()


class TestDisks:
    """Whether files that are not in the page cache are read past it from then on."""

    @pytest.fixture(autouse=True)
    def data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    @pytest.mark.parametrize(
        ("speeds", "direct"), [((100.0, 111.0), True), ((100.0, 109.0), False), (None, False)]
    )
    def test_what_is_kept(
        self,
        speeds: tuple[float, float] | None,
        direct: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(probes, "disk_throughput", lambda *_: speeds)
        found = ucformat.doctor(tmp_path / "disk")
        assert (found.disk_mb_per_s, found.direct_mb_per_s) == (speeds or (None, None))
        assert found.reads_direct is direct
        assert LocalStore(tmp_path / "disk" / "below").is_direct is direct
        assert not LocalStore(tmp_path / "diskette").is_direct
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "file").write_bytes(bytes(1 << 20))
        assert ucformat.doctor(tmp_path / "disk", read_only=True).disk_mb_per_s is None
        assert LocalStore(tmp_path / "disk").is_direct is direct

    def test_both_ways_are_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probes, "_drop", lambda _: True)  # as on a disk
        read_into, directs = LocalStore.read_into, []

        def counted(self: LocalStore, key: str, *more: Any) -> None:
            if key.endswith("/cold"):
                directs.append(self.is_direct)
            read_into(self, key, *more)

        monkeypatch.setattr(LocalStore, "read_into", counted)
        found = ucformat.doctor(tmp_path / "disk")
        assert (found.disk_mb_per_s or 0) > 0
        assert (found.direct_mb_per_s or 0) > 0
        assert set(directs) == {False, True}
        assert not (tmp_path / "disk").exists()

    def test_a_file_that_stays_cached_is_not_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(probes, "is_cached", lambda *_: True)
        assert ucformat.doctor(tmp_path / "disk").disk_mb_per_s is None


def test_a_url_with_a_secret_is_not_repeated() -> None:
    with pytest.raises(UsageError) as error:
        ucformat.doctor("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(error.value)


def stores(store: Store) -> None:
    """What is passed is a Store."""


stores(Liar(MemoryStore("typed")))
