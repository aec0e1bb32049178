"""`ucp sign`: signatures of manifests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ucformat.cli.ui.options import CATALOG, REF, apply_options, command
from ucformat.cli.ui.output import Heading
from ucformat.cli.ui.where import workers_option
from ucformat.errors import UsageError
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.ui.output import Output
    from ucformat.jobs.sign import Signature

_PASSWORD = "UCP_KEY_PASSWORD"  # noqa: S105 - the name of a variable

_BY = apply_options(
    click.option("--key", metavar="FILE", help="The private key (PEM; P-256, P-384 or P-521)."),
    click.option("--certificate", metavar="FILE", help="A certificate of the key, to include."),
    click.option(
        "--chain",
        metavar="FILE",
        multiple=True,
        help="Certificates between that one and its authority's. May be repeated.",
    ),
    click.option(
        "--sigstore",
        is_flag=True,
        help="Sign as whom the CI job's token, or a login in the browser, identifies.",
    ),
)


@command
@REF
@_BY
@click.option("--files", is_flag=True, help="Read all files, and sign their SHA-256, too.")
@click.option(
    "--signature", metavar="FILE", help="Write it to this file.  [default: beside the manifest]"
)
@click.option("--overwrite", is_flag=True, help="Replace the signature that is there.")
@workers_option("files to read")
@CATALOG
def sign(
    ref: str,
    key: str | None,
    certificate: str | None,
    chain: tuple[str, ...],
    sigstore: bool,  # noqa: FBT001
    files: bool,  # noqa: FBT001
    signature: str | None,
    overwrite: bool,  # noqa: FBT001
    workers: int | None,
    out: Output,
) -> None:
    """Sign a checkpoint, in the format of OpenSSF Model Signing.

    The manifest is signed, whose digests cover all other files: those of tensors detect accidents,
    not forgeries, unless --files signs them, too. The password of an encrypted key is asked for, or
    taken from UCP_KEY_PASSWORD.
    """
    import ucformat

    with out.progress("signing") as progress:
        signed = ucformat.sign(
            ref,
            key=key,
            password=None if key is None else _password(key),
            certificate=certificate,
            chain=chain,
            sigstore=sigstore,
            files=files,
            signature=signature,
            overwrite=overwrite,
            workers=workers,
            progress=progress,
        )
    data = {
        "path": signed.path,
        "id": signed.id,
        "files": signed.files,
        "bytes": signed.nbytes,
    }
    out.result(lambda: _describe(signed), lambda: data, lambda: [signed.path])


def _password(key: str) -> bytes | None:
    """The password of an encrypted key."""
    from ucformat.settings import local_path

    try:
        if b"ENCRYPTED" not in local_path(key).read_bytes():
            return None
    except OSError:  # an error of the job
        return None
    if (given := os.environ.get(_PASSWORD)) is not None:
        return given.encode()
    if not os.isatty(0):
        raise UsageError(f"the key {key} is encrypted", hint=f"set {_PASSWORD}")
    password: str = click.prompt(f"password of {key}", hide_input=True, err=True)
    return password.encode()


def _describe(signed: Signature) -> Iterator[str]:
    yield Heading(signed.path)
    if signed.files == 1:
        yield "  signed: the manifest, which has digests of all else"
        yield "  those of tensors detect accidents, not forgeries; --files signs every file"
    else:
        yield f"  signed: the manifest and {plural(signed.files - 1, 'file')}, {bytes_text(signed.nbytes)}"
