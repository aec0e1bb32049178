"""Where and how a checkpoint is written: the arguments of `save` that must be the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from ucformat.errors import UsageError
from ucformat.format.arrays import lay_out
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.format.arrays import Array
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.torch.state.local import LocalState

#: How tensors are stored.
Form = Literal["zarr", "packed", "safetensors"]


@message
class SaveOptions:
    """Where and how a checkpoint is written: the arguments of `save` that must be the same on all ranks."""

    url: str
    form: Form = "zarr"
    overwrite: bool = False
    replicas: Literal["equal", "first"] = "equal"
    chunk_bytes: int | None = None
    shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("form", get_args(Form)), ("replicas", ("equal", "first"))):
            if getattr(self, name) not in known:
                listed = " or ".join(f'"{value}"' for value in known)
                raise UsageError(f"{name}={getattr(self, name)!r} is not supported", hint=listed)
        for name in ("chunk_bytes", "shard_bytes"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UsageError(f"{name} must be at least 1, not {given}")

    def check(self, state: LocalState) -> None:
        """Check whether a state can be saved with these options."""
        sharded = next((t for t in state.tensors if t.sharded_wrapper), None)
        if self.replicas == "first" and sharded is not None:
            raise UsageError(
                f"{sharded.key} is inside a sharded wrapper, of which ranks must compare what they have in common",
                hint='leave replicas="first" out, and give values that differ between ranks as PerRank(value)',
            )

    def arrays(
        self, infos: Sequence[TensorInfo], attempt: str, folders: Mapping[Key, str] | None = None
    ) -> list[Array]:
        """Return the arrays of tensors in the Zarr form.

        Args:
            folders: of the arrays, if these are not all tensors of the checkpoint.
        """
        return lay_out(infos, f"data/{attempt}", self.chunk_bytes, self.shard_bytes, folders)
