"""What ranks do in `test_reports.py`: each function does what a report describes, and gives the words of certificates.

Weights are plain numbers, so that the guide can print what the certificates say.
"""

from __future__ import annotations

import hashlib
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.torch.ranks import told
from ucformat.torch import Certificate, Rng, certify, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 4


def words(certificate: Certificate) -> str:
    return told(certificate.checked)


def by_rank_0(call: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        call()
    dist.barrier()


class Layers(torch.nn.Module):
    """Layers that are numbered from 0; the weights of layer n of the whole model are all n + 1."""

    def __init__(self, count: int, *, first: int | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)
        )
        for number, layer in enumerate(self.layers):
            torch.nn.init.constant_(layer.weight, 0 if first is None else first + number + 1)


def stages(folder: Path) -> dict[str, Any]:
    """Megatron-LM 7452: a model of four layers is loaded by two stages, which number theirs from 0."""
    first, url = 2 * dist.get_rank(), folder / "dcp"
    whole = {"model": Layers(4, first=0).state_dict()}
    by_rank_0(lambda: dcp.save(whole, checkpoint_id=url, no_dist=True))
    stage = Layers(2)
    strict = dcp.DefaultLoadPlanner(allow_partial_load=False)
    dcp.load({"model": stage.state_dict()}, checkpoint_id=url, planner=strict)
    names = {"layers.*": first}
    return {
        "loaded": [layer.weight[0, 0].item() for layer in stage.layers],
        "words": words(certify({"model": stage}, url, names=names)),
        "without names": words(certify({"model": stage}, url)),
        "refused": told(lambda: save({"model": Layers(2, first=first)}, folder / "ck")),
        "restored": bool(load({"model": stage}, url, names=names, certify=True).certificate),
    }


def refit(folder: Path) -> dict[str, Any]:
    """NeMo-RL 3259: stages publish layers by local names, of which the first counts, to a replica of the model."""
    first = 2 * dist.get_rank()
    stage = Layers(2, first=first)
    if dist.get_rank() == 1:
        stage.norm = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(stage.norm.weight, 1)
    offers: list[dict[str, tuple[torch.Tensor, str]]] = [{}, {}]
    dist.all_gather_object(offers, {n: (t, digest(t)) for n, t in stage.state_dict().items()})
    published = offers[1] | offers[0]
    receiver = Layers(4)
    receiver.norm = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(receiver.norm.weight, 0)
    places, arrived = receiver.state_dict(), 0
    for name, (tensor, _) in published.items():
        places[name].copy_(tensor)
        arrived += tensor.numel()
    names = {"layers.*": first}
    save({"model": stage}, folder / "ck", names=names)
    return {
        "digests agree": all(digest(places[n]) == d for n, (_, d) in published.items()),
        "coverage": f"{arrived / sum(t.numel() for t in places.values()):.0%}",
        "words": words(certify({"model": receiver}, folder / "ck")),
        "refused": told(lambda: save({"model": stage}, folder / "local")),
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(6, 6, bias=False)


def adapter(folder: Path) -> dict[str, Any]:
    """Accelerate 4206: rank 0 alone writes its part of an adapter that FSDP2 shards, and reads it again."""
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )
    from safetensors.torch import save_file

    def adapted(value: float) -> Any:
        model = get_peft_model(Attention(), LoraConfig(r=6, target_modules=["q_proj"]))
        fully_shard(model)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return model

    trained, part, whole = adapted(0), folder / "part.bin", folder / "adapter"
    whole.mkdir(exist_ok=True)
    for number, tensor in enumerate(get_peft_model_state_dict(trained).values()):
        tensor.to_local().fill_(1 + dist.get_rank() + number / 2)
    state = get_peft_model_state_dict(trained)
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    by_rank_0(lambda: save_file(full, whole / "adapter_model.safetensors"))
    by_rank_0(lambda: torch.save(state, part))
    fresh = adapted(0)
    mine = torch.load(part, weights_only=True) if dist.get_rank() == 0 else {}
    result = set_peft_model_state_dict(fresh, mine)
    held = {"model": get_peft_model_state_dict(fresh)}
    return {
        "unexpected": result.unexpected_keys,
        "words": words(certify(held, whole)),
        "refused": told(lambda: load(held, part)),
        "restored": bool(load(held, whole, certify=True).certificate),
        "as it was trained": bool(certify({"model": state}, whole)),
    }


