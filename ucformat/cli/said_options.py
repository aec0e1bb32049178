"""`--config FILE` and `--metric NAME=VALUE`: what somebody knows of a checkpoint that its files do not say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONFIG", "METRIC", "parse_metric"]


def parse_metric(text: str, hint: str) -> tuple[str, float]:
    """A metric as `val_loss=2.13`; `hint` is the parameter that an error names."""
    name, equals, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not equals or not name or number is None:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE, as val_loss=2.13 is", param_hint=hint)
    return name, number


def _metrics(_ctx: click.Context, _param: click.Parameter, given: Sequence[str]) -> dict[str, float]:
    return dict(parse_metric(text, "--metric") for text in given)


def _config(_ctx: click.Context, _param: click.Parameter, given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    from ucformat.errors import UsageError
    from ucformat.written import read_written

    found = read_written(Path(given), "configuration")
    if not isinstance(found, dict):
        raise UsageError(f"{given} holds no mapping", hint="a configuration is a JSON or YAML file of keys and values")
    return found


CONFIG = click.option(
    "--config",
    metavar="FILE",
    callback=_config,
    help="The training's configuration, in JSON or YAML, besides what the files tell; it wins.",
)
METRIC = click.option(
    "--metric",
    "metrics",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_metrics,
    help="A measured number, besides what the files tell. Give it again for several.",
)
