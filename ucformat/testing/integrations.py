"""What every integration with a training library must do: a suite for pytest.

Subclass `IntegrationSuite` with the name of the integration and a method `train`, which trains,
saves the last step, and resumes, as a program of the library's users does.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.torch.integration import Integration

__all__ = ["IntegrationSuite"]


class IntegrationSuite:
    """The behaviour of every integration; a subclass has a `name` and a method `train`."""

    name: str

    def train(self, folder: Path, steps: int, resume: Path | None = None) -> Mapping[str, Any]:
        """Train up to a step, with new objects, and save it.

        Args:
            folder: where to save.
            steps: the number of the last step, counted from the first of the training.
            resume: the checkpoint to go on from; None: from the beginning.

        Returns:
            What the training holds at the end, tensors (copies) and plain values: the weights as
            `weight/<name>`, and whatever else has to be the same.
        """
        raise NotImplementedError

    def checkpoint(self, folder: Path, step: int) -> Path:
        """Where `train` has saved a step."""
        raise NotImplementedError

    @pytest.fixture
    def integration(self) -> Integration:
        """The registered integration."""
        pytest.importorskip("torch")
        from ucformat.torch.integration import INTEGRATIONS

        return INTEGRATIONS[self.name]

    @pytest.fixture(autouse=True)
    def _own_environment(self) -> Iterator[None]:
        """Libraries tell their ranks by variables who they are, which programs of later tests would find."""
        before = dict(os.environ)
        yield
        os.environ.clear()
        os.environ.update(before)

    @pytest.fixture
    def alone(self, tmp_path: Path) -> Iterator[None]:
        """A process group of this process alone."""
        dist = pytest.importorskip("torch.distributed")
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
        yield
        dist.destroy_process_group()

    def test_it_is_registered_with_its_public_names(self, integration: Integration) -> None:
        """Without an import of the library, which takes long."""
        assert integration.title
        if integration.module:
            found = importlib.util.find_spec(integration.module)
            assert found is not None
            assert found.origin is not None
            named = [
                ast.literal_eval(node.value)
                for node in ast.parse(Path(found.origin).read_text()).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ]
            assert named, f"{integration.module} has no __all__"

    @pytest.mark.usefixtures("alone")
    def test_a_training_goes_on_bit_for_bit(self, tmp_path: Path) -> None:
        straight = self.train(tmp_path / "straight", 4)
        before = self.train(tmp_path / "before", 2)
        place = self.checkpoint(tmp_path / "before", 2)
        after = self.train(tmp_path / "after", 4, place)
        assert _different(before, straight), "training changes nothing, so this proves nothing"
        assert _different(after, straight) == []
        what_was_saved(place, before)

    @pytest.mark.usefixtures("alone")
    def test_nothing_is_not_resumed(self, tmp_path: Path) -> None:
        """Where there is no checkpoint, that is an error, and no training from the beginning."""
        with pytest.raises(Exception, match="nothing"):
            self.train(tmp_path / "run", 2, tmp_path / "nothing")


def what_was_saved(place: Path, held: Mapping[str, Any]) -> None:
    """Check that a checkpoint is a universal one of the weights that a training held, undamaged.

    Args:
        place: the checkpoint.
        held: what `train` has returned.
    """
    import torch

    ck = ucformat.open(place)
    assert ck.kind == "ucformat"
    assert ucformat.verify(place)
    weights = {k.removeprefix("weight/"): v for k, v in held.items() if k.startswith("weight/")}
    assert weights, "what `train` returns has no weights"
    for name, value in weights.items():
        bits = value.contiguous().flatten().view(torch.uint8).numpy()
        assert ck[name].shape == tuple(value.shape), name
        assert ck[name].read().tobytes() == bits.tobytes(), name


def _different(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The keys under which two trainings do not hold the same."""
    import torch

    return sorted(
        key
        for key in found.keys() | expected.keys()
        if key not in found
        or key not in expected
        or not (
            torch.equal(found[key], expected[key])
            if isinstance(found[key], torch.Tensor)
            else found[key] == expected[key]
        )
    )