def perceptron(*, tensor_parallel: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model over all ranks, with weights of 1, and its optimizer."""
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(2, 6, bias=False))
    model.add_module("down", torch.nn.Linear(6, 3, bias=False))
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do a step, with gradients that say which rank's part of a weight they are of."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = torch.full_like(parameter, 0)
        parameter.grad.to_local().fill_(1 + dist.get_rank())
    optimizer.step()


def dropped_moments(folder: Path) -> dict[str, Any]:
    """AReaL 1468: the optimizer that a checkpoint is loaded into has made no states yet, so that none are asked for."""
    (model, optimizer), url = perceptron(), folder / "dcp"
    stepped(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=url)
    fresh, fresh_optimizer = perceptron()
    state = {"model": fresh.state_dict(), "optimizer": fresh_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=url)
    fresh.load_state_dict(state["model"])
    fresh_optimizer.load_state_dict(state["optimizer"])
    live = {"model": fresh, "optimizer": fresh_optimizer}
    x = torch.ones(1, 2)
    return {
        "same output": torch.equal(model(x), fresh(x)),
        "words": words(certify(live, url)),
        "restored": bool(load(live, url, certify=True).certificate),
        "states": len(fresh_optimizer.state),
    }


def moments_of_rank_0(folder: Path) -> dict[str, Any]:
    """Transformers 48569: under tensor parallelism all ranks load the parts of moments that rank 0 has saved."""
    model, optimizer = perceptron(tensor_parallel=True)
    stepped(model, optimizer)
    live = {"model": model, "optimizer": optimizer}
    save(live, folder / "ck", certify=True)
    by_rank_0(lambda: torch.save(optimizer.state_dict(), folder / "optimizer.pt"))
    fresh, fresh_optimizer = perceptron(tensor_parallel=True)
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    resumed = {"model": fresh, "optimizer": fresh_optimizer}
    return {
        "words": words(certify(resumed, folder / "ck")),
        "as they were saved": bool(certify(live, folder / "ck")),
        "refused": told(lambda: load(resumed, folder / "optimizer.pt")),
        "restored": bool(load(resumed, folder / "ck", certify=True).certificate),
    }


def trained(folder: Path) -> list[str]:
    """A Trainer saves step 3 itself, and by a callback as well."""
    from transformers import Trainer

    from tests.engines.huggingface.live_program import trainer
    from ucformat.engines.huggingface.live import SaveCallback

    saving = SaveCallback(str(folder / "universal"), certify=True)
    trainer(folder / "run", Trainer, callbacks=[saving], max_steps=3).train()
    dist.barrier()
    return sorted(path.name for path in (folder / "run" / "checkpoint-3").iterdir())


def resumed(folder: Path) -> dict[str, Any]:
    """The Trainer resumes there, perhaps on another number of ranks; then a UniversalTrainer does."""
    from transformers import Trainer, TrainerCallback

    from tests.engines.huggingface.live_program import trainer
    from ucformat.engines.huggingface.accelerate import unwrapped
    from ucformat.engines.huggingface.live import UniversalTrainer

    certificates: list[Certificate] = []

    class Certifying(TrainerCallback):
        def on_step_begin(self, *_: Any, **live: Any) -> None:
            if not certificates:
                state = {
                    "model": live["model"],
                    "optimizer": unwrapped(live["optimizer"]),
                    "scheduler": live["lr_scheduler"],
                    "rng": Rng(),
                }
                certificates.append(certify(state, folder / "universal" / "step-3"))

    class CertifiedTrainer(UniversalTrainer):
        save_options = MappingProxyType({"certify": True})

    out: dict[str, Any] = {}
    for cls, source in (
        (Trainer, "run/checkpoint-3"),
        (CertifiedTrainer, "run/checkpoint-3"),
        (CertifiedTrainer, "universal/step-3"),
    ):
        certificates.clear()
        here = folder / f"{cls.__name__}-{dist.get_world_size()}"
        again = trainer(here, cls, callbacks=[Certifying()], max_steps=4)
        refused = told(partial(again.train, resume_from_checkpoint=str(folder / source)))
        said = words(certificates[0]) if certificates else ""
        out[f"{cls.__name__} {source}"] = (again.state.global_step, said, refused)
    return out
