from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.conf.secret import opens, seal


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_key_opens_itself_only_plain_or_sealed(key, other):
    for configured in (key, seal(key)):
        if not key.startswith("sha256:"):
            assert opens(configured, key)
        assert opens(configured, other) == (other == key) or key.startswith("sha256:")


def test_sealing_hides_the_key_and_is_stable():
    assert "secret" not in seal("secret")
    assert seal(seal("secret")) == seal("secret")


def test_the_sealed_text_itself_opens_nothing():
    assert not opens(seal("secret"), seal("secret"))
