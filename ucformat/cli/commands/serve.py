"""`ucp serve`: checkpoints over HTTP."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ucformat.cli.ui.catalogs import url_of_catalog
from ucformat.cli.ui.options import CATALOG, OPENING, SIZE, Opening, command
from ucformat.errors import UnsafeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output


@command
@click.argument("refs", metavar="[[NAME=]REF]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    default=8400,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The port; 0: any.",
)
@click.option(
    "--assets",
    metavar="DIR",
    help="A folder whose config.json, tokenizer and similar files are served with the weights.",
)
@click.option("--max-shard-bytes", type=SIZE, help="Bytes of a file of weights.  [default: 5GB]")
@click.option(
    "--tokens",
    metavar="FILE",
    help="The tokens that clients need, and what each may see: TOML, see docs/guides/serve.md.",
)
@click.option("--public", is_flag=True, help="Serve other machines without tokens.")
@OPENING
@CATALOG
def serve(
    refs: tuple[str, ...],
    host: str,
    port: int,
    assets: str | None,
    max_shard_bytes: int | None,
    tokens: str | None,
    public: bool,  # noqa: FBT001
    opening: Opening,
    out: Output,
) -> None:
    """Serve checkpoints over HTTP, as the Hugging Face hub does.

    REF is a run, or a reference to a checkpoint; without any, all checkpoints of the catalog are
    served. Nothing is copied: files are computed from the tensors when they are asked for. Set
    HF_ENDPOINT=http://127.0.0.1:8400 for programs that load models. --view, --assets and
    --max-shard-bytes say how all checkpoints become files of a model.
    """
    try:
        from ucformat.web.access import is_loopback, load_tokens
        from ucformat.web.app import make_app, run
        from ucformat.web.library import Library, Presentation
    except ImportError as error:
        raise UsageError(f"{error}", hint="pip install 'ucformat[web]'") from None
    accepted = [] if tokens is None else load_tokens(tokens)
    if not accepted and not public and not is_loopback(host):
        raise UnsafeError(
            f"other machines could read everything at {host}",
            hint="give clients tokens (--tokens FILE), or serve everybody (--public)",
        )
    options = {"assets": assets, "max_shard_bytes": max_shard_bytes}
    presentation = Presentation(
        opening.view, {name: value for name, value in options.items() if value is not None}
    )
    with _catalog_for(refs) as catalog:
        runs, places = _served(refs, opening, catalog)
        library = Library(catalog if runs or not refs else None, places, presentation, runs=runs)
        app = make_app(library, accepted, open_to_all=public)

        def started(url: str) -> None:
            what = "everything in the catalog" if not refs else ", ".join([*runs, *places])
            out.result(
                lambda: [f"{url}  serves {what}"],
                lambda: {"url": url, "pid": os.getpid()},
                lambda: [url],
            )
            out.note(
                f"HF_ENDPOINT={url} python -c \"AutoModel.from_pretrained('RUN')\"; stop with Ctrl-C"
            )

        with _logging_requests(out):
            run(app, host, port, started)


@contextmanager
def _logging_requests(out: Output) -> Iterator[None]:
    """Print a line for each request, unless the command is to be quiet."""
    logger = logging.getLogger("ucformat.web")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(lambda record: record.levelno < logging.WARNING)  # others are printed anyway
    if not out.quiet:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _catalog_for(refs: Sequence[str]) -> Iterator[Catalog | None]:
    """The catalog for reading; None if it is off or empty, and references are served."""
    from ucformat.catalog.catalog import Catalog
    from ucformat.settings import load_settings

    if refs and load_settings().existing_catalog() is None:
        yield None
        return
    with Catalog(url_of_catalog(), read_only=True) as catalog:
        yield catalog


def _served(
    refs: Sequence[str], opening: Opening, catalog: Catalog | None
) -> tuple[list[str], dict[str, Callable[[], Checkpoint]]]:
    """The runs, and what opens each other checkpoint, by the name of its repository."""
    from ucformat.catalog.filter.syntax import quoted

    runs: list[str] = []
    places: dict[str, Callable[[], Checkpoint]] = {}
    plain = Opening(None, opening.options)
    for text in refs:
        name, equals, ref = text.partition("=")
        if not equals or "/" in name:
            name, ref = _name_of(text), text
            exists = os.path.exists(text)  # noqa: PTH110 - never fails
            if catalog and not exists and catalog.find(f"run = {quoted(text)}", limit=1):
                runs.append(text)
                continue
        if name in places or name in runs:
            raise UsageError(
                f"two checkpoints would be served as {name!r}", hint=f"name one: NAME={ref}"
            )
        places[name] = lambda ref=ref: plain.open(ref)  # type: ignore[misc]
        places[name]()  # an error is told now
    return runs, places


def _name_of(ref: str) -> str:
    """The name under which a reference is served."""
    if ref.startswith("alias:"):
        return ref.removeprefix("alias:")
    run, at, _ = ref.rpartition("@")
    return run if at and "/" not in ref else ref.rstrip("/").rpartition("/")[2]
