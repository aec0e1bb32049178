"""A thread pool without threads, for tests that need the same calls in the same order each time."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Inline"]


class Inline:
    """Takes the place of a `ThreadPoolExecutor`, and does its work at once, in the thread that asks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            found = work(*args, **more)
        except Exception as error:  # noqa: BLE001 - as a pool does; what is no Exception ends the test's command
            done.set_exception(error)
        else:
            done.set_result(found)
        return done

    def map(self, work: Callable[..., Any], *items: Any) -> Iterator[Any]:
        return map(work, *items)

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass
