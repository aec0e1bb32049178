"""The files of one DeepSpeed checkpoint: which must be present, and which must not.

A save folder holds `latest`, a text file with the name of a tag folder, and the tag folders. A tag
folder holds, for each model-parallel rank M (that of the pipeline stage times the tensor-parallel
degree, plus the tensor-parallel rank):

- ZeRO 0: `mp_rank_M_model_states.pt`
- ZeRO 1, 2: that, and for each data-parallel rank R
  `[bf16_]zero_pp_rank_R_mp_rank_M_optim_states.pt`
- ZeRO 3: for each R `zero_pp_rank_R_mp_rank_M_model_states.pt` and
  `[bf16_]zero_pp_rank_R_mp_rank_M_optim_states.pt`
- pipelines: also the modules' weights, `layer_L[-model_T]-model_states.pt` for each layer L that
  has any and each tensor-parallel rank T
- ZeRO 3 with the optimizer on NVMe: also `offloaded_tensors/rankRR/*.tensor.swp`
- experts: also their weights, `layer_L_expert_E_mp_rank_M_model_states.pt`, L counting layers of
  experts of the pipeline stage only; under ZeRO 0 the optimizer of each expert-parallel rank P,
  `expp_rank_P_mp_rank_M_optim_states.pt`. The weights of a pipeline's other parameters are then in
  the model states, not in files of layers.

(`pp_rank` is the data-parallel rank; `bf16_` marks training in bf16.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain, islice, product
from typing import TYPE_CHECKING

from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotFound,
    UnsupportedError,
    UsageError,
    first_names,
    option_text,
)
from ucformat.sources.base import PickleOptions, option
from ucformat.storage.base import check_key, exists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.layout import Layout
    from ucformat.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSourceOptions(PickleOptions):
    """The options of `DeepSpeed`."""

    groups: Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the parameters of each optimizer group, in order, if a ZeRO 0 checkpoint does not list "
        "them",
    )
    layout: Layout | str | None = option(  # noqa: RUF009 - it makes a field
        None,
        "layout",
        "how parameters are sharded over tensor-parallel ranks, if the checkpoint does not "
        "describe it, or does so "
        "wrongly: rules over the axis `tp`, or a preset (`llama`, `megatron-deepspeed`, "
        "`megatron-deepspeed-swiglu`)",
    )
    vocab: int | None = option(
        None, "number", "rows of the vocabulary without its padding, if the layout has `pad_to`"
    )
    optimizer: bool = option(
        default=True,
        how="flag",
        text=(
            "whether to read the optimizer's states; false if their files are missing, and the "
            "weights suffice"
        ),
    )
    cuts: Mapping[str, str | int] | None = option(
        None,
        "cuts",
        "how the parameters that a pattern (a glob or `/regex/`) matches are sharded: "
        "`replicate`, `mean`, `halves` "
        "(two tensors, one after the other, each sharded), or the dim along which parts are "
        "joined; it "
        "takes precedence over `layout`",
    )


_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPP = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SWAPPED = re.compile(r"offloaded_tensors/rank\d+/[^/]+\.tensor\.swp")
_ANY = re.compile(
    r"([^/]*/)?((bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)|mp_rank_\d+_model)_states\.pt"
)
_UNIVERSAL = re.compile(
    r"([^/]*/)?(zero/(.+/fp32|optimizer_state)\.pt|tmp/.+/\d+/fp32\.\d+)", re.DOTALL
)
_DIGITS = 6  # of a rank or layer; DeepSpeed writes no longer numbers
_MAX_FILES = 10_000  # files examined in a folder without `latest`
_LATEST = 4096  # bytes of `latest`
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")  # beside it
_MAX_LISTED = 10  # tags or files named in an error

_READ = "data, tensor and pipeline parallelism with ZeRO 0 to 3 are read"
_NOT_YET = (
    (re.compile(r"expert_\d+_mp_rank_\d+_.*"), "experts as DeepSpeed before 0.5 saved them", _READ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of a tag folder by role, as keys of the store."""

    tag: str  # "" where the store is rooted at the tag folder itself
    zero3: bool
    # by model-parallel rank, and under ZeRO 3 by data-parallel rank, else one file each
    models: tuple[tuple[str, ...], ...]
    optims: tuple[tuple[str, ...], ...]  # by model- and data-parallel rank; () if there are none
    layers: Mapping[int, tuple[str, ...]]  # of pipelines: by layer and tensor-parallel rank
    # by model-parallel rank, then by layer of experts and expert
    experts: Mapping[int, Mapping[tuple[int, int], str]]
    expert_optims: Mapping[int, Mapping[int, str]]  # by model- and expert-parallel rank
    latest: str | None
    swapped: Mapping[str, int] = field(default_factory=dict)  # bytes of the swap files of NVMe

    @property
    def all(self) -> tuple[str, ...]:
        """All files."""
        latest = [self.latest] if self.latest else []
        layers = (self.layers[number] for number in sorted(self.layers))
        experts = (by_rank.values() for by_rank in self.experts.values())
        optims = (by_rank.values() for by_rank in self.expert_optims.values())
        return (*latest, *chain(*self.models, *self.optims, *layers, *experts, *optims))


