"""A checkpoint as a JSON document, and the bytes that it names, from which `ucformat.open` reads it over HTTP."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import entry_data
from ucformat.errors import Conflict
from ucformat.reading.readable import path_to_json
from ucformat.schema.served import (
    LossDoc,
    OlderDoc,
    ServedAssetDoc,
    ServedDoc,
    ServedPlaceDoc,
    ServedTensorDoc,
    UnreadableDoc,
)
from ucformat.web.library import NoFile, reasons
from ucformat.web.tensors import content_of_bytes, content_of_tensor

if TYPE_CHECKING:
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import CheckpointMetadata, GroupPlace
    from ucformat.web.library import Access, Library, Served
    from ucformat.web.streaming import Content


def described(served: Served, ref: str, library: Library, access: Access) -> dict[str, Any]:
    """The document of an opened checkpoint, as a client may see it.

    Args:
        ref: the reference or place under which it was found.
    """
    ck = served.checkpoint
    metadata, training = ck.metadata, ck.training_info
    infos = list(ck.tensors.values())
    document = ServedDoc(
        id=ck.id,
        ref=ref if served.entry is None else served.entry.id,
        kind=ck.kind,
        step=metadata.step,
        run=training.run,
        config=dict(training.config),
        metrics=dict(training.metrics),
        engine=dict(metadata.engine),
        layout=dict(metadata.layout),
        aliases=dict(ck.aliases),
        nbytes=sum(info.nbytes for info in infos),
        tensors=tuple(_tensor(info, metadata) for info in infos),
        groups=tuple(dict(group) for group in metadata.groups),
        places=tuple(None if place is None else _place(place) for place in metadata.places),
        objects=dict(ck.objects),
        assets={name: ServedAssetDoc(file=file_of_asset(name)) for name in ck.assets},
        unreadable=tuple(
            UnreadableDoc(**reason) for reason in reasons(ck, limited=library.is_limited(access))
        ),
        lossy=tuple(
            LossDoc(name=key.name, state=key.state, **loss._asdict())
            for key, loss in ck.lossy.items()
        ),
        older=tuple(OlderDoc(**key._asdict(), step=step) for key, step in ck.older.items()),
        missing=(*ck.missing, *(f"{name}, a value of each rank" for name in ck.per_rank)),
        catalog=None if served.entry is None else entry_data(library.shown(served.entry, access)),
    )
    return document.model_dump(by_alias=True)


def schemas_of_document() -> dict[str, Any]:
    """The schemas of the document for OpenAPI, by name: that of all of it is `Checkpoint`."""
    schema = ServedDoc.model_json_schema(
        mode="serialization", ref_template="#/components/schemas/{model}"
    )
    return {**schema.pop("$defs", {}), "Checkpoint": schema}


def _tensor(info: TensorInfo, metadata: CheckpointMetadata) -> ServedTensorDoc:
    return ServedTensorDoc(
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=info.shape,
        nbytes=info.nbytes,
        file=file_of_tensor(info),
        paths=tuple(tuple(path_to_json(path)) for path in metadata.paths.get(info.key, ())),
        fingerprint=metadata.fingerprints.get(info.key),
    )


def _place(place: GroupPlace) -> ServedPlaceDoc:
    return ServedPlaceDoc(
        path=tuple(path_to_json(place.path)), names=place.names, flattened=place.flattened
    )


def file_of_tensor(info: TensorInfo) -> str:
    """The name of a tensor's bytes, which another tensor never has, nor this one with other bytes per element."""
    return f"tensors/{_digest(info.name, info.state, info.dtype, info.shape)}"


def file_of_asset(name: str) -> str:
    """The name of an asset's bytes."""
    return f"assets/{_digest(name)}"


def _digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def content_of_file(served: Served, identity: str, file: str) -> Content:
    """The bytes of a name in the document of the checkpoint with an id.

    Raises:
        Conflict: by now there is another checkpoint.
        NoFile: the document has no such name.
    """
    ck = served.checkpoint
    if ck.id != identity:
        raise Conflict(
            f"the checkpoint is not {identity} any more, but {ck.id}", hint="open it again"
        )
    names = served.files_of_document
    if not names:
        names |= {file_of_tensor(info): info for info in ck.tensors.values()}
        names |= {file_of_asset(name): name for name in ck.assets}
    value = names.get(file)
    if value is None:
        raise NoFile(f"{identity} has no file {file!r}")
    if isinstance(value, str):
        return content_of_bytes(ck.assets[value], ck, "application/octet-stream")
    return content_of_tensor(ck, value, (...,), "raw")
