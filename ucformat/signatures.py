"""Signatures of manifests in the format of OpenSSF Model Signing, which the package model-signing makes and verifies.

A signature states the SHA-256 of the manifest, and perhaps of other files of the checkpoint
(docs/spec/format.md, "Signature"). What it states is read before it is verified, for exact errors;
that it was signed, and that the manifest is the one that was, only the package decides.
"""

from __future__ import annotations

import logging
import sys
from base64 import b64decode
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.format.digest import whole_and_own_digest
from ucformat.geometry.tensor import single_extents
from ucformat.schema import MANIFEST
from ucformat.schema.values import loads
from ucformat.settings import load_settings, local_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.universal import Universal
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.storage.base import Store

__all__ = ["SIGNATURE", "Signed", "check_signed"]

#: The file of the signature, beside the manifest.
SIGNATURE = "manifest.json.sig"
#: Stands for the signers in the settings, where signers are given.
TRUSTED = "trusted"

#: How a signature says who signed: by a key, by a certificate of one, or by an identity.
Kind = Literal["key", "certificate", "sigstore"]

_PREDICATE = "https://model_signing/signature/v1.0"
_MATERIAL: dict[str, Kind] = {
    "publicKey": "key",
    "x509CertificateChain": "certificate",
    "certificate": "sigstore",
}
#: What others put beside a manifest: the package's own commands must not take it for unsigned files.
_NOT_SIGNED = [SIGNATURE, "attempts", "needed-by", "ucformat-catalog.json", ".ucf-lock"]
_MAX_BYTES = 256 << 20  # of a signature: it states a hundred bytes for each file
_NAMED = 5
_log = logging.getLogger("ucformat")


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signature states, whether or not it is valid: the SHA-256 of files, as hexadecimal digits, by key."""

    kind: Kind
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Signed:
    """A manifest with a valid signature.

    Attributes:
        by: which of the signers that were asked for has signed it.
        digests: the SHA-256 of the files that the signature covers, the manifest among them.
    """

    by: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Signer:
    """Whose signature is accepted: the holder of a key, of a certificate by an authority, or an identity."""

    kind: Kind
    text: str  # as the user gave it
    value: tuple[str, ...]  # of an identity its issuer and name, else the path of the PEM file

    def verify(self, signature: Path, digests: Mapping[str, str]) -> None:
        """Raise any exception unless it has signed exactly these digests."""
        config = package().verifying.Config()
        if self.kind == "sigstore":
            config.use_sigstore_verifier(oidc_issuer=self.value[0], identity=self.value[1])
        elif self.kind == "key":
            config.use_elliptic_key_verifier(public_key=self.value[0])
        else:
            config.use_certificate_verifier(certificate_chain=list(self.value))
        config.set_hashing_config(_Hashed(digests))
        with redirect_stdout(sys.stderr):  # it prints warnings
            config.verify(Path(MANIFEST), signature)


def check_signed(
    ck: Checkpoint,
    signed_by: str | PathLike[str] | Iterable[str | PathLike[str]],
    signature: str | PathLike[str] | None = None,
) -> Signed:
    """Check that the manifest that was opened is signed, and covers the bytes of all tensors.

    Args:
        signed_by: whose signature is accepted; of several, any one suffices. Each is the path of a
            public key or of the certificates of an authority (PEM), `sigstore:ISSUER,IDENTITY`, or
            `trusted` for the signers in the settings.
        signature: a local file with the signature (default: the one beside the manifest).

    Raises:
        UnsafeError: there is no signature, it is not by one of them, it is of another manifest, or
            the manifest does not cover all tensors.
    """
    source, signers = signable(ck), _signers(signed_by)
    path = None if signature is None else local_path(signature)
    where = f"{source.store.url}/{SIGNATURE}" if path is None else str(path)
    data = read_signature(source.store) if path is None else _read_local(path)
    if data is None:
        raise UnsafeError(
            f"{source.store.url} is not signed: it has no {SIGNATURE}",
            hint="sign it: ucp sign; or name the file of its signature: --signature FILE",
        )
    statement = read_statement(data, where)
    digest = manifest_digest(source)
    if statement.digests.get(MANIFEST) != digest:
        raise UnsafeError(
            f"{where} is the signature of another manifest: the one at {source.store.url} has the "
            f"SHA-256 {digest}, and was committed later, or altered",
            hint=f"if it is right, sign it: ucp sign {source.store.url} --overwrite",
        )
    by = _verified_by(signers, statement, data, where)
    refuse_uncovered(source, statement.digests)
    return Signed(by, statement.digests)


def signable(ck: Checkpoint) -> Universal:
    """The universal checkpoint whose manifest is signed; any other is refused."""
    if ck.universal is None:
        raise UnsupportedError(
            f"{ck.url} is a checkpoint of {ck.kind}, which has no manifest that can be signed",
            hint="`ucp convert SRC DST` makes a universal checkpoint of it",
        )
    return ck.universal


def _verified_by(signers: list[_Signer], statement: Statement, data: bytes, where: str) -> str:
    """The signer whose signature this is."""
    reasons = []
    with TemporaryDirectory(prefix="ucformat-") as folder:
        file = Path(folder) / SIGNATURE
        file.write_bytes(data)
        for signer in signers:
            if signer.kind != statement.kind:
                reasons.append(f"{signer.text} is a {signer.kind}")
                continue
            try:
                signer.verify(file, statement.digests)
            except UcformatError:
                raise
            except Exception as error:  # noqa: BLE001 - of the package, cryptography, sigstore or OpenSSL
                reason = " ".join(str(error).split())[:300] or "the signature does not match"
                reasons.append(f"{signer.text}: {reason}")
            else:
                return signer.text
    raise UnsafeError(
        f"{where}, which was made with a {statement.kind}, is by none of the signers that are "
        f"accepted: {first_names(reasons, _NAMED, '; ')}",
        hint="--signed-by and the setting `signers` say whose signatures are accepted",
    )


def read_statement(data: bytes, where: str) -> Statement:
    """Read what a signature states, without verifying it."""
    try:
        bundle = loads(data)
        material = bundle["verificationMaterial"].keys() & _MATERIAL.keys()
        statement = loads(b64decode(bundle["dsseEnvelope"]["payload"], validate=True))
        predicate = statement["predicate"]
        version, method = statement["predicateType"], predicate["serialization"]["method"]
        resources = {r["name"]: (r["algorithm"], r["digest"]) for r in predicate["resources"]}
        (kind,) = material
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{where} is not a signature of OpenSSF Model Signing: {str(error)[:200]}",
            hint="restore it from another copy, or sign the checkpoint again",
        ) from None
    algorithms = {algorithm for algorithm, _ in resources.values()}
    if (version, method) != (_PREDICATE, "files") or algorithms != {"sha256"}:
        raise UnsupportedError(
            f"{where} states {method} of {version!r} by {', '.join(sorted(map(str, algorithms)))}: "
            "only SHA-256 digests of whole files are supported",
            hint="sign the manifest again: ucp sign",
        )
    digests = {name: digest for name, (_, digest) in resources.items()}
    # of a single file, the package calls it so
    return Statement(_MATERIAL[kind], {MANIFEST: digests["."]} if {*digests} == {"."} else digests)


def make_signature(digests: Mapping[str, str], name: str, config: Any) -> bytes:
    """Sign the digests of files.

    Args:
        name: of the model, which only informs.
        config: the `model_signing.signing.Config` with a signer.
    """
    with TemporaryDirectory(prefix="ucformat-") as folder:
        file = Path(folder) / SIGNATURE
        config.set_hashing_config(_Hashed(digests)).sign(Path(name), file)
        return file.read_bytes()


def manifest_digest(source: Universal) -> str:
    """The SHA-256 of the manifest's file, which must be the one that was opened."""
    whole, own = whole_and_own_digest(source.store, MANIFEST)
    if own != source.manifest.digest:
        raise Conflict(
            f"{source.store.url}/{MANIFEST} was replaced since it was opened", hint="run it again"
        )
    return whole.removeprefix("sha256:")


