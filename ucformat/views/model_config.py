"""What a preset must know of a model besides its names: as the options say, else the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucformat.errors import LayoutError

__all__ = ["ModelConfig"]

_NORMS = "stores its norms less one (apply_layernorm_1p), which no view adds again"
_ROTARY = "turns neighbouring elements of a head (rotary_interleaved), Hugging Face's models its two halves"
_GATED = "gates the output of attention (attention_output_gate), for which the preset has no place"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Options of a preset, and the checkpoint that tells the others."""

    preset: str
    options: Mapping[str, int | bool | None]
    objects: Mapping[str, Any]
    assets: Mapping[str, bytes]
    names: tuple[str, ...]

    def flag(self, name: str) -> bool:
        """A switch; off unless it is given."""
        return bool(self.options.get(name))

    def given(self, name: str) -> int | None:
        """A number that only an option tells."""
        value = self.options.get(name)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise LayoutError(f"the preset {self.preset} has the option {name}: {value}, which is no number of them")
        return value

    @property
    def heads(self) -> int:
        """Attention heads."""
        found = self.given("heads") or self._told("num_attention_heads", ("num_attention_heads", "n_head"))
        if found is None:
            raise self._unknown("heads", "num_attention_heads")
        return found

    @property
    def groups(self) -> int:
        """Groups of heads that share a key and a value: as many as there are heads, unless it is said."""
        heads, found = self.heads, self.given("groups")
        if found is None:
            if self.args.get("group_query_attention") is False:
                found = heads
            else:
                found = self._told("num_query_groups", ("num_key_value_heads",))
        if found is None and "heads" in self.options:
            raise self._unknown("groups", "num_query_groups")
        found = heads if found is None else found
        if heads % found:
            raise LayoutError(f"the preset {self.preset}: {heads} heads do not come apart into {found} groups")
        return found

    @property
    def args(self) -> Mapping[str, Any]:
        """Megatron's own arguments."""
        found = self.objects.get("args")
        return found if isinstance(found, Mapping) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's configuration."""
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
        """LayoutError where the arguments say that the model computes something else than the family."""
        flags = {"apply_layernorm_1p": _NORMS, "rotary_interleaved": _ROTARY, "attention_output_gate": _GATED}
        for name, why in flags.items():
            if self.args.get(name) is True:
                raise LayoutError(f"the preset {self.preset} does not fit: the model {why}")

    def _told(self, argument: str, keys: tuple[str, ...]) -> int | None:
        for found in (self.args.get(argument), *(self.config.get(k) for k in keys)):
            if type(found) is int and found > 0:
                return found
        return None

    def _unknown(self, option: str, argument: str) -> LayoutError:
        return LayoutError(
            f"the preset {self.preset} must know the number of {option}, and the checkpoint does not tell it: it has "
            f"neither Megatron's arguments ({argument}) nor a config.json that says so",
            hint=f"give it: {{preset: {self.preset}, with: {{heads: 32, groups: 8}}}}",
        )
