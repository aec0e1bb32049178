"""What coverage-guided fuzzing kept (`make fuzz`): inputs that together reach most of what reads strangers' bytes."""

from __future__ import annotations

import pytest

from tests.fuzz import targets


@pytest.mark.parametrize("target", targets.TARGETS)
def test_inputs_that_were_kept(target: str) -> None:
    """Each is read, or refused, and two ways to read it agree."""
    read = 0
    try:
        for file in sorted((targets.CORPUS / target).iterdir()):
            try:
                targets.TARGETS[target](file.read_bytes())
            except targets.REFUSED:
                continue
            read += 1
    finally:
        targets.leave()
    assert read, "each was refused: they are of another form of the documents; make the seeds anew"
