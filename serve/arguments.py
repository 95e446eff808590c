"""The command line as data: command, overrides, options, and the flags that Hydra understands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from treadle.conf.errors import ConfigError, nearest
from treadle.conf.load import model_overrides
from treadle.conf.override import OPTIONAL, schema_keys
from treadle.conf.schema import GROUPS
from treadle.serve.commands import COMMANDS, Command, Option

OVERRIDE = re.compile(r"[~+]{0,2}[A-Za-z_][\w./@:-]*=|~[A-Za-z_][\w./]*$", re.ASCII)

COMMON = (
    Option(name="lock", summary="start from a lock file instead of the groups"),
    Option(name="config_dir", summary="folder with groups of yours: DIR/preset/mine.yaml, DIR/model/mine.yaml"),
)
"""Options of every command."""

HYDRA_VALUES = {"--cfg": "-c", "--info": "-i", "--package": "-p"}
HYDRA_SWITCHES = {"--multirun": "-m", "--resolve": "", "--hydra-help": "", "--shell-completion": "-sc"}
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_SHORT = {"-h": "--help", "-cd": "--config-dir"} | {
    short: long for long, short in (HYDRA_VALUES | HYDRA_SWITCHES).items() if short
}


@dataclass(kw_only=True)
class Arguments:
    """What was typed, taken apart."""

    command: Command | None = None
    overrides: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """keywords for the command's ``run``"""
    lock: str | None = None
    config_dir: str | None = None
    hydra: list[str] = field(default_factory=list)
    """flags to hand to Hydra, ready"""
    help: bool = False

    @property
    def sweep(self) -> bool:
        """Whether ``-m`` was given."""
        return "--multirun" in self.hydra


def parse(argv: Sequence[str]) -> Arguments:
    """Return the command line taken apart. Raises ConfigError, naming the nearest command or option."""
    arguments = Arguments()
    rest = list(argv)
    if rest and not rest[0].startswith("-") and rest[0] != "help":
        arguments.command = _command(rest.pop(0))
    elif rest[:1] == ["help"]:
        rest[0] = "--help"
    command = arguments.command
    known = {
        f"--{option.name.replace('_', '-')}": option for option in (*COMMON, *(command.options if command else ()))
    }
    words: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            words += rest
            break
        if word.startswith("-") and len(word) > 1 and not re.match(r"-\d", word):
            _flag(word, rest, arguments, known)
        elif OVERRIDE.match(word):
            _assign(word, arguments, known)
        else:
            words.append(word)
    for flag in ("--package", "--resolve"):
        if flag in arguments.hydra and "--cfg" not in arguments.hydra:
            hint = "for example --cfg job --package kv; a port is set by serve.port=8080"
            raise ConfigError("goes with --cfg only", key=flag, hint=hint)
    if command is not None:
        defaults = {option.name: option.default for option in command.options}
        arguments.options = {**defaults, **arguments.options}
    _place_words(words, arguments)
    return arguments


def read_words(arguments: Arguments, stdin: TextIO | None) -> None:
    """Take the free text of a command that has none from ``stdin``, unless that is a terminal.

    Raises: ConfigError if the command needs text and there is none.
    """
    command = arguments.command
    if command is None or command.words is None or arguments.options[command.words]:
        return
    if command.words_unless is not None and arguments.options[command.words_unless] is not None:
        return
    text = ""
    if stdin is not None and not stdin.isatty():
        try:
            text = stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not text: {error}", key=command.name) from None
    if not text:
        hint = f'write it behind the command, or pipe it in: echo "Hello" | treadle {command.name}'
        raise ConfigError(f"needs a {command.words}", key=f"treadle {command.name}", hint=hint)
    arguments.options[command.words] = text


