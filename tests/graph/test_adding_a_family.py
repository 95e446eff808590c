"""docs/adding-a-family.md does what it says: its description, added to no more than a folder, equals transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracle import made
from oracle_case import Case
from oracle_engine import check as check_engine
from oracle_graph import check

from treadle.conf.load import compose
from treadle.graph.family import SECTIONS, SpecError, family_for
from treadle.graph.layers import _FORMS as FORMS

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text()
KIND = "gpt_neox_japanese"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's description, where the page says it goes."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    family = tmp_path / "model" / "family"
    family.mkdir(parents=True)
    (family / f"{KIND}.yaml").write_text(text)
    return tmp_path


def test_the_page_adds_a_family_that_equals_transformers(folder: Path) -> None:
    model = made(KIND, Case(KIND, {"intermediate_multiple_size": 2}))
    with pytest.raises(SpecError, match="no family describes this model type"):
        family_for(model.config)
    check(model, [folder / "model" / "family"])
    families = f"model.families=[{folder / 'model' / 'family'}]"
    check_engine(model, (families, "passes=reference", "hardware=cpu", "kv.page_tokens=4", "hardware.threads=1"))


def test_a_folder_of_configuration_brings_its_families(folder: Path) -> None:
    deployment = compose(["model=hf", "model.path=x"], config_dir=str(folder))
    assert deployment.model.families == (str(folder / "model" / "family"),)


def test_every_section_and_every_form_is_on_the_page() -> None:
    table = set(re.findall(r"`(\w+)`", PAGE.partition("## The sections")[2]))
    assert set(SECTIONS) - {"per_layer_input", "mtp", "quant", "residual", "model_types", "final_norm"} <= table
    assert "model_types" in PAGE
    for form in FORMS:
        assert f"{form}:" in PAGE