def is_model_or_optimizer(name: str) -> bool:
    """Whether this is a name that DeepSpeed gives to files of a tag folder."""
    return _ANY.fullmatch(name) is not None


def looks_like_deepspeed(store: Store) -> bool:
    """Whether a folder has `latest`, or it or a folder in it has files with DeepSpeed's names."""
    if exists(store, "latest_universal") or _tag_in(store, "latest"):
        return True
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    if any(exists(store, name) for name in names):
        return True
    return any(
        _ANY.fullmatch(i.key) or _UNIVERSAL.fullmatch(i.key)
        for i in islice(store.list(), _MAX_FILES)
    )


def find_tag(store: Store) -> str:
    """The tag that `latest`, or else `latest_universal`, names; `""` if the store's root is a tag folder."""
    tag = _tag_in(store, "latest")
    if tag:
        return _existing(store, tag, "latest")
    keys = [info.key for info in islice(store.list(), _MAX_FILES)]
    named = [m for m in (_ANY.fullmatch(key) or _UNIVERSAL.fullmatch(key) for key in keys) if m]
    if any(not m[1] for m in named):
        return ""
    tag = _tag_in(store, "latest_universal")
    if tag:
        return _existing(store, tag, "latest_universal")
    tags = sorted({m[1].rstrip("/") for m in named})
    if len(tags) == 1:
        return tags[0]
    raise UsageError(
        f"{store.url} holds several DeepSpeed checkpoints and no file `latest`: "
        f"{first_names(tags, 10)}"
        if tags
        else f"{store.url} holds no DeepSpeed checkpoint",
        hint="open the folder of one of them",
    )


def is_universal(store: Store, tag: str) -> bool:
    """Whether a tag folder has DeepSpeed's universal format."""
    prefix = f"{tag}/" if tag else ""
    matches = (_UNIVERSAL.fullmatch(info.key.removeprefix(prefix)) for info in store.list(tag))
    return any(match is not None and not match[1] for match in matches)


def list_files(
    store: Store, tag: str, *, universal: bool = False, optimizer: bool = True
) -> TagFiles:
    """List the files of a tag folder, and check that none is missing."""
    prefix = f"{tag}/" if tag else ""
    sizes = {info.key.removeprefix(prefix): info.size for info in store.list(tag)}
    names = list(sizes)
    for pattern, feature, hint in _NOT_YET:
        for name in names:
            if pattern.fullmatch(name):
                raise _not_yet(feature, prefix + name, hint)
    single = {(_number(m[1]), 0): m[0] for m in map(_MODEL.fullmatch, names) if m}
    ranks = [m for m in map(_RANK.fullmatch, names) if m]
    cut = _rank_grid(prefix, [m for m in ranks if m[4] == "model"])
    optims = _rank_grid(prefix, [m for m in ranks if m[4] == "optim" and optimizer], whole=not cut)
    if not single and not cut and not universal:
        raise MissingData(
            f"{store.url}: {tag or 'the folder'} has no model states "
            "(mp_rank_00_model_states.pt, or "
            "zero_pp_rank_*_mp_rank_00_model_states.pt)",
            hint="the save did not finish, or files were lost; restore them from a copy",
        )
    if single and cut:
        raise IntegrityError(
            f"{prefix}{min(single.values())} and {cut[0][0]} are both present: ZeRO 3 and "
            "another stage, in one folder",
            hint="move the files of the save that you do not want elsewhere",
        )
    models = cut
    if single:
        models = _full_grid(prefix, single, "mp_rank_{0:02d}_model_states.pt")
    layers = _layers(prefix, [m for m in map(_LAYER.fullmatch, names) if m])
    experts, expert_optims = _experts(prefix, names, optimizer=optimizer)
    pointers = ("latest", "latest_universal") if tag else ()
    latest = next((key for key in pointers if _tag_in(store, key) == tag), None)
    swapped = {
        prefix + name: sizes[name] for name in names if _SWAPPED.fullmatch(name) and optimizer
    }
    by_role = (models, optims, layers, experts, expert_optims)
    return TagFiles(tag, bool(cut), *by_role, latest, swapped)


