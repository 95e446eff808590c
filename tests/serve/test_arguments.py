from __future__ import annotations

import pytest

from treadle.conf.errors import ConfigError
from treadle.serve.arguments import parse


def refused(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line.split())
    return str(caught.value)


def test_command_overrides_options_and_words_are_taken_apart():
    found = parse(
        ["generate", "model=hf", "Once", "upon", "--max-tokens", "7", "model.path=x", "--temperature=0.5", "a time"]
    )
    assert found.command is not None
    assert found.command.name == "generate"
    assert found.overrides == ["model=hf", "model.path=x"]
    given = {"prompt": "Once upon a time", "max_tokens": 7, "temperature": 0.5}
    assert found.options == given | {"seed": None, "input": None, "output": None}


def test_an_option_may_be_written_like_an_override():
    found = parse(["generate", "input=in.jsonl", "output=out.jsonl", "max_tokens=7", "kv.page_tokens=8"])
    assert found.overrides == ["kv.page_tokens=8"]
    assert (found.options["input"], found.options["output"], found.options["max_tokens"]) == (
        "in.jsonl",
        "out.jsonl",
        7,
    )
    assert parse(["serve", "output=x"]).overrides == ["output=x"], "another command's"
    assert "it takes int" in refused("generate max_tokens=many")


def test_after_two_dashes_everything_is_words():
    assert parse(["generate", "--", "x=1", "--max-tokens"]).options["prompt"] == "x=1 --max-tokens"


def test_words_that_only_look_like_overrides_stay_words():
    assert parse(["generate", "1+1=", "Is a=b?", "-5"]).overrides == []
    assert parse(["generate", "+model.config.a=1", "~model.config.b"]).overrides == [
        "+model.config.a=1",
        "~model.config.b",
    ]


def test_hydras_flags_are_kept_for_hydra():
    found = parse(["memory", "-m", "kv.page_tokens=8,16", "--config-dir", "mine"])
    assert found.sweep
    assert found.hydra == ["--multirun"]
    assert found.config_dir == "mine"
    assert parse(["--cfg", "job", "--resolve"]).hydra == ["--cfg", "job", "--resolve"]
    assert parse(["serve", "-c", "job", "-p", "kv"]).hydra == ["--cfg", "job", "--package", "kv"]
    assert parse(["serve", "--info", "defaults"]).hydra == ["--info", "defaults"]
    assert parse(["serve", "--info", "kv.page_tokens=8"]).hydra == ["--info", "all"]
    assert parse(["-sc", "install=bash"]).hydra == ["--shell-completion"]


@pytest.mark.parametrize("line", ["--help", "-h", "help", "serve --help", "serve kv.page_tokens=8 -h"])
def test_help_is_asked_for_in_many_ways(line):
    assert parse(line.split()).help


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("serv", "did you mean serve"),
        ("memroy", "did you mean memory"),
        ("fly", "commands: serve"),
        ("serve --lok x", "did you mean --lock"),
        ("foo", "lock, explain, bisect, bench, version; "),
        ("verison", "did you mean version?"),
        ("nosuch", "no command is called nosuch; commands: "),
        ("gen", "did you mean generate?"),
        ("serve --cfg jobs", "--cfg=jobs: no such choice; did you mean job?; it takes job, hydra, all"),
        ("serve --port 8000", "no option is called --port; did you mean serve.port=8000?"),
        ("serve --port=8000 kv.page_tokens=8", "did you mean serve.port=8000?"),
        ("serve --host serve.port=1", "did you mean serve.host=...?"),
        (
            "serve -p 9000",
            "--package: goes with --cfg only; for example --cfg job --package kv; a port is set by serve.",
        ),
        ("serve --resolve", "goes with --cfg only"),
        ("serve --prot 80", "did you mean serve.port=80?"),
        ("serve --model smollm2", "did you mean model=smollm2?"),
        ("serve --model a/b", "did you mean model=hf model.path='a/b'?"),
        ("serve --max-model-len 4096", "did you mean model.max_len=...?"),
        ("serve --foo", "--foo; options: --lock, --config-dir, --help; keys are set by group.key=value"),
        ("serve --max-tokens 3", "it is one of treadle generate"),
        ("--config mine", "did you mean --config-dir?"),
        ("generate inptu=in.jsonl output=out.jsonl", "inptu=in.jsonl: no such key; did you mean input=in.jsonl?"),
        ("generate --max-token 3 hi", "did you mean --max-tokens"),
        ("generate hi --max-tokens many", "int"),
        ("generate hi --max-tokens", "needs a value"),
        ("serve smollm2", "group=choice"),
        ("explain --show fuse_ad_norm", "--show=fuse_ad_norm: no such choice; did you mean fuse_add_norm?"),
        ("explain show=xyz", "it takes quantize, "),
    ],
)
def test_a_mistake_names_the_nearest_thing_that_works(line, part):
    assert part in refused(line)
