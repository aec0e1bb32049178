"""A process that commits where it is told to, when it is told to, and says what came of it."""

from __future__ import annotations

import sys
from typing import Any

from ucformat.errors import Conflict, UcformatError
from ucformat.format.commit import commit
from ucformat.jobs import convert as converting


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    def held(*args: Any) -> object:
        say("ready")  # all is written but the manifest
        sys.stdin.readline()
        return commit(*args)

    vars(converting)["commit"] = held
    for line in sys.stdin:
        src, dst, again = line.split()
        try:
            ck = converting.convert(src, dst, chunk_bytes=1 << 10, shard_bytes=16 << 10, overwrite=again == "overwrite")
        except Conflict as error:
            say("conflict", error.exit_code)
        except UcformatError as error:
            say("failed", repr(error.message))
        else:
            say("won", ck.id)


if __name__ == "__main__":
    main()
