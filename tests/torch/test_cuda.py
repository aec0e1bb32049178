"""Tensors on a CUDA device: what is saved from there and loaded to there, while kernels use and change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ucformat
import ucformat.torch
from tests.zero_files import FLAT, write_zero3
from ucformat.torch import load_into

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: run it on a machine with one, with PyTorch for CUDA",
)
FORMS = ("zarr", "packed", "safetensors")


def module(device: str, dtype: torch.dtype = torch.bfloat16, wide: int = 700) -> torch.nn.Module:
    """A module with an odd number of elements, larger than the buffers through which devices are filled."""
    model = torch.nn.Module()
    sizes = {"a": (3 * wide, 1001), "b": (7,), "c": (wide, 5, 33), "d": (24 * wide, 1009), "e": ()}
    for name, shape in sizes.items():
        model.register_parameter(
            name, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        )
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64, device=device))
    return model


@pytest.fixture(scope="module")
def filled() -> Iterator[torch.nn.Module]:
    torch.manual_seed(0)
    model = module("cuda")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    model.get_buffer("count").copy_(torch.arange(3))
    yield model
    del model
    torch.cuda.empty_cache()


def equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Both modules hold the same values, none of which is NaN or -0.0."""
    wanted = other.state_dict()
    for name, found in model.state_dict().items():
        assert found.dtype == wanted[name].dtype
        assert torch.equal(found.cpu(), wanted[name].cpu()), name


@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded_from_device_to_device(
    tmp_path: Path, form: Any, filled: torch.nn.Module
) -> None:
    ck = ucformat.torch.save({"model": filled}, tmp_path / "ck", form=form)
    assert ucformat.verify(tmp_path / "ck")
    into = module("cuda")
    ucformat.torch.load({"model": into}, tmp_path / "ck")
    equal(into, filled)
    for made in (module("meta"), module("cuda"), module("cpu")):
        load_into(made, tmp_path / "ck", device="cuda")
        equal(made, filled)
    wide = module("meta")
    load_into(wide, ck.url, device="cuda", dtype=torch.float32)
    for name, p in wide.named_parameters():
        assert p.device.type == "cuda"
        assert torch.equal(p, filled.get_parameter(name).float())


def test_safetensors_files_are_opened_on_the_device(
    tmp_path: Path, filled: torch.nn.Module
) -> None:
    ucformat.torch.save({"model": filled}, tmp_path / "ck", form="safetensors")
    folder = ucformat.open(tmp_path / "ck").hf_url
    assert folder is not None
    with safe_open(
        Path(folder.removeprefix("file://")) / "model.safetensors", "pt", device="cuda"
    ) as file:
        for name, wanted in filled.named_parameters():
            assert torch.equal(file.get_tensor(name), wanted)


def test_transposed_memory_is_filled_in_place(tmp_path: Path, filled: torch.nn.Module) -> None:
    ucformat.torch.save({"model": filled}, tmp_path / "ck", form="packed")
    model = module("cuda")
    turned = torch.empty(1001, 2100, dtype=torch.bfloat16, device="cuda").t()
    model.a = torch.nn.Parameter(turned)
    load_into(model, tmp_path / "ck")
    assert model.get_parameter("a").stride() == turned.stride()
    equal(model, filled)


def test_zero3_is_loaded_to_the_device(tmp_path: Path) -> None:
    arrays = {
        (name, state): torch.randn(shape).numpy()
        for name, shape in {"a": (4000, 2500), "b": (33, 7)}.items()
        for state in FLAT
    }
    source = write_zero3(tmp_path / "z", arrays, 3)
    model = torch.nn.ParameterDict(
        {n: torch.empty(a.shape, device="meta") for (n, s), a in arrays.items() if s == "master"}
    )
    load_into(model, source / "global_step5", device="cuda", dtype=torch.bfloat16)
    for name, p in model.items():
        assert torch.equal(p.cpu(), torch.from_numpy(arrays[name, "master"]).bfloat16())


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_kernels_change_what_is_saved_in_the_background(tmp_path: Path, form: Any) -> None:
    """The values are those at the call, though kernels were running before it and others begin after it."""
    model = module("cuda")
    with torch.no_grad():
        for step in range(1, 4):
            for p in model.parameters():
                p.fill_(float(step))
                for _ in range(50):
                    p.mul_(1.0)
            saving = ucformat.torch.async_save(
                {"model": model}, tmp_path / f"{form}{step}", form=form
            )
            for p in model.parameters():
                p.fill_(-1.0)
            saving.wait()
            ck = ucformat.open(tmp_path / f"{form}{step}")
            for name, _ in model.named_parameters():
                assert (ck[name].read().astype("float32") == step).all()


def test_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(65, 129), torch.nn.GELU(), torch.nn.Linear(129, 65)
        ).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def train(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range
    ) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(16, 65, generator=torch.Generator().manual_seed(step)).cuda()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = made()
    train(model, optimizer, range(5))
    ucformat.torch.save({"model": model, "optimizer": optimizer}, tmp_path / "ck")
    wanted = train(model, optimizer, range(5, 10))
    other, again = made()
    ucformat.torch.load({"model": other, "optimizer": again}, tmp_path / "ck")
    assert train(other, again, range(5, 10)) == wanted


@pytest.mark.parametrize("form", FORMS)
def test_fsdp2_saves_and_loads_on_the_device(tmp_path: Path, form: Any) -> None:
    """DTensors and their optimizer states; `load_into` makes DTensors of meta ones."""

    def made(device: str) -> torch.nn.Module:
        torch.manual_seed(2)
        with torch.device(device):
            model = torch.nn.Sequential(
                torch.nn.Linear(1025, 4099), torch.nn.GELU(), torch.nn.Linear(4099, 1025)
            )
        fully_shard(model, mesh=mesh)
        return model

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = made("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 1025, device="cuda")).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        ucformat.torch.save(state, tmp_path / "ck", form=form)
        assert ucformat.verify(tmp_path / "ck")
        other = made("cuda")
        again = torch.optim.AdamW(other.parameters())
        ucformat.torch.load({"model": other, "optimizer": again}, tmp_path / "ck")
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())
            for name, moment in optimizer.state[a].items():
                found = again.state[b][name]
                assert torch.equal(
                    *(x.to_local() if isinstance(x, DTensor) else x for x in (moment, found))
                )
        empty = made("meta")
        load_into(empty, tmp_path / "ck", device="cuda")
        for a, b in zip(model.parameters(), empty.parameters(), strict=True):
            assert isinstance(b, DTensor)
            assert torch.equal(a.to_local(), b.to_local())
    finally:
        dist.destroy_process_group()
