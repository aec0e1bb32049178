"""AutoModel's own Checkpointer over universal checkpoints: `live_program.py FOLDER`, under torchrun.

The class is that of docs/sources/automodel.md. Two ranks save twice, for the second save takes the
plan of the first from DCP's cache, and go on from the first; then one rank does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3]))  # for `tests`

from tests.torch.leaving import leave

PAGE = Path(__file__).parents[3] / "docs" / "sources" / "automodel.md"
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=20,
    intermediate_size=42,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=5,
    tie_word_embeddings=False,
)


def made() -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    model: Any = LlamaForCausalLM(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(objects: Any, first: int, last: int) -> list[float]:
    model, optimizer, scheduler = objects
    found = []
    for step in range(first, last):
        tokens = torch.randint(97, (4, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[dist.get_rank() :: dist.get_world_size()]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


def whole(objects: Any) -> dict[str, list[float]]:
    """The sums of all tensors' bits, by name."""
    model, optimizer, scheduler = objects
    tensors: dict[str, Any] = {}
    for name, p in model.named_parameters():
        tensors |= {f"weight/{name}": p}
        tensors |= {f"{s}/{name}": v for s, v in optimizer.state.get(p, {}).items()}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    bits = {
        n: [int(t.detach().contiguous().view(torch.int32).long().sum()), *t.shape]
        for n, t in full.items()
    }
    return {**bits, "lr": scheduler.get_last_lr()}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    code = PAGE.read_text().split("## Saving by ucformat", 1)[1].split("```python\n", 1)[1]
    exec(code.split("```", 1)[0], {"__name__": "of_the_page"})  # noqa: S102 - the page's own
    config = CheckpointingConfig(model_save_format="torch_save", save_consolidated=False)
    checkpointer = config.build(dist.get_rank(), 0, 0)
    found: dict[str, Any] = {"class": type(checkpointer).__name__}
    places = [folder / f"step_{n}" for n in (2, 4)]
    objects = made()
    if world > 1:
        for number, place in enumerate(places):
            train(objects, 2 * number, 2 * number + 2)
            found[place.name] = whole(objects)
            checkpointer.save_model(objects[0], str(place))
            checkpointer.save_optimizer(objects[1], objects[0], str(place), objects[2])
        found["losses"] = train(objects, 4, 6)
    for place in places:
        again = made()
        checkpointer.load_model(again[0], str(place / "model"))
        checkpointer.load_optimizer(again[1], again[0], str(place), again[2])
        found[f"{place.name} again"] = whole(again)
    found["losses again"] = train(again, 4, 6)
    checkpointer.close()
    if dist.get_rank() == 0:
        (folder / f"found-{world}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
