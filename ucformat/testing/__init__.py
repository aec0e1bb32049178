"""What every source, exporter, store and integration must do: suites for pytest, for packages of one's own, too.

Each is a class whose tests a subclass runs over one implementation (CONTRIBUTING.md). They need
pytest and NumPy; `IntegrationSuite` needs torch.
"""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in ("exporters", "integrations", "reading", "sources", "stores")
    )
)

from ucformat.testing.exporters import ExporterSuite, checkpoint_of  # noqa: E402 - after the above
from ucformat.testing.integrations import IntegrationSuite  # noqa: E402
from ucformat.testing.sources import Sample, SourceSuite, truth  # noqa: E402
from ucformat.testing.stores import StoreTests  # noqa: E402

__all__ = [
    "ExporterSuite",
    "IntegrationSuite",
    "Sample",
    "SourceSuite",
    "StoreTests",
    "checkpoint_of",
    "truth",
]
