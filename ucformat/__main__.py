"""`python -m ucformat` is `ucp`; in the processes that torchrun starts, they run a job together, and rank 0 reports."""

from __future__ import annotations

import os
import sys

from ucformat.cli.main import main
from ucformat.cli.ui import where

if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
    where.default_on = "torchrun"
    if os.environ["RANK"] != "0":
        sys.argv.append("--quiet")
main()
