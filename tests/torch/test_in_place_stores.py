"""The safetensors form of a save on a real HTTP endpoint of S3: any part may fail, and any rank be killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open

import ucformat
from tests.storage.proxy import Proxy, answer
from tests.torch.ranks import KILLED, Ranks
from tests.torch.test_in_place import verified
from ucformat.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.s3 import Bucket
    from tests.storage.proxy import Fault, Request

pytest.importorskip("torch")
RANKS = Ranks("tests.torch.in_place_program")


def intact(place: str, bucket: Bucket, found: list[Any], folder: Path) -> None:
    """The checkpoint holds what was saved, in the file of an export, and no upload is left."""
    ck = verified(place, found[0][0])
    key = f"{ck.hf_url}/model.safetensors".removeprefix(f"s3://{bucket.name}/")
    own = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    exported = folder / "exported"
    ucformat.export(ck, exported, "safetensors")
    assert own == (exported / "model.safetensors").read_bytes()
    with safe_open(exported / "model.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("columns"), ck["columns"][...])
    assert uploads(bucket) == []


def uploads(bucket: Bucket) -> list[str]:
    return [
        u["Key"]
        for u in bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", ())
    ]


@pytest.mark.front("False")
@pytest.mark.parametrize("boto", [True, False])
def test_ranks_write_one_file(boto: bool, bucket: Bucket, tmp_path: Path) -> None:
    place = bucket.place()
    found = RANKS.run("on_store", 3, tmp_path, url=place, boto=boto)
    writers = sum(written > 0 for _, written in found)
    assert writers == (3 if boto else 1)
    intact(place, bucket, found, tmp_path)


def test_in_the_background(bucket: Bucket, tmp_path: Path) -> None:
    place = bucket.place()
    intact(
        place,
        bucket,
        RANKS.run("on_store", 2, tmp_path, url=place, boto=True, background=True),
        tmp_path,
    )


@pytest.mark.matrix
@pytest.mark.parametrize(("victim", "boto"), [(0, True), (0, False), (2, True)])
def test_a_killed_rank_commits_nothing(
    victim: int, boto: bool, bucket: Bucket, tmp_path: Path
) -> None:
    place = bucket.place()
    found = RANKS.run("on_store", 3, tmp_path, url=place, boto=boto, victim=victim, after=1)
    assert found[victim] == KILLED
    assert all(isinstance(m, str) for rank, m in enumerate(found) if rank != victim)
    with pytest.raises(NotFound):
        ucformat.open(place)
    left = uploads(bucket)
    if victim:  # rank 0 has aborted them
        assert left == []
    for key in left:
        (upload,) = (
            u
            for u in bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
            if u["Key"] == key
        )
        bucket.client.abort_multipart_upload(
            Bucket=bucket.name, Key=key, UploadId=upload["UploadId"]
        )
    intact(place, bucket, RANKS.run("on_store", 3, tmp_path, url=place, boto=boto), tmp_path)


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(bucket.endpoint) as made:
        monkeypatch.setenv("UCP_ENDPOINT", made.endpoint)
        yield made


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.target


def first_of_each(
    chosen: Callable[[Request], bool], fault: Fault
) -> Callable[[Request], Fault | None]:
    """A fault of the first of equal requests."""
    seen: set[str] = set()

    def choose(request: Request) -> Fault | None:
        if not chosen(request) or request.target in seen:
            return None
        seen.add(request.target)
        return fault

    return choose


@pytest.mark.matrix
@pytest.mark.parametrize(("fault", "part"), [("reset", True), ("lied", True), ("lost", False)])
def test_a_request_is_repeated(
    fault: Fault, part: bool, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    """Also one that was executed, of which the answer says nothing, or that it failed."""
    proxy.choose = first_of_each(is_part if part else lambda r: r.completes, fault)
    place = bucket.place()
    found = RANKS.run("on_store", 2, tmp_path, url=place, boto=True)
    intact(place, bucket, found, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("part", [True, False])
def test_a_request_that_is_refused_fails_the_save(
    part: bool, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    denied = answer(
        "403 Forbidden", "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    )
    asked = 0

    def choose(request: Request) -> bytes | None:
        nonlocal asked
        asked += is_part(request)
        return denied if (is_part(request) and asked == 2 if part else request.completes) else None

    proxy.choose = choose
    place = bucket.place()
    found = RANKS.run("on_store", 3, tmp_path, url=place, boto=True)
    for message in found:
        assert message.startswith("PermissionDenied: ")
        assert "model.safetensors: AccessDenied: no" in message
    assert uploads(bucket) == []
    assert bucket.keys(place.rpartition("/")[2]) == []
    proxy.choose = lambda _: None
    intact(place, bucket, RANKS.run("on_store", 3, tmp_path, url=place, boto=True), tmp_path)


def test_one_process_writes_memory() -> None:
    import torch

    from ucformat.torch import save

    state = {"w": torch.arange(5000.0).reshape(50, 100), "n": torch.tensor(3)}
    save(state, "memory://in-place", form="safetensors")
    ck = ucformat.open("memory://in-place")
    ucformat.verify(ck).raise_if_damaged()
    assert np.array_equal(ck["w"][...], state["w"].numpy())
    assert str(ck.hf_url).startswith("memory://in-place/data/")
