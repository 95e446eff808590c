from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import gguf_metadata, tiny_tokenizer, write_directory

from treadle.conf.errors import ConfigError
from treadle.graph.source import DummySource
from treadle.runtime.text.load import byte_tokenizer, load_tokenizer
from treadle.runtime.text.template import chat_template
from treadle.runtime.text.tokenizer import TokenizerError


def gguf(**changes):
    return SimpleNamespace(kind="gguf", path=Path("some/model.gguf"), metadata=gguf_metadata(**changes))


def test_directory_and_file_give_the_same_tokenizer(tmp_path):
    directory = SimpleNamespace(kind="hf", path=write_directory(tmp_path), metadata={})
    text = "<|im_start|>the dog 12"
    assert load_tokenizer(directory).encode(text) == load_tokenizer(gguf()).encode(text)
    assert load_tokenizer(gguf()).encode(text) == tiny_tokenizer().encode(text)


def test_a_mistake_in_a_file_names_the_file():
    with pytest.raises(TokenizerError, match=r"model\.path=some/model.gguf: tokenizer.ggml.pre='x'"):
        load_tokenizer(gguf(pre="x"))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_the_tokens_of_a_model_without_files(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256, 5000]) == text


def test_a_model_without_files_can_chat():
    facts = load_tokenizer(DummySource({})).facts
    template = chat_template(facts.chat_templates, facts.template_tokens)
    assert template.render([{"role": "user", "content": "hi"}]) == "user: hi\nassistant:"


def test_sampling_defaults_are_the_parameters_that_requests_have():
    facts = load_tokenizer(gguf(), {"temperature": 0.6, "top_k": 20, "max_tokens": 99}).facts
    assert facts.sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert load_tokenizer(gguf()).facts.sampling == {}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1}, r"model\.sampling\.temprature: .*did you mean temperature"),
        ({"top_p": 1.5}, r"model\.sampling\.top_p: 1\.5 is outside.*model\.generation_config=none"),
        ({"temperature": "hot"}, r"model\.sampling\.temperature: 'hot', of type str: it takes a number"),
    ],
)
def test_sampling_defaults_that_no_request_may_have_are_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(gguf(), sampling)
