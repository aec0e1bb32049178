"""In the training loop: save universal checkpoints from any layout, load them into any other (extra `torch`)."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("ucformat.torch needs PyTorch: pip install 'ucformat[torch]'", name="torch") from error

from ucformat.jobs.record import record_commits
from ucformat.torch.background import SaveHandle, async_save
from ucformat.torch.dcp_reader import Reader
from ucformat.torch.dcp_writer import Writer
from ucformat.torch.evaluate import state_dict
from ucformat.torch.loading import LoadReport, load
from ucformat.torch.manager import Manager
from ucformat.torch.match import Problems
from ucformat.torch.objects import PerRank
from ucformat.torch.rng import Rng
from ucformat.torch.saving import save
from ucformat.torch.writing import Saved

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

record_commits()  # the rooms below know nothing of the catalog
