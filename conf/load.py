"""Compose a Deployment from the YAML groups and overrides, as Hydra does, with errors that a user can act on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from treadle.conf.check import check
from treadle.conf.errors import ConfigError, nearest, sibling
from treadle.conf.override import PRESET, check_overrides, unknown_key, wrong_type
from treadle.conf.schema import Deployment, PackageConfig

CONFIG_MODULE = "treadle.conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Deployment:
    """Return the deployment that the groups, ``config_dir``'s files and ``overrides`` describe, checked and frozen.

    Works inside another Hydra application too, whose state it leaves as it was. Raises ConfigError.
    """
    with _inside_hydra():
        ready = _ready(overrides, config_dir)
        try:
            tree = hydra_compose(CONFIG_NAME, ready)
        except (HydraException, OmegaConfBaseException) as error:
            found, file = _nothing_there(error, ready) or _translate(error), _file_at_fault(error, config_dir)
            raise (found if file is None else found.within(file)) from error
        except (YAMLError, OSError) as error:
            files = [file for text in overrides if (file := _file_of(text.replace("=", "/"), config_dir)) is not None]
            problem = "not YAML" if isinstance(error, YAMLError) else "not a file of keys"
            where = ", ".join(map(str, files)) or None
            raise ConfigError(f"{problem}: {' '.join(str(error).split())}", key=where) from error
    return from_tree(tree, config_dir)


def check_sweep(overrides: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """Return the overrides of a sweep (``-m``) ready for Hydra, each key and value checked. Raises ConfigError."""
    with _inside_hydra():
        return _ready(overrides, config_dir, sweep=True)


def from_tree(tree: DictConfig, config_dir: str | Path | None = None) -> Deployment:
    """Return the checked deployment of a composed, typed tree. Raises ConfigError on values that are missing."""
    if not tree.model.name:
        tree.model.name = _last_part(tree.model.path) if tree.model.path else "model"
    if config_dir is not None and (families := Path(config_dir).absolute() / "model" / "family").is_dir():
        tree.model.families = [*tree.model.families, str(families)]
    package = tree.model.package
    if package is not None and all(OmegaConf.is_missing(package, key) for key in package):
        tree.model.package = None
    try:
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise ConfigError("has no value", key=missing[0], hint=f"add {missing[0]}=... to the command")
        deployment = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], key=error.full_key) from error
    assert isinstance(deployment, Deployment)
    return check(deployment)


def typed_tree() -> DictConfig:
    """Return the schema as a tree that YAML may be merged into: typos and wrong types are refused by it."""
    tree = OmegaConf.structured(Deployment)
    assert isinstance(tree, DictConfig)
    OmegaConf.set_readonly(tree.model, False)
    tree.model.package = (
        PackageConfig()
    )  # a frozen class cannot be filled in from null, only from fields without a value
    _writable(tree)
    return tree


def register_schema() -> None:
    """Make the schema known to Hydra under the name that config.yaml starts from."""
    ConfigStore.instance().store(name="treadle_deployment", node=typed_tree(), provider="treadle")


def model_overrides(model: str) -> list[str]:
    """Return the overrides that mean ``model``: the name of a choice, a directory or a .gguf file."""
    if Path(model).exists() or model.endswith(".gguf") or "/" in model:
        quoted = model.replace("\\", "\\\\").replace("'", "\\'")
        return ["model=hf", f"model.path='{quoted}'"]
    return [f"model={model}"]


def _last_part(path: str) -> str:
    """Return what a model at ``path`` is called: without .gguf, the number of a shard and a hub's quantisation."""
    name = Path(path).absolute().name
    return re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".gguf")).partition(":")[0]


@contextmanager
def _inside_hydra() -> Iterator[None]:
    """Make Hydra ready for our groups, and afterwards as it was: an application around us keeps its own state."""
    register_schema()
    outer, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base=VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = outer
        VersionBase.instance().version_base = version


def _ready(overrides: Sequence[str], config_dir: str | Path | None, *, sweep: bool = False) -> list[str]:
    search = [] if config_dir is None else [_search_path(Path(config_dir))]

    def options(group: str) -> list[str]:
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group, ObjectType.CONFIG, config_name=CONFIG_NAME, overrides=search)

    ready = check_overrides(overrides, options, typed_tree(), sweep=sweep)
    for text in ready:
        group, _, choice = text.partition("=")
        file = _file_of(f"{group}/{choice}", config_dir)
        if file is not None and (resources.files(CONFIG_MODULE) / group / file.name).is_file():
            raise ConfigError(
                "treadle has one of that name, which wins", key=group, value=choice, hint=f"rename {file}"
            )
    return [*search, *ready]


def _search_path(config_dir: Path) -> str:
    if not config_dir.is_dir():
        raise ConfigError("not a directory", key="--config-dir", value=config_dir, nearest=sibling(config_dir))
    quoted = f"file://{config_dir.absolute()}".replace("'", "\\'")
    return f"hydra.searchpath=['{quoted}']"


def _writable(tree: DictConfig) -> None:
    """Undo the read-only flag that frozen dataclasses bring: YAML must merge in; the result is frozen again."""
    OmegaConf.set_readonly(tree, False)
    for key in tree:
        child = tree._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _writable(child)


def _file_at_fault(error: Exception, config_dir: str | Path | None) -> Path | None:
    """Return the file of ``config_dir`` that Hydra says it was merging; None if it says none, or one of treadle's."""
    merging = re.match(r"In '([^']+)'", str(error))
    return None if merging is None else _file_of(merging[1], config_dir)


def _file_of(choice: str, config_dir: str | Path | None) -> Path | None:
    """Return the file of ``config_dir`` for a choice, ``kv/mine``; None if it has none."""
    file = None if config_dir is None else Path(config_dir) / f"{choice}.yaml"
    return file if file is not None and file.is_file() else None


def _nothing_there(error: Exception, overrides: Sequence[str]) -> ConfigError | None:
    """Return the error for ``~KEY`` where nothing is called so; None if ``error`` is about something else."""
    found = re.search(r"Could not delete from config\. '([^']+)' does not exist", str(error))
    if found is None:
        return None
    parent, _, name = found[1].rpartition(".")
    tree = hydra_compose(CONFIG_NAME, [text for text in overrides if not text.startswith("~")])
    mapping = OmegaConf.select(tree, parent)
    names = [str(key) for key in mapping] if isinstance(mapping, DictConfig) else []
    close = [f"~{parent}.{each}" for each in nearest(name, names)]
    hint = f"there are {', '.join(names)}" if names else f"{parent} is empty"
    return ConfigError("nothing of that name to leave out", key=f"~{found[1]}", nearest=close, hint=hint)


def _translate(error: Exception) -> ConfigError:
    """Return the ConfigError that says what a YAML file of the user (the overrides are checked already) has wrong."""
    first = str(error).strip().splitlines()[0].partition(" raised while")[0]
    where = first.partition("'")[2].partition("'")[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ConfigError(f"a YAML file cannot be used: {first}")
    key, problem = cause.full_key or where, str(cause).splitlines()[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if key == PRESET:
            problem = "its keys are of all groups, which the first line of its file must say"
            return ConfigError(problem, key=where.replace("/", "="), hint="write there: # @package _global_")
        return unknown_key(key)
    if isinstance(cause, ValidationError) and cause.full_key:
        return wrong_type(key, "null" if "'None'" in problem else cause.value)
    return ConfigError(problem, key=key)
