"""Signatures: what they cover, whose are accepted, and that OpenSSF's own package makes and verifies the same ones."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import model_signing
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.numpy import save_file

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, manifest_file, random_array
from tests.keys import write_certified, write_keys
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    UcformatError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.jobs.removal import remove
from ucformat.schema import MANIFEST
from ucformat.signatures import SIGNATURE, uncovered
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.keys import Keys

GOLDEN = Path(__file__).parent / "golden" / "v1"
ARRAYS = {("w", "weight"): random_array((64, 30), "float32", 1)}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return write_keys(tmp_path, "alice")


@pytest.fixture
def other(tmp_path: Path) -> Keys:
    return write_keys(tmp_path, "mallory")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    source = Checkpoint(FakeSource.write(MemoryStore("signed"), ARRAYS, objects={"epoch": 3}))
    ucformat.convert(source, tmp_path / "ck", chunk_bytes=2000)
    return tmp_path / "ck"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def recommit(place: Path) -> None:
    """Put another manifest in its place, as somebody who knows the format."""
    document = json.loads((place / MANIFEST).read_bytes())
    (place / MANIFEST).write_bytes(manifest_file(document | {"metrics": {"val_loss": 0.0}}))


class TestThePackage:
    """model-signing, which shares no code with us."""

    def test_it_verifies_ours(self, place: Path, keys: Keys, other: Keys) -> None:
        def verify(public: Path) -> None:
            model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public).verify(
                place / MANIFEST, place / SIGNATURE
            )

        ucformat.sign(place, key=keys.private)
        verify(keys.public)
        with pytest.raises(ValueError, match="Key mismatch"):
            verify(other.public)
        recommit(place)
        with pytest.raises(ValueError, match="Signature mismatch"):
            verify(keys.public)

    def test_ours_verifies_its(self, place: Path, keys: Keys) -> None:
        model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private).sign(
            place / MANIFEST, place / SIGNATURE
        )
        assert ucformat.verify(place, signed_by=keys.public).signed_by == str(keys.public)

    def test_its_commands_verify_all_files(self, place: Path, keys: Keys) -> None:
        ucformat.sign(place, key=keys.private, files=True)
        line = [
            *(sys.executable, "-m", "model_signing", "verify", "key", str(place)),
            *("--signature", str(place / SIGNATURE), "--public_key", str(keys.public)),
        ]
        subprocess.run(line, check=True, capture_output=True)
        shard = next((place / "data").rglob("c/*/*"))
        shard.write_bytes(b"\1" + shard.read_bytes()[1:])
        failed = subprocess.run(line, check=False, capture_output=True, text=True)
        assert failed.returncode == 1
        assert shard.name in failed.stderr

    def test_ours_verifies_a_signature_of_the_whole_folder(self, place: Path, keys: Keys) -> None:
        (place / ".ucf-lock").unlink(missing_ok=True)
        model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private).sign(
            place, place / SIGNATURE
        )
        report = ucformat.verify(place, signed_by=keys.public)
        assert report.signed_files == sum(f.is_file() for f in place.rglob("*")) - 2

    def test_another_kind_of_digest_is_refused_by_name(self, place: Path, keys: Keys) -> None:
        hashed = model_signing.hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        config = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
        config.set_hashing_config(hashed).sign(place / MANIFEST, place / SIGNATURE)
        with pytest.raises(UnsupportedError, match="blake3"):
            ucformat.open(place, signed_by=keys.public)


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def test_keys_of_each_curve(place: Path, tmp_path: Path, curve: type[ec.EllipticCurve]) -> None:
    encrypted = write_keys(tmp_path, "encrypted", curve, b"secret")
    done = ucformat.sign(place, key=encrypted.private, password=b"secret")
    assert (done.files, done.path) == (1, f"{place}/{SIGNATURE}")
    ck = ucformat.open(place, signed_by=[encrypted.public])
    assert ck.id == done.id


def test_keys_that_cannot_sign(place: Path, tmp_path: Path, keys: Keys) -> None:
    encrypted = write_keys(tmp_path, "encrypted", password=b"secret")
    odd = write_keys(tmp_path, "odd", ec.SECP256K1)
    for key, password in (
        (encrypted.private, None),
        (encrypted.private, b"no"),
        (odd.private, None),
    ):
        with pytest.raises(UsageError, match="cannot be used to sign"):
            ucformat.sign(place, key=key, password=password)
    with pytest.raises(NotFound):
        ucformat.sign(place, key=tmp_path / "none.pem")
    with pytest.raises(UsageError, match="either"):
        ucformat.sign(place)
    with pytest.raises(UsageError, match="either"):
        ucformat.sign(place, key=keys.private, sigstore=True)
    assert not (place / SIGNATURE).exists()


class TestRefused:
    """What is not signed as was asked for is not opened."""

    def test_nothing_is_signed(self, place: Path, keys: Keys) -> None:
        ucformat.open(place)
        with pytest.raises(UnsafeError, match=r"is not signed: it has no manifest\.json\.sig"):
            ucformat.open(place, signed_by=keys.public)

    def test_another_signed_it(self, place: Path, keys: Keys, other: Keys) -> None:
        ucformat.sign(place, key=other.private)
        with pytest.raises(UnsafeError, match="none of the signers that are accepted"):
            ucformat.open(place, signed_by=keys.public)
        assert ucformat.open(place, signed_by=[keys.public, other.public])

    def test_another_manifest_was_committed(self, place: Path, keys: Keys) -> None:
        ucformat.sign(place, key=keys.private)
        recommit(place)
        ucformat.open(place)
        with pytest.raises(UnsafeError, match="is the signature of another manifest"):
            ucformat.open(place, signed_by=keys.public)
        with pytest.raises(UnsafeError, match="is the signature of another manifest"):
            ucformat.verify(place, signed_by=keys.public)

    def test_what_is_signed_was_changed(self, place: Path, keys: Keys) -> None:
        """A statement about the manifest that is there, under the signature of another statement."""
        ucformat.sign(place, key=keys.private)
        bundle = json.loads((place / SIGNATURE).read_bytes())
        before = sha256(place / MANIFEST)
        recommit(place)
        after = sha256(place / MANIFEST)
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
        assert before.encode() in payload
        changed = payload.replace(before.encode(), after.encode())
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
        (place / SIGNATURE).write_text(json.dumps(bundle))
        with pytest.raises(UnsafeError, match="the signature does not match"):
            ucformat.open(place, signed_by=keys.public)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"verificationMaterial":{}}'])
    def test_a_file_that_is_no_signature(self, place: Path, keys: Keys, content: bytes) -> None:
        (place / SIGNATURE).write_bytes(content)
        with pytest.raises(IntegrityError, match="is not a signature"):
            ucformat.open(place, signed_by=keys.public)

    def test_a_manifest_that_was_replaced_since(self, place: Path, keys: Keys) -> None:
        ck = ucformat.open(place)
        recommit(place)
        with pytest.raises(Conflict, match="was replaced since it was opened"):
            ucformat.sign(ck, key=keys.private)

    def test_a_foreign_checkpoint(self, tmp_path: Path, keys: Keys) -> None:
        save_file({"w": ARRAYS["w", "weight"]}, tmp_path / "m.safetensors")
        for call in (
            lambda: ucformat.sign(tmp_path / "m.safetensors", key=keys.private),
            lambda: ucformat.open(tmp_path / "m.safetensors", signed_by=keys.public),
        ):
            with pytest.raises(UnsupportedError, match="has no manifest that can be signed"):
                call()

    def test_signers_that_are_none(self, place: Path, keys: Keys, tmp_path: Path) -> None:
        ucformat.sign(place, key=keys.private)
        (tmp_path / "text").write_text("no key")
        for signer, reason in (
            (keys.private, "is a private key"),
            (tmp_path / "text", "is neither a public key"),
            ("sigstore:alice@example.com", "is not sigstore:ISSUER,IDENTITY"),
            ("trusted", "the setting `signers` is empty"),
        ):
            with pytest.raises(UsageError, match=reason):
                ucformat.open(place, signed_by=signer)
        with pytest.raises(UnsafeError, match=r"sigstore:https://a.b,c is a sigstore"):
            ucformat.open(place, signed_by="sigstore:https://a.b,c")


class TestCertificates:
    def test_by_an_authority(self, place: Path, tmp_path: Path, keys: Keys) -> None:
        ours, others = write_certified(tmp_path, "ours"), write_certified(tmp_path, "others")
        ucformat.sign(place, key=ours.key, certificate=ours.certificate)
        assert ucformat.verify(place, signed_by=ours.authority).signed_by == str(ours.authority)
        with pytest.raises(UnsafeError, match="none of the signers"):
            ucformat.verify(place, signed_by=others.authority)
        with pytest.raises(UnsafeError, match="is a key"):
            ucformat.verify(place, signed_by=keys.public)

    def test_a_certificate_of_another_key(self, place: Path, tmp_path: Path) -> None:
        ours, others = write_certified(tmp_path, "ours"), write_certified(tmp_path, "others")
        with pytest.raises(UsageError, match="does not match"):
            ucformat.sign(place, key=ours.key, certificate=others.certificate)


def test_trusted_signers_are_a_setting(
    place: Path, keys: Keys, other: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    ucformat.sign(place, key=keys.private)
    monkeypatch.setenv("UCP_SIGNERS", f"{other.public},{keys.public}")
    assert ucformat.verify(place, signed_by="trusted").signed_by == str(keys.public)
    monkeypatch.setenv("UCP_SIGNERS", str(other.public))
    with pytest.raises(UnsafeError):
        ucformat.verify(place, signed_by="trusted")


class TestCovered:
    """What a signature of the manifest says nothing of is not signed, and not accepted as signed."""

    @pytest.mark.parametrize("form", ["arrays", "safetensors"])
    def test_without_fingerprints(self, form: str, tmp_path: Path, keys: Keys) -> None:
        """Arrays have digests, and listed extents checksums in the sidecar."""
        shutil.copytree(GOLDEN / form, tmp_path / form)
        ucformat.sign(tmp_path / form, key=keys.private)
        assert ucformat.verify(tmp_path / form, signed_by=keys.public)

    def test_packed_with_fingerprints(self, tmp_path: Path, keys: Keys) -> None:
        model = torch.nn.Linear(30, 7)
        ucformat.torch.save({"model": model}, tmp_path / "ck", form="packed")
        ucformat.sign(tmp_path / "ck", key=keys.private)
        before = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        ck = ucformat.open(tmp_path / "ck", signed_by=keys.public)
        assert ucformat.torch.load({"model": model}, ck)
        assert torch.equal(model.weight, before)

    @pytest.mark.parametrize("missing", [0, 1])
    def test_each_tensor_counts(self, missing: int, tmp_path: Path) -> None:
        """Also if another one has a fingerprint, or is an array, whose digest the manifest has."""
        ucformat.torch.save({"model": torch.nn.Linear(30, 7)}, tmp_path / "ck", form="packed")
        source = ucformat.open(tmp_path / "ck").universal
        assert source is not None
        for other in ({"fingerprint": "0" * 32}, {"path": "data/w"}):
            changes: list[dict[str, Any]] = [other, other]
            changes[missing] = {"fingerprint": None}
            docs = {
                key: replace(doc, **change)
                for (key, doc), change in zip(source.docs.items(), changes, strict=True)
            }
            table = SimpleNamespace(
                kinds=list(docs.values()), fingerprint=[doc.fingerprint for doc in docs.values()]
            )
            manifest = SimpleNamespace(tensors=table, sidecar=source.manifest.sidecar)
            part: Any = SimpleNamespace(manifest=manifest, docs=docs, extents=source.extents)
            assert uncovered(part, {}) == [list(docs)[missing]]

    @pytest.mark.parametrize("form", ["packed", "packed-tiles"])
    def test_packed_without_fingerprints(self, form: str, tmp_path: Path, keys: Keys) -> None:
        """Their checksums are in the packed files themselves."""
        place = tmp_path / "ck"
        shutil.copytree(GOLDEN / form, place)
        with pytest.raises(UnsafeError, match="has neither digest nor fingerprint"):
            ucformat.sign(place, key=keys.private)
        model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private).sign(
            place / MANIFEST, place / SIGNATURE
        )
        with pytest.raises(UnsafeError, match="has neither digest nor fingerprint"):
            ucformat.open(place, signed_by=keys.public)
        done = ucformat.sign(place, key=keys.private, files=True, overwrite=True)
        assert ucformat.verify(place, signed_by=keys.public).signed_files == done.files - 1

    def test_virtual_ones(self, tmp_path: Path, keys: Keys) -> None:
        save_file({"w": ARRAYS["w", "weight"]}, tmp_path / "m.safetensors")
        bare = ucformat.convert(tmp_path / "m.safetensors", tmp_path / "bare", virtual=True)
        for files in (False, True):
            with pytest.raises(UnsafeError, match="has neither digest nor fingerprint"):
                ucformat.sign(bare, key=keys.private, files=files)
        ck = ucformat.convert(
            tmp_path / "m.safetensors", tmp_path / "sums", virtual=True, checksums=True
        )
        ucformat.sign(ck, key=keys.private)
        assert ucformat.verify(ck, signed_by=keys.public)


class TestFiles:
    def test_what_no_checksum_sees(self, place: Path, keys: Keys) -> None:
        done = ucformat.sign(place, key=keys.private, files=True)
        data = [f for f in place.rglob("*") if f.is_file() and "data" in f.parts]
        assert done.files >= len(data) + 1
        assert ucformat.verify(place, signed_by=keys.public)
        shard = next((place / "data").rglob("c/*/*"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
        reasons = [p.reason for p in ucformat.verify(place, signed_by=keys.public).problems]
        assert "its SHA-256 is not the signed one" in reasons
        shard.unlink()
        reasons = [p.reason for p in ucformat.verify(place, signed_by=keys.public).problems]
        assert "the signed file is missing" in reasons

    def test_damage_is_not_signed(self, place: Path, keys: Keys) -> None:
        shard = next((place / "data").rglob("c/*/*"))
        shard.write_bytes(b"\1" + shard.read_bytes()[1:])
        with pytest.raises(IntegrityError, match="is damaged, and was not signed"):
            ucformat.sign(place, key=keys.private, files=True)
        assert not (place / SIGNATURE).exists()

    def test_parts_compare_each_file_once(self, place: Path, keys: Keys) -> None:
        ucformat.sign(place, key=keys.private, files=True)
        shutil.rmtree(place / "objects")
        wrong = [
            p.file
            for n in range(2)
            for p in ucformat.verify(place, signed_by=keys.public, on=f"part:{n}/2").problems
            if p.reason == "the signed file is missing"
        ]
        assert len(wrong) == 1


class TestBeside:
    """The file of the signature, in the life of a checkpoint."""

    def test_it_is_not_replaced_unasked(self, place: Path, keys: Keys, other: Keys) -> None:
        ucformat.sign(place, key=keys.private)
        with pytest.raises(Conflict, match="exists"):
            ucformat.sign(place, key=other.private)
        ucformat.sign(place, key=other.private, overwrite=True)
        assert ucformat.open(place, signed_by=other.public)

    def test_in_a_file_of_its_own(self, place: Path, keys: Keys, tmp_path: Path) -> None:
        ucformat.sign(place, key=keys.private, signature=tmp_path / "ck.sig")
        assert not (place / SIGNATURE).exists()
        report = ucformat.verify(place, signed_by=keys.public, signature=tmp_path / "ck.sig")
        assert report.signed_by
        with pytest.raises(Conflict):
            ucformat.sign(place, key=keys.private, signature=tmp_path / "ck.sig")

    def test_a_copy_has_it(self, place: Path, keys: Keys, tmp_path: Path) -> None:
        ucformat.sign(place, key=keys.private)
        ucformat.copy(place, tmp_path / "copy")
        assert ucformat.verify(tmp_path / "copy", signed_by=keys.public).signed_by
        (tmp_path / "copy" / SIGNATURE).unlink()
        assert ucformat.copy(place, tmp_path / "copy").already
        assert ucformat.open(tmp_path / "copy", signed_by=keys.public)

    def test_a_copy_does_not_get_that_of_another_manifest(
        self, place: Path, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ucformat.sign(place, key=keys.private)
        recommit(place)
        ucformat.copy(place, tmp_path / "copy")
        assert not (tmp_path / "copy" / SIGNATURE).exists()
        assert "is of another manifest, and was not copied" in caplog.text

    @pytest.mark.parametrize("change", ["materialize", "overwrite"])
    def test_another_commit_there_makes_it_invalid(
        self, change: str, tmp_path: Path, keys: Keys, place: Path
    ) -> None:
        there = tmp_path / "there"
        shutil.copytree(GOLDEN / "safetensors", there)
        ucformat.sign(there, key=keys.private)
        if change == "materialize":
            ucformat.materialize(there)
        else:
            ucformat.convert(place, there, overwrite=True)
        with pytest.raises(UnsafeError, match="is the signature of another manifest"):
            ucformat.open(there, signed_by=keys.public)

    def test_it_is_removed_with_its_checkpoint(self, place: Path, keys: Keys) -> None:
        ck = ucformat.sign(place, key=keys.private)
        assert remove(LocalStore(place), ck.id) == ()
        assert not place.exists()


class TestSigstore:
    def test_without_the_network(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from sigstore import models

        def unreachable() -> None:
            raise ConnectionError("no route to host")

        monkeypatch.setattr(models.ClientTrustConfig, "production", unreachable)
        with pytest.raises(UcformatError, match="sigstore cannot be reached"):
            ucformat.sign(place, sigstore=True)
        assert not (place / SIGNATURE).exists()

    @pytest.mark.skipif(
        "UCP_TEST_SIGSTORE" not in os.environ,
        reason="needs the network and an identity: in a CI job with an OIDC token, or with a browser, "
        "set UCP_TEST_SIGSTORE=ISSUER,IDENTITY",
    )
    def test_with_an_identity(self, place: Path) -> None:
        ucformat.sign(place, sigstore=True)
        who = f"sigstore:{os.environ['UCP_TEST_SIGSTORE']}"
        assert ucformat.verify(place, signed_by=who).signed_by == who
        with pytest.raises(UnsafeError):
            ucformat.open(place, signed_by=f"{who}x")


def test_an_object_store(keys: Keys) -> None:
    store = MemoryStore("bucket")
    source = Checkpoint(FakeSource.write(MemoryStore("of"), ARRAYS))
    ck = ucformat.convert(source, store)
    ucformat.sign(ck, key=keys.private, files=True)
    assert ucformat.verify(store, signed_by=keys.public).signed_by


def test_without_the_package(place: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    ucformat.sign(place, key=keys.private)
    monkeypatch.setitem(sys.modules, "model_signing.manifest", None)
    calls: list[Callable[[], object]] = [
        lambda: ucformat.sign(place, key=keys.private, overwrite=True),
        lambda: ucformat.open(place, signed_by=keys.public),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="signatures need the package model-signing"):
            call()
