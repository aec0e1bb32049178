"""A reader of universal checkpoints that shares no code with the package: it was written from docs/spec alone.

`python reader.py CHECKPOINT [ROOT …]` lists the tensors of a checkpoint in a local folder. It holds
them whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np
from crc32c import crc32c
from numcodecs import blosc  # type: ignore[import-untyped]
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class Absent(Exception):
    """There is no committed checkpoint."""


class Damaged(Exception):
    """Bytes are missing, wrong or contradictory."""


class Upgrade(Exception):
    """Written by a later revision of the format."""


class Refused(Exception):
    """It leads out of the checkpoint."""


SIZES = {
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}
SIZES |= {f"{kind}{n}": n // 8 for kind in ("int", "uint") for n in (8, 16, 32, 64)}
SIZES |= {f"float{n}": n // 8 for n in (16, 32, 64)}
OTHERS = {
    f"float8_{kind}": 1
    for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
}
OTHERS |= {f"float6_{kind}{how}": 1 for kind in ("e2m3fn", "e3m2fn") for how in ("", "_packed")}
OTHERS |= {"float4_e2m1fn": 1, "float4_e2m1fn_x2": 1, "complex32": 4, "bcomplex32": 4}
OTHERS |= {f"{kind}{n}": 1 for kind in ("int", "uint") for n in range(1, 8)}
OTHERS |= {"bits8": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits16": 2}
SIZES |= OTHERS
FEATURES = {"packed", "extents", "virtual", "codecs", "bases", "patches", "lossy", "steps"}
FARTHEST, NONE = 1 << 60, "xxh3:" + 32 * "0"
MOST_INTEGER, MOST_TEXT, MOST_LEVELS, MOST_BITS = 1 << 62, 1 << 16, 128, 1 << 13


def need(truth: object, reason: str, error: type[Exception] = Damaged) -> None:
    """Raise the error unless something is true."""
    if not truth:
        raise error(reason)


def strict(data: bytes) -> Any:
    """JSON as RFC 8259 has it, within the limits."""
    try:
        value = json.loads(
            data.decode(),
            parse_constant=lambda word: need(None, f"{word} is no JSON"),
            object_pairs_hook=unique,
        )
    except (ValueError, RecursionError) as error:
        raise Damaged(f"no JSON: {error}") from None
    check_value(value, 0)
    return value


def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose members have different names."""
    need(len(dict(members)) == len(members), "a member is there twice")
    return dict(members)


def check_value(value: Any, levels: int) -> None:
    """The limits of nesting, integers and text."""
    if isinstance(value, dict | list):
        need(levels < MOST_LEVELS, "too many levels")
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            check_value(inner, levels + 1)
    elif isinstance(value, str):
        need(not re.search("[\ud800-\udfff]", value), "text that is not Unicode")
    elif isinstance(value, int):
        need(value.bit_length() <= MOST_BITS, "a large integer")


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; integers and text have their limits, and booleans are no integers."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if not isinstance(value, kind):
        return False
    if isinstance(value, str):
        return len(value) <= MOST_TEXT
    return not isinstance(value, int) or abs(value) <= MOST_INTEGER


def of_type(document: Any, required: Any, nullable: Any = (), optional: Any = ()) -> None:
    """The types of an object's members. Optional ones may be absent, nullable ones may be null, too."""
    need(isinstance(document, dict), "not an object")
    given = {name: kind for name, kind in dict(optional).items() if name in document}
    for name, kind in {**required, **given}.items():
        need(is_a(document.get(name), kind), f"{name} is missing or no {kind}")
    for name, kind in dict(nullable).items():
        need(document.get(name) is None or is_a(document[name], kind), f"{name} is no {kind}")


def all_text(values: Any, reason: str) -> None:
    """A list, or the names and values of an object, are texts."""
    listed = [*values, *values.values()] if isinstance(values, dict) else values
    need(isinstance(listed, list) and all(is_a(v, str) for v in listed), reason)


def size_of(t: Any) -> int:
    """Bytes of an element of a tensor, whose dtype may be unknown."""
    return SIZES.get(t["dtype"]) or int(t["itemsize"])


def check_digest(digest: str) -> None:
    kind, _, digits = digest.partition(":")
    need(kind in ("sha256", "xxh3"), f"the digest {digest} is of an unknown kind", Upgrade)
    need(
        re.fullmatch("[0-9a-f]{64}" if kind == "sha256" else "[0-9a-f]{32}", digits),
        f"{digest} is no digest",
    )


def check_paths(paths: Any, pairs: tuple[type[Any], ...] = ()) -> None:
    """Paths in the state; in those of a kind, a pair of texts is what surrounds the name."""
    need(isinstance(paths, list) and all(isinstance(p, list) for p in paths), "paths in the state")
    parts = [part for path in paths for part in path]
    need(all(type(p) in (str, int, *pairs) for p in parts), "a path in the state")
    need(
        all([*map(type, p)] == [str, str] for p in parts if isinstance(p, list)),
        "a pair in a path in the state",
    )


def folder_of(name: str) -> str:
    """The folder of an array, if none is listed."""
    plain = quote(name, safe="").replace("~", "%7E")
    return "%2E" + plain[1:] if plain.startswith(".") else plain


def beside(url: str) -> str | None:
    """The name of a base in the same folder as the checkpoint."""
    name = unquote(url[3:], errors="surrogateescape")
    spelled = "".join(
        f"%{c.encode(errors='surrogateescape')[0]:02X}"
        if c < " " or c in "%?#\\" or "\udc80" <= c <= "\udcff"
        else c
        for c in name
    )
    wrong = name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(".ucf-")
    return None if wrong or url != f"../{spelled}" else name


DESCRIBED = ("described", "distribution", "writer", "position")


@dataclass
class Extent:
    """A row of the sidecar; its block is offset, bytes and checksum."""

    file: str
    offset: int
    block: tuple[int, int, int] | None
    start: list[int]
    shape: list[int]
    strides: list[int]
    tile: list[int]


