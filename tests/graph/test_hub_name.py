from __future__ import annotations

from pathlib import Path

import pytest

from treadle.conf.errors import ConfigError
from treadle.graph.hub_name import HubName, choose_gguf, hub_name

MANY = [
    "config.json",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-Q8_0.gguf",
    "m.IQ4_NL.gguf",
    "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/m-UD-Q4_K_XL-00002-of-00002.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/Na.me_2-3B", HubName("Org-1/Na.me_2-3B")),
        ("org/name:Q4_K_M", HubName("org/name", quant="Q4_K_M")),
        ("org/name/x.gguf", HubName("org/name", file="x.gguf")),
        ("org/name/sub/x-00001-of-00002.gguf", HubName("org/name", file="sub/x-00001-of-00002.gguf")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("../name", None),
        ("models/x.gguf", None),
        ("a/b/c", None),
        ("org/name:", None),
    ],
)
def test_what_looks_like_a_name_of_the_hub(path: str, expected: HubName | None) -> None:
    assert hub_name(path) == expected
    assert expected is None or str(expected) == path


def test_what_exists_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is None


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("IQ4_NL", "m.IQ4_NL.gguf"),
        ("Q4_K_XL", "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("UD-Q4_K_XL", "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf"),
    ],
)
def test_a_quantisation_names_one_file(quant: str, file: str) -> None:
    assert choose_gguf(HubName("o/n", quant=quant), MANY) == file


def test_without_a_quantisation_there_must_be_one_file() -> None:
    assert choose_gguf(HubName("o/n"), ["m-Q8_0.gguf", "mmproj-F16.gguf"]) == "m-Q8_0.gguf"
    assert choose_gguf(HubName("o/n"), ["config.json"]) is None
    with pytest.raises(ConfigError, match=r"o/n: 5 GGUF files have this name; did you mean model\.path=o/n:Q4_K_M"):
        choose_gguf(HubName("o/n"), MANY)


def test_names_that_mean_nothing_are_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"o/n:Q8_K: no GGUF .*o/n:Q8_0\?; the repository has .*IQ4_NL"):
        choose_gguf(HubName("o/n", quant="Q8_K"), MANY)
    with pytest.raises(ConfigError, match=r"o/n/m-Q4_K\.gguf: .*model\.path=o/n/m-Q4_K_[MS]\.gguf"):
        choose_gguf(HubName("o/n", file="m-Q4_K.gguf"), MANY)
