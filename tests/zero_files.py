"""ZeRO-3 checkpoints as DeepSpeed 0.19 lays them out, of any arrays and any number of ranks, without DeepSpeed.

For what real engines are too slow for: many ranks, large tensors, many rounds. `tests/sources`
proves the source on real ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sources.torch_files import (
    call,
    dictionary,
    glob,
    integer,
    save,
    storage,
    tensor,
    text,
    tuple_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["write_zero3"]

FLAT = ("master", "exp_avg", "exp_avg_sq")


def mapping(items: list[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(k + v for k, v in items) + b"u"


def a_list(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def write_zero3(
    folder: Path, arrays: Mapping[tuple[str, str], Any], ranks: int, step: int = 5
) -> Path:
    """Write `folder/global_step<step>` and `latest`; each tensor must be there in all of `FLAT`, as float32."""
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = {name: a.shape for (name, state), a in arrays.items() if state == "master"}
    for rank in range(ranks):
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        sizes = [
            (text(n), call(glob("torch", "Size"), tuple_of(*map(integer, s))))
            for n, s in shapes.items()
        ]
        model = dictionary(
            module=mapping(
                [
                    (text(n), tensor((0,), (1,), 0, storage("0", 0, "BFloat16Storage")))
                    for n in shapes
                ]
            ),
            buffer_names=a_list(),
            param_shapes=a_list(mapping(sizes)),
            frozen_param_shapes=b"N",
            shared_params=dictionary(),
            frozen_param_fragments=b"N",
            global_steps=integer(step),
            dp_world_size=integer(ranks),
            mp_world_size=integer(1),
            ds_version=text("0.19.8"),
        )
        save(tag / f"{stem}_model_states.pt", model, {"0": b""})
        flat = {state: partition(arrays, shapes, state, rank, ranks) for state in FLAT}
        n = flat["master"].size
        whole = {s: tensor((n,), (1,), 0, storage(str(i), n)) for i, s in enumerate(FLAT)}
        state = dictionary(
            step=tensor((), (), 0, storage("3", 1)),
            exp_avg=whole["exp_avg"],
            exp_avg_sq=whole["exp_avg_sq"],
        )
        group = dictionary(lr=b"G" + np.array(1e-3, ">f8").tobytes(), params=a_list(integer(0)))
        inner = dictionary(state=mapping([(integer(0), state)]), param_groups=a_list(group))
        optimizer = dictionary(
            zero_stage=integer(3),
            partition_count=integer(ranks),
            overflow=b"\x89",
            optimizer_state_dict=inner,
            fp32_flat_groups=a_list(whole["master"]),
        )
        data = {str(i): flat[s].tobytes() for i, s in enumerate(FLAT)} | {
            "3": np.float32(step).tobytes()
        }
        save(
            tag / f"bf16_{stem}_optim_states.pt",
            dictionary(optimizer_state_dict=optimizer, ds_version=text("0.19.8")),
            data,
        )
    return folder


def partition(
    arrays: Mapping[tuple[str, str], Any],
    shapes: Mapping[str, Any],
    state: str,
    rank: int,
    ranks: int,
) -> Any:
    """A rank's flat group: its part of each tensor, each padded to equal parts; the padding is poisoned."""
    parts = []
    for name in shapes:
        a = arrays[name, state].reshape(-1)
        n = -(-a.size // ranks)
        padded = np.full(n * ranks, 1e30, np.float32)
        padded[: a.size] = a
        parts.append(padded[rank * n : (rank + 1) * n])
    return np.concatenate(parts)
