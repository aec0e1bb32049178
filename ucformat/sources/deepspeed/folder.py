"""The files of one DeepSpeed checkpoint: which there must be, and which must not.

A save folder holds `latest`, a text file with the name of a tag folder, and the tag folders. Without model parallelism
a tag folder holds:

- ZeRO 0: `mp_rank_00_model_states.pt`
- ZeRO 1, 2: that, and for each data-parallel rank R `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt`
- ZeRO 3: for each R `zero_pp_rank_R_mp_rank_00_model_states.pt` and `[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt`

(`pp_rank` is the data-parallel rank; `bf16_` says that the engine trained in bf16.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, MissingData, NotFound, Refused, UsageError
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from ucformat.storage.base import Store

__all__ = ["Files", "find_tag", "is_model_or_optimizer", "list_files", "looks_like_deepspeed"]

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_ANY = re.compile(r"([^/]*/)?((bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)|mp_rank_\d+_model)_states\.pt")
_LOOK = 10_000  # files of a folder without `latest` that are looked at
_LATEST = 4096  # bytes of `latest`
_NAMED = 10  # of several tags, so many are named in the error

_NOT_YET = (
    (re.compile(r"layer_\d+_expert_\d+_.*|expp_rank_\d+_.*"), "expert parallelism (deepspeed.moe)"),
    (re.compile(r"layer_\d+-model_.*"), "pipeline parallelism"),
    (re.compile(r"offloaded_tensors/.*"), "an optimizer offloaded to NVMe, whose states are swap files"),
    (re.compile(r"zero/.*/fp32\.pt|zero/optimizer_state\.pt"), "DeepSpeed's universal format"),
)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a tag folder by role, as keys of the store; lists are by data-parallel rank."""

    tag: str  # "" where the store is rooted at the tag folder itself
    model: str | None
    rank_models: tuple[str, ...]
    optims: tuple[str, ...]
    latest: str | None

    @property
    def all(self) -> tuple[str, ...]:
        """Every one of them."""
        single = [key for key in (self.latest, self.model) if key]
        return (*single, *self.rank_models, *self.optims)


def is_model_or_optimizer(name: str) -> bool:
    """Whether DeepSpeed names the files of a tag folder so."""
    return _ANY.fullmatch(name) is not None


def looks_like_deepspeed(store: Store) -> bool:
    """Whether this folder has `latest`, or (or a folder in it has) files as DeepSpeed names them."""
    if _exists(store, "latest_universal") or _tag_in_latest(store):
        return True
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    if any(_exists(store, name) for name in names):
        return True
    return any(_ANY.fullmatch(info.key) for info in islice(store.list(), _LOOK))


def find_tag(store: Store) -> str:
    """The tag that `latest` names; `""` where the store is rooted at a tag folder."""
    tag = _tag_in_latest(store)
    if tag:
        if next(iter(store.list(check_key(tag))), None) is None:
            raise NotFound(
                f"{store.url}: `latest` names the checkpoint {tag!r}, but there is no such folder",
                hint="it was moved or deleted, or the save did not finish; open another tag's folder itself",
            )
        return tag
    found = [m for m in (_ANY.fullmatch(info.key) for info in islice(store.list(), _LOOK)) if m]
    if any(not m[1] for m in found):
        return ""
    if _exists(store, "latest_universal"):
        raise _not_yet("DeepSpeed's universal format", "latest_universal")
    tags = sorted({m[1].rstrip("/") for m in found})
    if len(tags) == 1:
        return tags[0]
    more = f" and {len(tags) - _NAMED} more" if len(tags) > _NAMED else ""
    raise UsageError(
        f"{store.url} holds several DeepSpeed checkpoints and no file `latest`: {', '.join(tags[:_NAMED])}{more}"
        if tags
        else f"{store.url} holds no DeepSpeed checkpoint",
        hint="open the folder of one of them",
    )


