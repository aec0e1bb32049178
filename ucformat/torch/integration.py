"""What a training library registers: where its public names are, and what only it knows of a live model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ucformat.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    import torch

__all__ = ["INTEGRATIONS", "AttachedEntries", "Integration", "integrations"]


@dataclass(frozen=True, slots=True)
class AttachedEntries:
    """Entries of a module's state dict that the `load_state_dict` of the module does not take.

    Attributes:
        keys: their keys.
        resized: those whose value a load may replace by one of another shape.
        load: sets them, from their values by key; called before the module's `load_state_dict`.
    """

    keys: frozenset[str]
    resized: frozenset[str]
    load: Callable[[Mapping[str, Any]], None]


class Integration:
    """A training library, as far as saving and loading know it.

    Register an instance in the group `ucformat.integrations` of the entry points of your package
    (CONTRIBUTING.md, "Add a live engine"). All are imported when a state is saved or loaded, so its
    module imports neither the library nor torch.

    Attributes:
        title: the name of the library in documents.
        module: the module in which users find the public names (its `__all__`); it may import the
            library. Empty if there are none.
    """

    title: ClassVar[str]
    module: ClassVar[str] = ""

    def model_files(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - for subclasses
        form: str,  # noqa: ARG002
    ) -> Callable[[], dict[str, bytes]] | None:
        """What makes the files that the library needs beside the weights of a model.

        Args:
            module: a module of a training state that is saved, as it is wrapped there.
            form: the form of the checkpoint, as in `save`.

        Returns:
            a function that returns their contents by name; None if it is no model of the library.

        Raises:
            UnsupportedError: the library could not load the model's weights from this form.
        """
        return None

    def attached_entries(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        keys: Collection[str],  # noqa: ARG002
    ) -> Iterable[AttachedEntries]:
        """The entries of a state dict that the library keeps beside the tensors of modules.

        Args:
            module: a module of a training state.
            keys: the keys of its state dict.

        Raises:
            UnsupportedError: the tensors of the module are not what they seem to be.
        """
        return ()


#: The integrations that packages register, by name.
INTEGRATIONS: Registry[Integration] = Registry("integrations", "integration")


def integrations() -> Iterator[Integration]:
    """All integrations; of those that cannot be imported a warning is logged."""
    return (integration for _, integration in INTEGRATIONS.items())
