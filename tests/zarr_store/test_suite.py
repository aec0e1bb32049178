"""The tests that zarr-python has for stores, of which those that write first are given what the checkpoint holds.

Its state machines (`zarr.testing.stateful`) have no step that does not follow from writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.storage
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.store import StoreTests

import ucformat
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.storage.local import LocalStore
from ucformat.zarr_store.store import CheckpointStore

if TYPE_CHECKING:
    from pathlib import Path

KEY, DATA = "weight/t/c/0", b"\x01\x02\x03\x04"
REFUSED = "store was opened in read-only mode and does not support writing"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
class TestZarrs(StoreTests[CheckpointStore, cpu.Buffer]):
    store_cls = CheckpointStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        arrays = {
            ("t", "weight"): np.frombuffer(DATA, np.uint8),
            ("u", "weight"): np.arange(6.0).reshape(2, 3),
        }
        ucformat.convert(
            Checkpoint(FakeSource.write(LocalStore(tmp_path / "fake"), arrays)), tmp_path / "ck"
        )
        return {"checkpoint": ucformat.open(tmp_path / "ck")}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> CheckpointStore:
        return zarr.core.sync.sync(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> CheckpointStore:
        return self.store_cls(**store_kwargs)

    async def set(self, store: CheckpointStore, key: str, value: Buffer) -> None:
        """Nothing is set; it has to be there."""
        assert (await self.get(store, key)).to_bytes() == value.to_bytes()

    async def get(self, store: CheckpointStore, key: str) -> Buffer:
        assert key == KEY
        return self.buffer_cls.from_bytes(DATA)

    def test_store_repr(self, store: CheckpointStore) -> None:
        assert str(store).endswith("/ck")
        assert repr(store) == f"CheckpointStore({str(store)!r})"

    def test_store_supports_writes(self, store: CheckpointStore) -> None:
        assert (store.supports_writes, store.supports_deletes) == (False, False)

    def test_store_supports_listing(self, store: CheckpointStore) -> None:
        assert store.supports_listing

    # --- tests of zarr-python that read, with a key of the checkpoint

    @pytest.mark.parametrize("key", [KEY])
    @pytest.mark.parametrize(
        ("data", "byte_range"),
        [
            (DATA, None),
            (DATA, RangeByteRequest(1, 4)),
            (DATA, OffsetByteRequest(1)),
            (DATA, SuffixByteRequest(1)),
        ],
    )
    async def test_get(
        self, store: CheckpointStore, key: str, data: bytes, byte_range: Any
    ) -> None:
        await super().test_get(store, key, data, byte_range)

    async def test_get_not_open(self, store_not_open: CheckpointStore) -> None:
        assert not store_not_open._is_open
        observed = await store_not_open.get(KEY, default_buffer_prototype())
        assert observed is not None
        assert observed.to_bytes() == DATA

    async def test_get_raises(self, store: CheckpointStore) -> None:
        with pytest.raises((ValueError, TypeError), match=r"Unexpected byte_range, got.*"):
            await store.get(KEY, default_buffer_prototype(), (0, 2))  # type: ignore[arg-type]

    async def test_get_many(self, store: CheckpointStore) -> None:
        keys = [KEY, "zarr.json", "weight/u/c/0/0"]
        wanted = [(key, default_buffer_prototype(), None) for key in keys]
        observed = {
            key: found.to_bytes()
            async for key, found in store._get_many(wanted)
            if found is not None
        }
        assert observed[KEY] == DATA
        assert observed.keys() == set(keys)

    @pytest.mark.parametrize(
        "key_ranges",
        [
            [],
            [("zarr.json", RangeByteRequest(0, 2))],
            [(KEY, RangeByteRequest(0, 2)), ("zarr.json", None)],
            [
                (KEY, RangeByteRequest(0, 2)),
                (KEY, SuffixByteRequest(2)),
                ("weight/u/c/0/0", OffsetByteRequest(2)),
            ],
        ],
    )
    async def test_get_partial_values(self, store: CheckpointStore, key_ranges: Any) -> None:
        observed = await store.get_partial_values(default_buffer_prototype(), key_ranges)
        expected = [
            await store.get(key, default_buffer_prototype(), span) for key, span in key_ranges
        ]
        assert [o and o.to_bytes() for o in observed] == [e and e.to_bytes() for e in expected]
        assert None not in expected

    @pytest.mark.parametrize("key", [KEY])
    @pytest.mark.parametrize("data", [DATA])
    async def test_getsize(self, store: CheckpointStore, key: str, data: bytes) -> None:
        await super().test_getsize(store, key, data)

    async def test_getsize_prefix(self, store: CheckpointStore) -> None:
        assert await store.getsize_prefix("weight/u/c") == 48

    async def test_exists(self, store: CheckpointStore) -> None:
        assert not await store.exists("foo")
        assert not await store.exists("weight/t")
        assert await store.exists(KEY)

    async def test_is_empty(self, store: CheckpointStore) -> None:
        assert not await store.is_empty("")
        assert await store.is_empty("weigh")
        assert not await store.is_empty("weight/")
        assert not await store.is_empty("weight")
        assert await store.is_empty("spam/")

    async def test_get_bytes(self, store: CheckpointStore) -> None:
        assert await store._get_bytes(KEY, prototype=default_buffer_prototype()) == DATA
        with pytest.raises(FileNotFoundError):
            await store._get_bytes("nonexistent_key", prototype=default_buffer_prototype())

    def test_get_bytes_sync(self, store: CheckpointStore) -> None:
        assert store._get_bytes_sync(KEY, prototype=default_buffer_prototype()) == DATA

    async def test_get_json(self, store: CheckpointStore) -> None:
        found = await store._get_json("weight/zarr.json", prototype=default_buffer_prototype())
        assert found["node_type"] == "group"

    def test_get_json_sync(self, store: CheckpointStore) -> None:
        found = store._get_json_sync("weight/t/zarr.json", prototype=default_buffer_prototype())
        assert found["shape"] == [4]

    async def test_serializable_store(self, store: CheckpointStore) -> None:
        import pickle

        new = pickle.loads(pickle.dumps(store))  # noqa: S301
        assert new == store
        assert new.read_only == store.read_only
        assert (await new.get(KEY, default_buffer_prototype())).to_bytes() == DATA

    # --- writing is refused

    async def test_set(self, store: CheckpointStore) -> None:  # type: ignore[override]
        for writes in (store.set, store.set_if_not_exists):
            with pytest.raises(ValueError, match=REFUSED):
                await writes(KEY, self.buffer_cls.from_bytes(b"new"))
        assert (await store._get_bytes(KEY, prototype=default_buffer_prototype())) == DATA

    async def test_set_not_open(self, store_not_open: CheckpointStore) -> None:
        await self.test_set(store_not_open)

    async def test_set_many(self, store: CheckpointStore) -> None:
        with pytest.raises(ValueError, match=REFUSED):
            await store._set_many([(KEY, self.buffer_cls.from_bytes(b"new"))])

    async def test_set_if_not_exists(self, store: CheckpointStore) -> None:
        await self.test_set(store)

    async def test_clear(self, store: CheckpointStore) -> None:
        for removes in (store.clear(), store.delete(KEY), store.delete_dir("weight")):
            with pytest.raises(ValueError, match=REFUSED):
                await removes
        assert await store.exists(KEY)

    # --- listing: a copy in a store of zarr-python lists the same (test_store.py)

    async def test_list(self, store: CheckpointStore) -> None:
        expected = [
            "zarr.json",
            "weight/zarr.json",
            "weight/t/zarr.json",
            KEY,
            "weight/u/zarr.json",
            "weight/u/c/0/0",
        ]
        assert sorted([key async for key in store.list()]) == sorted(expected)

    async def test_list_prefix(self, store: CheckpointStore) -> None:
        expected = [key async for key in store.list()]
        for prefix in (
            "",
            "w",
            "weight",
            "weight/",
            "weight/t",
            "weight/t/c",
            "weight/u/c/0/",
            "zarr",
            "x",
            "/",
        ):
            found = [key async for key in store.list_prefix(prefix)]
            assert sorted(found) == sorted(key for key in expected if key.startswith(prefix))

    async def test_list_empty_path(self, store: CheckpointStore) -> None:
        assert [key async for key in store.list_prefix("")] == [key async for key in store.list()]

    async def test_list_dir(self, store: CheckpointStore) -> None:
        for root, expected in {
            "": ["weight", "zarr.json"],
            "weight": ["t", "u", "zarr.json"],
            "weight/t": ["c", "zarr.json"],
            "weight/t/c": ["0"],
            "weight/u/c": ["0"],
            "weight/u/c/0": ["0"],
            "weight/u/c/0/0": [],
            "weight/u/c/1": [],
            "weight/x": [],
            "weights": [],
        }.items():
            for path in (root, f"{root}/") if root else (root,):
                assert sorted([name async for name in store.list_dir(path)]) == expected, path
