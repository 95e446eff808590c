from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from history_model import VOCAB, Bench
from letters import LETTERS, expected, letters_llm, text
from tiny_model import write_model
from tiny_text import TEMPLATE, write_directory

from treadle.conf.schema import ServeConfig
from treadle.runtime.driver import Driver
from treadle.runtime.progress import AnswerBar
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.template import chat_template
from treadle.serve.__main__ import main
from treadle.serve.batch.records import read_records
from treadle.serve.batch.results import Results, open_results
from treadle.serve.batch.run import Batch
from treadle.serve.served import Served

DEFAULTS = {"max_tokens": 8, "temperature": 0.0, "seed": None}


class Killed(BaseException):
    """Ends a run as SIGKILL does, as far as the files are concerned."""


class Files:
    """Runs batches of one input over the letters model, as one process after another would."""

    def __init__(self, folder, lines, **settings):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        self.settings = settings

    def run(self, kill_after: int | None = None) -> Batch:
        bench = Bench(**self.settings)
        tokenizer = letters_llm(bench).get_tokenizer()
        facts = tokenizer.facts
        served = Served(
            name="letters",
            fingerprint="fp",
            created=0,
            tokenizer=tokenizer,
            template=partial(chat_template, facts.chat_templates, facts.template_tokens),
            limits=Limits(max_len=64, vocab=VOCAB),
            config=ServeConfig(),
        )
        driver = Driver(bench.engine, tokenizer)
        with open_results(self.target) as results, AnswerBar(1, show=False) as bar:
            batch = Batch(served, driver, results, bar)
            if kill_after is not None:
                results.append = partial(_dying, results, results.append, len(results.done) + kill_after)
            try:
                batch.run(read_records(self.source, DEFAULTS))
                results.sort(read_records(self.source, DEFAULTS))
            finally:
                driver.close()
        return batch

    def answers(self):
        return [json.loads(line) for line in self.target.read_text().splitlines()]


def _dying(results: Results, append, most: int, record, content):
    if len(results.done) == most:
        with open(results._target, "ab") as file:
            file.write(b'{"id": "half a li')
        raise Killed
    append(record, content)


def prompts(count: int):
    return [{"id": i, "prompt": LETTERS[i % VOCAB] * (1 + i % 5), "max_tokens": 1 + i % 7} for i in range(count)]


def answer_to(record) -> str:
    return text(expected(record["prompt"], record["max_tokens"]))


def test_every_line_is_answered_in_order(tmp_path):
    files = Files(tmp_path, prompts(40), max_queue=3)
    batch = files.run()
    assert (batch.answered, batch.errors) == (40, 0)
    for record, answer in zip(prompts(40), files.answers(), strict=True):
        assert (answer["id"], answer["line"]) == (record["id"], record["id"] + 1)
        assert answer["choices"][0]["text"] == answer_to(record)
        assert answer["usage"]["completion_tokens"] == record["max_tokens"]


