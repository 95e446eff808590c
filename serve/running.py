"""The state memory of a server that runs, as its /metrics say it."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from itertools import chain
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from treadle.conf.errors import ConfigError

PATIENCE_S = 10.0
"""Seconds that the server may take to begin its answer, and to end it."""
MAX_BYTES = 16 << 20
"""More than any engine's numbers take."""

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Samples:
    """Numbers of one moment, by name and labels."""

    model: str
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """Return the number of that name with these labels, 0 if there is none."""
        return self.values.get(name, {}).get(frozenset(labels.items()), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the numbers of that name by what one label says."""
        series = ((dict(labels), value) for labels, value in self.values.get(name, {}).items())
        return {labels[label]: value for labels, value in series if label in labels}

    def named(self, end: str) -> str:
        """Return the one name that ends so, whatever the server's prefix is; ``end`` itself if there is none."""
        return next((name for name in self.values if name.endswith(end)), end)


def read_metrics(url: str, api_key: str | None = None) -> Samples:
    """Return what the server at ``url`` says now.

    Raises: ConfigError, saying why, if none of treadle's answers there.
    """
    address = url if "//" in url else f"http://{url}"
    try:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
    except ValueError:
        raise ConfigError(
            "not the address of a server", key="--url", value=url, nearest=["http://127.0.0.1:8000"]
        ) from None
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/metrics")
    if api_key is not None:
        request.add_header("authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = _read(answer).decode()
    except urllib.error.HTTPError as error:
        key = "give its serve.api_key=KEY" if api_key is None else "the serve.api_key given is not the server's"
        hints = {401: key, 404: "it was started with serve.metrics=false, or is no treadle"}
        raise ConfigError(
            f"/metrics answers {error.code}", key="--url", value=url, hint=hints.get(error.code, "")
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise ConfigError(f"no server answers there: {why}", key="--url", value=url) from None
    samples = _samples(text)
    if not samples.values.get("treadle:arena_bytes"):
        raise ConfigError("no treadle engine answers there", key="--url", value=url)
    return samples


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Return the whole body. Raises ValueError if it is too long, or takes too long."""
    body, end = bytearray(), time.monotonic() + PATIENCE_S
    while part := answer.read1(1 << 16):
        body += part
        if len(body) > MAX_BYTES or time.monotonic() > end:
            raise ValueError("the answer does not end")
    if answer.length:
        raise http.client.IncompleteRead(bytes(body), answer.length)
    return bytes(body)


def _samples(text: str) -> Samples:
    values: dict[str, dict[Labels, float]] = {}
    models = set[str]()
    try:
        families = [family.samples for family in text_string_to_metric_families(text)]
    except ValueError:
        families = []
    for sample in chain.from_iterable(families):
        labels = dict(sample.labels)
        models.add(labels.pop("model_name", ""))
        if math.isfinite(sample.value):
            values.setdefault(sample.name, {})[frozenset(labels.items())] = sample.value
    return Samples(", ".join(sorted(models - {""})), values)
