"""The numbers that a preset needs about a model, from its options or else from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ucformat.errors import LayoutError
from ucformat.views.document import PresetInput

_NORMS = "stores its norms less one (apply_layernorm_1p), which no view adds again"
_ROTARY = "turns neighbouring elements of a head (rotary_interleaved), Hugging Face's models its two halves"
_GATED = "gates the output of attention (attention_output_gate), for which the preset has no place"


class ModelConfig(PresetInput):
    """The input of a preset, with the numbers of the model that it tells."""

    def flag(self, name: str) -> bool:
        """The value of a Boolean option; False if it is not given."""
        return bool(self.options.get(name))

    def given(self, name: str) -> int | None:
        """The value of a numeric option; None if it is not given."""
        value = self.options.get(name)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise LayoutError(
                f"the preset {self.preset}: its option {name} must be at least 1, not {value}"
            )
        return value

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        found = self.given("heads") or self._recorded(
            "num_attention_heads", ("num_attention_heads", "n_head")
        )
        if found is None:
            raise self._unknown("heads", "num_attention_heads")
        return found

    @property
    def groups(self) -> int:
        """Number of groups of heads that share a key and a value (default: the number of heads)."""
        heads, found = self.heads, self.given("groups")
        if found is None:
            if self.args.get("group_query_attention") is False:
                found = heads
            else:
                found = self._recorded("num_query_groups", ("num_key_value_heads",))
        if found is None and "heads" in self.options:
            raise self._unknown("groups", "num_query_groups")
        found = heads if found is None else found
        if heads % found:
            raise LayoutError(
                f"the preset {self.preset}: {heads} heads cannot be split into {found} groups"
            )
        return found

    @property
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments; empty if the checkpoint has none."""
        found = self.objects.get("args")
        return found if isinstance(found, Mapping) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's configuration; empty if the checkpoint has none."""
        for key, data in self.assets.items():
            if key.rpartition("/")[2] == "config.json":
                try:
                    found = json.loads(data)
                except (ValueError, RecursionError) as e:
                    raise LayoutError(f"{key} is not JSON ({e})") from e
                if isinstance(found, dict):
                    inner = found.get("text_config")
                    return inner if isinstance(inner, dict) else found
        return {}

    def check_megatron(self) -> None:
        """Raise LayoutError if Megatron's arguments describe a model that differs from the family."""
        flags = {
            "apply_layernorm_1p": _NORMS,
            "rotary_interleaved": _ROTARY,
            "attention_output_gate": _GATED,
        }
        for name, why in flags.items():
            if self.args.get(name) is True:
                raise LayoutError(f"the preset {self.preset} does not fit: the model {why}")

    def _recorded(self, argument: str, keys: tuple[str, ...]) -> int | None:
        for found in (self.args.get(argument), *(self.config.get(k) for k in keys)):
            if type(found) is int and found > 0:
                return found
        return None

    def _unknown(self, option: str, argument: str) -> LayoutError:
        return LayoutError(
            f"the preset {self.preset} needs the number of {option}, which the checkpoint does not contain: it has "
            f"neither Megatron's arguments ({argument}) nor a config.json with it",
            hint=f"pass it: {{preset: {self.preset}, with: {{heads: 32, groups: 8}}}}",
        )
