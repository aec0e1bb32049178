"""Signs a checkpoint: its manifest, and if asked for all its files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UsageError,
    first_names,
)
from ucformat.format.structure import MOUNT, Problem
from ucformat.jobs.copy import listed
from ucformat.jobs.run import run, workers_for
from ucformat.references import open_reference
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.settings import local_path
from ucformat.signatures import (
    SIGNATURE,
    make_signature,
    manifest_digest,
    package,
    put_signature,
    refuse_uncovered,
    signable,
)
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike
    from pathlib import Path

    from ucformat.format.audit import AuditItem
    from ucformat.format.universal import Universal
    from ucformat.storage.base import Bytes, FileWriter

__all__ = ["Signature", "sign"]

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Signature:
    """The result of signing.

    Attributes:
        path: the url or path of the signature.
        id: the checkpoint's id.
        files: the number of files whose SHA-256 it states, the manifest included.
        nbytes: their size in bytes, without the manifest's.
    """

    path: str
    id: str
    files: int
    nbytes: int


def sign(
    place: str | PathLike[str] | Checkpoint,
    *,
    key: str | PathLike[str] | None = None,
    password: bytes | None = None,
    certificate: str | PathLike[str] | None = None,
    chain: Iterable[str | PathLike[str]] = (),
    sigstore: bool = False,
    files: bool = False,
    signature: str | PathLike[str] | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Signature:
    """Sign the manifest of a universal checkpoint, in the format of OpenSSF Model Signing.

    It takes milliseconds: the manifest has digests of all else. Those of tensors detect accidents,
    not forgeries; with `files` every file is read, compared with its checksums, and its SHA-256
    signed, too. Needs the package model-signing.

    Args:
        place: a checkpoint, or its path, url or reference.
        key: the file of a private key (PEM; NIST P-256, P-384 or P-521).
        password: of the key, if it is encrypted.
        certificate: the file of a certificate of the key, which the signature then contains.
        chain: files of the certificates between that one and its authority's.
        sigstore: sign with an identity instead of a key: that of the CI job, else of whoever logs
            in in the browser. Needs the network.
        files: sign the checkpoint's files, too.
        signature: a local file for the signature (default: `manifest.json.sig` beside the
            manifest).
        overwrite: replace a signature that is there.
        workers: files read at once (default: one for each core; for object stores eight at least).
        progress: called with the bytes done and the bytes in all.

    Raises:
        Conflict: there is a signature already.
        UnsafeError: the manifest has neither digest nor fingerprint of some tensor.
        IntegrityError: a file is damaged.
    """
    config = _signer(key, password, certificate, chain, sigstore=sigstore)
    ck = place if isinstance(place, Checkpoint) else open_reference(place)
    source = signable(ck)
    path = None if signature is None else local_path(signature)
    if not overwrite and (exists(source.store, SIGNATURE) if path is None else path.exists()):
        raise _exists(source.store.url, path)
    chosen = _own_files(source) if files else []
    digests = {MANIFEST: manifest_digest(source)}
    refuse_uncovered(source, {MANIFEST: "", **{item.file: "" for item in chosen}})
    digests |= _hashed(source, chosen, workers, progress)
    name = source.store.url.rstrip("/").rpartition("/")[2] or "checkpoint"
    try:
        data = make_signature(digests, name, config)
    except Exception as error:
        raise UcformatError(
            f"the checkpoint at {source.store.url} could not be signed: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if path is not None:
        try:
            with path.open("wb" if overwrite else "xb") as file:
                file.write(data)
        except OSError as error:
            raise PermissionDenied(f"{path} cannot be written: {error.strerror}") from error
    else:
        if exists(source.store, TOMBSTONE):
            raise Conflict(f"the checkpoint at {source.store.url} is being deleted")
        if not put_signature(source.store, data, overwrite=overwrite):
            raise _exists(source.store.url, path)
    where = f"{source.store.url}/{SIGNATURE}" if path is None else str(path)
    return Signature(where, ck.id, len(digests), sum(item.nbytes for item in chosen))


def _signer(
    key: str | PathLike[str] | None,
    password: bytes | None,
    certificate: str | PathLike[str] | None,
    chain: Iterable[str | PathLike[str]],
    *,
    sigstore: bool,
) -> Any:
    """The package's configuration of a signer."""
    if sigstore == (key is not None):
        raise UsageError("give either a key to sign with, or sigstore")
    chain = tuple(chain)
    if certificate is None and chain:
        raise UsageError("a chain of certificates needs the certificate of the key")
    if certificate is not None and (key is None or password is not None):
        raise UsageError(
            "a certificate needs its key, which must not be encrypted",
            hint="decrypt it: openssl pkey -in KEY -out FILE",
        )
    config = package().signing.Config()
    if key is None:
        try:
            return config.use_sigstore_signer(use_ambient_credentials=True)
        except Exception as error:
            raise UcformatError(
                f"sigstore cannot be reached: {type(error).__name__}: {str(error)[:300]}",
                hint="it needs the network; --key FILE does not",
            ) from error
    try:
        if certificate is None:
            return config.use_elliptic_key_signer(private_key=local_path(key), password=password)
        return config.use_certificate_signer(
            private_key=local_path(key),
            signing_certificate=local_path(certificate),
            # the package cannot parse an empty chain
            certificate_chain=[local_path(c) for c in chain or (certificate,)],
        )
    except OSError as error:
        raise NotFound(f"{error.filename or key} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{key} cannot be used to sign: {' '.join(str(error).split())[:300]}",
            hint="it must be a private key in PEM, on the curve P-256, P-384 or P-521: "
            "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY",
        ) from None


def _exists(url: str, path: Path | None) -> Conflict:
    return Conflict(
        f"{path or f'{url}/{SIGNATURE}'} exists",
        hint="--overwrite replaces it; --signature FILE writes another",
    )


def _own_files(source: Universal) -> list[AuditItem]:
    return [item for item in listed(source) if not item.file.startswith(MOUNT)]


class _Hash:
    """What a check of a file writes to, in place of a copy."""

    def __init__(self) -> None:
        self.state = hashlib.sha256()

    def write(self, data: Bytes) -> None:
        self.state.update(data)


def _hashed(
    source: Universal,
    chosen: list[AuditItem],
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> dict[str, str]:
    """The SHA-256 of files, which are compared with their checksums in the same pass."""

    def check(item: AuditItem) -> tuple[str, list[Problem]]:
        out = _Hash()
        _, problems = item.check(source.store, cast("FileWriter", out))
        return out.state.hexdigest(), problems

    digests, done, total = dict[str, str](), 0, sum(item.nbytes for item in chosen)
    for item, (digest, problems) in run(check, chosen, workers or workers_for(source.store)):
        if problems:
            raise IntegrityError(
                f"{source.store.url} is damaged, and was not signed: "
                f"{first_names(map(str, problems), _NAMED, '; ')}",
                hint="ucp verify names all damage",
            )
        digests[item.file] = digest
        done += item.nbytes
        if progress is not None:
            progress(done, total)
    return digests
