"""`ucp attest`: what is known of a checkpoint, for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ucformat.cli.ui.options import CATALOG, REF, SOURCE, command
from ucformat.cli.ui.output import dumps

if TYPE_CHECKING:
    from ucformat.cli.ui.output import Output


@command
@REF
@click.option(
    "--format",
    "form",
    type=click.Choice(["cyclonedx", "openlineage"]),
    default="cyclonedx",
    help="An ML-BOM of CycloneDX 1.6, or an event of OpenLineage.  [default: cyclonedx]",
)
@SOURCE
@CATALOG
def attest(
    ref: str,
    form: Literal["cyclonedx", "openlineage"],
    options: dict[str, Any] | None,
    out: Output,
) -> None:
    """Print what a checkpoint and the catalog know of it, as JSON for other tools.

    The hashes, the lineage, metrics, datasets, hyperparameters and software.
    """
    import ucformat

    document = ucformat.attest(ref, form, options=options)
    lines = dumps(document, indent=2).splitlines()
    out.result(lambda: lines, lambda: document, lambda: lines)
