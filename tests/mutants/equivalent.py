"""Changes that no test can notice, and why."""

from __future__ import annotations

#: The name of each change, as `python -m tests.mutants` prints it -> the argument.
EQUIVALENT: dict[str, str] = {
    "ucformat/catalog/filter/compile.py:_ago: boundary: span > timedelta(0)": "a span of 0 takes no time over its ends",
    "ucformat/engines/deepspeed/opened.py:Merged._add: check dropped: if len(slices) == 1 and "
    "(not (sharding.padding_rows or sharding.scaled)): local = slices[0].contents": "a single rank's sharding is one "
    "region, the whole tensor; the way of several ranks then finds the same, and takes states of other shapes as "
    "replicas: it only takes longer",
    "ucformat/torch/saving/base.py:_below: check dropped: if scheme in ('', 'file'): return "
    "sorted((str(manifest.parent) for manifest in Path(path).glob(f'*/{": "a store lists the same "
    "places; it only takes longer, as it lists all files of each of them",
    "ucformat/jobs/remnants.py:keep_needed: boundary: plan.left >= plan.stored": "as many bytes are left only if no "
    "tensor that has any is dropped: then the checkpoint stays, or is written once without the empty ones",
    "ucformat/format/tile_index.py:read_index: boundary: plain > MAX_SPAN": "a file with an index of so many bytes "
    "would have 2**36 tiles, more than any index may have",
}
