"""A checkpoint that a job reads, and the comparison of what is read of it with the checksums in its files."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from ucformat.errors import check_choice
from ucformat.jobs.convert_checks import StreamVerifier
from ucformat.reading.plan import ReadItem
from ucformat.reading.read import read_items
from ucformat.storage.watched import find_watched

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Piece, TensorInfo, Tiles
    from ucformat.jobs.sums import SumPart
    from ucformat.reading.plan import Verify


class Input:
    """A checkpoint that a job reads.

    Args:
        compared: the keys of files that are compared as a whole otherwise (default: none).
    """

    def __init__(self, checkpoint: Checkpoint, compared: Collection[str] = (), *, verify: bool) -> None:
        check_choice("verify", verify, (True, False))
        self.checkpoint, self.verify = checkpoint, verify
        watching = find_watched(checkpoint.store) if verify else None
        self.verifier = None if watching is None else StreamVerifier(checkpoint, compared)
        self._observing = ExitStack()
        if watching is not None and self.verifier is not None:
            self._observing.enter_context(watching.observed(self.verifier.see))

    def close(self) -> None:
        """Stop comparing."""
        self._observing.close()

    def task(self) -> AbstractContextManager[list[SumPart]]:
        """Note what is read of checksums inside the block, as `StreamVerifier.task`."""
        return nullcontext([]) if self.verifier is None else self.verifier.task()

    def read(
        self,
        wanted: Sequence[tuple[InputBox, Sequence[tuple[int, Piece]]]],
        buffers: Sequence[NDArray[np.uint8]],
        threads: int | None = None,
    ) -> bool:
        """Read pieces of tensors into memory.

        Args:
            threads: number of reading threads (None: as many as suit the store).

        Returns:
            Whether checksums cover all of these bytes, or none are compared at all.
        """
        bare = [box for box, pieces in wanted for _, piece in pieces if not box.expect(piece.box)]
        store, costs = self.checkpoint.store, self.checkpoint.store.costs
        if self.verifier is not None:  # it combines the checksums of blocks that are read in parts
            costs = replace(costs, block=0)
        labels = [""] * len(buffers)
        for box, pieces in wanted:
            for number, _ in pieces:
                labels[number] = str(box.info.key)
        items = [ReadItem(box.info, box.planned, pieces) for box, pieces in wanted]
        verify: Verify = "whole" if self.verify else "never"
        read_items(store, items, buffers, labels, verify=verify, costs=costs, threads=threads)
        return not bare

    def within(self, info: TensorInfo, box: Box) -> InputBox:
        """A box of a tensor, to be read piece by piece."""
        return InputBox.of(self, info, box)


@dataclass(frozen=True, slots=True)
class InputBox:
    """A box of a tensor of an input, and the extents that hold it."""

    input: Input
    info: TensorInfo
    box: Box
    extents: Sequence[Extent | Tiles]
    planned: Sequence[Extent | Tiles]

    @classmethod
    def of(cls, input_: Input, info: TensorInfo, box: Box) -> Self:
        """Find the extents of a box."""
        found = input_.checkpoint.source.extents(info.key, box)
        extents = [e for e in found if e.box.intersect(box)]
        verifier = input_.verifier
        planned = extents if verifier is None else [verifier.planned(info, e) for e in extents]
        return cls(input_, info, box, extents, planned)

    @property
    def carries(self) -> bool:
        """Whether checksums are compared that cover any of its bytes."""
        verifier = self.input.verifier
        return verifier is not None and verifier.carries(self.info, self.extents)

    def expect(self, box: Box | None = None) -> bool:
        """Compare the checksums that cover a box.

        Returns:
            Whether checksums cover all of its bytes, or none are compared at all.
        """
        verifier = self.input.verifier
        return verifier is None or verifier.expect(self.info, self.extents, box or self.box)

    def read(self, piece: Piece, raw: NDArray[np.uint8]) -> bool:
        """Read a box into memory."""
        return self.input.read([(self, [(0, piece)])], [raw], threads=1)
