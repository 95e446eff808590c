"""What Hydra does better itself: ``--cfg``, ``--info``, sweeps with ``-m`` and shell completion."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from treadle.conf.errors import ConfigError
from treadle.conf.load import CONFIG_MODULE, CONFIG_NAME, VERSION_BASE, check_sweep, compose, from_tree, register_schema
from treadle.conf.schema import Deployment
from treadle.serve.arguments import COMMON, HYDRA_SWITCHES, HYDRA_VALUES, Arguments
from treadle.serve.commands import COMMANDS

Job = Callable[[Callable[[], Deployment], Sequence[str]], tuple[int, bool]]
"""runs one deployment of a sweep, of these overrides; returns its exit code, and whether the sweep goes on"""


def run_hydra(arguments: Arguments, job: Job) -> int:
    """Let Hydra act on its flags and return the exit code; ``job`` makes each deployment of a sweep.

    Raises ConfigError for a configuration that is not valid, before Hydra sees it.
    """
    if arguments.lock is not None:
        raise ConfigError("a lock file is not composed", key="--lock", hint=f"leave out {arguments.hydra[0]}")
    completing = "--shell-completion" in arguments.hydra
    if completing:
        if any(word.startswith("query=") for word in arguments.overrides) and not _prepare_completion():
            return 0
        overrides = arguments.overrides
    else:
        overrides = check_sweep(arguments.overrides, arguments.config_dir)
        if not arguments.sweep:
            compose(arguments.overrides, arguments.config_dir)
    codes: list[int] = []

    def task(tree: DictConfig) -> None:
        checked = partial(from_tree, tree, arguments.config_dir)
        code, goes_on = job(checked, list(HydraConfig.get().overrides.task))
        codes.append(code)
        if not goes_on:
            raise SystemExit(0)  # Hydra lets it pass

    with tempfile.TemporaryDirectory(prefix="treadle-sweep-") as folder:
        # A sweep writes multirun.yaml into its directory; unless somebody wants it, it goes with the folder.
        if arguments.sweep and not any(text.lstrip("+").startswith("hydra.sweep.dir=") for text in overrides):
            overrides = [*overrides, f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
        return _call(task, [*arguments.hydra, *overrides]) or max(codes, default=0)


def complete(line: str) -> tuple[str, list[str] | None]:
    """Return the line for Hydra to complete (its command and our options left out) or else our own completions."""
    words = line.split()
    last = "" if line.endswith(" ") else words[-1]
    before = words[1:] if not last else words[1:-1]
    if not before:
        return line, [name for name in [*(command.name for command in COMMANDS), "version"] if name.startswith(last)]
    command = next((one for one in COMMANDS if one.name == before[0]), None)
    if last.startswith("-"):
        options = [*COMMON, *(command.options if command else ())]
        flags = [f"--{option.name.replace('_', '-')}" for option in options] + [*HYDRA_VALUES, *HYDRA_SWITCHES]
        return line, [flag for flag in flags if flag.startswith(last)]
    overrides = [word for word in before[1:] if "=" in word and not word.startswith("-")]
    return " ".join([words[0], *overrides, last]), None


def _prepare_completion() -> bool:
    """Rewrite the line that the shell wants completed; False if the completions are printed already."""
    line, own = complete(os.environ.get("COMP_LINE", "treadle "))
    if own is not None:
        print(" ".join(own))
        return False
    os.environ["COMP_LINE"] = line
    return True


def _call(task: Callable[[DictConfig], None], argv: list[str]) -> int:
    """Run Hydra's own command line with ``argv`` and return its exit code."""
    register_schema()
    decorated: Any = hydra.main(f"pkg://{CONFIG_MODULE}", CONFIG_NAME, version_base=VERSION_BASE)(task)
    root, before = logging.getLogger(), sys.argv
    handlers, level = root.handlers[:], root.level
    sys.argv = ["treadle", *argv]
    try:
        decorated()
    except SystemExit as leave:
        return 2 if leave.code else 0
    finally:
        sys.argv, root.handlers[:] = before, handlers  # Hydra prints --info by a handler of the root logger
        root.setLevel(level)
    return 0