def refuse_uncovered(source: Universal, digests: Mapping[str, str]) -> None:
    """Refuse a checkpoint if a signature of these digests would say nothing of the bytes of some tensors."""
    if not (keys := uncovered(source, digests)):
        return
    sidecar = source.manifest.sidecar
    virtual = sidecar is not None and bool(sidecar.sources)
    raise UnsafeError(
        f"a signature of the manifest of {source.store.url} says nothing of the bytes of "
        f"{first_names(keys, _NAMED)}: it has neither digest nor fingerprint of them",
        hint="convert it again with --checksums, which reads the files, or without --virtual"
        if virtual
        else "sign its files, too: ucp sign --files; or convert it, which computes fingerprints",
    )


def uncovered(source: Universal, digests: Mapping[str, str]) -> list[Key]:
    """The tensors of which neither the manifest, nor a file with a digest in it or in `digests`, has a digest.

    A digest is also a fingerprint, or checksums of all bytes.
    """
    table = source.manifest.tensors
    if not any(kind.in_sidecar for kind in table.kinds) or (
        table.fingerprint and None not in table.fingerprint
    ):
        return []
    sidecar = source.manifest.sidecar
    sources = () if sidecar is None else sidecar.sources
    whole = digests.keys() | {doc.path for doc in sources if doc.digest is not None}

    def is_covered(extent: Extent) -> bool:
        in_sidecar = extent.block is not None and extent.block.crc32c is not None
        return in_sidecar or extent.file in whole

    return [
        key
        for key, doc in source.docs.items()
        if doc.in_sidecar
        and doc.fingerprint is None
        and not all(map(is_covered, single_extents(source.extents(key))))
    ]