def _command(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [*(command.name for command in COMMANDS), "version"]
    raise ConfigError(
        f"no command is called {name}",
        nearest=[one for one in names if one.startswith(name)] or nearest(name, names, likeness=0.65),
        hint=f"commands: {', '.join(names)}; treadle --help",
    )


def _place_words(words: list[str], arguments: Arguments) -> None:
    command = arguments.command
    if command is not None and command.words is not None:
        arguments.options[command.words] = " ".join(words)
    elif words:
        hint = "write group=choice or group.key=value; treadle --help lists them"
        raise ConfigError(f"{words[0]!r} is not an override", hint=hint)


def _flag(word: str, rest: list[str], arguments: Arguments, known: dict[str, Option]) -> None:
    """Take one flag, and its value from ``rest``, into ``arguments``."""
    name, equals, value = word.partition("=")
    name = _SHORT.get(name, name)
    if name == "--help":
        arguments.help = True
    elif name in HYDRA_SWITCHES:
        arguments.hydra.append(name)
    elif name == "--info":
        chosen = value if equals else rest.pop(0) if rest and rest[0] in _INFO else "all"
        arguments.hydra += [name, chosen]
    elif name in HYDRA_VALUES:
        given = value if equals else _value(name, rest)
        if name == "--cfg" and given not in _CFG:
            close, hint = nearest(given, _CFG), f"it takes {', '.join(_CFG)}"
            raise ConfigError("no such choice", key=name, value=given, nearest=close, hint=hint)
        arguments.hydra += [name, given]
    elif name in known:
        option = known[name]
        taken = True if option.kind is bool else _typed(option, name, value if equals else _value(name, rest))
        if option in COMMON:
            setattr(arguments, option.name, taken)
        else:
            arguments.options[option.name] = taken
    else:
        follows = bool(rest) and not rest[0].startswith("-") and OVERRIDE.match(rest[0]) is None
        raise _unknown_flag(name, value if equals else rest[0] if follows else "...", known)


def _unknown_flag(name: str, value: str, known: dict[str, Option]) -> ConfigError:
    """Return the error for a flag that is none: the key, of ours or by its name at vLLM, or the flag that is meant."""
    flags = {flag.strip("-"): flag for flag in (*known, *HYDRA_SWITCHES, *HYDRA_VALUES, "--help", "--version")}
    word = name.strip("-").replace("-", "_")
    close = [flag for flag in flags.values() if flag.startswith(name)] or _as_overrides(word, value)
    others = [command.name for command in COMMANDS if any(option.name == word for option in command.options)]
    hint = ""
    if not close and others:
        hint = f"it is one of treadle {' and '.join(others)}"
    elif not close:
        keys = {key.rpartition(".")[2].replace("_", "-"): f"{key}={value}" for key in reversed(schema_keys())}
        close = [flags.get(one) or keys[one] for one in nearest(name.strip("-"), [*flags, *keys], likeness=0.65)]
        hint = "" if close else f"options: {', '.join([*known, '--help'])}; keys are set by group.key=value"
    return ConfigError(f"no option is called {name}", nearest=close, hint=hint)


def _as_overrides(word: str, value: str) -> list[str]:
    """Return what a flag of this name most likely means as overrides, the alternatives if there are several."""
    from treadle.runtime.keywords import KEYWORDS

    if word == "model":
        return [" ".join(model_overrides(value))]
    if word in (*GROUPS, *OPTIONAL):
        return [f"{word}={value}"]
    keys = [key for key in schema_keys() if key.rpartition(".")[2] == word]
    return [f"{key}={value}" for key in keys] or ([f"{KEYWORDS[word]}=..."] if word in KEYWORDS else [])


def _assign(word: str, arguments: Arguments, known: dict[str, Option]) -> None:
    """Take ``name=value``: an option of the command, which no group is called like, or else an override."""
    name, _, value = word.partition("=")
    option = known.get(f"--{name.replace('_', '-')}")
    if option is None or option in COMMON or option.kind is bool:
        options = [one.name for one in known.values() if one not in COMMON and one.kind is not bool]
        if name.isidentifier() and name not in (*GROUPS, *OPTIONAL):
            close = [f"{one}={value}" for one in nearest(name, options, likeness=0.65)]
            if close:
                raise ConfigError("no such key", key=name, value=value, nearest=close)
        arguments.overrides.append(word)
    else:
        arguments.options[option.name] = _typed(option, name, value)


def _typed(option: Option, name: str, text: str) -> Any:
    if option.choices and text not in option.choices:
        hint = f"it takes {', '.join(option.choices)}"
        raise ConfigError("no such choice", key=name, value=text, nearest=nearest(text, option.choices), hint=hint)
    try:
        return option.kind(text)
    except ValueError:
        raise ConfigError("wrong type", key=name, value=text, hint=f"it takes {option.kind.__name__}") from None


def _value(name: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigError("needs a value", key=name)
    return rest.pop(0)
