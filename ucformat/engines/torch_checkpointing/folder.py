"""The files of a checkpoint of torch_checkpointing, by name."""

from __future__ import annotations

import re

#: The pickled description of what was saved with a resharder.
METADATA = "metadata.pkl"
#: A file of a rank, where the program names no other: the item and the rank.
DEFAULT_FILE = re.compile(r"([A-Za-z0-9_-]+(?<!_rank))_(\d+)\.pt")  # `_rank_0` is another tool's