def list_files(store: Store, tag: str) -> Files:
    """The files of a tag folder, all there; or an error that names what is missing, superfluous or not yet read."""
    prefix = f"{tag}/" if tag else ""
    names = [info.key.removeprefix(prefix) for info in store.list(tag)]
    for pattern, what in _NOT_YET:
        for name in names:
            if pattern.fullmatch(name):
                raise _not_yet(what, prefix + name)
    models = [m for m in map(_MODEL.fullmatch, names) if m]
    ranks = [m for m in map(_RANK.fullmatch, names) if m]
    for match, part in [(m, m[1]) for m in models] + [(m, m[3]) for m in ranks]:
        if int(part):
            raise _not_yet("tensor or pipeline parallelism", prefix + match[0])
    rank_models = _by_rank(prefix, [m for m in ranks if m[4] == "model"])
    optims = _by_rank(prefix, [m for m in ranks if m[4] == "optim"])
    if bool(models) == bool(rank_models):
        if not models:
            raise MissingData(
                f"{store.url}: {tag or 'the folder'} has no model states (mp_rank_00_model_states.pt, or "
                "zero_pp_rank_*_mp_rank_00_model_states.pt)",
                hint="the save did not finish, or files were lost; restore them from a copy",
            )
        raise IntegrityError(
            f"{prefix}{models[0][0]} and {rank_models[0]} stand side by side: ZeRO 3 and another stage, in one folder",
            hint="move the files of the save that you do not want elsewhere",
        )
    model = prefix + models[0][0] if models else None
    return Files(tag, model, rank_models, optims, "latest" if tag and _exists(store, "latest") else None)


def check_world(files: Files, world: int) -> None:
    """MissingData or IntegrityError where there are fewer or more ranks' files than the checkpoint had ranks."""
    for kind, keys in (("model", files.rank_models), ("optim", files.optims)):
        if not keys and kind == "model":
            continue
        if len(keys) < world:
            name = (keys or ("zero_pp_rank_0_mp_rank_00_optim_states.pt",))[-1]
            missing = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{len(keys)}", name)
            raise MissingData(
                f"{missing} is missing: the checkpoint was saved by {world} data-parallel ranks, and {len(keys)} files "
                f"of {kind} states are there",
                hint="copy all files of the tag folder; each rank wrote its own, perhaps to its node's disk",
            )
        if len(keys) > world:
            raise IntegrityError(
                f"{keys[world]} does not belong to this checkpoint, which was saved by {world} data-parallel ranks",
                hint="an earlier save by more ranks left it; move it, and those of higher ranks, elsewhere",
            )


def _by_rank(prefix: str, found: list[re.Match[str]]) -> tuple[str, ...]:
    """Keys in the order of their ranks, which must be 0, 1, 2 … without a gap."""
    if len({m[1] for m in found}) > 1:
        plain, bf16 = (next(m[0] for m in found if bool(m[1]) == flag) for flag in (False, True))
        raise IntegrityError(
            f"{prefix}{plain} and {prefix}{bf16} stand side by side: two saves, one in bf16, were made to one folder",
            hint="move the files of the save that you do not want elsewhere",
        )
    by_rank = {int(m[2]): m for m in found}
    for rank in range(len(by_rank)):
        if rank not in by_rank:
            name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", found[0][0])
            raise MissingData(
                f"{prefix}{name} is missing, and files of higher ranks are there",
                hint="copy all files of the tag folder; each rank wrote its own, perhaps to its node's disk",
            )
    return tuple(prefix + by_rank[rank][0] for rank in range(len(by_rank)))


def _not_yet(what: str, key: str) -> Refused:
    return Refused(f"{key}: not yet read: {what}", hint="ZeRO 0 to 3 with data parallelism alone are read")


def _exists(store: Store, key: str) -> bool:
    try:
        store.info(key)
    except NotFound:
        return False
    return True


def _tag_in_latest(store: Store) -> str | None:
    if not _exists(store, "latest") or store.info("latest").size > _LATEST:
        return None
    text = store.read("latest").decode(errors="replace").strip()
    return text if text and "\n" not in text else None
