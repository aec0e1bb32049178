"""What is wrong with the invalid checkpoints of the corpus: small edits of valid ones."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from tests.conformance.make import (
    ATTEMPT,
    CREATED,
    CUT,
    CUT_PLACES,
    DATA,
    DESCRIBED,
    PER_RANK,
    SHAPES,
    changed,
    deep,
    described_files,
    edited,
    flipped,
    nested,
    objects_of,
    of_two_files,
    packed_files,
    per_rank_of,
    placed,
    placed_in,
    ranges_of,
    safetensors_files,
)
from ucformat.format.digest import bytes_digest, with_own_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.make import Columns, Edit, Files

    Faults = dict[str, tuple[str, str, Files]]


def of_arrays(flat: Files) -> Faults:
    """Of a manifest, and of arrays."""

    def edit(change: Callable[[Any], object]) -> Files:
        return edited(flat, change)

    def kind(**values: Any) -> Files:
        return edit(lambda m: m["tensors"]["kinds"][0].update(values))

    def member(name: str, value: Any) -> Files:
        return edit(lambda m: m.update({name: value}))

    def without_member(name: str) -> Files:
        return edit(lambda m: m.pop(name))

    def table(**values: Any) -> Files:
        return edit(lambda m: m["tensors"].update(values))

    def row(column: str, value: Any) -> Files:
        return edit(lambda m: m["tensors"][column].__setitem__(0, value))

    manifest, objects = "manifest.json", f"objects/{ATTEMPT}/objects.json"
    ranked, of_ranks = (
        per_rank_of(flat, ranges_of(PER_RANK)),
        f"objects/{ATTEMPT}/per_rank-00000.bin",
    )
    more = [*ranges_of(PER_RANK)[:2], b'{"other": 1}']

    def ranks(number: int, **values: Any) -> Files:
        return edited(of_two_files(flat), lambda m: m["per_rank"]["files"][number].update(values))

    def all_ranks(change: Callable[[Any], object]) -> Files:
        return edited(of_two_files(flat), lambda m: change(m["per_rank"]))

    first = next(k for k in flat if k.endswith("/weight/a/c/0/0"))
    second = next(k for k in flat if k.endswith("/exp_avg/a/c/0/0"))
    third = next(
        k for k in flat if k.startswith(second.rpartition("/c/")[0]) and k != second and "/c/" in k
    )
    zarr = first.replace("c/0/0", "zarr.json")
    tomb = json.dumps(
        {
            "format": "ucformat-tombstone",
            "version": 1,
            "id": "0" * 32,
            "attempt": ATTEMPT,
            "created": CREATED,
        }
    )
    number = json.dumps({"a": 1})
    return {
        "no-manifest": ("absent", "manifest.json is missing", changed(flat, manifest, lambda _: b"")),
        "manifest-tombstone": ("absent", "manifest.json is a tombstone", {**flat, manifest: tomb.encode()}),
        "manifest-flipped": ("damaged", "a bit of the manifest is flipped", flipped(flat, manifest, 600)),
        "manifest-flipped-digest": ("damaged", "a bit of the manifest's own digest is flipped", flipped(flat, manifest, -10)),
        "manifest-truncated": ("damaged", "the manifest is cut off", changed(flat, manifest, lambda d: d[:-200])),
        "manifest-no-digest": ("damaged", "the manifest does not end with a digest", changed(flat, manifest, lambda d: d[:-88] + b"\n}")),
        "manifest-line-feed": ("damaged", "a line feed follows the manifest", changed(flat, manifest, lambda d: d + b"\n")),
        "manifest-format": ("damaged", "another format", edit(lambda m: m.update(format="other"))),
        "manifest-bare-nan": ("damaged", "NaN, which is no JSON", {**flat, manifest: with_own_digest(
            flat[manifest].replace(b'{\n   "$float": "nan"\n  }', b"NaN").replace(b'{"$float":"nan"}', b"NaN")[:-88] + b"\n}")}),
        "objects-member-twice": ("damaged", "a member of objects.json is there twice", objects_of(flat, b'{"x": 1, "y": {"a": 1, "a": 2}}')),
        "objects-deep": ("damaged", "objects.json of 129 levels", deep(flat, 129)),
        "objects-not-utf-8": ("damaged", "objects.json in UTF-16", objects_of(flat, '{"x": 1}'.encode("utf-16"))),
        "manifest-no-tensors": ("damaged", "`tensors` is missing", edit(lambda m: m.pop("tensors"))),
        "manifest-attempt": ("damaged", "an attempt that is not 20 digits", edit(lambda m: m.update(attempt="0123"))),
        "newer-version": ("upgrade", "version 2", edit(lambda m: m.update(version=2))),
        "newer-version-other-members": ("upgrade", "version 2, in which nothing else need be as it was",
                                        edit(lambda m: (m.clear(), m.update(format="ucformat", version=2, tensors=5)))),
        "newer-feature": ("upgrade", "a feature that version 1 has not, with members of another type", edit(lambda m: m.update(requires=["delta"], tensors=5))),
        "newer-feature-vendor": ("upgrade", "a feature of a vendor besides one of version 1", edit(lambda m: m.update(requires=["packed", "acme.delta"]))),
        "requires-text": ("damaged", "`requires` is a text", edit(lambda m: m.update(requires="packed"))),
        "dtype-no-itemsize": ("damaged", "an unknown dtype of an unknown size", kind(dtype="float5")),
        "dtype-itemsize": ("damaged", "an unknown dtype of elements of three bytes", kind(dtype="float5", itemsize=3)),
        "dtype-other-itemsize": ("damaged", "a dtype with elements of another size", kind(itemsize=4)),
        "lineage-no-kind": ("damaged", "lineage without a kind", edit(lambda m: m.update(lineage=[{"url": "x"}]))),
        "manifest-member-twice": ("damaged", "a member is there twice", {**flat, manifest: with_own_digest(flat[manifest][:-88].replace(b'"step":', b'"step": 3, "step":') + b"\n}")}),
        "manifest-deep": ("damaged", "129 levels", edit(lambda m: m.update(config=nested(128)))),
        "manifest-surrogate": ("damaged", "half of a pair of surrogates", edit(lambda m: m.update(config={"a": "\ud800"}))),
        "manifest-integer-large": ("damaged", "an integer above 2^62", edit(lambda m: m.update(step=2**62 + 1))),
        "manifest-integer-long": ("damaged", "an integer of 8193 bits in a value", edit(lambda m: m.update(config={"a": 2**8192}))),
        "manifest-text-long": ("damaged", "a state of 65537 characters", kind(state="s" * 65537)),
        "manifest-minor": ("damaged", "a negative minor number", edit(lambda m: m.update(minor=-1))),
        **{f"manifest-no-{name}": ("damaged", f"`{name}` is missing", without_member(name)) for name in ("format", "version", "id", "attempt", "created")},
        **{f"manifest-mistyped-{name}": ("damaged", f"`{name}` is of another type", member(name, value))
           for name, value in {"version": "1", "id": 5, "created": 5, "step": "3", "aliases": ["a"], "objects": "x", "groups": [{"params": "a"}], "run": 7, "minor": "0", "metrics": []}.items()},
        "file-mistyped": ("damaged", "a size is a text", edit(lambda m: m["objects"].update(nbytes=str(m["objects"]["nbytes"])))),
        "file-true": ("damaged", "a size is a boolean", edit(lambda m: m["objects"].update(nbytes=True))),
        "group-flattened": ("damaged", "a number for a boolean", edit(lambda m: m.update(groups=[{"params": [], "flattened": 1}]))),
        "kind-no-dtype": ("damaged", "a kind without a dtype", edit(lambda m: m["tensors"]["kinds"][0].pop("dtype"))),
        "kind-null": ("damaged", "a kind whose shape is null", kind(shape=None)),
        "newer-digest": ("upgrade", "a kind of digest that version 1 has not", row("digest", "blake3:" + "0" * 64)),
        "digest-spelled-wrong": ("damaged", "a digest of too few digits", row("digest", "xxh3:00")),
        "tensor-twice": ("damaged", "a name and state is listed twice", edit(lambda m: [m["tensors"][k].append(m["tensors"][k][0]) for k in ("name", "kind", "digest", "fingerprint")])),
        "tensor-dims": ("damaged", "65 dims", kind(shape=[1] * 65)),
        "tensor-edge": ("damaged", "an edge above 2^62", kind(shape=[2**62 + 1, 0])),
        "table-list": ("damaged", "tensors one by one", edit(lambda m: m.update(tensors=[{"name": "a", "state": "weight", "dtype": "int8", "shape": []}]))),
        "table-no-column": ("damaged", "a column is missing", edit(lambda m: m["tensors"].pop("kind"))),
        "table-kind-short": ("damaged", "a column is shorter than the others", edit(lambda m: m["tensors"]["kind"].pop())),
        "table-digest-short": ("damaged", "a column is shorter than the others", edit(lambda m: m["tensors"]["digest"].pop())),
        "table-no-name": ("damaged", "the number of no name", row("name", 3)),
        "table-no-kind": ("damaged", "the number of no kind", row("kind", 5)),
        "table-negative": ("damaged", "a negative number", row("name", -1)),
        "table-float": ("damaged", "a number with a point", row("kind", 0.0)),
        "table-true": ("damaged", "a boolean for a number", row("name", False)),
        "table-name-twice": ("damaged", "a name is listed twice", edit(lambda m: m["tensors"]["names"].append("a"))),
        "table-unused-kind": ("damaged", "a kind that no tensor has is impossible", edit(lambda m: m["tensors"]["kinds"].append({**m["tensors"]["kinds"][0], "chunk": [1]}))),
        "table-path-of-none": ("damaged", "a path of no tensor", table(path={"5": f"{DATA}/weight/a"})),
        "table-path-spelled": ("damaged", "a number that is spelled otherwise", table(path={"00": f"{DATA}/weight/a"})),
        "table-path-characters": ("damaged", "a path with another character", table(path={"0": f"{DATA}/weight/ü"})),
        "table-path-out": ("refused", "a path outside of the checkpoint", table(path={"0": f"../{DATA}/weight/a"})),
        "table-at-of-none": ("damaged", "paths in the state of no tensor", table(at={"5": [["a"]]})),
        "table-at": ("damaged", "a path in the state that is none", table(at={"0": [["a", True]]})),
        "tensor-no-place": ("damaged", "neither a path nor a sidecar", kind(path=None)),
        "array-no-digest": ("damaged", "an array without a digest", row("digest", None)),
        "array-no-chunk": ("damaged", "an array without a chunk", kind(chunk=None)),
        "array-shard": ("damaged", "a shard that is not a multiple of its chunk", kind(shard=[3, 3], chunk=[2, 3])),
        "array-wrong-digest": ("damaged:verify", "a digest that is not the array's", row("digest", "xxh3:" + "0" * 32)),
        "fingerprint-wrong": ("damaged:verify", "a fingerprint that is not the tensor's", row("fingerprint", "0" * 32)),
        "fingerprint-spelled-wrong": ("damaged", "a fingerprint of too few digits", row("fingerprint", "00")),
        "table-fingerprint-short": ("damaged", "a column is shorter than the others", edit(lambda m: m["tensors"]["fingerprint"].pop())),
        "array-path-out": ("refused", "an array outside of the checkpoint", kind(path=f"../{DATA}/weight")),
        "alias-of-nothing": ("damaged", "an alias of no tensor", edit(lambda m: m.update(aliases={"x": "y"}))),
        "alias-of-alias": ("damaged", "an alias of an alias", edit(lambda m: m["aliases"].update(x="tied"))),
        "alias-of-tensor": ("damaged", "an alias that is a tensor's name", edit(lambda m: m.update(aliases={"none": "a"}))),
        "shard-missing": ("damaged", "a shard is missing", changed(flat, first, lambda _: b"")),
        "shard-truncated": ("damaged", "a shard is cut off", changed(flat, first, lambda d: d[:10])),
        "shard-index-truncated": ("damaged:verify", "the index of a shard is cut off", changed(flat, first, lambda d: d[:-1])),
        "shard-longer": ("damaged:verify", "a byte follows a shard's index", changed(flat, first, lambda d: d + b"\0")),
        "shard-flipped": ("damaged", "a bit of a chunk is flipped", flipped(flat, first, 3)),
        "shard-flipped-checksum": ("damaged", "a bit of a chunk's checksum is flipped", flipped(flat, first, 17)),
        "shard-flipped-index": ("damaged:verify", "a bit of the index is flipped", flipped(flat, first, -6)),
        "shard-of-another": ("damaged:verify", "a shard has another shard's place", {**flat, second: flat[third]}),
        "zarr-json": ("damaged:verify", "a zarr.json is not what the manifest says", changed(flat, zarr, lambda d: d.replace(b"bfloat16", b"float16"))),
        "objects-missing": ("damaged", "objects.json is missing", changed(flat, objects, lambda _: b"")),
        "objects-flipped": ("damaged", "a bit of objects.json is flipped", flipped(flat, objects, 30)),
        "objects-bare-nan": ("damaged", "NaN in objects.json", objects_of(flat, b'{"x": NaN}')),
        "objects-no-object": ("damaged", "objects.json is an array", objects_of(flat, f"[{number}]".encode())),
        "objects-path-out": ("refused", "objects outside of the checkpoint", edit(lambda m: m["objects"].update(path="../x"))),
        "per-rank-missing": ("damaged", "the values of ranks are missing", changed(ranked, of_ranks, lambda _: b"")),
        "per-rank-flipped": ("damaged", "a bit of a rank's values is flipped", flipped(ranked, of_ranks, 9)),
        "per-rank-index": ("damaged", "a rank's values are not where the previous end", per_rank_of(flat, ranges_of(PER_RANK), move=1)),
        "per-rank-name": ("damaged", "a rank has a value of a name that is not listed", per_rank_of(flat, more)),
        "per-rank-name-twice": ("damaged", "a name of values is listed twice", all_ranks(lambda d: d["names"].append("rng"))),
        "per-rank-few": ("damaged", "a file has more ranks than the manifest says", edited(ranked, lambda m: (m["per_rank"].update(ranks=2), m["per_rank"]["files"][0].update(ranks=2)))),
        "per-rank-count": ("damaged", "the files have fewer ranks than there are", all_ranks(lambda d: d.update(ranks=4))),
        "per-rank-gap": ("damaged", "no file has the values of a rank", ranks(1, first=2)),
        "per-rank-overlap": ("damaged", "two files have the values of a rank", ranks(1, first=0)),
        "per-rank-order": ("damaged", "the files are not in the order of ranks", all_ranks(lambda d: d["files"].reverse())),
        "per-rank-begin": ("damaged", "the values of rank 0 are missing", all_ranks(lambda d: (d["files"].pop(0), d.update(ranks=2)))),
        "per-rank-nobody": ("damaged", "a file of no rank", ranks(1, first=1, ranks=0)),
        "per-rank-many": ("damaged", "more than 2^20 ranks", all_ranks(lambda d: (d.update(ranks=2**20 + 1), d["files"][1].update(ranks=2**20, nbytes=2**30)))),
        "per-rank-index-large": ("damaged", "an index that is larger than its file", all_ranks(lambda d: (d.update(ranks=1001), d["files"][1].update(ranks=1000)))),
        "per-rank-path-out": ("refused", "the values of ranks are outside of the checkpoint", ranks(1, path="../x")),
        "asset-flipped": ("damaged", "a bit of an asset is flipped", flipped(flat, f"assets/{ATTEMPT}/vocab.txt", 0)),
    }  # fmt: skip


def of_compressed(flat: Files) -> Faults:
    """Of arrays of compressed chunks; all checksums that no fault is about are right."""
    even = next(k for k in flat if k.endswith("/even/c/0/0"))
    zarr = even.replace("c/0/0", "zarr.json")
    data = flat[even]
    count = next(n for n in range(1, 99) if data[-4 - 16 * n :][:8] == bytes(8))  # entries
    end = len(data) - 4 - 16 * count
    lengths = [int.from_bytes(data[end + 16 * n + 8 :][:8], "little") for n in range(count)]

    def sealed(body: bytes) -> bytes:
        return body + crc32c(body).to_bytes(4, "little")

    def indexed(chunks: bytes, index: list[int]) -> Files:
        return {**flat, even: chunks + sealed(b"".join(n.to_bytes(8, "little") for n in index))}

    def entries(*lengths: int) -> list[int]:
        return [n for k, length in enumerate(lengths) for n in (sum(lengths[:k]), length)]

    def first(change: Callable[[bytearray], object]) -> Files:
        body = bytearray(data[: lengths[0] - 4])
        change(body)
        chunk = sealed(bytes(body))
        return indexed(chunk + data[lengths[0] : end], entries(len(chunk), *lengths[1:]))

    def kind(**values: Any) -> Files:
        return edited(flat, lambda m: m["tensors"]["kinds"][0].update(values))

    right, whole = entries(*lengths), data[:end]
    return {
        "compressed-not-required": (
            "damaged",
            "a codec, and `requires` does not name the feature",
            edited(flat, lambda m: m.update(requires=[])),
        ),
        "compressed-tiles": (
            "damaged",
            "an array with the codec of packed files",
            kind(codec="tiles"),
        ),
        "compressed-mistyped": ("damaged", "a codec that is no text", kind(codec=1)),
        "compressed-large": (
            "damaged",
            "chunks of 2 GiB",
            kind(chunk=[1 << 29, 1], shard=[1 << 29, 1]),
        ),
        "compressed-chunk": ("damaged", "a bit of a chunk is flipped", flipped(flat, even, 20)),
        "compressed-index": ("damaged", "a bit of an index is flipped", flipped(flat, even, -10)),
        "compressed-truncated": (
            "damaged",
            "a shard is cut off",
            changed(flat, even, lambda d: d[:30]),
        ),
        "compressed-missing": ("damaged", "a shard is missing", changed(flat, even, lambda _: b"")),
        "compressed-overlap": (
            "damaged",
            "two chunks are one and the same",
            indexed(whole, [*right[:2], *right[:2], *right[4:]]),
        ),
        "compressed-gap": (
            "damaged",
            "a byte between two chunks",
            indexed(
                data[: lengths[0]] + b"\0" + data[lengths[0] : end],
                [*right[:2], *(n + (k % 2 == 0) for k, n in enumerate(right[2:]))],
            ),
        ),
        "compressed-trailing": (
            "damaged",
            "a byte between the chunks and the index",
            indexed(whole + b"\0", right),
        ),
        "compressed-absent": (
            "damaged",
            "a chunk with elements that is not stored",
            indexed(data[lengths[0] : end], [2**64 - 1] * 2 + entries(*lengths[1:])),
        ),
        "compressed-far": (
            "damaged",
            "a chunk beyond the file",
            indexed(whole, [2**62, *right[1:]]),
        ),
        "compressed-long": (
            "damaged",
            "a chunk that is longer than the file",
            indexed(whole, [right[0], 2**62, *right[2:]]),
        ),
        "compressed-short": (
            "damaged",
            "a chunk of 19 bytes",
            first(lambda d: d.__delitem__(slice(15, None))),
        ),
        "compressed-longer": (
            "damaged",
            "a chunk that is longer than its bytes and a header",
            first(lambda d: d.extend(bytes(1200))),
        ),
        "compressed-more": (
            "damaged",
            "a header says that a chunk has more bytes than it has",
            first(lambda d: d.__setitem__(slice(4, 8), (1 << 30).to_bytes(4, "little"))),
        ),
        "compressed-less": (
            "damaged",
            "a header says that a chunk has fewer bytes than it has",
            first(lambda d: d.__setitem__(slice(4, 8), (512).to_bytes(4, "little"))),
        ),
        "compressed-itemsize": (
            "damaged",
            "a header has elements of another size",
            first(lambda d: d.__setitem__(3, 2)),
        ),
        "compressed-flags": (
            "damaged",
            "a header of a chunk that is split",
            first(lambda d: d.__setitem__(2, 0x81)),
        ),
        "compressed-version": (
            "damaged",
            "a header of another version of Blosc",
            first(lambda d: d.__setitem__(0, 3)),
        ),
        "compressed-stored": (
            "damaged",
            "a header has another number of stored bytes",
            first(lambda d: d.__setitem__(12, d[12] ^ 1)),
        ),
        "compressed-zstd": (
            "damaged",
            "bytes that zstd does not decompress",
            first(lambda d: d.__setitem__(slice(20, None), bytes(len(d) - 20))),
        ),
        "compressed-digest": (
            "damaged:verify",
            "a digest of another tensor",
            edited(
                flat, lambda m: m["tensors"]["digest"].__setitem__(0, m["tensors"]["digest"][1])
            ),
        ),
        "compressed-document": (
            "damaged:verify",
            "a `zarr.json` of an array that is not compressed",
            changed(flat, zarr, lambda d: d.replace(b'"name": "blosc"', b'"name": "gzip"')),
        ),
    }


ENTRY = struct.Struct("<QIIIBBHQQ")


def of_lossy(whole: Files) -> Faults:
    """Of tensors that are encoded with loss."""
    name = next(k for k in whole if k.endswith(".bin"))

    def table(**values: Any) -> Files:
        return edited(whole, lambda m: m["tensors"].update(values))

    def unmarked(m: Any) -> None:
        m["tensors"]["bound"] = {}
        for kind in m["tensors"]["kinds"]:
            kind.pop("lossy", None)

    bound = json.loads(whole["manifest.json"])["tensors"]["bound"]
    rest = {row: errors for row, errors in bound.items() if row != "0"}
    return {
        "lossy-not-required": ("damaged", "a lossy tensor, and `requires` does not name the feature", edited(whole, lambda m: m["requires"].remove("lossy"))),
        "lossy-unmarked": ("damaged", "lossy tiles, of which the manifest says nothing", edited(whole, unmarked)),
        "lossy-no-bound": ("damaged", "a lossy tensor without a bound", table(bound=rest)),
        "lossy-other-bound": ("damaged", "a bound of a tensor that is not lossy", table(bound={**bound, "10": [0, 0]})),
        "lossy-negative": ("damaged", "a bound below zero", table(bound={**rest, "0": [-1, 0]})),
        "lossy-one": ("damaged", "a bound of one number", table(bound={**rest, "0": [1]})),
        "lossy-tile": ("damaged", "a bit of a stored tile is flipped", flipped(whole, name, 20)),
    }  # fmt: skip


def of_partial(partial: Files) -> Faults:
    """Of tensors that are older than the checkpoint."""

    def manifest(change: Edit) -> Files:
        return edited(partial, change, "3/manifest.json")

    def step(value: Any) -> Files:
        return manifest(lambda m: m["tensors"]["kinds"][-1].update(step=value))

    def counts(**values: Any) -> Files:
        return manifest(lambda m: m["experts"]["layers"]["layers.0.experts"].update(values))

    return {
        "partial-not-required": ("damaged", "an older tensor, and `requires` does not name the feature", manifest(lambda m: m["requires"].remove("steps"))),
        "partial-of-no-step": ("damaged", "an older tensor of a checkpoint without a step", manifest(lambda m: m.pop("step"))),
        "partial-same-step": ("damaged", "an older tensor of the checkpoint's own step", step(3)),
        "partial-later": ("damaged", "an older tensor of a later step", step(4)),
        "partial-text": ("damaged", "a step that is text", step("1")),
        "partial-large": ("damaged", "a step below -2^62", step(-(2**62) - 1)),
        "partial-counts": ("damaged", "tokens of different numbers of experts", counts(held=[5])),
        "partial-window": ("damaged", "a place beyond the end of a window", manifest(lambda m: m["window"].update(at=2))),
        "partial-globs": ("damaged", "a group that is no list", manifest(lambda m: m["window"].update(groups=["a"]))),
        "partial-negative": ("damaged", "a number of tokens below zero", counts(stored=[5, -1])),
    }  # fmt: skip


def of_encoded(whole: Files) -> Faults:
    """Of encoded packed files; all checksums that no fault is about are right."""
    name = next(k for k in whole if k.endswith("/rank0.bin"))
    data = whole[name]
    count = int.from_bytes(data[-24:-16], "little")
    size = int.from_bytes(data[-16:-8], "little")
    begin = len(data) - 32 - 40 * count

    def sealed(offset: int, body: bytes) -> bytes:
        return body + placed_in("rank0", offset, body)

    def indexed(
        change: Callable[[list[list[int]]], object] = lambda _: None,
        stored: bytes = data[:begin],
        plain: int = size,
        magic: bytes = b"UCFTILES",
        zero: int = 0,
        more: int = 0,
    ) -> Files:
        entries = [list(entry) for entry in ENTRY.iter_unpack(data[begin:-32])]
        change(entries)
        index = b"".join(ENTRY.pack(*entry) for entry in entries)
        index += struct.pack("<8sQQI", magic, len(entries) + more, plain, zero)
        return {**whole, name: stored + sealed(len(stored), index)}

    def first(field: int, value: int) -> Files:
        return indexed(lambda entries: entries[0].__setitem__(field, value))

    def kind(**values: Any) -> Files:
        return edited(whole, lambda m: m["tensors"]["kinds"][0].update(values))

    assert indexed() == whole
    _, _, stored, *_ = ENTRY.unpack_from(data, begin)
    one_more = data[:begin] + sealed(begin, b"abcd")
    *_, before, last = ENTRY.iter_unpack(data[begin:-32])
    without = data[: begin - last[2] - 4]
    return {
        "encoded-not-required": ("damaged", "a codec, and `requires` does not name the feature", edited(whole, lambda m: m["requires"].remove("codecs"))),
        "encoded-blosc": ("damaged", "packed files with the codec of arrays", kind(codec="blosc")),
        "encoded-plain": ("damaged", "encoded files of tensors without a codec", edited(whole, lambda m: [k.pop("codec") for k in m["tensors"]["kinds"]])),
        "encoded-tile": ("damaged", "a bit of a stored tile is flipped", flipped(whole, name, 20)),
        "encoded-tile-crc": ("damaged", "a bit of the checksum of a stored tile is flipped", flipped(whole, name, stored)),
        "encoded-index": ("damaged", "a bit of an index is flipped", flipped(whole, name, begin + 30)),
        "encoded-trailer": ("damaged", "a bit of a trailer is flipped", flipped(whole, name, -6)),
        "encoded-truncated": ("damaged", "a file is cut off", changed(whole, name, lambda d: d[:-9])),
        "encoded-empty": ("damaged", "a file without an index", changed(whole, name, lambda _: b"")),
        "encoded-moved": ("damaged", "a file of another rank", {**whole, name: whole[name.replace("rank0", "rank1")]}),
        "encoded-magic": ("damaged", "a trailer with another name", indexed(magic=b"UCFTILEZ")),
        "encoded-not-zero": ("damaged", "a trailer with a number instead of zero", indexed(zero=1)),
        "encoded-count": ("damaged", "more entries than the file has", indexed(more=1 << 40)),
        "encoded-size": ("damaged", "a plain file that ends before its last tile", indexed(plain=size - 1)),
        "encoded-longer": ("damaged", "64 bytes after the last tile of the plain file", indexed(plain=size + 64)),
        "encoded-gap": ("damaged", "a byte between the last payload and the index", indexed(stored=data[:begin] + bytes(1))),
        "encoded-start": ("damaged", "a tile that begins 64 bytes later", indexed(lambda entries: [e.__setitem__(0, e[0] + 64) for e in entries], plain=size + 64)),
        "encoded-overlap": ("damaged", "two tiles of the plain file that overlap", indexed(lambda entries: entries[1].__setitem__(0, entries[1][0] - 64))),
        "encoded-nothing": ("damaged", "a tile of no bytes", first(1, 0)),
        "encoded-bomb": ("damaged", "a tile of more than 2^24 bytes", first(1, (1 << 24) + 4)),
        "encoded-lengthened": ("damaged", "a tile with more bytes than its Blosc buffer", first(1, 16_004)),
        "encoded-payload": ("damaged", "a payload that is longer than its tile", first(2, 16_001)),
        "encoded-checksum": ("damaged", "another checksum of the plain tile", first(3, 5)),
        "encoded-unknown": ("upgrade", "an encoding that this version has not", first(4, 99)),
        "encoded-raw": ("damaged", "a shorter payload that is not compressed", first(4, 0)),
        "encoded-itemsize": ("damaged", "elements of three bytes", first(5, 3)),
        "encoded-elements": ("damaged", "elements of another size than the Blosc buffer has", first(5, 2)),
        "encoded-base": ("damaged", "a base of a tile that is no patch", first(6, 0)),
        "encoded-fingerprint": ("damaged:verify", "another fingerprint of a tile", first(7, 5)),
        "encoded-more": ("damaged:verify", "a tile of no tensor", indexed(lambda entries: entries.append([size, 4, 4, 0, 0, 1, 0xFFFF, 0, 0]), one_more, size + 8)),
        "encoded-fewer": ("damaged", "a tile is missing", indexed(lambda entries: entries.pop(), without, before[0] + before[1] + 4)),
    }  # fmt: skip


def of_packed(columns: Columns, files: Files) -> Faults:
    """Of a sidecar, and of packed files."""
    good = packed_files(columns, files)
    path, rank0, rank1 = f"{DATA}/extents.safetensors", f"{DATA}/rank0.bin", f"{DATA}/rank1.bin"
    n = len(columns["tensor"])

    def row(name: str, at: int, value: int, **more: Any) -> Files:
        values = [*columns[name]]
        values[at] = value
        return packed_files({**columns, name: values}, files, **more)

    def block(at: int, *values: int) -> Files:
        """The same with another block of a row."""
        names = ("block_offset", "block_nbytes", "crc32c")
        return packed_files(
            {
                **columns,
                **{
                    k: [*columns[k][:at], v, *columns[k][at + 1 :]]
                    for k, v in zip(names, values, strict=True)
                },
            },
            files,
        )

    without = {k: v for k, v in columns.items() if k != "strides"}
    no_first = {
        k: v[1:]
        if k in ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
        else v[2:]
        for k, v in columns.items()
    }
    assert n == 7
    assert len(SHAPES) == 5
    swapped = {**files, rank0: files[rank1], rank1: files[rank0]}
    bomb = zlib.compress(bytes(8 * n + 1), 0)
    other = bytearray(files[rank1])
    other[-1] ^= 1
    again = {
        **columns,
        "crc32c": [*columns["crc32c"][:-1], crc32c(bytes(other[columns["offset"][-1] :]))],
    }
    short = bytearray(files[rank0])
    at = columns["block_offset"][0]
    short[at] ^= 1
    stale = columns["crc32c"][:]
    stale[0] = crc32c(b"other")
    begin = columns["offset"][-1]
    elements = files[rank1][begin::2]
    tiled = files[rank1][:begin] + b"".join(
        data + placed(1, at, data)
        for at, data in ((begin, elements[:4]), (begin + 8, elements[4:]))
    )
    apart = {
        **columns,
        **{
            name: [*columns[name][:-1], v]
            for name, v in (("block_offset", -1), ("block_nbytes", 0), ("crc32c", 0))
        },
        "strides": [*columns["strides"][:-1], 1],
        "tile": [*columns["tile"][:-1], 4],
    }
    return {
        "sidecar-flipped": ("damaged", "a bit of the sidecar is flipped", flipped(good, path, -3)),
        "sidecar-missing": ("damaged", "the sidecar is missing", changed(good, path, lambda _: b"")),
        "sidecar-newer-column": ("upgrade", "a column that version 1 has not", packed_files({**columns, "scale": [1]}, files)),
        "sidecar-newer-checksum": ("upgrade", "a kind of checksum that version 1 has not", row("crc32c", 0, -3)),
        "sidecar-no-column": ("damaged", "a column is missing", packed_files(without, files)),
        "sidecar-too-long": ("damaged", "a column becomes longer than its rows", packed_files(columns, files, offset=bomb)),
        "sidecar-too-short": ("damaged", "a column becomes shorter than its rows", packed_files(columns, files, offset=zlib.compress(bytes(8), 0))),
        "sidecar-trailing": ("damaged", "bytes follow a column's stream", packed_files(columns, files, file=zlib.compress(bytes(8 * n), 0) + b"x")),
        "sidecar-extents": ("damaged", "more extents than any stream could have", packed_files(columns, files, extents=str(1 << 40))),
        "sidecar-not-required": ("damaged", "tensors that are no arrays, which is not required", edited(good, lambda m: m.pop("requires"))),
        "sidecar-not-packed": ("damaged", "placed checksums, which are not required", edited(good, lambda m: m.update(requires=["extents"]))),
        "sidecar-not-extents": ("damaged", "checksums in the sidecar, which are not required", edited(good, lambda m: m.update(requires=["packed"]))),
        "described-not-required": ("damaged", "described tensors, which are not required", edited(described_files(), lambda m: m.update(requires=["extents"]))),
        "sidecar-member-twice": ("damaged", "a column is there twice", header_twice(good)),
        "block-none": ("damaged", "a file of its own without a checksum", block(n - 1, -1, 0, 0)),
        "block-none-nbytes": ("damaged", "a size of no block", block(2, -1, 8, 0)),
        "block-none-crc": ("damaged", "a checksum of no block", block(2, -1, 0, 8)),
        "block-not-placed": ("damaged", "a checksum behind its block that is not placed", packed_files({**columns, "crc32c": [-1 if c == -2 else c for c in columns["crc32c"]]}, files)),
        "described-mesh-listed": ("damaged", "a mesh whose ranks are listed, although strides give them", described_files(meshes=[{"sizes": [2, 2], "ranks": [0, 2, 1, 3]}, DESCRIBED["meshes"][1]])),
        "described-mesh-stride": ("damaged", "a stride of an axis of one rank", described_files(of=(CUT, CUT_PLACES), meshes=[*CUT["meshes"][:3], {"sizes": [1, 2], "first": 2, "strides": [4, 4]}])),
        "described-mesh-first": ("damaged", "a first rank besides listed ones", described_files(meshes=[DESCRIBED["meshes"][0], {**DESCRIBED["meshes"][1], "first": 1}])),
        "described-mesh-twice": ("damaged", "a mesh is listed twice", described_files(meshes=[*DESCRIBED["meshes"], DESCRIBED["meshes"][0]])),
        "described-distribution-twice": ("damaged", "a distribution is listed twice, once with a member that says nothing", described_files(distributions=[*DESCRIBED["distributions"], {"mesh": 1, "cuts": []}])),
        "described-part": ("damaged", "a part without a flat buffer", described_files(distributions=[{"mesh": 1, "part": 1}, *DESCRIBED["distributions"][1:]])),
        "extent-of-no-tensor": ("damaged", "the number of no tensor", row("tensor", n - 1, 5)),
        "extent-of-no-file": ("damaged", "the number of no file", row("file", 0, 2)),
        "extent-negative": ("damaged", "a negative offset", row("offset", 0, -4)),
        "extent-leaves-tensor": ("damaged", "an extent leaves its tensor", row("start", 0, 4)),
        "extent-leaves-block": ("damaged", "an extent leaves its block", row("block_nbytes", 0, columns["block_nbytes"][0] - 1)),
        "extent-leaves-file": ("damaged:verify", "an extent leaves its file", row("offset", n - 1, len(files[rank1]) - 2)),
        "extent-too-far": ("damaged", "an offset above 2^60", row("offset", n - 1, 2**61)),
        "extent-hole": ("damaged", "extents do not cover their tensor", packed_files(no_first, files)),
        "extent-overlap": ("damaged", "extents overlap that are no replicas", row("start", 2, 1)),
        "extent-replicas-tiles": ("damaged", "replicas have different tiles", packed_files(apart, {**files, rank1: tiled})),
        "extent-replicas": ("damaged:verify", "replicas differ", packed_files(again, {**files, rank1: bytes(other)})),
        "tile-zero": ("damaged", "a tile has an edge of 0", row("tile", 5, 0)),
        "tile-strides": ("damaged", "tiles with strides", row("strides", 4, 24)),
        "tile-block": ("damaged", "tiles with a block", row("block_offset", 2, 0)),
        "tile-flipped": ("damaged", "a bit of a tile is flipped", flipped(good, rank0, columns["offset"][2] + 1)),
        "block-flipped": ("damaged", "a bit under a checksum in the sidecar is flipped", packed_files(columns, {**files, rank0: bytes(short)})),
        "block-stale": ("damaged", "a checksum in the sidecar is another one", packed_files({**columns, "crc32c": stale}, files)),
        "block-flipped-behind": ("damaged:verify", "a bit of a checksum behind its block is flipped", flipped(good, rank0, -1)),
        "packed-swapped": ("damaged", "each file has the other's place", packed_files(columns, swapped)),
        "packed-missing": ("damaged", "a file is missing", changed(good, rank1, lambda _: b"")),
        "packed-truncated": ("damaged", "a file is cut off", changed(good, rank1, lambda d: d[:100])),
        "packed-path-absolute": ("refused", "a file outside of the checkpoint", packed_files(columns, files, ["/etc/hosts", rank1])),
        "packed-path-out": ("refused", "a file outside of the checkpoint", packed_files(columns, files, ["../x", rank1])),
        "described-writer": ("damaged", "a writer that does not exist", described_files({"writer": [3, 2, 0, 0, 0]})),
        "described-twice": ("damaged", "a tensor is described twice", described_files({"described": [2, 4, 0, 0, 3]})),
        "described-order": ("damaged", "a flat buffer's tensors are not the last", described_files({"distribution": [0, 3, 1, 2, 3]})),
        "described-tile": ("damaged", "a tile has an edge of 0", described_files({"described_tile": [1, 1, 2, 0, 2, 2, 5]})),
        "described-flat": ("damaged", "a flat buffer is too short", described_files({"position": [0, 0, 0, 12, 3]})),
        "described-position": ("damaged", "a position without a flat buffer", described_files({"position": [1, 0, 0, 9, 3]})),
        "described-ranks": ("damaged", "a rank is twice in a mesh", described_files(meshes=[{"sizes": [2, 2], "strides": [1, 1]}, DESCRIBED["meshes"][1]])),
        "described-axis": ("damaged", "an axis cuts twice", described_files(distributions=[{"mesh": 1, "cuts": [[0, 0], [0, 0]]}, *DESCRIBED["distributions"][1:]])),
        "described-member": ("damaged", "an unknown member", described_files(more=1)),
        "described-folder": ("damaged", "a folder outside of the checkpoint", described_files(folder="data/../..")),
        "described-flipped": ("damaged", "a bit of a tile is flipped", flipped(described_files(), f"{DATA}/rank-00000.bin", 1)),
        "safetensors-header": ("damaged:verify", "a bit of the header is flipped", flipped(safetensors_files(), f"{DATA}/weights/model.safetensors", 12)),
        "packed-gap": ("damaged:verify", "bytes that only align are not zero", flipped(good, rank1, columns["block_nbytes"][1] + 2)),
    }  # fmt: skip


def header_twice(files: Files) -> Files:
    """The same with a sidecar whose header has a column twice."""
    path = f"{DATA}/extents.safetensors"
    data = files[path]
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].rstrip()
    tensor = json.dumps(json.loads(text)["tensor"]).encode()
    text = text[:-1] + b',"tensor":' + tensor + b"}"
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    changes = {"nbytes": len(data), "digest": bytes_digest(data)}
    return edited({**files, path: data}, lambda m: m["sidecar"].update(changes))


def of_virtual(virtual: Files) -> Faults:
    """Of files elsewhere."""
    source = f"sources/{ATTEMPT}/rank1.bin"

    def sidecar(**values: Any) -> Files:
        return edited(virtual, lambda m: m["sidecar"].update(values))

    def first(**values: Any) -> Files:
        return edited(virtual, lambda m: m["sidecar"]["sources"][0].update(values))

    return {
        "virtual-not-required": ("damaged", "files elsewhere, which is not required", edited(virtual, lambda m: m.update(requires=["packed", "extents"]))),
        "virtual-root": ("refused", "a root that the user did not allow", sidecar(roots=["@PLACE@/elsewhere"])),
        "virtual-no-root": ("damaged", "a source below a root that is not listed", sidecar(roots=[])),
        "virtual-twice": ("damaged", "a source is listed twice", edited(virtual, lambda m: m["sidecar"]["sources"].append(m["sidecar"]["sources"][0]))),
        "virtual-unlisted": ("damaged", "a file that no source names", edited(virtual, lambda m: m["sidecar"]["sources"].pop())),
        "virtual-missing": ("damaged", "a source is missing", changed(virtual, source, lambda _: b"")),
        "virtual-size": ("damaged", "a source of another size", first(nbytes=1)),
        "virtual-time": ("damaged", "a source of another time", first(modified=1.0)),
        "virtual-etag": ("damaged", "a source that had an etag, and has none", first(etag="x")),
    }  # fmt: skip


def of_patches(whole: Files) -> Faults:
    """Of patches; all checksums of what is stored are right."""
    name = next(k for k in whole if k.startswith("3/") and k.endswith("/rank0.bin"))
    data = whole[name]
    begin = len(data) - 32 - 40 * int.from_bytes(data[-24:-16], "little")
    entries = [list(entry) for entry in ENTRY.iter_unpack(data[begin:-32])]
    assert {entry[4] for entry in entries} >= {2, 3, 4}

    def indexed(number: int, field: int, value: int) -> Files:
        changed = [list(entry) for entry in entries]
        changed[number][field] = value
        index = b"".join(ENTRY.pack(*entry) for entry in changed) + data[-32:-4]
        return {**whole, name: data[:begin] + index + placed_in("rank0", begin, index)}

    def payload(number: int, change: Callable[[bytearray], object]) -> Files:
        at = sum(entry[2] + 4 * (entry[2] > 0) for entry in entries[:number])
        body = bytearray(data[at : at + entries[number][2]])
        change(body)
        sealed = bytes(body) + placed_in("rank0", at, bytes(body))
        return {**whole, name: data[:at] + sealed + data[at + len(sealed) :]}

    def manifest(change: Edit, number: int = 3) -> Files:
        return edited(whole, change, f"{number}/manifest.json")

    xor, overwrite, same = ([e[4] for e in entries].index(n) for n in (2, 3, 4))
    other = next(k for k in whole if k.startswith("2/") and k.endswith("/rank0.bin"))
    plain = next(k for k in whole if k.startswith("1/") and k.endswith("/rank0.bin"))
    return {
        "patched-not-required": ("damaged", "patches, which are not required", manifest(lambda m: m["requires"].remove("patches"))),
        "patched-no-base": ("damaged", "a patch that has no base", indexed(xor, 6, 0xFFFF)),
        "patched-other-base": ("damaged", "a patch of another base than the manifest says", indexed(xor, 6, 1)),
        "patched-number": ("damaged", "the number of no base", manifest(lambda m: m["tensors"]["kinds"][0].update(base=1))),
        "patched-missing": ("damaged", "there is no base", manifest(lambda m: m["bases"][0].update(url="../4"))),
        "patched-base": ("damaged", "a base that is damaged", flipped(whole, other, 20)),
        "patched-anchor": ("damaged", "the base of the base is damaged", flipped(whole, plain, 20)),
        "patched-same-stored": ("damaged", "a tile that is equal to the base, and is stored", indexed(xor, 4, 4)),
        "patched-nothing": ("damaged", "a patch of no bytes", indexed(same, 4, 2)),
        "patched-runs": ("damaged", "a patch of more runs than elements", payload(overwrite, lambda b: b.__setitem__(slice(0, 4), b"\xff\0\0\0"))),
        "patched-count": ("damaged", "a patch of more elements than the tile", payload(overwrite, lambda b: b.__setitem__(slice(4, 8), b"\xff\xff\xff\0"))),
        "patched-columns": ("damaged", "columns that are longer than the payload", payload(overwrite, lambda b: b.__setitem__(slice(8, 12), b"\xff\xff\0\0"))),
    }  # fmt: skip


def of_based(based: Files) -> Faults:
    """Of tensors of bases."""

    def manifest(change: Edit, number: int = 3) -> Files:
        return edited(based, change, f"{number}/manifest.json")

    def base(number: int = 0, **values: Any) -> Files:
        return manifest(lambda m: m["bases"][number].update(values))

    def no_fingerprint(m: Any) -> None:
        m["tensors"]["fingerprint"][0] = None

    def kind(**values: Any) -> Files:
        return manifest(lambda m: m["tensors"]["kinds"][-1].update(values))

    def circle(m: Any) -> None:
        m["bases"][0].update(id=f"{2:032x}", url="../3")

    def moved(m: Any) -> None:
        m["objects"]["path"] = "bases/0/" + m["objects"]["path"]

    places = ("../..", "2", "../%32", "http://h/../2", "../%2F2")
    return {
        "based-not-required": ("damaged", "bases, which are not required", manifest(lambda m: m["requires"].remove("bases"))),
        "based-twice": ("damaged", "a base is listed twice", base(1, id=f"{1:032x}")),
        "based-on-itself": ("damaged", "it is its own base", base(id=f"{2:032x}")),
        "based-id": ("damaged", "an id that is none", base(id="x")),
        **{f"based-place-{n}": ("damaged", f"a base at {url}", base(url=url)) for n, url in enumerate(places)},
        "based-elsewhere": ("refused", "a base at a place that the user did not allow", base(url="/nowhere/2")),
        "based-on-the-net": ("refused", "a base at a URL that the user did not allow", base(url="http://127.0.0.1:9/2")),
        "based-missing": ("damaged", "there is no base", base(url="../4")),
        "based-other": ("damaged", "another checkpoint is where the base was", manifest(lambda m: m.update(id="0" * 31 + "9"), 2)),
        "based-circle": ("damaged", "the base is based on it", manifest(circle, 2)),
        "based-no-fingerprint": ("damaged", "a tensor of a base without a fingerprint", manifest(no_fingerprint)),
        "based-fingerprint": ("damaged", "the base's tensor has another fingerprint", manifest(lambda m: m["tensors"]["fingerprint"].__setitem__(0, "0" * 32))),
        "based-bare": ("damaged", "the base's tensor has no fingerprint", manifest(lambda m: m["tensors"].pop("fingerprint"), 1)),
        "based-shape": ("damaged", "the base's tensor has another shape", kind(shape=[1])),
        "based-dtype": ("damaged", "the base's tensor has another dtype", kind(dtype="uint16")),
        "based-number": ("damaged", "the number of no base", kind(base=2)),
        "based-array": ("damaged", "a tensor of a base that is an array", kind(path=f"{DATA}/weight")),
        "based-file": ("damaged", "a file that is that of a base by its name", manifest(moved)),
    }  # fmt: skip
