"""`save`: a DeepSpeed engine as one universal checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ucformat.sources.configuration import of_program
from ucformat.torch.deepspeed.collect import collect
from ucformat.torch.group import TIMEOUT, meeting
from ucformat.torch.saving import save_held, terms_of
from ucformat.torch.writing import Note

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.writing import Saved

__all__ = ["save"]


def save(
    engine: Any,
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    client_state: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    timeout: float = TIMEOUT,
) -> Saved:
    """Save a DeepSpeed engine of ZeRO 0, 1, 2 or 3 as it is between two steps; all ranks call it together.

    Kept are weights, masters, all optimizer states, optimizer groups by name, frozen parameters, buffers, the learning
    rate scheduler, the loss scaler, the step counters and the client state. Random generators are not the engine's.

    Args:
        engine: what `deepspeed.initialize` returned.
        url: where the checkpoint is to lie; the same on all ranks.
        step: the training step (default: the engine's).
        run: the name of the training run, for the catalog.
        metrics: numbers to note, for the catalog: `{"val_loss": 2.1}`.
        config: the configuration of the training, plain JSON values (default: DeepSpeed's, without secrets).
            DeepSpeed's is always kept as the object `ds_config`, too.
        client_state: values of your own, the same on all ranks; what each rank has for itself as
            `ucformat.torch.PerRank(value)`.
        form: `zarr` writes arrays, `packed` one file for each rank; see `ucformat.torch.save`.
        overwrite: replace a checkpoint that is committed there; it stays whole until this one is.
        lineage: what this checkpoint comes from.
        timeout: seconds after which a silent rank is taken for dead.

    Raises:
        Refused: the engine has state that cannot be saved yet (pipeline, tensor or expert parallelism, NVMe), or is in
            the middle of a gradient accumulation.
        Conflict: a checkpoint is committed there already.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    with meeting(None, timeout, "save", url) as ranks:
        with ranks.telling():
            state = collect(engine, client_state)
            steps = int(engine.global_steps) if step is None else step
            if config is None:
                config = of_program(("ds_config", engine._config._param_dict))  # noqa: SLF001 - engine.config may name a file
            note = Note.of(steps, run, metrics, config, lineage)
            terms = terms_of(url, form, overwrite, None, None, "equal")
        return save_held(state, terms, note, ranks)