def check_world(files: TagFiles, mp: int, dp: int | None, *, optims: bool = True) -> None:
    """Check that there is one file for each rank.

    Args:
        dp: number of data-parallel ranks; None: optimizer files are optional.
        optims: whether optimizer files must exist; if not, there must be none.
    """
    by_rank = [(rank, keys.values()) for rank, keys in files.experts.items()]
    by_rank += [(rank, keys.values()) for rank, keys in files.expert_optims.items()]
    beyond = (key for rank, keys in by_rank if rank >= mp for key in keys)
    if (extra := next(beyond, None)) is not None:
        raise IntegrityError(
            f"{extra} does not belong to this checkpoint, which was saved by {mp} model-parallel ranks",
            hint="an earlier save by more ranks left it; move it elsewhere",
        )
    kinds = [("model", files.models, dp or 1 if files.zero3 else 1)]
    kinds += [("optim", files.optims, dp if optims else 0)] if dp else []
    for kind, ranks, wide in kinds:
        keys = ranks or ((_like(files.models[0][0], 0, 0, kind),),)
        there = {(m, r) for m, row in enumerate(ranks) for r in range(len(row))}
        absent = (
            coordinates
            for coordinates in product(range(mp), range(wide))
            if coordinates not in there
        )
        missing = [_like(keys[0][0], m, r, kind) for m, r in absent]
        if missing:
            raise MissingData(
                f"{first_names(missing, _MAX_LISTED)} is missing: the checkpoint was saved by "
                f"{dp} data-parallel ranks{f' of each of {mp} model-parallel ranks' if mp > 1 else ''}, and "
                f"{len(there)} files of {kind} states are present",
                hint=copy_hint(weights=kind == "optim" and not files.zero3),
            )
        for m, r in sorted(there):
            if m >= mp or r >= wide:
                raise IntegrityError(
                    f"{ranks[m][r]} does not belong to this checkpoint, which was saved by {dp} "
                    "data-parallel ranks"
                    f" of {mp} model-parallel ranks",
                    hint=(
                        "an earlier save by more ranks left it; move it, and those of higher "
                        "ranks, elsewhere"
                    ),
                )


def _number(text: str) -> int:
    if len(text) > _DIGITS:
        raise UnsupportedError(f"{text} is not a rank or layer that DeepSpeed writes")
    return int(text)


def _like(key: str, m: int, r: int, kind: str) -> str:
    """The name of another rank's file, or of another kind of file."""
    folder, slash, name = key.rpartition("/")
    if "zero_pp_rank" not in name and kind == "model":
        return f"{folder}{slash}mp_rank_{m:02d}_model_states.pt"
    bf16 = "bf16_" if name.startswith("bf16_") else ""
    return f"{folder}{slash}{bf16}zero_pp_rank_{r}_mp_rank_{m:02d}_{kind}_states.pt"


def copy_hint(writer: str = "rank", *, weights: bool = False) -> str:
    """What to do about missing files."""
    hint = (
        f"copy all files of the tag folder; each {writer} wrote its own, perhaps to its node's disk"
    )
    if not weights:
        return hint
    return (
        f"{hint}; without the optimizer's files the weights are whole: {option_text('optimizer')}"
    )


