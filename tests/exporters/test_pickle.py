"""What exporters pickle: plain values and known classes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from ucformat.errors import UnsupportedError
from ucformat.exporters.pickle import Call, Global, Instance, dump

SYSTEM = Global("os", "system")


@pytest.mark.parametrize(
    "value", [SYSTEM, Call(SYSTEM, ("true",)), Instance(SYSTEM, {}), {"a": [(SYSTEM,)]}]
)
def test_a_global_that_is_not_allowed_is_not_written(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"os\.system is not written to a pickle"):
        dump(value, lambda _: "")
