"""What is known of a checkpoint, as other tools read it: CycloneDX ML-BOM and OpenLineage."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

from ucformat._version import __version__
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFound, UnsupportedError, check_choice
from ucformat.references import open_catalog, open_reference
from ucformat.settings import load_settings
from ucformat.signatures import SIGNATURE, manifest_digest
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime
    from os import PathLike

    from ucformat.schema.manifest import Manifest

__all__ = ["Facts", "attest", "facts_of", "uri_of"]

_PRODUCER = f"pkg:pypi/ucformat@{__version__}"
_EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/"
_FACETS = "https://openlineage.io/spec/facets/"
#: Keys of configurations that name the data of a training.
_DATASETS = frozenset(
    {"dataset", "datasets", "dataset_name", "dataset_path", "data_path", "train_data_path"}
)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A checkpoint that this one was made from: directly if `distance` is 1."""

    id: str | None
    name: str
    url: str | None
    kind: str  # how what was made from it was made
    distance: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a checkpoint, from itself and from the catalog."""

    ck: Checkpoint
    manifest: Manifest
    name: str
    sha256: str | None  # of the manifest's file
    signed: bool  # whether a signature, valid or not, is beside it
    created: datetime | None
    urls: tuple[str, ...]
    metrics: Mapping[str, float]
    tags: tuple[str, ...]
    certified: bool | None  # the last result, if any
    ancestors: tuple[Ancestor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(info.nbytes for info in self.ck.tensors.values())


def attest(
    place: str | PathLike[str] | Checkpoint,
    format: Literal["cyclonedx", "openlineage"] = "cyclonedx",  # noqa: A002
    *,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a checkpoint, by what it and the catalog know: JSON for other tools.

    It proves nothing by itself: whoever receives it compares the hashes with the checkpoint.

    Args:
        place: a checkpoint, or its path, url or reference.
        format: `cyclonedx` for an ML-BOM of CycloneDX 1.6, `openlineage` for an event of the run
            that wrote it.
        options: facts that the files of a foreign checkpoint lack, as in `open`.
    """
    check_choice("format", format, ("cyclonedx", "openlineage"))
    ck = place if isinstance(place, Checkpoint) else open_reference(place, options=options)
    facts = facts_of(ck)
    return _cyclonedx(facts) if format == "cyclonedx" else _openlineage(facts)


def facts_of(ck: Checkpoint) -> Facts:
    """What a checkpoint and the catalog know of it."""
    manifest, catalog = ck.manifest, load_settings().catalog_url()
    universal = None if ck.viewed else ck.universal
    name = ck.home.rstrip("/").rpartition("/")[2]
    if manifest.run is not None and manifest.step is not None:
        name = f"{manifest.run}@{manifest.step}"
    urls: tuple[str, ...] = (ck.home,)
    metrics, tags, certified = dict(manifest.metrics), tuple[str, ...](), None
    ancestors: tuple[Ancestor, ...] = tuple(
        Ancestor(p.id, p.url.rstrip("/").rpartition("/")[2], p.url, p.kind, 1)
        for p in manifest.lineage
    )
    if catalog is not None:
        with suppress(NotFound), open_catalog(ck.id) as opened:
            entry = opened.get(ck.id)
            name, metrics, tags = entry.name, metrics | dict(entry.metrics), entry.tags
            certified = None if entry.certified is None else entry.certified.ok
            urls = tuple(dict.fromkeys((ck.home, *entry.urls)))
            graph = opened.lineage(ck.id)
            kinds = {edge.parent: edge.label for edge in reversed(graph.edges)}
            ancestors = tuple(
                Ancestor(node.id, node.name, node.url, kinds[key], node.distance)
                for key, node in graph.nodes.items()
                if key != graph.root
            )
    return Facts(
        ck,
        manifest,
        name,
        None if universal is None else manifest_digest(universal),
        universal is not None and exists(universal.store, SIGNATURE),
        None if universal is None else manifest.created,
        urls,
        metrics,
        tags,
        certified,
        ancestors,
    )


def uri_of(url: str) -> str:
    """A path or url as a URI."""
    return url if "://" in url else Path(url).as_uri()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings, by keys with dots."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _datasets(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The datasets that a configuration names, and the key of each."""
    for key, value in _flat(config):
        if key.rpartition(".")[2] in _DATASETS:
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and name:
                    yield name, key


# CycloneDX: https://cyclonedx.org/docs/1.6/json/


def _cyclonedx(facts: Facts) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "tools": {
            "components": [{"type": "application", "name": "ucformat", "version": __version__}]
        },
        "component": _component(facts),
    }
    if facts.created is not None:
        metadata["timestamp"] = facts.created.isoformat()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{_uuid(facts.ck.id)}",
        "version": 1,
        "metadata": metadata,
    }


