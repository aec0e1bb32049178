"""Universal checkpoints in training loops: save from any layout, load into any other (extra `torch`)."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("ucformat.torch needs PyTorch: pip install 'ucformat[torch]'", name="torch") from error

from ucformat.jobs.record import record_commits
from ucformat.torch.dcp.reader import Reader
from ucformat.torch.dcp.writer import Writer
from ucformat.torch.loading.load import LoadReport, load, state_dict
from ucformat.torch.loading.match import Problems
from ucformat.torch.manager.manager import Manager
from ucformat.torch.saving.asynchronous import async_save
from ucformat.torch.saving.background import SaveHandle
from ucformat.torch.saving.save import Saved, save
from ucformat.torch.state.objects import PerRank, Rng

__all__ = [
    "LoadReport",
    "Manager",
    "PerRank",
    "Problems",
    "Reader",
    "Rng",
    "SaveHandle",
    "Saved",
    "Writer",
    "async_save",
    "load",
    "save",
    "state_dict",
]

record_commits()  # saves are recorded in the catalog
