"""Keys laid over config.json: where they go, and which of them anybody reads."""

from __future__ import annotations

import pytest

from treadle.conf.errors import ConfigError
from treadle.graph.expression import asked_keys
from treadle.graph.family import config_keys, known_families
from treadle.graph.overlay import overlay, refuse_unread


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("${hf:a.b|c,1.5}", {"a", "c"}),
        ("${hf:a}", {"a"}),
        ("${x:'[max(n, 2) for n in sizes if other.get(key)]'}", {"sizes", "other", "key"}),
        ("${x:a + b}", {"a", "b"}),
        ("${norm.eps}", set()),
        ("hf:a", set()),
        (3, set()),
        ({"x": ["${hf:a}", {"y": "${hf:b}"}]}, {"a", "b"}),
    ],
)
def test_keys_that_an_interpolation_reads(value, keys):
    assert asked_keys(value) == keys


def test_keys_of_a_family_are_those_of_all_its_variants(tmp_path):
    (tmp_path / "odd.yaml").write_text(
        "extends: llama\ndefaults: {spare: 1}\nvariants:\n- if: switch is not None\n  embed: {scale: '${hf:factor}'}\n"
    )
    own = config_keys("odd", [tmp_path]) - config_keys("llama")
    assert own == {"spare", "switch", "factor"}
    refuse_unread({"factor": 2}, {}, "odd", [tmp_path])
    with pytest.raises(ConfigError, match=r"did you mean model\.config\.factor\?"):
        refuse_unread({"facter": 2}, {}, "odd", [tmp_path])


WITHOUT_ROPE = {"falcon_mamba", "inkling_text", "jamba", "mamba", "mamba2", "nemotron_h", "rwkv"}


@pytest.mark.parametrize("family", known_families())
def test_every_family_reads_the_size_of_its_layers(family):
    keys = config_keys(family)
    assert {"hidden_size", "num_hidden_layers"} <= keys
    assert ("rope_theta" in keys) == (family not in WITHOUT_ROPE)


def test_keys_go_into_the_text_part_too():
    config = {"a": 1, "text_config": {"a": 1, "b": 2}}
    assert overlay(config, {"a": 3}) == {"a": 3, "text_config": {"a": 3, "b": 2}}
    assert overlay(config, {"text_config": {"b": 4}}) == {"a": 1, "text_config": {"b": 4}}
