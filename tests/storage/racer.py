"""A process that commits where it is told to, when it is told to, and says what came of it."""

from __future__ import annotations

import sys
from typing import Any

from ucformat.errors import Conflict, UcformatError
from ucformat.format.commit import commit
from ucformat.jobs import convert as converting
from ucformat.storage.base import content_version, exists
from ucformat.storage.objects import ObjectStore


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def put_if_not_seen(store: ObjectStore, key: str, data: bytes) -> str:
    """What a store that knows no conditions could do: look, then put."""
    if exists(store, key):
        raise Conflict(f"{key} exists")
    with store.create(key) as out:
        out.write(data)
    return content_version(data)


def main() -> None:
    if sys.argv[1:] == ["careless"]:
        setattr(ObjectStore, "put_if_absent", put_if_not_seen)  # noqa: B010 - a method, which mypy lets nobody replace

    def held(*args: Any) -> object:
        say("ready")  # all is written but the manifest
        sys.stdin.readline()
        return commit(*args)

    vars(converting)["commit"] = held
    for line in sys.stdin:
        src, dst, again = line.split()
        try:
            ck = converting.convert(
                src, dst, chunk_bytes=1 << 10, shard_bytes=16 << 10, overwrite=again == "overwrite"
            )
        except Conflict as error:
            say("conflict", error.exit_code)
        except UcformatError as error:
            say("failed", repr(error.message))
        else:
            say("won", ck.id)


if __name__ == "__main__":
    main()