def _component(facts: Facts) -> dict[str, Any]:
    manifest, ck = facts.manifest, facts.ck
    card: dict[str, Any] = {}
    if datasets := [
        {
            "type": "dataset",
            "name": name,
            "contents": {"properties": _properties({"ucformat:config": key})},
        }
        for name, key in _datasets(manifest.config)
    ]:
        card["modelParameters"] = {"datasets": datasets}
    if facts.metrics:
        measured = [{"type": k, "value": _text(v)} for k, v in sorted(facts.metrics.items())]
        card["quantitativeAnalysis"] = {"performanceMetrics": measured}
    references = [{"type": "distribution", "url": uri_of(url)} for url in facts.urls]
    if facts.signed:
        url = f"{uri_of(ck.url)}/{SIGNATURE}"
        references.append({"type": "digital-signature", "url": url})
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": ck.id,
        "name": facts.name,
        "version": ck.id,
        "externalReferences": references,
        "properties": _properties(_parameters(facts)),
    }
    if facts.tags:
        component["tags"] = list(facts.tags)
    if card:
        component["modelCard"] = card
    if facts.sha256 is not None:
        component["hashes"] = _sha256(facts.sha256)
        component["components"] = [
            {"type": "file", "name": doc.path, "hashes": _sha256(doc.digest.partition(":")[2])}
            for doc in sorted(manifest.files, key=lambda doc: doc.path)
        ]
    if facts.ancestors:
        component["pedigree"] = {"ancestors": list(map(_ancestor, facts.ancestors))}
    return component


def _ancestor(ancestor: Ancestor) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "name": ancestor.name,
        "properties": _properties(
            {"ucformat:lineage": ancestor.kind, "ucformat:distance": ancestor.distance}
        ),
    }
    if ancestor.id is not None:
        component["version"] = ancestor.id
    if ancestor.url is not None:
        component["externalReferences"] = [{"type": "distribution", "url": uri_of(ancestor.url)}]
    return component


def _parameters(facts: Facts) -> dict[str, Any]:
    """What CycloneDX has no member for: sizes, hyperparameters, configuration and software."""
    manifest, ck = facts.manifest, facts.ck
    stored = Counter((key.state, info.dtype) for key, info in ck.tensors.items())
    parameters = {
        "kind": ck.kind,
        "run": manifest.run,
        "step": manifest.step,
        "tensors": len(ck.tensors),
        "bytes": facts.nbytes,
        "part_of": ck.metadata.part_of or None,
        **{f"tensors:{state}:{dtype}": n for (state, dtype), n in sorted(stored.items())},
        **{f"producer:{key}": value for key, value in manifest.producer.items()},
        **{f"layout:{key}": value for key, value in _flat(manifest.layout)},
        **{f"config:{key}": value for key, value in _flat(manifest.config)},
    }
    for number, group in enumerate(manifest.groups):
        parameters |= {f"group:{number}:{key}": value for key, value in _flat(group.options)}
    return {f"ucformat:{k}": value for k, value in parameters.items() if value is not None}


def _properties(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "value": _text(value)} for name, value in values.items()]


def _sha256(digits: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digits}]


def _uuid(identifier: str) -> UUID:
    with suppress(ValueError):
        return UUID(identifier)
    return uuid5(NAMESPACE_URL, identifier)


# OpenLineage: https://openlineage.io/docs/spec/object-model


def _openlineage(facts: Facts) -> dict[str, Any]:
    """An event of the run that wrote a checkpoint: of a training, which went on, it only tells more."""
    manifest, ck = facts.manifest, facts.ck
    if facts.created is None:
        raise UnsupportedError(
            f"{ck.url} does not say when it was written, which an event of OpenLineage does",
            hint="`ucp convert SRC DST` makes a universal checkpoint of it; or use cyclonedx",
        )
    launch = manifest.launch
    output = _dataset(facts.urls[0], ck.id)
    output["outputFacets"] = {
        "outputStatistics": _facet("OutputStatisticsOutputDatasetFacet", "1-0-2", size=facts.nbytes)
    }
    parameters = {
        name.removeprefix("ucformat:"): value for name, value in _parameters(facts).items()
    }
    return {
        "eventType": "COMPLETE" if launch is None else "OTHER",
        "eventTime": facts.created.isoformat(),
        "producer": _PRODUCER,
        "schemaURL": f"{_EVENT}RunEvent",
        "run": {
            "runId": str(_uuid(ck.id if launch is None else launch.id)),
            "facets": {
                "processing_engine": _facet(
                    "ProcessingEngineRunFacet", "1-1-1", version=__version__, name="ucformat"
                ),
                "ucformat_checkpoint": {
                    "_producer": _PRODUCER,
                    "_schemaURL": f"{_EVENT}RunFacet",
                    "manifestSha256": facts.sha256,
                    "metrics": dict(facts.metrics),
                    "parameters": parameters,
                },
            },
        },
        "job": {"namespace": "ucformat", "name": manifest.run or facts.name},
        "inputs": [_dataset(a.url, a.id) for a in facts.ancestors if a.distance == 1 and a.url],
        "outputs": [output],
    }


def _facet(kind: str, revision: str, **members: Any) -> dict[str, Any]:
    schema = f"{_FACETS}{revision}/{kind}.json#/$defs/{kind}"
    return {"_producer": _PRODUCER, "_schemaURL": schema, **members}


def _dataset(url: str, checkpoint: str | None) -> dict[str, Any]:
    """A checkpoint, under the name that OpenLineage has for a place."""
    scheme, separator, path = url.partition("://")
    host, _, key = path.partition("/")
    place = ("file", url) if not separator or scheme == "file" else (f"{scheme}://{host}", key)
    facets = {}
    if checkpoint is not None:
        facets["version"] = _facet("DatasetVersionDatasetFacet", "1-0-1", datasetVersion=checkpoint)
    return {"namespace": place[0], "name": place[1], "facets": facets}
