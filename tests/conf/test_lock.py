from __future__ import annotations

import re

import pytest

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.lock import fingerprint, from_lock, to_lock
from treadle.conf.secret import opens

CHOICES = ["model=qwen3-0.6b", "kv.page_tokens=32", "model.config.rope_theta=1e4", "model.allow_unused=['a.*']"]


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "server.lock.yaml"
    path.write_text(to_lock(compose(CHOICES), {"pages": 7}))
    return path


def refused(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_lock(path, overrides)
    return str(caught.value)


def test_a_lock_file_gives_the_same_deployment(lock):
    assert from_lock(lock) == compose(CHOICES)


def test_keys_may_change_on_top_groups_may_not(lock):
    deployment = from_lock(lock, ["serve.port=9", "model.max_len=auto"])
    assert deployment.serve.port == 9
    assert fingerprint(deployment) == fingerprint(from_lock(lock))
    assert "chosen already" in refused(lock, "passes=reference")
    assert "scheduler.max_num_seqs=8" in refused(lock, "preset=throughput")
    assert "serve.port" in refused(lock, "serve.prt=9")


def test_an_edited_lock_file_is_refused(lock):
    lock.write_text(lock.read_text().replace("page_tokens: 32", "page_tokens: 16"))
    assert "edited by hand" in refused(lock)


def test_a_key_that_no_group_has_is_refused_in_a_lock_too(lock):
    text = lock.read_text()
    lock.write_text(text.replace("page_tokens: 32", "page_token: 32"))
    assert refused(lock).endswith(f"did you mean kv.page_tokens?; in {lock}")
    lock.write_text(text.replace("page_tokens: 32", "page_tokens: many"))
    assert refused(lock) == f"kv.page_tokens=many: wrong type; it takes an integer; in {lock}"


@pytest.mark.parametrize("text", ["", "a: b\n", "[1, 2]\n", "a: [\n", "lock: 99\ndeployment: {}\n"])
def test_what_is_not_a_lock_file_is_refused(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert "--lock" in refused(path)


def test_a_missing_lock_file_names_the_nearest(lock):
    assert str(lock) in refused(lock.with_name("servr.lock.yaml"))


def test_the_fingerprint_is_about_answers_not_about_addresses():
    base = fingerprint(compose())
    assert re.fullmatch(r"fp_[0-9a-f]{16}", base)
    assert fingerprint(compose(["serve.port=1", "serve.api_key=k", "passes.compile_cache=/tmp/x"])) == base
    assert fingerprint(compose(["kv.page_tokens=32"])) != base
    assert fingerprint(compose(["passes.compile=false"])) != base


def test_the_key_of_the_api_is_never_written_down_and_still_asked_for(tmp_path):
    path = tmp_path / "x.lock.yaml"
    path.write_text(to_lock(compose(["serve.api_key=open-sesame"])))
    assert "open-sesame" not in path.read_text()
    kept = from_lock(path).serve.api_key
    assert kept is not None
    assert opens(kept, "open-sesame")
    assert not opens(kept, "open")
