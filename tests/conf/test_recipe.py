from __future__ import annotations

import dataclasses

import pytest

from treadle.conf.document import choices
from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.lock import fingerprint, from_lock, to_lock
from treadle.conf.recipe import WORKLOADS, Decode, Recipe, higher_is_better, read_recipe, unit

RECIPES = [name for name, _ in choices("bench")]
DECODE = {"workload": "decode", "context": 4}


def recipe(*overrides: str) -> Recipe:
    bench = compose(overrides).bench
    return read_recipe(bench.rows, bench.rivals)


def refused(data: object, rivals: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recipe({"r": data}, rivals or {})
    return str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_a_whole_configuration(name):
    deployment = compose([f"bench={name}"])
    assert deployment.bench.name == name
    rows = recipe(f"bench={name}").rows
    assert rows
    for row in rows.values():
        assert row.figures, "a shipped row says what it shows"
        for figure, goals in row.figures.items():
            if goals.target is None:
                continue
            for baseline in goals.baselines.values():
                assert (goals.target > baseline) == higher_is_better(figure), "a target is better than who is there"
            if goals.floor is not None:
                assert (goals.target < goals.floor) == higher_is_better(figure), "and no better than the hardware"


def test_the_recipes_choose_model_and_hardware_and_the_command_line_overrules_them():
    chosen = compose(["bench=llama3-8b"])
    assert (chosen.model.name, chosen.model.weights, chosen.hardware.name) == ("llama3-8b", "dummy", "h200")
    assert chosen.scheduler.max_num_seqs == 256
    other = compose(["bench=llama3-8b", "model=qwen3-0.6b", "hardware=cpu", "scheduler.max_num_seqs=8"])
    assert (other.model.name, other.hardware.device, other.scheduler.max_num_seqs) == ("qwen3-0.6b", "cpu", 8)


def test_rows_can_be_changed_added_and_left_out_on_the_command_line():
    rows = recipe(
        "bench=cpu",
        "bench.rows.prefill_512.prompt=8",
        "bench.rows.new={workload: decode, context: 3}",
        "~bench.rows.decode_128",
    ).rows
    assert rows["prefill_512"].prompt == 8  # type: ignore[union-attr]
    assert isinstance(rows["new"], Decode)
    assert "decode_128" not in rows


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("bench.rivals={}", "bench.rivals={}: leaves all that is there as it is; mappings are merged; '~bench.rivals"),
        ("bench.rivals=null", "'~bench.rivals.NAME' leaves one out"),
        ("~bench.rivals", "'~bench.rivals.NAME' leaves one out"),
        ("model.sampling={}", "model.generation_config=none"),
        ("~bench.rows.decode_12", "~bench.rows.decode_12: nothing of that name to leave out; did you mean ~bench"),
        ("~bench.rivals.xyz", "there are transformers_bf16, "),
        ("bench.rows.prefil.trials=1", "bench.rows.prefil: nothing is called so; did you mean bench.rows.prefill_512?"),
        ("bench.rivals.llama.folder=x", "bench.rivals.llama: nothing is called so; did you mean bench.rivals.l"),
    ],
)
def test_what_is_not_there_and_what_cannot_be_emptied_is_said(override, says):
    with pytest.raises(ConfigError) as caught:
        compose(["bench=cpu", override])
    assert says in str(caught.value)


def test_without_a_recipe_there_are_no_rows():
    assert recipe() == Recipe(rows={})


@pytest.mark.parametrize(
    ("data", "key", "says"),
    [
        ({"workload": "decod"}, "bench.rows.r.workload=decod", "did you mean workload: decode?"),
        ({}, "bench.rows.r", "nothing is called so; a new one needs bench.rows.r.workload: decode, prefill"),
        (3, "bench.rows.r", "nothing is called so; a new one needs bench.rows.r.workload: decode, prefill"),
        ({"workload": "decode"}, "bench.rows.r.context", "has no value"),
        ({**DECODE, "contxt": 3}, "bench.rows.r.contxt", "did you mean context?"),
        ({**DECODE, "context": "x"}, "bench.rows.r.context", "Expected `int`"),
        ({**DECODE, "batch": 0}, "bench.rows.r.batch", ">= 1"),
        ({**DECODE, "output": 1}, "bench.rows.r.output", ">= 2"),
        ({**DECODE, "figures": {"tpot": {}}}, "bench.rows.r.figures.tpot", "did you mean tpot_ms?"),
        (
            {**DECODE, "figures": {"tpot_ms": {"targt": 3}}},
            "bench.rows.r.figures.tpot_ms.targt",
            "did you mean target?",
        ),
        ({**DECODE, "figures": {"tpot_ms": {"target": -3}}}, "bench.rows.r.figures.tpot_ms.target", "> 0.0"),
        ({**DECODE, "figures": 3}, "bench.rows.r.figures", "Expected `object`"),
    ],
)
def test_a_mistake_names_its_key_and_what_works(data, key, says):
    message = refused(data)
    assert message.startswith(f"{key}:")
    assert says in message


def test_a_rival_is_one_that_can_be_run():
    assert "did you mean engine: transformers?" in refused(DECODE, {"t": {"engine": "transformer"}})
    assert "bench.rivals.t.dtyp: no such key; did you mean dtype?" in refused(DECODE, {"t": {"engine": "x", "dtyp": 1}})


def test_a_mistake_is_found_when_the_configuration_is_composed():
    with pytest.raises(ConfigError, match="did you mean prompt"):
        compose(["bench=cpu", "bench.rows.prefill_512.promt=3"])
    with pytest.raises(ConfigError, match="did you mean bench=cpu"):
        compose(["bench=cup"])
    with pytest.raises(ConfigError, match=r"bench\.trials=1"):
        compose(["bench=cpu", "bench.trials=0"])


def test_units_follow_from_names():
    given = {name for kind in WORKLOADS.values() for name in kind.gives}
    assert {unit(name) for name in given} == {"ms", "pct", "s", "tok/s"}
    assert {name for name in given if higher_is_better(name)} == {"prompt_tok_s", "output_tok_s"}


def test_a_recipe_does_not_change_what_a_deployment_answers(tmp_path):
    deployment = compose(["bench=cpu"])
    more = dataclasses.replace(deployment, bench=dataclasses.replace(deployment.bench, trials=9))
    assert fingerprint(more) == fingerprint(deployment)
    (tmp_path / "lock.yaml").write_text(to_lock(more))
    assert from_lock(tmp_path / "lock.yaml") == more


def test_rows_and_rivals_can_be_left_out_one_by_one():
    whole = compose(["bench=cpu"]).bench
    part = compose(["bench=cpu", "~bench.rows.decode_128", "~bench.rivals.llama_cpp", "bench.trials=1"]).bench
    assert part.rows == {name: row for name, row in whole.rows.items() if name != "decode_128"} != whole.rows
    assert part.rivals == {name: one for name, one in whole.rivals.items() if name != "llama_cpp"} != whole.rivals
    assert part.trials == 1 < whole.trials
