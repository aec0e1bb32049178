"""A client sees what its token's filter allows, whatever it asks for."""

from __future__ import annotations

import pytest

from tests.catalog.acts import put
from ucformat.catalog.catalog import Catalog
from ucformat.errors import UsageError
from ucformat.web.library import Access, Library


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    catalog = Catalog(f"sqlite:///{tmp_path_factory.mktemp('scope') / 'catalog.db'}")
    for n in range(4):
        metrics = {"loss": 1.0} if n else {"secret_metric": 1.0}
        put(catalog, n, run="open" if n else "secret", metrics=metrics)
    return Library(catalog)


def test_no_filter_leads_out_of_a_scope(library: Library) -> None:
    access = Access("somebody", "run = 'open'")
    assert len(library.entries(access)) == 3
    assert len(library.entries(access, "step >= 0 or step < 9")) == 3
    for where in ("step > 99) or (step >= 0", "step > 99) or (run = 'secret'", "step = 0 )", "("):
        with pytest.raises(UsageError) as caught:
            library.entries(access, where)
        assert "'open'" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        library.entries(access, "metric.secret_metri = 1")
    assert "secret_metric " not in f"{caught.value} "
    with pytest.raises(UsageError, match="secret_metric"):  # who sees all is helped
        library.entries(Access(), "metric.secret_metri = 1")
