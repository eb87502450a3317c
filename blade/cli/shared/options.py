# SPDX-License-Identifier: Apache-2.0
"""Options that commands share, and ``--config KEY=VALUE`` as a ``Config``."""

import argparse
import ast
import json
from collections.abc import Sequence
from typing import Any

from blade.config import Config
from blade.errors import ConfigError

Commands = Any
"""The type that ``ArgumentParser.add_subparsers`` returns; argparse does not export it."""


class UsageError(ConfigError):
    """An option has a value that does not exist, or needs another option."""


def add_command(
    commands: Commands, shared: argparse.ArgumentParser, name: str, text: str
) -> argparse.ArgumentParser:
    """The parser of a command, with the options that all commands share."""
    short = text.splitlines()[0]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        parents=[shared],
        help=short[0].lower() + short[1:].rstrip("."),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_model(parser: argparse.ArgumentParser, *, needs_inputs: bool = True) -> None:
    """Add MODEL.pt, --inputs, --config and the options for reading them."""
    parser.add_argument(
        "model", metavar="MODEL.pt", help="TorchScript, or with --allow-pickle a saved nn.Module"
    )
    add_inputs(parser, required=needs_inputs)
    add_config(parser)
    add_pickle(parser)
    parser.add_argument("--eval", action="store_true", help="put the model in eval mode first")


def add_inputs(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--inputs",
        metavar="SAMPLES.pt",
        required=required,
        help="torch.save of a tensor, a tuple (positional), a dict (keywords), or a list of such samples",
    )


def add_pickle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read files with torch.load although that runs code they contain: only if you trust them",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="fields of blade.Config, values as in Python: optimization_pipeline=disc timing=False "
        "'dynamic_shapes={\"x\": {0: (1, 8)}}'",
    )


def parse_config(entries: Sequence[str]) -> Config:
    """A checked ``Config``; raises ``ConfigError`` also for a repeated key or an entry that is not KEY=VALUE."""
    fields: dict[str, Any] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--config {entry}: KEY=VALUE is expected, for example timing=False")
        if key in fields:
            raise ConfigError(f"--config {entry}: {key} was given before; give it once")
        fields[key] = parse_value(value)
    return Config(**fields)


def parse_value(text: str) -> Any:
    """A Python literal, else JSON (``true``, ``null``), else the text itself."""
    text = text.strip()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text
