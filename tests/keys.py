"""Keys and certificates to sign checkpoints with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


class Keys(NamedTuple):
    private: Path
    public: Path


class Certified(NamedTuple):
    key: Path
    certificate: Path
    authority: Path


def write_keys(
    folder: Path, name: str, curve: type[ec.EllipticCurve] = ec.SECP256R1, password: bytes = b""
) -> Keys:
    key = ec.generate_private_key(curve())
    keys = Keys(folder / f"{name}.pem", folder / f"{name}.pub")
    keys.private.write_bytes(_pem(key, password))
    keys.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return keys


def write_certified(folder: Path, name: str) -> Certified:
    """A key with a certificate by an authority of its own."""
    issuer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = Certified(*(folder / f"{name}.{suffix}" for suffix in ("key", "crt", "ca")))
    files.key.write_bytes(_pem(key))
    root = _certificate(issuer, issuer, name, "authority", authority=True)
    files.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    leaf = _certificate(key, issuer, name, "signer", authority=False)
    files.certificate.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    return files


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    issuer: ec.EllipticCurvePrivateKey,
    name: str,
    subject: str,
    *,
    authority: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    usage = {
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    of = x509.SubjectKeyIdentifier.from_public_key
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name, subject))
        .issuer_name(_name(name, "authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1 + authority))
        .not_valid_after(now + timedelta(days=1 + authority))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                **usage,
            ),
            critical=True,
        )
        .add_extension(of(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
        .sign(issuer, hashes.SHA256())
    )


def _name(name: str, subject: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {subject}")])


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption(),
    )
