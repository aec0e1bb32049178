"""What trainings with Megatron-Core refuse or tell, each in a process of its own: `python -m … NAME FOLDER`."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.megatron.live.train import Training

SPEC: dict[str, Any] = {"layers": 1, "swiglu": True, "bf16": True, "optimizer": "dp_reshardable"}


def refused(call: Any) -> list[str]:
    """The message and hint of the error of a call."""
    from ucformat.errors import UcformatError

    try:
        call()
    except UcformatError as error:
        return [type(error).__name__, error.message, error.hint or ""]
    raise AssertionError("it was not refused")


def optimizers(folder: Path) -> dict[str, Any]:
    """Optimizers of which not everything would be saved, and state dicts without names."""
    import ucformat.torch.megatron as um

    training = Training(SPEC)
    place = str(folder / "ck")
    state = training.state()
    told = {}
    how = {"distrib_optim_sharding_type": "dp_reshardable"}
    training.step()
    buckets = training.optimizer.sharded_state_dict(training.model(), metadata=dict(how))
    told["buckets"] = refused(lambda: um.save({**state, "optimizer": buckets}, place))
    del state["model"]
    told["without its model"] = refused(lambda: um.save(state, place))
    part = training.run.optimizers[0]
    part.config.use_precision_aware_optimizer = True
    told["precision-aware"] = refused(lambda: um.save(training.state(), place))
    part.config.use_precision_aware_optimizer = False
    inner = part.optimizer
    first = next(iter(inner.state.values()))
    first["exp_avg_max"] = torch.zeros(3)
    told["another shape"] = refused(lambda: um.save(training.state(), place))
    del first["exp_avg_max"]
    first["step"] += 1
    told["steps"] = refused(lambda: um.save(training.state(), place))
    first["step"] -= 1
    told["names="] = refused(lambda: um.save(training.state(), place, names={"layers.*": 1}))
    told["written"] = sorted(p.name for p in folder.glob("ck*"))
    return told


def keys(state: dict[str, Any]) -> dict[str, Any]:
    """The keys of a state's tensors, with their shapes, and of its objects."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    out: dict[str, Any] = {}
    for entry in nested_values(state):
        built = nested_values(entry.build()) if hasattr(entry, "build") else [entry]
        out |= {e.key: list(e.global_shape) for e in built if isinstance(e, ShardedTensor)}
        out |= {e.unique_key: None for e in built if isinstance(e, ShardedObject)}
    return out


def listed(strategy: Any, folder: Path) -> dict[str, Any]:
    """The keys that a strategy lists of a checkpoint, in the same form."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {
        key: list(e.global_shape) if isinstance(e, ShardedTensor) else None
        for key, e in strategy.load_sharded_metadata(folder).items()
    }


def single_keys(folder: Path) -> dict[str, Any]:
    """Layers, experts and halves with keys of their own (`singleton_local_shards`)."""
    from megatron.core import dist_checkpointing

    import ucformat
    import ucformat.torch.megatron as um

    training = Training({**SPEC, "layers": 2, "optimizer": None, "experts": 2})
    training.step()
    save, load = um.strategies()
    place, exported = folder / "ck", folder / "exported"
    place.mkdir()

    def state() -> dict[str, Any]:
        module = training.chunks[0].module
        model = {"model": module.sharded_state_dict(metadata={"singleton_local_shards": True})}
        return {**model, "optimizer": training.optimizer.sharded_state_dict(model)}

    dist_checkpointing.save(state(), str(place), save)
    loaded, *others = dist_checkpointing.load(state(), str(place), load, strict="return_all")
    saved = training.chunks[0].module.state_dict()
    ucformat.export(place, exported, "megatron")
    return {
        "own": keys(state()),
        "listed": listed(load, place),
        "others": [sorted(each) for each in others],
        "same": all(torch.equal(saved[n], t) for n, t in loaded["model"].items() if t is not None),
        "said": dist_checkpointing.load_content_metadata(str(exported)),
    }


def older(folder: Path) -> dict[str, Any]:
    """Megatron's own function, which returns no report, loads older tensors only if that is asked for."""
    from megatron.core import dist_checkpointing

    import ucformat.torch.megatron as um
    from ucformat.torch import Window

    training = Training({**SPEC, "layers": 2, "optimizer": None})
    window = Window(steps=2, groups=(("*layers.0.*",), ("*layers.1.*",)))

    def state() -> dict[str, Any]:
        model = training.model()
        return {**model, "optimizer": training.optimizer.sharded_state_dict(model)}

    for step in (1, 2):
        training.step()
        save, _ = um.strategies(saving={"step": step, "partial": window})
        (folder / str(step)).mkdir()
        dist_checkpointing.save(state(), str(folder / str(step)), save)
    told = {}
    for name, asked in (("default", {}), ("asked", {"strict_step": False})):
        _, load = um.strategies(loading=asked)  # type: ignore[arg-type]
        try:
            dist_checkpointing.load(state(), str(folder / "2"), load)
            told[name] = "loaded"
        except Exception as error:  # noqa: BLE001 - of Megatron
            told[name] = str(error)
    return told


