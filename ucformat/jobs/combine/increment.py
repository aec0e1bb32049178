"""Which tensors of a combination equal those of a base, and are referenced instead of written.

Only those are expected to of which all inputs equal the base's tensor. If they are taken, or must be equal in all
inputs, that is certain. What is combined is computed to compare it: the sum of 0 and -0 is 0, and products are rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ucformat.geometry.box import Box
from ucformat.jobs.combine.job import CombineJob
from ucformat.jobs.shards import NO_ATTEMPT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.tensor import Key
    from ucformat.jobs.combine.job import Combination
    from ucformat.jobs.combine.methods import Operand
    from ucformat.jobs.increments import Base, Comparison, References
    from ucformat.jobs.shards import WriteOptions
    from ucformat.storage.base import Store


def compare_outputs(
    combination: Combination,
    base: Base,
    fingerprints: Sequence[Mapping[Key, str | None]] | None = None,
) -> Comparison:
    """Compare the tensors that will be made with those of a base; reads nothing.

    Args:
        fingerprints: those that are known of each input's tensors (default: those that it records).

    Returns:
        Of those that are expected to be equal, which are, and which must be read.
    """
    fingerprints = fingerprints or [s.metadata.fingerprints for s in combination.sources]
    expected, certain = [], {}
    for key, output in combination.outputs.items():
        alike = base.alike(output.info)
        inputs = {fingerprints[o.input].get(o.info.key) for o in _operands(combination, key)}
        if alike is not None and inputs <= {alike.fingerprint, None}:
            expected.append(output.info)
            if output.how != "combined" and None not in inputs:
                certain[key] = alike.fingerprint
    return base.compare(expected, certain)


def find_references(
    combination: Combination, base: Base, store: Store, options: WriteOptions
) -> References:
    """Find the tensors that equal those of a base; reads what does not follow from records, and writes nothing."""
    from ucformat.jobs.fingerprints import compute_fingerprints  # which needs SQLAlchemy

    fingerprints = [dict(source.metadata.fingerprints) for source in combination.sources]
    for number, source in enumerate(combination.sources):
        unread = {
            o.info.key: o.info
            for info in compare_outputs(combination, base, fingerprints).unread
            for o in _operands(combination, info.key)
            if o.input == number and fingerprints[number].get(o.info.key) is None
        }
        if unread:
            infos = list(unread.values())
            fingerprints[number] |= compute_fingerprints(source, infos, lambda _: None)
    comparison = compare_outputs(combination, base, fingerprints)
    others = combination.outputs.keys() - {info.key for info in comparison.unread}
    # bytes that are damaged have another fingerprint, and are verified when they are written
    unverified = replace(options, verify=False, progress=None)
    with CombineJob(combination.without(others), store, NO_ATTEMPT, unverified) as job:
        computed = base.compare(comparison.unread, job.fingerprints())
    return base.referenced([*comparison.equal, *computed.equal])


def _operands(combination: Combination, key: Key) -> Sequence[Operand]:
    output = combination.outputs[key]
    return combination.operands(output, Box.whole(output.info.shape))
