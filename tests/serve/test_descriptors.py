from __future__ import annotations

import resource

import pytest

from treadle.serve.descriptors import MAX_BACKLOG, OWN_FILES, connection_limits


@pytest.mark.parametrize(
    ("soft", "hard", "most", "backlog", "raised"),
    [
        (256, 1 << 20, 1408, MAX_BACKLOG, 1408 + MAX_BACKLOG + OWN_FILES),
        (200, 200, 86, 50, None),
        (1024, resource.RLIM_INFINITY, 1408, MAX_BACKLOG, 1408 + MAX_BACKLOG + OWN_FILES),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1408, MAX_BACKLOG, None),
        (1 << 20, 1 << 20, 1408, MAX_BACKLOG, None),
        (32, 32, 1, 8, None),
    ],
)
def test_the_limit_of_files_is_raised_or_kept_to(monkeypatch, soft, hard, most, backlog, raised):
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append(limits))
    limits = connection_limits(capacity=288)
    assert (limits.most, limits.backlog) == (most, backlog)
    assert [new for new, _ in calls if new != soft] == ([] if raised is None else [raised])
