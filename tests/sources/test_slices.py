"""A slice of a tensor opens the files that hold it, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.fakes import random_array
from tests.sources.suite import DATA
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.engines.pytorch.source import Dcp
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting

if TYPE_CHECKING:
    from pathlib import Path


def test_a_row_of_zero_3_opens_the_optimizer_file_of_its_rank(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((64, 5), "float32", i) for i, s in enumerate(FLAT)}
    store = Counting(LocalStore(write_zero3(tmp_path / "src", arrays, 16)))
    ck = Checkpoint(DeepSpeed().open(store))
    for row, rank in ((0, 0), (37, 9), (63, 15)):
        store.requests.clear()
        assert ck["w", "exp_avg"][row].tobytes() == arrays["w", "exp_avg"][row].tobytes()
        opened = {key for key in store.requests if "optim_states" in key}
        assert all(f"rank_{rank}_" in key for key in opened)


def test_a_walk_over_zero_3_opens_each_file_once(tmp_path: Path) -> None:
    arrays = {("w", s): random_array((64, 5), "float32", i) for i, s in enumerate(FLAT)}
    store = Counting(LocalStore(write_zero3(tmp_path / "src", arrays, 16)))
    ck = Checkpoint(DeepSpeed().open(store))
    found = np.concatenate([ck["w", "master"][row : row + 1] for row in range(64)])
    assert found.tobytes() == arrays["w", "master"].tobytes()
    assert max(store.requests.values()) < 20


def test_a_row_of_dcp_opens_one_item_of_its_tensor() -> None:
    store = Counting(LocalStore(DATA / "dcp" / "fsdp2-uneven" / "ckpt"))
    ck = Checkpoint(Dcp().open(store))
    name = max((n for n, s in ck.tensors if s == "weight"), key=lambda n: ck[n].shape[0])
    whole = ck[name][...]
    store = Counting(LocalStore(DATA / "dcp" / "fsdp2-uneven" / "ckpt"))
    ck = Checkpoint(Dcp().open(store))
    store.requests.clear()
    assert ck[name][1:2].tobytes() == whole[1:2].tobytes()
    assert len(store.requests) == 1