def strictness(folder: Path) -> dict[str, Any]:
    """Megatron compares the keys of a universal checkpoint with those of a state by itself."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from torch.distributed.checkpoint.api import CheckpointException

    import ucformat
    import ucformat.torch.megatron as um

    training = Training({**SPEC, "layers": 2, "optimizer": None})
    training.step()
    save, load = um.strategies()

    def state() -> dict[str, Any]:
        model = training.model()
        return {**model, "optimizer": training.optimizer.sharded_state_dict(model)}

    (folder / "ck").mkdir()
    dist_checkpointing.save(state(), str(folder / "ck"), save)
    told: dict[str, Any] = {"own": keys(state()), "listed": listed(load, folder / "ck")}
    told["groups"] = [g.options["lr"] for g in ucformat.open(folder / "ck").manifest.groups]
    arguments: Any = (str(folder / "ck"), load)
    told["all"] = [
        sorted(keys)
        for keys in dist_checkpointing.load(state(), *arguments, strict="return_all")[1:]
    ]
    more = {"more": ShardedTensor.from_rank_offsets("more", torch.ones(2))}
    expected: dict[str, type[BaseException]] = {
        "raise_all": CheckpointingException,
        "assume_ok_unexpected": CheckpointException,
    }
    for strict, kind in expected.items():
        try:
            dist_checkpointing.load({**state(), **more}, *arguments, strict=strict)
        except kind as error:
            told[strict] = "more" in str(error)
    told["without"] = [
        sorted(keys)
        for keys in dist_checkpointing.load(
            {**training.model(), **more}, *arguments, strict="return_all"
        )[1:]
    ]
    (folder / "direct").mkdir()
    save.save(more, folder / "direct")  # without the values that `dist_checkpointing.save` adds
    zeros = {"more": ShardedTensor.from_rank_offsets("more", torch.zeros(2))}
    part = {"x": ShardedObject("optimizer.distributed.dp_group_idx_0.optimizer", None, (1,), (0,))}
    told["part"] = refused(lambda: load.load(part, folder / "direct"))
    told["direct"] = load.load(zeros, folder / "direct")["more"].tolist()
    metadata = dist_checkpointing.load_tensors_metadata(*arguments)
    loaded = dist_checkpointing.load(metadata, *arguments, validate_access_integrity=False)
    told["empty"] = {k: list(loaded[k].shape) for k in metadata}
    steps = [  # the norms as a model of Transformer Engine's specification names them
        {"rename": rf"/(.*)\.{own}\.(.*)/", "to": rf"\1.{fused}_\2"}
        for own, fused in (
            ("input_layernorm", "self_attention.linear_qkv.layer_norm"),
            ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
        )
    ]
    fused = ucformat.open(folder / "ck").view(steps)
    told["fused"] = sorted(n for n in fused.names() if "layer_norm_weight" in n)
    parameters = list(training.run.models[0].parameters())
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    report = um.load({**training.model(), "optimizer": training.optimizer}, fused, certify=True)
    told["from fused"] = bool(report) and all(map(torch.equal, before, parameters))
    return told


def before_the_first_step(folder: Path) -> dict[str, Any]:
    """An optimizer without states is saved and loaded as such, also into one that has some."""
    import ucformat.torch.megatron as um

    training = Training(SPEC)
    um.save(training.state(), folder / "first")
    initial = [p.detach().clone() for p in training.run.models[0].parameters()]
    losses = [training.step() for _ in range(2)]
    um.save(training.state(), folder / "second")
    state = {**training.model(), "optimizer": training.optimizer}
    report = um.load(state, folder / "first")
    same = all(map(torch.equal, initial, training.run.models[0].parameters()))
    training.step_number = 0
    again = [training.step() for _ in range(2)]
    # and states that are made for a load are deleted if it is refused
    for part in training.run.optimizers:
        part.optimizer.state.clear()
    message = refused(lambda: um.load(state, folder / "second", rename=lambda name: f"x.{name}"))
    left = sum(len(part.optimizer.state) for part in training.run.optimizers)
    return {
        "complete": bool(report),
        "same": same,
        "losses": losses,
        "again": again,
        "left": left,
        "refused": message,
    }


def step_of_groups(folder: Path) -> dict[str, Any]:
    """An optimizer that counts steps in its groups, without its step."""
    import ucformat.torch.megatron as um

    training = Training({**SPEC, "fused": True})
    um.save(training.state(), folder / "first")
    training.step()
    um.save(training.state(), folder / "second")
    groups = [g for part in training.run.optimizers for g in part.optimizer.param_groups]
    steps = [g.pop("step") for g in groups]
    state = {**training.model(), "optimizer": training.optimizer}
    lost = um.certify(state, folder / "second")
    told: dict[str, Any] = {"steps": steps, "certified": bool(lost), "lost": str(lost)}
    um.load(state, folder / "second")
    told["loaded"] = [g["step"] for g in groups]
    um.load(state, folder / "first")
    told["before"] = [g.get("step") for g in groups]
    return told


def weights_alone(folder: Path) -> dict[str, Any]:
    """A state without the optimizer loads weights, and a checkpoint without one is no training."""
    import ucformat.torch.megatron as um

    training = Training(SPEC)
    training.step()
    um.save(training.state(), folder / "all")
    um.save(training.model(), folder / "weights")
    um.async_save(training.state(), folder / "later", form="packed").wait()
    whole = [p.detach().clone() for p in training.run.models[0].parameters()]
    training.step()
    report = um.load(training.model(), folder / "all", strict=True)
    same = all(map(torch.equal, whole, training.run.models[0].parameters()))
    lineage = report.lineage.kind
    message = refused(lambda: um.load(training.state(), folder / "weights"))
    return {"complete": bool(report), "same": same, "lineage": lineage, "refused": message}


def padding(folder: Path) -> dict[str, Any]:
    """A vocabulary that is padded otherwise is loaded, and the report says that it is."""
    import ucformat
    import ucformat.torch.megatron as um

    training = Training(SPEC)
    training.step()
    place = folder / "ck"
    um.save(training.state(), place)
    ck = ucformat.open(place)
    name = "output_layer.weight"
    rows = {state: list(ck[name, state].shape) for state in ck.states(name)}
    # without the vocabulary's size the padding is a part of the weights
    um.save({k: v for k, v in training.state().items() if k != "args"}, folder / "unknown")
    unknown = list(ucformat.open(folder / "unknown")[name, "weight"].shape)
    um.save(
        {k: v for k, v in training.state().items() if k != "args"}, folder / "told", vocab_size=19
    )
    told = list(ucformat.open(folder / "told")[name, "weight"].shape)
    return {"rows": rows, "unknown": unknown, "told": told}


def objects(folder: Path) -> dict[str, Any]:
    """Sharded objects and plain values come back as they were."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    import ucformat.torch.megatron as um

    training = Training(SPEC)
    rng = [{"torch_rng_state": torch.get_rng_state()[:16], "random_rng_state": (3, (0, 1), None)}]
    sharded = ShardedObject("rng_state", rng, (1, 1), (0, 0), replica_id=0)
    scheduler = {"max_lr": 0.1, "num_steps": 3, "lr_decay_style": "cosine"}
    values = {
        "opt_param_scheduler": scheduler,
        "rng_state": sharded,
        "here": LocalNonpersistentObject(5),
    }
    um.save({**training.state(), **values, "iteration": 7}, folder / "ck")
    asked = ShardedObject("rng_state", None, (1, 1), (0, 0), replica_id=0)
    state = {**training.model(), "rng_state": asked, "here": LocalNonpersistentObject(6)}
    found = um.load(state, folder / "ck").state
    other = ShardedObject("rng_state", None, (2, 1), (1, 0), replica_id=0)
    message = refused(lambda: um.load({**training.model(), "rng_state": other}, folder / "ck"))
    part = training.run.optimizers[0]
    part.grad_scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 2, 1)
    training.step_number = 0
    part.grad_scaler.update(found_inf=True)  # which halves the scale
    scale = float(part.grad_scaler.scale)
    um.save(training.state(), folder / "scaled")
    part.grad_scaler.update(found_inf=True)
    um.load({**training.model(), "optimizer": training.optimizer}, folder / "scaled", certify=True)
    return {
        "scale": [scale, float(part.grad_scaler.scale)],
        "scheduler": found["opt_param_scheduler"] == scheduler,
        "iteration": found["iteration"],
        "args": isinstance(found["args"], Namespace)
        and vars(found["args"]) == vars(training.state()["args"]),
        "rng": torch.equal(found["rng_state"][0]["torch_rng_state"], rng[0]["torch_rng_state"])
        and found["rng_state"][0]["random_rng_state"] == (3, (0, 1), None),
        "here": found["here"],
        "refused": message,
    }