@pytest.mark.parametrize("kill_after", [0, 1, 7])
def test_ended_anywhere_and_started_again_nothing_is_lost_or_twice(tmp_path, kill_after):
    files = Files(tmp_path, prompts(25))
    runs = 0
    while True:
        runs += 1
        try:
            batch = files.run(kill_after if kill_after or runs < 3 else None)
        except Killed:
            continue
        break
    assert runs == (3 if kill_after == 0 else 25 // kill_after + (kill_after > 1))
    assert batch.answered <= 25
    answers = files.answers()
    assert [answer["id"] for answer in answers] == list(range(25))
    assert [answer["choices"][0]["text"] for answer in answers] == [answer_to(record) for record in prompts(25)]
    before = files.target.read_bytes()
    assert files.run().answered == 0
    assert files.target.read_bytes() == before


def test_bad_lines_do_not_stop_the_rest(tmp_path):
    lines = [
        {"prompt": "abc"},
        "{ no json\n",
        {"prompt": "abc", "temperature": -1},
        {"prompt": "a" * 64},
        {"prompt": "a" * 60},
        {"prompt": "a" * 60, "max_tokens": 9},
        {"prompt": "abc", "model": "other"},
        {"messages": [{"role": "user", "content": "c"}], "n": 2},
        {"prompt": "abc", "stop_token_ids": list(range(17))},
    ]
    files = Files(tmp_path, lines)
    batch = files.run()
    assert (batch.answered, batch.errors) == (3, 6)
    answers = files.answers()
    assert [answer["line"] for answer in answers] == list(range(1, 10))
    assert [answer.get("error", {}).get("param") for answer in answers] == [
        None, None, "temperature", "prompt", None, "max_tokens", "model", None, "stop_token_ids",
    ]  # fmt: skip
    assert answers[1]["id"] is None
    assert "JSON" in answers[1]["error"]["message"]
    assert answers[4]["usage"]["completion_tokens"] == 4, "a default is shortened to what fits"
    chat = answers[7]
    assert [choice["message"]["content"] for choice in chat["choices"]] == [text(expected("acb"))] * 2


def test_a_request_that_fails_in_a_step_costs_only_itself(tmp_path):
    poison = 5
    files = Files(tmp_path, [*prompts(3), {"id": "bad", "prompt": LETTERS[poison]}, *prompts(30)[20:]], poison=poison)
    batch = files.run()
    errors = [answer for answer in files.answers() if "error" in answer]
    assert batch.errors == len(errors) >= 1
    bad = next(answer for answer in errors if answer["id"] == "bad")
    assert bad["error"]["type"] == "server_error"
    assert "not finite" in bad["error"]["message"]


def test_lines_of_openais_are_answered_in_openais_shape(tmp_path):
    body = {"model": "letters", "messages": [{"role": "user", "content": "c"}], "max_tokens": 4, "temperature": 0}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body | {"max_tokens": 0}},
    ]
    files = Files(tmp_path, lines)
    files.run()
    good, bad = files.answers()
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("a", None, 200)
    assert good["response"]["body"]["choices"][0]["message"]["content"] == text(expected("acb", 4))
    assert good["response"]["body"]["object"] == "chat.completion"
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 400)
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert files.run().answered == 0


def test_the_command_line_killed_and_started_again(tmp_path, monkeypatch, capsys):
    write_directory(write_model(tmp_path / "tiny"), chat_template=TEMPLATE)
    source, target = tmp_path / "prompts.jsonl", tmp_path / "out[b].jsonl"
    lines = [{"id": f"p{i}", "prompt": [5] * (1 + i % 3), "max_tokens": 80, "ignore_eos": True} for i in range(40)]
    source.write_text("\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    words = ["generate", "model=hf", f"model.path={tmp_path / 'tiny'}", "passes=reference", "kv.memory=8MiB"]
    words += ["scheduler.max_num_seqs=2", "hardware.threads=1", f"input={source}", f"output={target}"]
    process = subprocess.Popen([sys.executable, "-P", "-m", "treadle.serve", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = target.read_bytes().count(b"\n")
    assert 5 <= kept < 41
    assert main(words) == 1, "a line got an error"
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [*(f"p{i}" for i in range(40)), None]
    assert [answer["error"]["message"] for answer in answers if "error" in answer] == [answers[-1]["error"]["message"]]
    by_prompt = [{answer["choices"][0]["text"] for answer in answers[i:-1:3]} for i in range(3)]
    assert [len(texts) for texts in by_prompt] == [1, 1, 1]
    said = capsys.readouterr().out
    assert f"{kept} before" in said
    target.write_text("".join(json.dumps(answer) + "\n" for answer in answers[1:]))
    assert main(words) == 1
    assert "1 answer and 0 errors of 41 lines, 40 before, 1 of them an error" in capsys.readouterr().out
    monkeypatch.setattr("treadle.runtime.build.build_engine", None)
    assert main(words) == 1, "what is complete loads nothing, and its errors still count"
    assert f"{target} has all 41 answers, 1 of them an error" in capsys.readouterr().out
    source.write_text("\n".join(map(json.dumps, lines)) + "\n")
    target.write_text("".join(json.dumps(answer) + "\n" for answer in answers[:-1]))
    assert main(words) == 0
    assert capsys.readouterr().out == f"{target} has all 40 answers\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["input=in.jsonl"], "needs input and output"),
        (["output=out.jsonl", "Hello"], "needs input and output"),
        (["input=no.jsonl", "output=out.jsonl"], "cannot be read"),
        (["input=in.jsonl", "output=in.jsonl"], "is the input too"),
        (["input=in.jsonl", "output=out.jsonl", "--max-tokens", "0"], "max_tokens=0"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tmp_path, monkeypatch, capsys, words, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    write_directory(write_model(tmp_path / "tiny"), chat_template=TEMPLATE)
    monkeypatch.setattr("treadle.runtime.build.build_engine", None)
    assert main(["generate", "model=hf", "model.path=tiny", *words]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
