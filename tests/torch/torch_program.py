"""Trainings with several stages on a rank, two optimizers, shards of columns, and context parallelism."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.torch.fsdp1_program import TOKENS, Net, State
from tests.torch.ranks import told
from ucformat.torch import StateParts, certify, load, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["STAGES", "muon_state", "plain", "stage_of", "train"]

BEFORE, AFTER = 3, 3
STAGES, MICRO = 4, 4
SHARED_BATCH = 8


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(TOKENS, (SHARED_BATCH, 4), generator=torch.Generator().manual_seed(step))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def plain(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(state: State, steps: int) -> list[float]:
    """The losses of some steps of a model that is not cut into stages, with all optimizers of a state."""
    losses = []
    optimizers = [o for o in state.values() if isinstance(o, torch.optim.Optimizer)]
    for _ in range(steps):
        tokens = tokens_of(state["done"])
        loss = loss_of(state["model"](tokens), tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state["done"] += 1
        losses.append(loss.item())
    return losses


# Several stages on a rank


class Stage(nn.Module):
    """A part of the model, under the names that it has there."""

    def __init__(self, net: Net, number: int) -> None:
        super().__init__()
        if number == 0:
            self.embed = net.embed
        elif number == STAGES - 1:
            self.head = net.head
        else:
            self.layers = nn.ModuleDict({str(number - 1): net.layers[number - 1]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.children(),):
            for inner in part.values() if isinstance(part, nn.ModuleDict) else (part,):
                x = inner(x)
        return x


def stage_of(net: Net, number: int) -> nn.Module:
    return Stage(net, number)


def stages(seed: int, *, one_optimizer: bool, cut: bool) -> tuple[State, Any]:
    """This rank's two stages of four, in turns, with an optimizer for each, or one; and the schedule."""
    rank, world = dist.get_rank(), 2
    group = None
    net = plain(seed)
    mesh = None
    if cut:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    numbers = [rank, rank + world]
    parts = [stage_of(net, number) for number in numbers]
    if mesh is not None:
        for part in parts:
            fully_shard(part, mesh=mesh["dp"])
    pipeline = [
        PipelineStage(part, number, STAGES, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B([*pipeline], MICRO, loss_fn=loss_of)
    optimizer: Any
    if one_optimizer:
        optimizer = torch.optim.AdamW(
            [p for part in parts for p in part.parameters()], lr=1e-2, foreach=False
        )
    else:
        optimizer = StateParts([adamw(part) for part in parts])
    return {"model": StateParts(parts), "optimizer": optimizer, "done": 0}, schedule


def train_stages(state: State, schedule: Any, steps: int) -> list[float]:
    """The losses, on the ranks that have the last stage; of a stage that is not the last, nothing."""
    optimizer = state["optimizer"]
    optimizers = optimizer.parts if isinstance(optimizer, StateParts) else (optimizer,)
    out = []
    first = any(hasattr(part, "embed") for part in state["model"].parts)
    last = any(hasattr(part, "head") for part in state["model"].parts)
    for _ in range(steps):
        tokens, losses = tokens_of(state["done"]), []  # type: ignore[var-annotated]
        given = (tokens,) if first else ()
        schedule.step(*given, **({"target": tokens, "losses": losses} if last else {}))
        for each in optimizers:
            each.step()
            each.zero_grad()
        state["done"] += 1
        out += [torch.stack(losses).mean().item()] if losses else []
    return out


def interleaved(folder: Path, *, one_optimizer: bool, cut: bool = False) -> list[Any]:
    """Save stages, load them into others, and what one process has saved; the losses of each."""
    state, schedule = stages(0, one_optimizer=one_optimizer, cut=cut)
    train_stages(state, schedule, BEFORE)
    save(state, folder / "stages", certify=True)
    expected = train_stages(state, schedule, AFTER)
    again, schedule = stages(1, one_optimizer=not one_optimizer, cut=cut)
    report = load(again, folder / "stages", strict=True, certify=True)
    found = train_stages(again, schedule, AFTER)
    other, schedule = stages(1, one_optimizer=one_optimizer, cut=cut)
    load(other, folder / "one", strict=True, certify=True)
    return [expected, found, train_stages(other, schedule, AFTER), report.tensors]


# Muon beside AdamW


def muon_state(model: nn.Module, *, combined: bool = False) -> State:
    """Muon for the matrices of the blocks, AdamW for the rest: two optimizers, or one with two kinds of groups."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if "layers" in name and p.dim() == 2]
    others = [p for name, p in named if not ("layers" in name and p.dim() == 2)]
    if combined:
        return {"model": model, "optimizer": Both(matrices, others), "done": 0}
    return {
        "model": model,
        "muon": torch.optim.Muon(matrices, lr=1e-2),
        "adamw": torch.optim.AdamW(others, lr=1e-2, foreach=False),
        "done": 0,
    }


class Both(torch.optim.Optimizer):
    """One optimizer whose groups are of two kinds, as users write them."""

    def __init__(self, matrices: Sequence[Any], others: Sequence[Any]) -> None:
        groups = [
            {"params": matrices, "muon": True, "lr": 1e-2, "momentum": 0.9},
            {"params": others, "muon": False, "lr": 1e-2, "beta": 0.9},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["muon"]:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    p.add_(buffer.sign(), alpha=-group["lr"])
                else:
                    average = state.setdefault("exp_avg", torch.zeros_like(p))
                    state["step"] = state.get("step", 0) + 1
                    average.mul_(group["beta"]).add_(p.grad)
                    p.add_(average, alpha=-group["lr"] / state["step"])


def sharded(model: Any, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def resumed(folder: Path, name: str, make: Callable[[int], State]) -> list[Any]:
    """Save, load into another one, and load what one process has saved; the losses of each."""
    state = make(0)
    train(state, BEFORE)
    save(state, folder / name, certify=True)
    expected = train(state, AFTER)
    again = make(1)
    load(again, folder / name, strict=True, certify=True)
    found = train(again, AFTER)
    other = make(1)
    load(other, folder / "one", strict=True, certify=True)
    return [expected, found, train(other, AFTER)]


def muon(folder: Path, *, combined: bool) -> list[Any]:
    """Under FSDP2."""
    return resumed(folder, "cut", lambda seed: muon_state(sharded(plain(seed)), combined=combined))


def matrices(folder: Path) -> list[Any]:
    """Of shards of columns; and FSDP2 over tensor parallelism, which cuts columns and rows."""

    def columns(seed: int) -> State:
        def place(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None

        torch.manual_seed(seed)
        model = wide()
        fully_shard(model, shard_placement_fn=place)
        return {"model": model, "optimizer": adamw(model), "done": 0}

    def both(seed: int) -> State:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(seed)
        model = wide()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return {"model": model, "optimizer": adamw(model), "done": 0}

    if dist.get_world_size() == 4:
        return resumed(folder, "cut", both)
    return resumed(folder, "cut", columns)


def wide() -> nn.Module:
    return Wide()


class Wide(nn.Module):
    """Rows and columns that 4 ranks cut unevenly, where PyTorch allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 10)
        self.up, self.down = nn.Linear(10, 6), nn.Linear(6, 10)
        self.head = nn.Linear(10, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        out: torch.Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return out


def float8(folder: Path) -> list[Any]:
    """Weights that torchao casts when FSDP2 gathers them: a plain model takes what is inside; not the reverse."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))

    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = fully_shard(convert_to_float8_training(layers(), config=config))
    save({"model": model}, folder / "float8", certify=True)
    again = fully_shard(convert_to_float8_training(layers(), config=config))
    load({"model": again}, folder / "float8", strict=True, certify=True)
    other = fully_shard(layers())
    load({"model": other}, folder / "float8", rename={r"(.*)\._tensor": r"\1"})
    save({"model": other}, folder / "plain")
    return [
        [p.to_local().tolist() for p in other.parameters()]
        == [p.to_local()._tensor.tolist() for p in again.parameters()],
        told(
            lambda: load(
                {"model": again}, folder / "plain", rename={r"(.*)weight": r"\1weight._tensor"}
            )
        ),
    ]


SEQUENCE = 8


class Attending(Net):
    """A model whose tokens see those before them, with persistent buffers for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 21)
        self.register_buffer("angles", torch.linspace(0, 3, SEQUENCE * 7).view(SEQUENCE, 7).sin())
        self.register_buffer("positions", torch.arange(SEQUENCE))

    def forward(
        self, tokens: torch.Tensor, angles: Any = None, positions: Any = None, group: Any = None
    ) -> torch.Tensor:
        angles = self.angles if angles is None else angles
        positions = self.positions if positions is None else positions
        query, *others = self.mix(self.embed(tokens) + angles).split(7, -1)
        key, value = (_gathered(t, 1, group) for t in others)
        later = positions[:, None] < _gathered(positions, 0, group)
        scores = (query @ key.transpose(1, 2)).masked_fill(later, float("-inf"))
        x = scores.softmax(-1) @ value
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class _Gather(torch.autograd.Function):
    """Joins the parts of the ranks of a context; each gets the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, part.shape[dim]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.size
        return total.narrow(ctx.dim, first, ctx.size), None, None


def _gathered(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return tensor if group is None else _Gather.apply(tensor, dim, group)


def attending(seed: int) -> Attending:
    torch.manual_seed(seed)
    return Attending()


def batch_of(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (SHARED_BATCH, SEQUENCE), generator=g)


def train_attending(state: State, count: int) -> list[float]:
    """The losses of one process."""
    return _context_steps(state, count, lambda tokens, targets: (state["model"](tokens), targets))


def _context_steps(state: State, count: int, forward: Any) -> list[float]:
    out = []
    for _ in range(count):
        tokens = batch_of(state["done"])
        logits, targets = forward(tokens, tokens.roll(-1, 1))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["done"] += 1
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        out.append(total.item())
    return out


def context(folder: Path) -> dict[str, Any]:
    """FSDP2 over data and context parallel ranks together, by both of PyTorch's ways to cut sequences."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    cp, group = mesh["cp"], mesh["cp"].get_group()

    def make(seed: int) -> State:
        model = sharded(attending(seed), mesh=mesh["dp_cp"])
        return {"model": model, "optimizer": adamw(model), "done": 0}

    def own_rows(*batches: torch.Tensor) -> list[torch.Tensor]:
        rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
        return [t.chunk(size)[rank].clone() for t in batches]

    def in_place(state: State, count: int, inside: Callable[[], Any] | None = None) -> Any:
        """As `context_parallel` cuts the sequence, and the model's own buffers in it."""
        model, told_inside = state["model"], []

        def forward(*batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, targets = own_rows(*batches)
            buffers = [tokens, targets, model.angles, model.positions]
            kept = {tokens, targets}
            with context_parallel(
                cp, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers=kept
            ):
                assert len(model.angles) == SEQUENCE // 2
                told_inside.append(None if inside is None else inside())
                return model(tokens, group=group), targets

        losses = _context_steps(state, count, forward)
        return losses if inside is None else told_inside[-1]

    def new_tensors(state: State, count: int) -> list[float]:
        """As `_context_parallel_shard` returns parts, and leaves the buffers as they are."""
        model = state["model"]

        def forward(*batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            given = [*own_rows(*batches), model.angles, model.positions]
            tokens, targets, *rest = _context_parallel_shard(cp, given, [1, 1, 0, 0])
            return model(tokens, *rest, group=group), targets

        return _context_steps(state, count, forward)

    state = make(0)
    in_place(state, BEFORE)
    save(state, folder / "cut", certify=True)
    expected = in_place(state, AFTER)
    again = make(1)
    load(again, folder / "cut", strict=True, certify=True)
    assert certify(again, folder / "cut")
    other = make(1)
    load(other, folder / "one", strict=True, certify=True)
    results = [expected, new_tensors(again, AFTER), in_place(other, AFTER)]
    refused = [
        in_place(other, 1, lambda: told(lambda: save(other, folder / "inside"))),
        in_place(other, 1, lambda: told(lambda: load(other, folder / "cut"))),
    ]
    with context_parallel(
        cp,
        buffers=[other["model"].angles],
        buffer_seq_dims=[0],
        no_restore_buffers={other["model"].angles},
    ):
        pass  # which leaves the part of this rank
    refused.append(told(lambda: save(other, folder / "inside")))
    return {"losses": results, "refused": refused}


# States in 8 bits


def low_bit_state(seed: int, library: str, kind: str) -> State:
    """A model whose matrices have states in 8 bits, whole, replicated or sharded; `local`: of the rank's shard."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind in ("flat", "orig"):
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=kind == "orig", device_id=cpu)
    elif kind == "fsdp2":
        fully_shard(model)
    if library == "local":
        optimizer: Any = OfShards(model.parameters(), {})
    elif library == "bitsandbytes":
        optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(model.parameters())
    else:
        torch.compile = lambda function=None, **_: function  # it needs a compiler
        optimizer = importlib.import_module("torchao.optim").AdamW8bit(model.parameters())
    return {"model": model, "optimizer": optimizer, "done": 0}


class OfShards(torch.optim.Optimizer):
    """Keeps plain states of each rank's shards, as some fused optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            own = p.to_local()
            self.state[p].setdefault("average", torch.zeros_like(own)).lerp_(p.grad.to_local(), 0.1)
            own.sub_(self.state[p]["average"])


def train_low_bit(state: State, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        g = torch.Generator().manual_seed(state["done"])
        loss = state["model"](torch.randn(4, 64, generator=g)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["done"] += 1
        losses.append(loss.item())
    return losses


def low_bit(folder: Path, library: str, kinds: list[str]) -> dict[str, Any]:
    """The losses of trainings that go on, and what is said of those that are refused."""
    out: dict[str, Any] = {}
    for kind in kinds:
        state = low_bit_state(0, library, kind)
        train_low_bit(state, BEFORE)
        out[kind] = said = told(lambda: save(state, folder / kind, certify=True))  # noqa: B023
        if not said:
            expected = train_low_bit(state, AFTER)
            again = low_bit_state(1, library, kind)
            load(again, folder / kind, strict=True, certify=True)
            out[kind] = [expected, train_low_bit(again, AFTER)]
    return out