class Checkpoint:
    """An opened checkpoint; `roots` are the folders in which files of others may be read.

    `above` are the ids of those that are based on it.
    """

    def __init__(
        self, place: str | Path, roots: Sequence[str | Path] = (), above: tuple[str, ...] = ()
    ) -> None:
        self.place, self.roots = Path(place), [Path(r).resolve() for r in roots]
        self.above = above
        self.manifest = self._open()
        self.tensors = self._table(self.manifest["tensors"])
        names = {(t["name"], t["state"]) for t in self.tensors}
        need(len(names) == len(self.tensors), "a name and state is listed twice")
        self.aliases: dict[str, str] = self.manifest["aliases"]
        stored = {name for name, _ in names}
        need(
            all(n not in stored and of in stored for n, of in self.aliases.items()),
            "an alias of nothing, or a name",
        )
        self.sources = {
            s["path"]: s for s in (self.manifest.get("sidecar") or {}).get("sources", ())
        }
        self._extents: list[list[Extent]] | None = None

    def _open(self) -> Any:
        try:
            data = (self.place / "manifest.json").read_bytes()
        except FileNotFoundError:
            raise Absent("no manifest.json") from None
        ending = b',\n "digest": "sha256:%s"\n}' % hashlib.sha256(data[:-88]).hexdigest().encode()
        if data[-88:] != ending:
            with suppress(TypeError, KeyError):
                need(strict(data)["format"] != "ucformat-tombstone", "it is being removed", Absent)
            raise Damaged("the manifest is not what its digest says")
        m: Any = strict(data)
        need(
            isinstance(m, dict) and m.get("format") == "ucformat" and type(m.get("version")) is int,
            "no manifest",
        )
        need(m["version"] <= 1, f"version {m['version']}", Upgrade)
        need(m["version"] == 1, "there is no such version")
        if isinstance(named := m.get("requires"), list):
            need(all(n in FEATURES for n in named), f"it requires {named}", Upgrade)
        files = dict.fromkeys(
            ("objects", "per_rank", "sidecar", "verified", "grid", "experts", "window"), dict
        )
        nullable = {"run": str, "step": int, "commits": int, **files}
        optional = dict.fromkeys(
            ("producer", "metrics", "config", "layout", "aliases", "assets"), dict
        )
        lists = dict.fromkeys(("requires", "groups", "lineage", "writers"), list)
        m = {name: kind() for name, kind in [*optional.items(), *lists.items()]} | m
        of_type(
            m,
            {"id": str, "attempt": str, "created": str, "tensors": dict},
            nullable,
            {**optional, **lists, "minor": int},
        )
        all_text(m["requires"], "requires")
        all_text(m["aliases"], "aliases")
        need(m.get("minor", 0) >= 0, "minor")
        need(re.fullmatch("[0-9a-f]{20}", m["attempt"]), "no attempt has this name")
        of_ranks = self._check_ranks(m["per_rank"]) if m.get("per_rank") else ()
        for file in (
            *m["assets"].values(),
            *of_ranks,
            *(m[k] for k in ("objects", "sidecar") if m.get(k)),
        ):
            of_type(file, {"path": str, "nbytes": int, "digest": str})
            need(file["nbytes"] >= 0, "a negative size")
            check_digest(file["digest"])
        for edge in m["lineage"]:
            of_type(edge, {"kind": str, "url": str}, {"id": str, "commits": int}, {"engine": dict})
        for group in m["groups"]:
            of_type(
                group,
                {"params": list},
                {"at": list, "names": list},
                {"options": dict, "flattened": bool},
            )
        sidecar = m.get("sidecar") or {}
        self._check_bases(m)
        self._check_sources(sidecar)
        if (window := m.get("window")) is not None:
            lists = dict.fromkeys(("groups", "update"), list)
            of_type(window, {"steps": int, "at": int}, {"pattern": str}, lists)
            need(2 <= window["steps"] < 64 and 0 <= window["at"] < window["steps"], "a window")
            for globs in (*window.get("groups", ()), window.get("update", [])):
                need(is_a(globs, list) and all(is_a(g, str) for g in globs), "globs")
        if (experts := m.get("experts")) is not None:
            of_type(experts, {"layers": dict, "lost": int | float})
            for layer in experts["layers"].values():
                of_type(layer, dict.fromkeys(("seen", "held", "stored"), list))
                need(
                    len({*map(len, layer.values())}) == 1, "tokens of different numbers of experts"
                )
                counts = [n for of_experts in layer.values() for n in of_experts]
                need(all(type(n) is int and 0 <= n <= MOST_INTEGER for n in counts), "tokens")
        need(not sidecar.get("roots") or "virtual" in m["requires"], "it is virtual")
        return m

    def _check_bases(self, m: Any) -> None:
        m.setdefault("bases", [])
        need(isinstance(m["bases"], list) and len(m["bases"]) <= 4096, "bases")
        for base in m["bases"]:
            of_type(base, {"id": str, "url": str})
            need(re.fullmatch("[0-9a-f]{32}", base["id"]), "the id of a base")
            url = base["url"]
            far = re.match(r"/|[A-Za-z][A-Za-z0-9+.-]*://[^/]", url) and "\0" not in url
            far = far and ".." not in unquote(url).split("/")
            need(far or beside(url), f"no base is at {url!r}")
        ids = {base["id"] for base in m["bases"]}
        need(len(ids) == len(m["bases"]) and m["id"] not in ids, "a base is listed twice")
        need(not ids or "bases" in m["requires"], "it has bases")

    def _base(self, number: int) -> Checkpoint:
        base, place = self.manifest["bases"][number], self.place.resolve()
        need(base["id"] not in (*self.above, self.manifest["id"]), "bases in a circle")
        need(len(self.above) < 64, "too many bases")
        if name := beside(base["url"]):
            place = place.parent / name
            allowed = not place.is_symlink()
        else:
            need("://" not in base["url"], f"{base['url']} is not local", Refused)
            place, allowed = Path(base["url"]), False
        inside = any(place.resolve().is_relative_to(r) for r in self.roots)
        need(allowed or inside, f"{place} is not allowed", Refused)
        try:
            opened = Checkpoint(place, self.roots, (*self.above, self.manifest["id"]))
        except Absent:
            raise Damaged(f"there is no base at {place}") from None
        need(opened.manifest["id"] == base["id"], f"another checkpoint is at {place}")
        return opened

    def _of_base(self, t: Any, *, patch: bool = False) -> Bytes:
        base, key = self._base(t["base"]), (t["name"], t["state"])
        there = [n for n, u in enumerate(base.tensors) if (u["name"], u["state"]) == key]
        need(there, f"a base lacks {key}")
        u = base.tensors[there[0]]
        same = all(t[k] == u[k] for k in ("dtype", "shape", "fingerprint")[: 2 if patch else 3])
        need(same and size_of(t) == size_of(u), f"a base has another {key}")
        return np.frombuffer(base.elements(there[0]), np.uint8)

    def _check_ranks(self, doc: Any) -> list[Any]:
        of_type(doc, {"ranks": int, "names": list, "files": list})
        need(
            all(isinstance(n, str) for n in doc["names"])
            and len({*doc["names"]}) == len(doc["names"]),
            "names",
        )
        end = 0
        for file in doc["files"]:
            of_type(file, {"first": int, "ranks": int, "nbytes": int})
            need(
                file["first"] == end and file["ranks"] >= 1,
                "the values of a rank are missing, or there twice",
            )
            need(
                file["nbytes"] >= 22 * file["ranks"] + 4,
                "there is no room for the values of the ranks",
            )
            end += file["ranks"]
        need(1 <= end == doc["ranks"] <= 1 << 20, "the number of ranks")
        return list(doc["files"])

    def _check_sources(self, sidecar: Any) -> None:
        seen = set()
        for source in sidecar.get("sources", ()):
            of_type(
                source,
                {"path": str, "nbytes": int},
                {"modified": int | float, "etag": str, "digest": str},
            )
            check_digest(source.get("digest") or NONE)
            path = re.fullmatch("roots/([0-9]{1,9})/(.+)", source["path"], re.DOTALL)
            need(
                path and int(path[1]) < len(sidecar.get("roots", ())),
                f"{source['path']} lies below no root",
            )
            need(source["path"] not in seen, f"{source['path']} is listed twice")
            seen.add(source["path"])

    def _table(self, t: Any) -> list[Any]:
        t = {"digest": [], "fingerprint": [], "path": {}, "at": {}, "bound": {}} | t
        of_type(
            t,
            dict.fromkeys(("names", "kinds", "name", "kind", "digest", "fingerprint"), list)
            | {"path": dict, "at": dict, "bound": dict},
        )
        names, kinds, n = t["names"], t["kinds"], len(t["name"])
        need(all(is_a(x, str) for x in names) and len(set(names)) == len(names), "names")
        for kind in kinds:
            self._check_kind(kind)
        optional = {len(t["digest"]), len(t["fingerprint"])}
        need(len(t["kind"]) == n and optional <= {0, n}, "columns of different lengths")
        need(
            all(
                f is None or (is_a(f, str) and re.fullmatch("[0-9a-f]{32}", f))
                for f in t["fingerprint"]
            ),
            "a fingerprint that is none",
        )
        for column, of in ((t["name"], names), (t["kind"], kinds)):
            need(all(type(k) is int and 0 <= k < len(of) for k in column), "the number of nothing")
        need({*t["path"], *t["at"]} <= {str(k) for k in range(n)}, "a path of no tensor")
        lossy = {str(k) for k in range(n) if kinds[t["kind"][k]].get("lossy") is not None}
        need({*t["bound"]} == lossy, "a lossy tensor without a bound, or one of another tensor")
        for bound in t["bound"].values():
            need(is_a(bound, list) and len(bound) == 2, "a bound")
            need(all(type(x) in (int, float) and 0 <= x < math.inf for x in bound), "a bound")
        for paths in t["at"].values():
            check_paths(paths)
        out = []
        for row, (name, kind) in enumerate(zip(t["name"], t["kind"], strict=True)):
            folder, digest = kinds[kind].get("path"), t["digest"][row] if t["digest"] else None
            need(isinstance(digest, str | None), "a digest that is no text")
            check_digest(digest or NONE)
            need(folder is None or digest, "an array without digest")
            need(
                folder is not None or str(row) not in t["path"],
                "a path of a tensor that is no array",
            )
            path = (
                None
                if folder is None
                else t["path"].get(str(row), f"{folder}/{folder_of(names[name])}")
            )
            need(path is None or re.fullmatch("[A-Za-z0-9._~%/-]+", path), "path")
            fingerprint = t["fingerprint"][row] if t["fingerprint"] else None
            of_base = kinds[kind].get("base") is not None and kinds[kind].get("codec") is None
            need(not of_base or fingerprint, "a tensor of a base without a fingerprint")
            own = {"digest": digest, "fingerprint": fingerprint, "path": path}
            out.append({**kinds[kind], "name": names[name], **own})
        return out

    def _check_kind(self, t: Any) -> None:
        nullable = {"chunk": list, "shard": list, "path": str, "itemsize": int, "codec": str}
        nullable |= {"base": int, "lossy": str, "step": int}
        of_type(t, {"state": str, "dtype": str, "shape": list}, nullable, {"at": list})
        size = SIZES.get(t["dtype"], t.get("itemsize"))
        need(size in (1, 2, 4, 8, 16), f"nobody knows how large elements of {t['dtype']} are")
        need(t.get("itemsize") in (None, size), "an itemsize that is not that of the dtype")
        check_paths(t.get("at", []), (list,))
        shape = t["shape"]
        need(
            all(type(n) is int and n >= 0 for n in shape)
            and len(shape) <= 64
            and max(shape, default=0) <= 1 << 62,
            "shape",
        )
        codec = t.get("codec")
        marked = t.get("lossy") is not None
        need(not marked or "lossy" in self.manifest["requires"], "it does not require lossy")
        if (step := t.get("step")) is not None:
            need("steps" in self.manifest["requires"], "it does not require steps")
            own = self.manifest.get("step")
            need(
                own is not None and step < own, "a tensor that is older, and not of an earlier step"
            )
        need(codec is None or "codecs" in self.manifest["requires"], "it does not require codecs")
        need(codec != ("blosc" if t.get("path") is None else "tiles"), "a codec of another form")
        if t.get("base") is not None:
            need(0 <= t["base"] < len(self.manifest["bases"]), "the number of no base")
            need(t.get("path") is None, "a tensor of a base that is an array")
            need(codec is None or "patches" in self.manifest["requires"], "it has patches")
            if codec is None:
                return
        if t.get("path") is None:
            need(self.manifest.get("sidecar"), "no path and no sidecar")
            need({"packed", "extents"} & {*self.manifest["requires"]}, "it is packed")
            return
        chunk, shard = t.get("chunk"), t.get("shard")
        need(chunk is not None and shard is not None, "an array without chunk or shard")
        need(len(shape) <= 32 and len(chunk) == len(shard) == len(shape), "dims")
        need(all(type(n) is int and n >= 1 for n in (*chunk, *shard)), "edges of a chunk or shard")
        need(
            all(s % c == 0 for s, c in zip(shard, chunk, strict=True)),
            "a shard is not a multiple of its chunk",
        )
        need(codec != "blosc" or math.prod(chunk) * size < (1 << 31) - 16, "chunks are too large")
        need(
            math.prod(-(-n // s) for n, s in zip(shape, shard, strict=True)) <= 10**7,
            "too many shards",
        )

    def _path(self, path: str) -> Path:
        parts = path.split("/")
        bad = (
            any(p in ("", ".", "..") or p.startswith(".ucf-") for p in parts)
            or "\\" in path
            or "\0" in path
        )
        need(not bad, f"{path!r} leads out of the checkpoint", Refused)
        need(not path.startswith("bases/"), f"{path!r} is a file of a base")
        if not path.startswith("roots/"):
            found = (self.place / path).resolve()
            need(
                found.is_relative_to(self.place.resolve()),
                f"{path!r} is a link that leads out",
                Refused,
            )
            return found
        source: Any = self.sources.get(path)
        need(source is not None, f"{path!r} is not listed")
        url = self.manifest["sidecar"]["roots"][int(parts[1])]
        need("://" not in url or url.startswith("file://"), f"{url} is not local", Refused)
        root = Path(unquote(urlsplit(url).path) if "://" in url else url).resolve()
        need(any(root.is_relative_to(r) for r in self.roots), f"{root} is not allowed", Refused)
        found = root.joinpath(*parts[2:])
        need(found.is_file(), f"{found} is missing")
        info = found.stat()
        same = (info.st_size, info.st_mtime, None) == (
            source["nbytes"],
            source.get("modified"),
            source.get("etag"),
        )
        need(same, f"{found} has changed")
        return found

    def read(self, path: str) -> bytes:
        """A whole file."""
        try:
            return self._path(path).read_bytes()
        except OSError:
            raise Damaged(f"{path} is missing") from None

    def _file(self, doc: Any) -> bytes:
        data = self.read(doc["path"])
        need(
            len(data) == doc["nbytes"]
            and "sha256:" + hashlib.sha256(data).hexdigest() == doc["digest"],
            doc["path"],
        )
        return data

    def objects(self) -> dict[str, Any]:
        """The objects, as they are spelled."""
        doc = self.manifest.get("objects")
        found: Any = {} if doc is None else strict(self._file(doc))
        need(isinstance(found, dict), "objects.json holds no object")
        return dict(found)

    def per_rank(self) -> dict[str, list[Any]]:
        """The values of each rank, as they are spelled."""
        doc = self.manifest.get("per_rank") or {"names": [], "files": []}
        ranks = [values for file in doc["files"] for values in self._ranges(file, {*doc["names"]})]
        return {name: [values.get(name) for values in ranks] for name in doc["names"]}

    def _ranges(self, file: Any, names: set[str]) -> list[Any]:
        data, at, index, ranks = self._file(file), 0, b"", []
        begin = len(data) - 4 - 16 * file["ranks"]
        for n in range(file["ranks"]):
            nbytes = int.from_bytes(data[begin + 16 * n + 8 : begin + 16 * n + 16], "little")
            need(4 <= nbytes <= begin - at, "the values of a rank")
            body, crc = data[at : at + nbytes - 4], data[at + nbytes - 4 : at + nbytes]
            need(int.from_bytes(crc, "little") == crc32c(body), "the checksum of a rank's values")
            index += at.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
            at += nbytes
            ranks.append(strict(body))
            need(isinstance(ranks[-1], dict) and {*ranks[-1]} <= names, "the values of a rank")
        need(data[at:] == index + crc32c(index).to_bytes(4, "little"), "the index of the ranks")
        return ranks

    def assets(self) -> dict[str, bytes]:
        """The assets."""
        return {name: self._file(doc) for name, doc in self.manifest["assets"].items()}

    def __iter__(self) -> Iterator[tuple[Any, bytes]]:
        """Every tensor: what the manifest says of it, and its elements."""
        return ((t, self.elements(number)) for number, t in enumerate(self.tensors))

    def elements(self, number: int) -> bytes:
        """The elements of a tensor in row-major order."""
        t = self.tensors[number]
        need(t["dtype"] in SIZES, f"{t['name']} has the dtype {t['dtype']}", Upgrade)
        need(t.get("codec") in (None, "blosc", "tiles"), f"{t['name']} has another codec", Upgrade)
        if t.get("base") is not None and t.get("codec") is None:
            a = self._of_base(t)
        else:
            a = self._packed(number, t) if t.get("path") is None else self._array(t)
        data, expected = a.tobytes(), t["fingerprint"]
        need(expected in (None, fingerprint_of(data, size_of(t))), f"fingerprint of {t['name']}")
        return data

    def _array(self, t: Any) -> Bytes:
        shape, chunk, shard, size = t["shape"], t["chunk"], t["shard"], size_of(t)
        nbytes, codec = math.prod(chunk) * size, t.get("codec")
        out = np.zeros((*shape, size), np.uint8)
        leaves: dict[tuple[int, ...], bytes] = {}
        per_shard = [s // c for s, c in zip(shard, chunk, strict=True)]
        for at in product(*(range(-(-n // s)) for n, s in zip(shape, shard, strict=True))):
            data = self.read("/".join([t["path"], "c", *map(str, at)]))
            end, offset = len(data) - 16 * math.prod(per_shard) - 4, 0
            need(end >= 0, f"a shard of {t['name']} without its index")
            index, crc = data[end:-4], data[-4:]
            need(int.from_bytes(crc, "little") == crc32c(index), f"the index of {t['name']}")
            for n, inner in enumerate(product(*map(range, per_shard))):
                entry = index[16 * n : 16 * n + 16]
                where = [a * s + i * c for a, s, i, c in zip(at, shard, inner, chunk, strict=True)]
                if any(w >= n for w, n in zip(where, shape, strict=True)):
                    need(entry == b"\xff" * 16, "an index with a chunk that has no elements")
                    continue
                need(int.from_bytes(entry[:8], "little") == offset, "a gap between chunks")
                begin, offset = offset, offset + int.from_bytes(entry[8:], "little")
                body, crc = data[begin : offset - 4], data[offset - 4 : offset]
                least, most = (20 + (nbytes >> 15), 20 + nbytes) if codec else (nbytes + 4,) * 2
                need(least <= offset - begin <= most and offset <= end, "the length of a chunk")
                need(int.from_bytes(crc, "little") == crc32c(body), f"a chunk of {t['name']}")
                body = decompressed(body, nbytes, size) if codec else body
                box = [min(c, n - w) for c, n, w in zip(chunk, shape, where, strict=True)]
                held = np.frombuffer(body, np.uint8).reshape(*chunk, size)[tuple(map(slice, box))]
                out[tuple(slice(w, w + b) for w, b in zip(where, box, strict=True))] = held
                leaves[tuple(w // c for w, c in zip(where, chunk, strict=True))] = xxh3_128_digest(
                    body
                )
            need(offset == end, f"bytes between the chunks of {t['name']} and their index")
        need(
            t["digest"] == digest_of(t["dtype"], shape, chunk, leaves), f"the digest of {t['name']}"
        )
        return out

    def extents(self) -> list[list[Extent]]:
        """The extents of each tensor."""
        if self._extents is None:
            self._extents = self._sidecar(self._file(self.manifest["sidecar"]))
        return self._extents

    def _sidecar(self, data: bytes) -> list[list[Extent]]:
        end = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = dict(strict(data[8:end]))
        meta = header.pop("__metadata__", {})
        need(meta.get("format") == "ucformat-extents" and "files" in meta, "no sidecar")
        rows = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
        dims = ("start", "shape", "strides")
        need({*rows, *dims} <= set(header), "columns are missing")
        known = {
            *rows,
            *dims,
            "tile",
            *(("described_tile", *DESCRIBED) if "described" in meta else ()),
        }
        need(set(header) <= known, "unknown columns", Upgrade)
        files = strict(meta["files"].encode())
        need(isinstance(files, list), "files")
        for file in files:
            outside = not isinstance(file, str) or "://" in file or file.startswith("/")
            need(not outside, f"{file!r} lies outside", Refused)
        need(
            re.fullmatch("[0-9]{1,10}", meta.get("extents", "")),
            "it does not say how many extents it has",
        )

        def column(name: str, count: int) -> list[int]:
            entry = header[name]
            need(entry["dtype"] == "U8" and len(entry["shape"]) == 1, f"the column {name}")
            packed = data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]]
            need(len(packed) == entry["shape"][0], f"the column {name}")
            need(
                count <= 1 << 27 and 8 * count <= 1032 * len(packed),
                f"the column {name} cannot be so long",
            )
            stream = zlib.decompressobj()
            try:
                raw = stream.decompress(packed, 8 * count + 1)
            except zlib.error as error:
                raise Damaged(f"the column {name}: {error}") from None
            need(
                len(raw) == 8 * count and stream.eof and not stream.unused_data,
                f"the column {name}",
            )
            values = (
                np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(8, count).T)
                .view("<u8")
                .reshape(count)
            )
            if name in ("tensor", "file", "offset", "block_offset"):
                values = np.cumsum(values, dtype=np.uint64)  # modulo 2^64
            return list(values.astype(np.int64).tolist())

        n = int(meta["extents"])
        by_row = {name: column(name, n) for name in rows}
        need(all(0 <= k < len(self.tensors) for k in by_row["tensor"]), "a tensor that is none")
        ndims = [len(self.tensors[k]["shape"]) for k in by_row["tensor"]]
        by_dim = {name: column(name, sum(ndims)) for name in (*dims, "tile") if name in header}
        by_dim.setdefault("tile", [0] * sum(ndims))
        out: list[list[Extent]] = [[] for _ in self.tensors]
        first, used = 0, {"packed"} if "described" in meta else set()
        for k, ndim in enumerate(ndims):
            row = {name: values[k] for name, values in by_row.items()}
            box = {name: values[first : first + ndim] for name, values in by_dim.items()}
            first += ndim
            need(row["crc32c"] >= -2, "an unknown kind of checksum", Upgrade)
            need(
                0 <= row["file"] < len(files) and row["offset"] >= 0 and row["block_offset"] >= -1,
                "a row",
            )
            need(row["block_nbytes"] >= 0 and row["crc32c"] < 1 << 32, "a row")
            need(
                min((v for values in box.values() for v in values), default=0) >= 0,
                "a negative number",
            )
            uncovered = row["block_offset"] == -1
            need(not uncovered or row["block_nbytes"] == row["crc32c"] == 0, "numbers of no block")
            used.add("packed" if any(box["tile"]) or row["crc32c"] == -2 else "extents")
            block = (
                (row["block_offset"], row["block_nbytes"], row["crc32c"])
                if row["block_offset"] >= 0
                else None
            )
            e = Extent(files[row["file"]], row["offset"], block, **box)
            self._check_extent(e, self.tensors[row["tensor"]])
            out[row["tensor"]].append(e)
        need(used <= {*self.manifest["requires"]}, f"it does not require {used}")
        if "described" in meta:
            need({*DESCRIBED, "described_tile"} <= set(header), "columns are missing")
            for number, found in self._described(
                strict(meta["described"].encode()), column
            ).items():
                need(not out[number], "a tensor is described and listed")
                out[number] = found
        return out

    def _described(
        self, told: Any, column: Callable[[str, int], list[int]]
    ) -> dict[int, list[Extent]]:
        need(
            isinstance(told, dict)
            and set(told) == {"tensors", "folder", "meshes", "distributions"},
            "described",
        )
        need(re.fullmatch("data/[^/]+", told["folder"]) and whole(told["tensors"]), "described")
        meshes = [mesh(m) for m in told["meshes"]]
        need(all(m not in meshes[:n] for n, m in enumerate(meshes)), "a mesh is listed twice")
        distributions = [{"cuts": [], "flat": None, "part": 0, **d} for d in told["distributions"]]
        need(
            all(d not in distributions[:n] for n, d in enumerate(distributions)),
            "a distribution is listed twice",
        )
        rows = list(zip(*(column(name, told["tensors"]) for name in DESCRIBED), strict=True))
        need(all(0 <= row[0] < len(self.tensors) for row in rows), "a tensor that is none")
        tiles = column("described_tile", sum(len(self.tensors[row[0]]["shape"]) for row in rows))
        out: dict[int, list[Extent]] = {}
        ends: dict[int, int] = {}
        groups: list[Any] = []
        for number, which, writer, position in rows:
            shape, size = self.tensors[number]["shape"], size_of(self.tensors[number])
            tile, tiles = tiles[: len(shape)], tiles[len(shape) :]
            need(
                0 <= which < len(distributions) and number not in out and all(t > 0 for t in tile),
                "a row",
            )
            d = distributions[which]
            need(
                set(d) == {"mesh", "cuts", "flat", "part"} and 0 <= d["mesh"] < len(meshes),
                "a distribution",
            )
            sizes, ranks = meshes[d["mesh"]]
            axes = [axis for _, axis in d["cuts"]] + ([] if d["flat"] is None else [d["flat"]])
            need(len(set(axes)) == len(axes) and all(0 <= a < len(sizes) for a in axes), "axes")
            need(all(0 <= dim < len(shape) for dim, _ in d["cuts"]) and position >= 0, "a row")
            need(
                d["part"] > 0 if d["flat"] is not None else (d["part"], position) == (0, 0),
                "a flat buffer",
            )
            group = (which,) if d["flat"] is not None else (which, shape, size, tile)
            need(
                group not in groups[:-1]
                and not (len(group) > 1 and groups and len(groups[-1]) == 1),
                "the order",
            )
            groups += [group] if [group] != groups[-1:] else []
            others = [a for a in range(len(sizes)) if a not in axes]
            need(0 <= writer < math.prod(sizes[a] for a in others), "a writer")
            out[number] = []
            for at, rank in zip(product(*map(range, sizes)), ranks, strict=True):
                box = [(0, n) for n in shape]
                for dim, axis in d["cuts"]:
                    (a, b), step = box[dim], -(-(box[dim][1] - box[dim][0]) // sizes[axis])
                    box[dim] = (min(b, a + at[axis] * step), min(b, a + (at[axis] + 1) * step))
                boxes = [box]
                if d["flat"] is not None:
                    count = math.prod(b - a for a, b in box)
                    need(
                        position + count <= d["part"] * sizes[d["flat"]],
                        "a flat buffer is too short",
                    )
                    low = min(max(0, at[d["flat"]] * d["part"] - position), count)
                    boxes = list(
                        parts(
                            box, low, min(max(0, (at[d["flat"]] + 1) * d["part"] - position), count)
                        )
                    )
                if [at[a] for a in others] != list(
                    np.unravel_index(writer, [sizes[a] for a in others])
                ):
                    continue
                for found in boxes:
                    begin, edges = [a for a, _ in found], [b - a for a, b in found]
                    if not math.prod(edges):
                        continue
                    end = ends.get(rank, 0)
                    block = None if shape else (end, size, -2)
                    strides = [0] * (len(shape) - 1) + [size] * bool(shape)
                    e = Extent(
                        f"{told['folder']}/rank-{rank:05}.bin",
                        end,
                        block,
                        begin,
                        edges,
                        strides,
                        tile,
                    )
                    count = math.prod(len(cuts(e, k)) for k in range(len(shape)))
                    ends[rank] = -(-(end + math.prod(edges) * size + 4 * count) // 64) * 64
                    out[number].append(e)
        return out

    def _check_extent(self, e: Extent, t: Any) -> None:
        size = size_of(t)
        fits = all(s + n <= edge for s, n, edge in zip(e.start, e.shape, t["shape"], strict=True))
        need(fits, "an extent leaves its tensor")
        if any(e.tile):
            need(all(e.tile) and e.block is None, "impossible tiles")
            need(e.strides == [0] * (len(e.shape) - 1) + [size], "strides of tiles")
            need(
                math.prod(max(1, len(cuts(e, d))) for d in range(len(e.tile))) <= 1 << 20,
                "too many tiles",
            )
            need(
                math.prod(e.shape) * size <= FARTHEST and e.offset <= FARTHEST,
                "an impossible offset",
            )
        elif math.prod(e.shape):
            strong = e.block is not None and e.block[2] != -1
            need(strong or e.file.startswith("roots/"), f"no checksum in {e.file}")
            span = sum((n - 1) * s for n, s in zip(e.shape, e.strides, strict=True))
            need(max(span, e.offset, *(e.block or ())[:2]) <= FARTHEST, "an impossible offset")
            if e.block is not None:
                begin, nbytes, _ = e.block
                need(
                    begin <= e.offset and e.offset + span + size <= begin + nbytes,
                    "an extent leaves its block",
                )

    def _packed(self, number: int, t: Any) -> Bytes:
        size = size_of(t)
        out, seen = np.zeros((*t["shape"], size), np.uint8), np.zeros(t["shape"], bool)
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        encoded = t.get("codec") == "tiles"
        for e in self.extents()[number]:
            where = tuple(slice(s, s + n) for s, n in zip(e.start, e.shape, strict=True))
            if not math.prod(e.shape):
                continue
            need(not encoded or any(e.tile) or (e.block or (0,))[-1] == -2, "no tile")
            data = self._plain(e.file) if encoded else self.read(e.file)
            held = tiles(e, data, size) if any(e.tile) else strided(e, data, size)
            box = (tuple(e.start), tuple(e.shape))
            if box in boxes:
                need(
                    boxes[box] == e.tile and (out[where] == held).all(),
                    f"replicas of {t['name']} differ",
                )
                continue
            need(not seen[where].any(), f"extents of {t['name']} overlap")
            boxes[box] = e.tile
            out[where], seen[where] = held, True
        need(seen.all(), f"extents do not cover {t['name']}")
        return out

    def _plain(self, file: str) -> bytes:
        """The plain file of an encoded one, whose index has the tiles of all tensors and no other."""
        data, out, end = self.read(file), bytearray(), 0
        expected: dict[tuple[int, int, int], Any] = {}
        for t, extents in zip(self.tensors, self.extents(), strict=True):
            for e in extents:
                at, size = e.offset, size_of(t)
                for box in boxes_of(e) if e.file == file and all(e.shape) else ():
                    nbytes = math.prod(b - a for a, b in box) * size
                    expected[at, nbytes, size] = (t, box)
                    at += nbytes + 4
        count, plain = (int.from_bytes(data[at : at + 8], "little") for at in (-24, -16))
        begin = len(data) - 32 - 40 * count
        need(data[-32:-24] == b"UCFTILES" and begin >= 0, f"{file} has no index of tiles")
        need(data[-8:-4] == bytes(4), f"the trailer of {file}")
        check_block(file, data, begin, 40 * count + 28, -2)
        for at in range(begin, len(data) - 32, 40):
            start, nbytes, stored, crc = (
                int.from_bytes(data[at + a : at + b], "little")
                for a, b in ((0, 8), (8, 12), (12, 16), (16, 20))
            )
            encoding, size, base = data[at + 20], data[at + 21], data[at + 22 : at + 24]
            need(size in (1, 2, 4, 8, 16) and 0 < nbytes <= 1 << 24, "a tile")
            need(nbytes % size == 0 and stored <= nbytes, "a tile")
            need((encoding == 4) == (stored == 0), "a tile that is stored in no bytes")
            need((encoding in (2, 3, 4)) == (base != b"\xff\xff"), "a base")
            need(encoding < 7, "an unknown encoding", Upgrade)
            need(encoding or stored == nbytes, "a tile")
            need(0 <= start - len(out) < 64, "tiles that do not follow each other")
            after = end + stored + 4 * (stored > 0)
            need(after <= begin, "tiles that do not end before their index")
            if stored:
                check_block(file, data, end, stored, -2)
            body = data[end : end + stored]
            t, box = expected.pop((start, nbytes, size), ({}, None))
            need(box is not None, "a tile of no tensor")
            if encoding == 1:
                body = decompressed(body, nbytes, size)
            elif encoding >= 5:
                need(t.get("lossy") is not None, "a lossy tile of a tensor that is not lossy")
                body = dequantized(encoding, body, nbytes // size, t["dtype"])
            elif encoding:
                need(t.get("base") == int.from_bytes(base, "little"), "a patch of another base")
                there = self._of_base(t, patch=True).reshape(*t["shape"], size)
                old = there[tuple(slice(a, b) for a, b in box)].tobytes()
                body = patched(encoding, body, old, size)
            sums = fingerprint_of(body, size, places(t["shape"], box))
            lanes = (data[at + 24 : at + 32], data[at + 32 : at + 40])
            need(sums == "".join(lane[::-1].hex() for lane in lanes), "the fingerprint of a tile")
            out += bytes(start - len(out)) + body + crc.to_bytes(4, "little")
            end = after
        need(end == begin and 0 <= plain - len(out) < 64, "tiles that do not end at their index")
        need(not expected, "a tile that is in no index")
        return bytes(out) + bytes(plain - len(out))


def strided(e: Extent, data: bytes, size: int) -> Bytes:
    """The elements of an extent without tiles."""
    last = e.offset + sum((n - 1) * s for n, s in zip(e.shape, e.strides, strict=True)) + size
    need(last <= len(data), f"{e.file} ends before an extent does")
    if e.block is not None:
        check_block(e.file, data, *e.block)
    return np.ndarray((*e.shape, size), np.uint8, data, e.offset, (*e.strides, 1))


def tiles(e: Extent, data: bytes, size: int) -> Bytes:
    """The elements of an extent of tiles."""
    offset, out = e.offset, np.zeros((*e.shape, size), np.uint8)
    for tile in boxes_of(e):
        nbytes = math.prod(b - a for a, b in tile) * size
        check_block(e.file, data, offset, nbytes, -2)
        held = np.frombuffer(data, np.uint8, nbytes, offset).reshape(
            *(b - a for a, b in tile), size
        )
        out[tuple(slice(a - s, b - s) for (a, b), s in zip(tile, e.start, strict=True))] = held
        offset += nbytes + 4
    return out


def boxes_of(e: Extent) -> list[Any]:
    """The tiles of an extent, each as the range of each dim; itself, if it has none."""
    if any(e.tile):
        return list(product(*(cuts(e, d) for d in range(len(e.tile)))))
    return [[(a, a + n) for a, n in zip(e.start, e.shape, strict=True)]]


def places(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers of the elements of a box of a tensor."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return [sum(map(mul, at, steps)) for at in product(*(range(a, b) for a, b in box))]


def whole(value: Any, low: int = 0, high: int = 1 << 31) -> bool:
    """Whether a value is an integer in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def mesh(m: Any) -> tuple[list[int], list[int]]:
    """The sizes of a mesh, and its ranks in row-major order."""
    m = {"first": 0, "strides": [], "ranks": [], **m}
    sizes, strides, listed = m["sizes"], m["strides"], m["ranks"]
    need(set(m) == {"sizes", "first", "strides", "ranks"}, "a mesh")
    need(
        all(whole(v) for v in (m["first"], *strides, *m["ranks"]))
        and all(whole(n, 1) for n in sizes),
        "a mesh",
    )
    need(math.prod(sizes) <= 1 << 20, "a mesh")
    ranks = listed
    if not listed:
        need(len(strides) == len(sizes), "a mesh")
        ranks = [m["first"] + sum(map(mul, at, strides)) for at in product(*map(range, sizes))]
    need(len(set(ranks)) == len(ranks) == math.prod(sizes) and max(ranks) < 1 << 20, "a mesh")
    grid = np.array(ranks).reshape(sizes)
    steps = [int(grid.take(1, a).flat[0]) - ranks[0] if n > 1 else 0 for a, n in enumerate(sizes)]
    follow = [ranks[0] + sum(map(mul, at, steps)) for at in product(*map(range, sizes))] == ranks
    regular = follow and min(steps, default=0) >= 0
    need(not listed if regular else listed and not m["first"], "a mesh of another spelling")
    need(listed or strides == steps, "strides of an axis of one rank")
    return sizes, ranks


def parts(box: list[tuple[int, int]], low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """The boxes of a range of a box's elements, in row-major order."""
    if low >= high:
        return
    if not box:
        yield []
        return
    (begin, _), below = box[0], math.prod(b - a for a, b in box[1:])
    first, last = -(-low // below), high // below
    if first > last:  # within one row
        yield from (
            [(begin + last, begin + last + 1), *p]
            for p in parts(box[1:], low - last * below, high - last * below)
        )
        return
    yield from (
        [(begin + first - 1, begin + first), *p]
        for p in parts(box[1:], low - (first - 1) * below, below)
        if low % below
    )
    if first < last:
        yield [(begin + first, begin + last), *box[1:]]
    yield from (
        [(begin + last, begin + last + 1), *p] for p in parts(box[1:], 0, high - last * below)
    )


def cuts(e: Extent, d: int) -> list[tuple[int, int]]:
    """The tiles along a dim, cut by the box."""
    start, stop, edge = e.start[d], e.start[d] + e.shape[d], e.tile[d]
    first, last = start // edge, -(-stop // edge)
    need(last - first <= 1 << 20, "too many tiles")
    return [(max(start, k * edge), min(stop, (k + 1) * edge)) for k in range(first, last)]


def check_block(file: str, data: bytes, begin: int, nbytes: int, crc: int) -> None:
    """Compare the bytes of a block with their checksum."""
    body, stored = data[begin : begin + nbytes], data[begin + nbytes : begin + nbytes + 4]
    need(len(body) == nbytes and (crc >= 0 or len(stored) == 4), f"{file} ends before a block does")
    place = (
        "/".join(file.split("/")[-2:]).encode() + begin.to_bytes(8, "little") if crc == -2 else b""
    )
    expected = crc if crc >= 0 else int.from_bytes(stored, "little")
    need(crc32c(place + body) == expected, f"the checksum of the block at {begin} of {file}")


def decompressed(data: bytes, nbytes: int, size: int) -> bytes:
    """The bytes of a compressed chunk."""
    need(data[:2] == b"\2\1" and data[2] in (0x91, 0x93) and data[3] == size, "no Blosc buffer")
    sizes = [int.from_bytes(data[at : at + 4], "little") for at in (4, 12)]
    need(sizes == [nbytes, len(data)], "a Blosc buffer of another size")
    if data[2] == 0x93:
        need(len(data) == nbytes + 16, "a Blosc buffer that is not what its header says")
        return data[16:]
    try:
        return bytes(blosc.decompress(data))
    except (RuntimeError, ValueError) as error:
        raise Damaged(f"a Blosc buffer: {error}") from None


def patched(encoding: int, payload: bytes, old: bytes, size: int) -> bytes:
    """The bytes of a tile that is a patch of others."""
    if encoding == 2:
        bits = decompressed(payload, len(old), size)
        return bytes(a ^ b for a, b in zip(bits, old, strict=True))
    if encoding == 4:
        return old
    need(len(payload) >= 12, "a patch without a header")
    runs, count, stored = (int.from_bytes(payload[at : at + 4], "little") for at in (0, 4, 8))
    need(runs <= count and runs * 8 + count * size <= len(old), "a patch of too many elements")

    def part(data: bytes, nbytes: int, of: int) -> bytes:
        return data if len(data) == nbytes else decompressed(data, nbytes, of)

    columns = np.frombuffer(part(payload[12 : 12 + stored], 8 * runs, 4), "<u4").tolist()
    values = part(payload[12 + stored :], count * size, size)
    out, at, taken = bytearray(old), -1, 0
    for before, length in zip(columns[:runs], columns[runs:], strict=True):
        begin, n = (at + 1 + before) * size, (length + 1) * size
        need(begin + n <= len(out) and taken + n <= len(values), "a run that leaves the tile")
        out[begin : begin + n] = values[taken : taken + n]
        at, taken = at + 1 + before + length + 1, taken + n
    need(taken == len(values), "runs of another number of elements")
    return bytes(out)


def dequantized(encoding: int, payload: bytes, count: int, dtype: str) -> bytes:
    """The bytes of a tile that is encoded with loss."""
    need(dtype in ("float32", "float16", "bfloat16"), "a lossy tile of another dtype")
    head, block = int.from_bytes(payload[:4], "little"), 256
    if encoding == 5:
        need(head <= 1, "codes of an unknown kind")
        values = [0.0, 1.0]
        for p in range(7):
            n = 1 << p + 1 - head
            some = [(2 * n + 9 * (2 * k + 1)) / (20 * n * 10 ** (6 - p)) for k in range(n)]
            values += some + ([-x for x in some] if head else [])
        begin, each, bits = 4, 1, 8
    else:
        block = int.from_bytes(payload[4:8], "little")
        need(head in (2, 3, 4, 8) and block, "codes of other widths")
        begin, each, bits = 8, 2, head
    blocks = -(-count // block)
    at = begin + 4 * each * blocks
    need(len(payload) == at + -(-count * bits // 8), "a payload of another number of elements")
    numbers = np.frombuffer(payload, "<f4", each * blocks, begin).reshape(blocks, each)
    of_each = numbers[np.arange(count) // block]
    stream = np.unpackbits(np.frombuffer(payload, np.uint8, -1, at), bitorder="little")
    places = np.arange(count)[:, None] * bits + np.arange(bits)
    codes = stream[places].astype(np.int64) @ (1 << np.arange(bits))
    with np.errstate(all="ignore"):
        if encoding == 5:
            out = np.array(sorted(values), np.float32)[codes] * of_each[:, 0]
        else:
            out = codes.astype(np.float32) * of_each[:, 1] + of_each[:, 0]
        if dtype != "bfloat16":
            return bytes(out.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes())
    need(np.isfinite(out).all(), "elements that are no numbers")
    words = out.view(np.uint32).astype(np.uint64)
    rounded = (words + 0x7FFF + (words >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return bytes(rounded.astype("<u2").tobytes())


def digest_of(
    dtype: str, shape: Sequence[int], chunk: Sequence[int], leaves: dict[tuple[int, ...], bytes]
) -> str:
    """The digest of a tensor from those of its chunks."""
    head = json.dumps(
        {"dtype": dtype, "shape": list(shape), "chunk": list(chunk)}, separators=(",", ":")
    )
    return "xxh3:" + xxh3_128_hexdigest(
        head.encode() + b"\n" + b"".join(leaves[at] for at in sorted(leaves))
    )


def fingerprint_of(data: bytes, itemsize: int, numbers: Sequence[int] | None = None) -> str:
    """The fingerprint of a tensor with these elements, or the part of those that have these numbers."""
    nbytes, sums = min(itemsize, 4), [0, 0]
    each = itemsize // nbytes
    for number in range(len(data) // nbytes):
        word = int.from_bytes(data[number * nbytes : (number + 1) * nbytes], "little")
        element = number // each if numbers is None else numbers[number // each]
        block, place = divmod(element * each + number % each, 1024)
        for lane in (0, 1):
            within = splitmix64(-1 - 2 * place - lane) % 2**32 | 1
            sums[lane] += word * within * (splitmix64(2 * block + lane) | 1)
    return "".join(f"{s % 2**64:016x}" for s in sums)


@lru_cache(1 << 17)  # places in blocks repeat
def splitmix64(x: int) -> int:
    """The first output of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


if __name__ == "__main__":
    checkpoint = Checkpoint(sys.argv[1], sys.argv[2:])
    for n, tensor in enumerate(checkpoint.tensors):
        digest = hashlib.sha256(checkpoint.elements(n)).hexdigest()
        sys.stdout.write(f"{tensor['name']} {tensor['state']} {digest}\n")
