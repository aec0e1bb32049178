"""What a rank asks another one that serves the files of its node, and how it is answered.

    client:  what, bytes of the key, offset, bytes, bytes from a row to the next, rows; the key   (35 bytes, and these)
    server:  outcome, and the bytes that follow; these                                           (9 bytes, and these)

An answer to `READ` is the bytes of all rows; to `INFO` and `LIST`, encoded descriptions of files; to a
request that failed, the message.
"""

from __future__ import annotations

import struct

from ucformat.errors import MissingData, NotFound, UcformatError, UnsafeError
from ucformat.storage.base import Info

__all__ = ["ANSWER", "ERRORS", "INFO", "LIST", "MOST_BYTES", "OTHER", "READ", "REQUEST", "Listing"]

REQUEST = struct.Struct("<BHqqqq")
ANSWER = struct.Struct("<Bq")
READ, INFO, LIST = range(3)

#: By outcome; 0 is success.
ERRORS: dict[int, type[UcformatError]] = {1: NotFound, 2: MissingData, 3: UnsafeError}
#: The outcome of any other failure.
OTHER = 9
#: Of the rows of one request, which the server has in memory.
MOST_BYTES = 8 << 20

Listing = tuple[Info, ...]