def guide(folder: Path) -> dict[str, Any]:
    """The script of the guide, as it is printed: once through, and from its middle on."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    page = (Path(__file__).parents[4] / "docs" / "guides" / "megatron.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    training = Training(SPEC)
    for group in training.optimizer.param_groups:
        group["min_lr"] = 1e-3
    losses: dict[str, list[float]] = {"whole": [], "resumed": []}
    for run, resume in (("whole", None), ("resumed", str(folder / "whole" / "2"))):
        scheduler = OptimizerParamScheduler(
            training.optimizer, 0.0, 1e-2, 1e-3, 1, 10, "linear", 0.01, 0.01, 1, "constant"
        )

        def train_step(iteration: int, run: str = run, scheduler: Any = scheduler) -> None:
            training.step_number = iteration
            losses[run].append(training.step())
            scheduler.step(1)

        names: dict[str, Any] = {
            "model": training.chunks,
            "optimizer": training.optimizer,
            "opt_param_scheduler": scheduler,
            "args": training.run.args,
            "resume": resume,
            "folder": str(folder / run),
            "train_step": train_step,
            "steps": 4,
            "every": 2,
        }
        exec(compile(code, "megatron.md", "exec"), names)  # noqa: S102
    return losses


if __name__ == "__main__":
    SPEC["world"] = 1
    told = globals()[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()
