"""`python -m ucformat.cli` is `ucp`."""

from __future__ import annotations

from ucformat.cli.main import main

main()
