"""Universal checkpoints in training loops: save from any layout, load into any other (extra `torch`)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ucformat.jobs.record import record_commits

if TYPE_CHECKING:
    from ucformat.engines.pytorch.dcp_reader import Reader
    from ucformat.engines.pytorch.dcp_writer import Writer
    from ucformat.torch.capturing.capture import CapturedLayout, capture
    from ucformat.torch.certificate import Certificate, CertificateEntry
    from ucformat.torch.loading.certify import certify
    from ucformat.torch.loading.load import LoadReport, load, state_dict
    from ucformat.torch.loading.load_into import LoadedKeys, load_into
    from ucformat.torch.loading.match import Problems
    from ucformat.torch.loading.replay import replay
    from ucformat.torch.manager.increments import Increments
    from ucformat.torch.manager.manager import Manager
    from ucformat.torch.manager.merging import merge_deltas
    from ucformat.torch.manager.tuning import DeltaCosts, tune_deltas
    from ucformat.torch.publishing.publish import Published, Publisher, publish
    from ucformat.torch.publishing.subscribe import Subscription, Update, subscribe
    from ucformat.torch.saving.asynchronous import async_save
    from ucformat.torch.saving.deltas import Deltas
    from ucformat.torch.saving.experts import Experts
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.save import Saved, save
    from ucformat.torch.saving.window import Window
    from ucformat.torch.state.changed import ChangedRows
    from ucformat.torch.state.deltas import gradients
    from ucformat.torch.state.fingerprint import fingerprint
    from ucformat.torch.state.loaders import deal_evenly
    from ucformat.torch.state.objects import PerRank, Rng, StateParts
    from ucformat.torch.tiers.live import reshard
    from ucformat.torch.tiers.tier import Tier

__all__ = [
    "CapturedLayout",
    "Certificate",
    "CertificateEntry",
    "ChangedRows",
    "DeltaCosts",
    "Deltas",
    "Experts",
    "Increments",
    "LoadReport",
    "LoadedKeys",
    "Manager",
    "PerRank",
    "Problems",
    "Published",
    "Publisher",
    "Reader",
    "Rng",
    "SaveHandle",
    "Saved",
    "StateParts",
    "Subscription",
    "Tier",
    "Update",
    "Window",
    "Writer",
    "async_save",
    "capture",
    "certify",
    "deal_evenly",
    "fingerprint",
    "gradients",
    "load",
    "load_into",
    "merge_deltas",
    "publish",
    "replay",
    "reshard",
    "save",
    "state_dict",
    "subscribe",
    "tune_deltas",
]

_HOMES = {
    "CapturedLayout": "ucformat.torch.capturing.capture",
    "Certificate": "ucformat.torch.certificate",
    "CertificateEntry": "ucformat.torch.certificate",
    "ChangedRows": "ucformat.torch.state.changed",
    "DeltaCosts": "ucformat.torch.manager.tuning",
    "Deltas": "ucformat.torch.saving.deltas",
    "Experts": "ucformat.torch.saving.experts",
    "Increments": "ucformat.torch.manager.increments",
    "LoadReport": "ucformat.torch.loading.load",
    "LoadedKeys": "ucformat.torch.loading.load_into",
    "Manager": "ucformat.torch.manager.manager",
    "PerRank": "ucformat.torch.state.objects",
    "Problems": "ucformat.torch.loading.match",
    "Published": "ucformat.torch.publishing.publish",
    "Publisher": "ucformat.torch.publishing.publish",
    "Reader": "ucformat.engines.pytorch.dcp_reader",
    "Rng": "ucformat.torch.state.objects",
    "SaveHandle": "ucformat.torch.saving.handles",
    "Saved": "ucformat.torch.saving.save",
    "StateParts": "ucformat.torch.state.objects",
    "Subscription": "ucformat.torch.publishing.subscribe",
    "Tier": "ucformat.torch.tiers.tier",
    "Update": "ucformat.torch.publishing.subscribe",
    "Window": "ucformat.torch.saving.window",
    "Writer": "ucformat.engines.pytorch.dcp_writer",
    "async_save": "ucformat.torch.saving.asynchronous",
    "capture": "ucformat.torch.capturing.capture",
    "certify": "ucformat.torch.loading.certify",
    "deal_evenly": "ucformat.torch.state.loaders",
    "fingerprint": "ucformat.torch.state.fingerprint",
    "gradients": "ucformat.torch.state.deltas",
    "load": "ucformat.torch.loading.load",
    "load_into": "ucformat.torch.loading.load_into",
    "merge_deltas": "ucformat.torch.manager.merging",
    "publish": "ucformat.torch.publishing.publish",
    "replay": "ucformat.torch.loading.replay",
    "reshard": "ucformat.torch.tiers.live",
    "save": "ucformat.torch.saving.save",
    "state_dict": "ucformat.torch.loading.load",
    "subscribe": "ucformat.torch.publishing.subscribe",
    "tune_deltas": "ucformat.torch.manager.tuning",
}

record_commits()  # saves are recorded in the catalog


def __getattr__(name: str) -> object:
    """Load a public name when it is first used; what other rooms use of this one does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucformat.torch' has no attribute {name!r}")
    if find_spec("torch") is None:
        raise ModuleNotFoundError(
            "ucformat.torch needs PyTorch: pip install 'ucformat[torch]'", name="torch"
        )
    public: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return __all__
