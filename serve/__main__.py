"""``treadle COMMAND [group=choice ...] [group.key=value ...]``: the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from treadle.conf.errors import ConfigError
from treadle.conf.origin import blame_preset
from treadle.serve.arguments import Arguments, parse, read_words

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.conf.schema import Deployment

EXIT_USER = 2
"""exit code for a mistake that its message explains"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2, one line and no traceback for a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(words)
        # Here, where it is known what to do if nobody reads it any more.
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _complain(error)
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != "treadle":
            raise
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(words: list[str]) -> int:
    if words in (["version"], ["--version"]):
        from importlib.metadata import version

        print(f"treadle {version('treadle')}")
        return 0
    if words[:1] == ["version"]:
        raise ConfigError(f"treadle version takes nothing behind it: {words[1]}")
    arguments = parse(words)
    if arguments.help or (arguments.command is None and not arguments.hydra):
        from treadle.serve.usage import print_help

        print_help(_console(), arguments.command)
        return 0 if arguments.help or not words else EXIT_USER
    try:
        return _sweep(arguments) if arguments.hydra else _once(arguments)
    except ConfigError as error:
        raise blame_preset(error, arguments.overrides, arguments.config_dir) from error


def _once(arguments: Arguments) -> int:
    deployment = _deployment(arguments)
    read_words(arguments, sys.stdin)
    return _run(arguments, deployment)


def _sweep(arguments: Arguments) -> int:
    """Let Hydra act on its flags, and run the command on each deployment of a sweep."""
    from treadle.serve.hydra_flags import run_hydra

    if arguments.sweep and arguments.command is None:
        hint = "for example treadle memory -m kv.page_tokens=8,16"
        raise ConfigError("a sweep needs a command", key="-m", hint=hint)
    if arguments.sweep:
        read_words(arguments, sys.stdin)
    return run_hydra(arguments, partial(_run_one, arguments))


def _deployment(arguments: Arguments) -> Deployment:
    if arguments.lock is not None:
        from treadle.conf.lock import from_lock

        return from_lock(arguments.lock, arguments.overrides)
    from treadle.conf.load import compose

    return compose(arguments.overrides, arguments.config_dir)


def _run_one(arguments: Arguments, deployment: Callable[[], Deployment], overrides: Sequence[str]) -> tuple[int, bool]:
    """Run one job of a sweep; return its exit code and whether the sweep goes on, as it does after mistakes."""
    from treadle.serve.startup import one_of_several

    assert arguments.command is not None
    console = _console()
    console.rule(" ".join(overrides) or "defaults", align="left")
    try:
        with one_of_several():
            code = _run(arguments, deployment())
    except ConfigError as error:
        code = _complain(blame_preset(error, overrides, arguments.config_dir))
    return code, code == EXIT_USER or not arguments.command.until_ended


def _run(arguments: Arguments, deployment: Deployment) -> int:
    """Resolve the deployment and run the command's module on it."""
    from importlib import import_module

    from treadle.graph.resolve import refuse_elsewhere, resolve
    from treadle.runtime.progress import PhaseBars
    from treadle.runtime.text.load import check_sampling

    command = arguments.command
    assert command is not None
    module, options = import_module(f"treadle.serve.commands.{command.name}"), dict(arguments.options)
    if command.asks is not None and options.pop(command.asks) is not None:
        return int(module.ask(deployment, _console(), **arguments.options))
    with PhaseBars() as bars:
        resolved = resolve(deployment, bars)
    # Here, so that what plans refuses what serving would.
    check_sampling(resolved.deployment.model.sampling, resolved.spec.vocab)
    if command.computes:
        refuse_elsewhere(resolved)
    code = module.run(resolved, _console(), **options)
    assert isinstance(code, int)
    return code


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def _complain(error: Exception) -> int:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red").append(Text(str(error), style="default")))
    return EXIT_USER


if __name__ == "__main__":
    sys.exit(main())