def _rank_grid(
    prefix: str, files: list[re.Match[str]], *, whole: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Keys by model- and data-parallel rank, without a gap; `whole`: weights do not need them."""
    if len({m[1] for m in files}) > 1:
        plain, bf16 = (next(m[0] for m in files if bool(m[1]) == flag) for flag in (False, True))
        raise IntegrityError(
            f"{prefix}{plain} and {prefix}{bf16} are both present: two saves, one in bf16, were "
            "made to one folder",
            hint="move the files of the save that you do not want elsewhere",
        )
    if not files:
        return ()
    name = f"{files[0][1] or ''}zero_pp_rank_{{1}}_mp_rank_{{0:02d}}_{files[0][4]}_states.pt"
    by_rank = {(_number(m[3]), _number(m[2])): m[0] for m in files}
    return _full_grid(prefix, by_rank, name, copy_hint(weights=whole))


def _full_grid(
    prefix: str, files: Mapping[tuple[int, int], str], name: str, hint: str = ""
) -> tuple[tuple[str, ...], ...]:
    """The files as a full grid of these two numbers; MissingData names those that are missing."""
    high, wide = (1 + max(key[i] for key in files) for i in (0, 1))
    # One file with a huge number in its name must not make a list of all others.
    if high * wide > 4 * len(files) + _MAX_FILES:
        raise MissingData(
            f"{prefix}{name.format(0, 0)} and most of the {high * wide} files like it are missing",
            hint=hint or copy_hint(),
        )
    absent = (
        coordinates for coordinates in product(range(high), range(wide)) if coordinates not in files
    )
    if missing := [prefix + name.format(*coordinates) for coordinates in absent]:
        raise MissingData(
            f"{first_names(missing, 10)} is missing, but files of higher ranks are present",
            hint=hint or copy_hint(),
        )
    return tuple(tuple(prefix + files[m, r] for r in range(wide)) for m in range(high))


def _layers(prefix: str, files: list[re.Match[str]]) -> dict[int, tuple[str, ...]]:
    """Keys by layer and tensor-parallel rank: every layer has a file for each rank."""
    if not files:
        return {}
    if len({m[2] is None for m in files}) > 1:
        raise IntegrityError(
            f"{prefix}: layers with and without a tensor-parallel rank (`-model_…`) are both "
            "present",
            hint="move the files of the save that you do not want elsewhere",
        )
    by_rank = {(_number(m[1]), _number(m[2] or "0")): m[0] for m in files}
    degree = 1 + max(rank for _, rank in by_rank)
    name = f"layer_{{0:02d}}{'-model_{1:02d}' if files[0][2] else ''}-model_states.pt"
    out = {}
    for layer in sorted({layer for layer, _ in by_rank}):
        absent = (r for r in range(degree) if (layer, r) not in by_rank)
        if missing := [prefix + name.format(layer, r) for r in absent]:
            raise MissingData(
                f"{', '.join(missing[:_MAX_LISTED])} is missing, but files of other "
                "tensor-parallel ranks are present",
                hint=copy_hint(),
            )
        out[layer] = tuple(prefix + by_rank[layer, r] for r in range(degree))
    return out


def _experts(
    prefix: str, names: Sequence[str], *, optimizer: bool
) -> tuple[dict[int, dict[tuple[int, int], str]], dict[int, dict[int, str]]]:
    """Keys by layer and expert, and of the optimizers by expert-parallel rank; of each model-parallel rank."""
    weights: dict[int, dict[tuple[int, int], str]] = {}
    for m in filter(None, map(_EXPERT.fullmatch, names)):
        weights.setdefault(_number(m[3]), {})[_number(m[1]), _number(m[2])] = prefix + m[0]
    optims: dict[int, dict[int, str]] = {}
    for m in filter(None, map(_EXPP.fullmatch, names if optimizer else ())):
        optims.setdefault(_number(m[2]), {})[_number(m[1])] = prefix + m[0]
    experts = {rank: dict(sorted(files.items())) for rank, files in sorted(weights.items())}
    return experts, {rank: dict(sorted(files.items())) for rank, files in sorted(optims.items())}


def _not_yet(feature: str, key: str, hint: str = _READ) -> UnsupportedError:
    return UnsupportedError(f"{key}: not yet read: {feature}", hint=hint)


def _existing(store: Store, tag: str, file: str) -> str:
    if next(iter(store.list(check_key(tag))), None) is None:
        keys = (info.key for info in islice(store.list(), _MAX_FILES))
        beside = [key for key in keys if key.endswith(_WEIGHTS) and "/" not in key]
        whole = next((key for key in sorted(beside, key=lambda k: not k.endswith(".json"))), None)
        weights = f"; for weights alone open {store.url}/{whole}" if whole else ""
        raise NotFound(
            f"{store.url}: `{file}` names the checkpoint {tag!r}, but there is no such folder",
            hint=(
                "it was moved or deleted, or the save did not finish; open another tag's "
                f"folder itself{weights}"
            ),
        )
    return tag


def _tag_in(store: Store, file: str) -> str | None:
    """The tag that a file `latest` names."""
    if not exists(store, file) or store.info(file).size > _LATEST:
        return None
    text = store.read(file).decode(errors="replace").strip()
    return text if text and "\n" not in text else None
