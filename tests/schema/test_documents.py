"""The schemas of the documents beside checkpoints are published as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ucformat.schema.documents import CatalogDoc, ChannelDoc, NeededByDoc, TombstoneDoc

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("catalog-document", CatalogDoc),
        ("channel", ChannelDoc),
        ("needed-by", NeededByDoc),
        ("tombstone", TombstoneDoc),
    ],
)
def test_the_published_schema_is_the_current_one(name: str, document: Any) -> None:
    """Else write it anew: json.dumps(document.model_json_schema(mode="validation"), indent=2)."""
    published = json.loads((SCHEMAS / f"{name}-v1.json").read_text())
    assert published == document.model_json_schema(mode="validation")
