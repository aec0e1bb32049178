"""The processes of a JAX program as the ranks of a save or load, which meet at JAX's coordination service."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax

from ucformat.errors import UsageError
from ucformat.torch.comm.group import Members, group_alone, group_at, group_for_call

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from ucformat.torch.comm.group import Group


class CoordinationStore:
    """The key-value store of JAX's coordination service, as a `MeetingStore`.

    Attributes:
        host, port: where the service is.
    """

    def __init__(self, client: Any, address: str, prefix: str = "") -> None:
        self._client, self._address, self._prefix = client, address, prefix
        host, _, port = address.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)

    def below(self, prefix: str) -> CoordinationStore:
        """Return the part of the store whose names have a prefix."""
        return CoordinationStore(self._client, self._address, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str) -> None:
        """See MeetingStore."""
        self._client.key_value_set(self._prefix + key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """See MeetingStore."""
        return str(self._client.key_value_try_get(self._prefix + key)).encode()

    def add(self, key: str, amount: int) -> int:
        """See MeetingStore."""
        return int(self._client.key_value_increment(self._prefix + key, amount))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """See MeetingStore."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            left = max(1, int(1000 * (end - time.monotonic())))
            self._client.blocking_key_value_get(self._prefix + key, left)

    def check(self, keys: list[str]) -> bool:
        """See MeetingStore."""
        try:
            return all(self.get(key) is not None for key in keys)
        except RuntimeError:  # one is not set
            return False

    def delete_key(self, key: str) -> bool:
        """See MeetingStore."""
        self._client.key_value_delete(self._prefix + key)
        return True

    def has_extended_api(self) -> bool:
        """See MeetingStore."""
        return False


@lru_cache(maxsize=1)
def _store_of(client: Any, address: str) -> CoordinationStore:
    """The store of a client, the same for each call."""
    return CoordinationStore(client, address)


def processes_for_call(call: str, place: object, timeout: float) -> AbstractContextManager[Group]:
    """Use the group of all processes of the program for one collective call; see `group_for_call`."""
    return group_for_call(call, place, None, timeout, _group_of_processes)


def _group_of_processes(_: None, timeout: float, call: str) -> Group:
    count = jax.process_count()
    if count == 1:
        return group_alone()
    from jax._src.distributed import global_state  # there is no public way to the service

    if getattr(global_state, "client", None) is None:
        raise UsageError(
            f"this program has {count} processes that have no coordination service in common",
            hint="start them by jax.distributed.initialize()",
        )
    store = _store_of(global_state.client, global_state.coordinator_address)
    ranks = tuple(range(count))
    return group_at(Members(store, store.below, ranks, jax.process_index(), count), timeout, call)