def _read_local(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None


def _signers(signed_by: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[_Signer]:
    given = [signed_by] if isinstance(signed_by, str | PathLike) else list(signed_by)
    texts: list[str] = []
    for text in map(str, given):
        texts += load_settings().signers if text == TRUSTED else [text]
    if not texts:
        raise UsageError(
            "no signer is trusted: the setting `signers` is empty",
            hint="docs/security.md says how to trust a signer; or name one: --signed-by KEY",
        )
    return [_signer(text) for text in texts]


def _signer(text: str) -> _Signer:
    scheme, _, identity = text.partition(":")
    if scheme == "sigstore":
        issuer, _, name = identity.partition(",")
        if not name or not issuer.startswith("https://"):
            raise UsageError(
                f"{text!r} is not sigstore:ISSUER,IDENTITY",
                hint="such as sigstore:https://accounts.google.com,alice@example.com",
            )
        return _Signer("sigstore", text, (issuer, name))
    path = local_path(text)
    pem = _read_local(path)
    if b"-----BEGIN CERTIFICATE-----" in pem:
        return _Signer("certificate", text, (str(path),))
    if b"-----BEGIN PUBLIC KEY-----" in pem:
        return _Signer("key", text, (str(path),))
    private = b"PRIVATE KEY-----" in pem
    raise UsageError(
        f"{path} is a private key; a signer is known by the public one"
        if private
        else f"{path} is neither a public key nor a certificate in PEM",
        hint=f"print the public key: openssl pkey -in {path} -pubout" if private else None,
    )


def read_signature(store: Store) -> bytes | None:
    """Read the signature beside a manifest; None if there is none."""
    try:
        if store.info(SIGNATURE).size > _MAX_BYTES:
            raise IntegrityError(f"{store.url}/{SIGNATURE} is larger than any signature")
        return store.read(SIGNATURE)
    except NotFound:
        return None


def copy_signature(source: Universal, dst: Store) -> None:
    """Copy the signature beside a manifest to where the manifest was copied; failures are warnings.

    One of another manifest is not copied, and does not replace one of this.
    """
    try:
        data = read_signature(source.store)
        if data is None:
            return
        if not _is_of(data, source):
            _log.warning(
                "%s/%s is of another manifest, and was not copied", source.store.url, SIGNATURE
            )
        else:
            there = read_signature(dst)
            if there is None or not _is_of(there, source):
                put_signature(dst, data, overwrite=True)
    except UcformatError as error:
        _log.warning("the signature was not copied to %s: %s", dst.url, error.message)


def _is_of(data: bytes, source: Universal) -> bool:
    """Whether a file is a signature, valid or not, of a manifest."""
    with suppress(UcformatError):
        return read_statement(data, SIGNATURE).digests.get(MANIFEST) == manifest_digest(source)
    return False


def put_signature(store: Store, data: bytes, *, overwrite: bool) -> bool:
    """Write a signature beside the manifest; False if there is one already."""
    try:
        store.put_if_absent(SIGNATURE, data)
    except Conflict:
        if not overwrite:
            return False
        _, version = store.read_versioned(SIGNATURE)
        store.replace(SIGNATURE, data, version)
    store.flush()
    return True


class _Hashed:
    """Digests that were computed already, where the package expects what computes them from local files."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = digests

    def hash(self, model_path: Path, *, files_to_hash: object = None) -> Any:  # noqa: ARG002
        """See `model_signing.hashing.Config`."""
        manifest = package().manifest
        single = {*self._digests} == {MANIFEST}
        arguments = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        if not single:
            arguments["ignore_paths"] = _NOT_SIGNED
        items = [
            manifest.FileManifestItem(
                path=PurePosixPath("." if single else key),
                digest=manifest.hashing.Digest("sha256", bytes.fromhex(digest)),
            )
            for key, digest in self._digests.items()
        ]
        kind = manifest.SerializationType.from_args(arguments)
        return manifest.Manifest(model_path.name, items, kind)

    def add_ignored_paths(self, **_: object) -> None:
        """See `model_signing.hashing.Config`: no folder is searched."""


def package() -> Any:
    """The package model-signing, imported only where something is signed or verified."""
    try:
        import model_signing.manifest
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise UnsupportedError(
            f"signatures need the package model-signing: {error}",
            hint="pip install 'ucformat[sign]'",
        ) from None
    return model_signing
