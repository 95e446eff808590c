"""What the hub refuses, and why it could not be asked, as errors of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from treadle.conf.errors import ConfigError, nearest, sibling
from treadle.graph.hub_name import HubName


def refuse(error: Exception, name: HubName, revision: str | None, hub: ModuleType) -> NoReturn:
    """Raise what huggingface_hub (``hub``) raised about a model as a ConfigError, its own bugs as they are."""
    errors, cache = hub.errors, hub.constants.HF_HUB_CACHE
    page = f"{hub.constants.ENDPOINT}/{name.repo}"
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, errors.GatedRepoError):
        raise ConfigError(
            "the hub gives this model to those only who were granted it",
            key="model.path",
            value=name,
            hint=f"ask for it at {page}, then let HF_TOKEN hold a token of that account",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        close = nearest(str(revision), _asked(lambda: _refs(hub, name.repo)))
        raise ConfigError(
            f"{name.repo} has no such branch, tag or commit",
            key="model.revision",
            value=revision,
            nearest=[f"model.revision={ref}" for ref in close],
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        close = (*sibling(Path(str(name))), *_asked(lambda: _similar(hub, name.repo)))
        raise ConfigError(
            "there is no such directory, and no such model on the hub, or it is private",
            key="model.path",
            value=name,
            nearest=[f"model.path={path}" for path in close],
            hint="HF_TOKEN lets a private one be seen",
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        raise ConfigError(f"the hub refuses this token ({status})", key="HF_TOKEN", hint=f"needed for {page}")
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        raise ConfigError(
            "the hub is switched off by HF_HUB_OFFLINE, and the cache does not have all of this model",
            key="model.path",
            value=name,
            nearest=[f"model.path={path}" for path in sibling(Path(str(name)))],
            hint=f"the cache is {cache}; HF_HOME moves it",
        )
    if is_away(error, hub) or isinstance(error, OSError):
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"cannot be fetched: {said[0]}",
            key="model.path",
            value=name,
            hint=f"files that are whole are kept in {cache}; HF_ENDPOINT names another hub",
        )
    raise error


def is_away(error: Exception, hub: ModuleType) -> bool:
    """Whether an error means that nobody answered, or nobody able to."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return error.response is None or error.response.status_code >= 500 or error.response.status_code == 429
    # What the library's HTTP client raises has this base, whichever client its version has.
    client: type[Exception] = hub.errors.HfHubHTTPError.__bases__[0]
    return isinstance(error, client | ConnectionError | TimeoutError | hub.errors.LocalEntryNotFoundError)


def _asked(ask: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return what may help a message, nothing if that cannot be had either."""
    try:
        return ask()
    except Exception:
        return ()


def _refs(hub: ModuleType, repo: str) -> Sequence[str]:
    refs = hub.HfApi().list_repo_refs(repo)
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _similar(hub: ModuleType, repo: str) -> Sequence[str]:
    found = [model.id for model in hub.HfApi().list_models(search=repo.partition("/")[2], limit=20)]
    return nearest(repo, found)
