"""Tensors on devices: each is waited for on its own, by whatever thread; `devices_program.py` is the accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torch.devices_program import SCENARIOS
from ucformat.torch.saving.background import HostBuffer, room_for, stage
from ucformat.torch.state.local import local_state


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each scenario; a process has one accelerator, so they have a process of their own."""
    command = [
        sys.executable,
        "-m",
        "tests.torch.devices_program",
        str(tmp_path_factory.mktemp("devices")),
    ]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_devices_are_waited_for(outcomes: dict[str, str], scenario: str) -> None:
    assert outcomes[scenario] == ""


class Cuda:
    """The calls of the CUDA runtime that pin memory, which refuses; the next kernel raises its last error."""

    def __init__(self, answer: int) -> None:
        self.answer, self.error = answer, 0
        self.calls: list[tuple[str, int]] = []
        self.current = 0

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert pointer
        assert nbytes
        assert flags == 1
        self.calls.append(("register", self.current))
        self.error = self.answer
        return self.answer

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        assert pointer
        self.calls.append(("unregister", self.current))
        return 0

    def device(self, device: torch.device) -> Any:
        cuda = self

        class On:
            def __enter__(self) -> None:
                cuda.current = device.index

            def __exit__(self, *_: object) -> None:
                cuda.current = 0

        return On()

    def kernel(self, *_: object, device: torch.device) -> None:
        assert device.index == 3
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("answer", [0, 2], ids=["pinned", "refused"])
def test_memory_is_pinned_on_the_device_or_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    cuda = Cuda(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    buffer = HostBuffer(1000)
    assert not cuda.calls
    with monkeypatch.context() as patched:
        patched.setattr(torch, "ones", cuda.kernel)
        for _ in range(2):
            buffer.pin(torch.device("cuda:3"))
    assert cuda.calls == [("register", 3)]  # once, whether it was refused or not
    assert cuda.error == 0
    buffer.close()
    assert cuda.calls[1:] == ([] if answer else [("unregister", 3)])


def test_where_training_runs_on_the_cpu_cuda_is_not_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cudart", "synchronize", "device"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace())
    state = local_state({"w": torch.ones(1000)})
    buffer = HostBuffer(room_for(state))
    with ThreadPoolExecutor(1) as pool:
        stage(state, buffer, pool)
    buffer.close()
