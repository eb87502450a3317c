# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command line; every error that a user can cause is one sentence on stderr.

    code = run(["report", "OUT.pt", "--json"])

With ``--json`` stdout holds exactly one JSON document, even if a command fails:
``{"error": {"exit": 3, "message": ...}}``. Output of models and libraries goes to stderr.
"""

import argparse
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType

from torch.jit._trace import TracerWarning

from blade.cli.commands import bench, bisect, cache, doctor, optimize, partition
from blade.cli.commands import report as show
from blade.cli.shared.result import CommandResult, ExitCode
from blade.errors import BackendError, ConfigError, InputError
from blade.version import __version__

COMMANDS = (doctor, optimize, bench, show, partition, bisect, cache)
EPILOG = """exit codes:
  0  done
  1  done, and the answer is bad news: DISC does not work (doctor), values differ (bisect),
     slower than --require (bench)
  2  an option or a field of the config is wrong
  3  a file, the model or the samples cannot be used
  4  a backend that was named, or blade's own runtime, cannot work here
  5  the interval of the speed-up includes --require: too noisy to tell (bench)
  70 a bug in blade;  130 interrupted

BLADE_LOG=info prints one line per decision to stderr; BLADE_LOG=debug or --traceback shows where an
error came from."""


def main() -> None:
    """Entry point of ``blade`` and ``python -m blade``; a bug ends in a sentence and an exit code, too."""
    sys.excepthook = _internal_error
    if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack our tables' lines
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; a usage error raises ``SystemExit(2)``."""
    args = _parser().parse_args(argv)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            _silence_known_warnings()
            if args.json:
                stack.enter_context(redirect_stdout(sys.stderr))
            result: CommandResult = args.run(args)
    except (ConfigError, InputError, BackendError) as error:
        return _failed(args, error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED
    _print(json.dumps(result.data, indent=2, allow_nan=False) if args.json else result.text)
    return result.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blade" if Path(sys.argv[0]).name == "blade" else "python -m blade",
        description="Makes PyTorch models faster, by measurement.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"blade {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    shared.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = command.add(commands, shared)
        own.set_defaults(run=command.run)
    return parser


def _failed(args: argparse.Namespace, error: ConfigError | InputError | BackendError) -> ExitCode:
    code = ExitCode.BACKEND if isinstance(error, BackendError) else ExitCode.INPUT
    code = ExitCode.USAGE if isinstance(error, ConfigError) else code
    message = str(error).strip()
    if args.traceback or logging.getLogger("blade").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    sys.stderr.write(f"error: {message}\n")
    if args.json:
        _print(json.dumps({"error": {"exit": int(code), "message": message}}, indent=2))
    return code


def _internal_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an unexpected error. ``SystemExit`` from an excepthook sets the exit code."""
    debug = logging.getLogger("blade").isEnabledFor(logging.DEBUG)
    if "--traceback" in sys.argv or debug:
        traceback.print_exception(kind, error, trace)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    sys.stderr.write(
        f"internal error: {kind.__name__}: {first}\nThis is a bug in blade, or in a library it calls; "
        "please report it with the output of the same command and --traceback.\n"
    )
    sys.exit(ExitCode.INTERNAL)


def _silence_known_warnings() -> None:
    """Ignore TorchScript's deprecation (docs/limits.md) and the tracer's warnings, which become Reasons."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", ".*torch.jit", category)
    warnings.simplefilter("ignore", TracerWarning)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
