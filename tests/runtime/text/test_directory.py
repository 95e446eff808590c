import json

import pytest
from tiny_text import TEMPLATE, gguf_metadata, tiny_tokenizer, trained, write_directory

from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import TokenizerError
from treadle.runtime.text.vocabulary import tokenizer_from_gguf


def write(path, value):
    path.write_text(json.dumps(value))


def test_reads_what_the_files_say(tmp_path):
    write_directory(tmp_path)
    write(
        tmp_path / "generation_config.json",
        {"eos_token_id": [2, 0], "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True},
    )
    tokenizer = tokenizer_from_directory(tmp_path)
    text = "the dogs 123 <|im_start|>"
    assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2, 0))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.facts.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_end_comes_from_config_json_without_a_generation_config(tmp_path):
    write_directory(tmp_path, eos_token=None)
    write(tmp_path / "config.json", {"eos_token_id": 0})
    assert tokenizer_from_directory(tmp_path).eos_ids == (0,)


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    write_directory(tmp_path)
    write(tmp_path / "tokenizer_config.json", {})
    write(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    assert tokenizer_from_directory(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(("explicit", "first"), [(True, 1), (False, None), (None, None)])
def test_bos_is_added_when_the_config_says_so(tmp_path, explicit, first):
    write_directory(tmp_path, **({} if explicit is None else {"add_bos_token": explicit}))
    plain = tiny_tokenizer().encode("the")
    assert tokenizer_from_directory(tmp_path).encode("the") == ([first, *plain] if first else plain)


def test_tokens_declared_in_the_config_alone_are_added(tmp_path):
    new = tiny_tokenizer().vocab_size
    declared = {str(new): {"content": "<think>", "special": False}, "1": {"content": "<|im_start|>", "special": True}}
    write_directory(tmp_path, added_tokens_decoder=declared)
    assert tokenizer_from_directory(tmp_path).encode("<think>") == [new]
    write_directory(tmp_path, added_tokens_decoder={"9999": {"content": "<think>"}})
    with pytest.raises(
        TokenizerError, match=f"tokenizer_config.json: declares token 9999 '<think>'.*gives it id {new}"
    ):
        tokenizer_from_directory(tmp_path)


def test_chat_templates_from_lists_and_files(tmp_path):
    entries = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_directory(tmp_path, chat_template=entries)
    assert tokenizer_from_directory(tmp_path).facts.chat_templates == {"default": "a", "tool_use": "b"}
    write(tmp_path / "chat_template.json", {"chat_template": "c"})
    assert tokenizer_from_directory(tmp_path).chat_template == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("e")
    found = tokenizer_from_directory(tmp_path).facts.chat_templates
    assert found == {"default": "d", "tool_use": "b", "rag": "e"}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"model\.path=.*: no tokenizer.json, tokenizer.model, or vocab.json"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"it has tekken.json"):
        tokenizer_from_directory(tmp_path)


def write_merges(directory, **config):
    """The files that a vocabulary had before there was tokenizer.json."""
    model = json.loads(trained())["model"]
    write(directory / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n")
    write(directory / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **config})
    return directory


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path):
    new = tiny_tokenizer().vocab_size
    write(tmp_path / "added_tokens.json", {"<think>": new})
    tokenizer = tokenizer_from_directory(write_merges(tmp_path, eos_token="<|im_end|>"))
    text = "the dogs don't 12 日本"
    assert tokenizer.encode(text) == tokenizer_from_gguf(gguf_metadata(pre="qwen2")).encode(text)
    assert tokenizer.encode("<think><|im_end|>") == [new, 2]
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ((2,), {2})


def test_merges_whose_cut_is_unknown_are_refused(tmp_path):
    write_merges(tmp_path, tokenizer_class="OddTokenizer")
    with pytest.raises(TokenizerError, match=r"tokenizer_class OddTokenizer: how this class cuts.*GPT2Token"):
        tokenizer_from_directory(tmp_path)
    write_merges(tmp_path)
    (tmp_path / "merges.txt").write_text("zzz yyy\n")
    with pytest.raises(TokenizerError, match=r"merges.txt: does not fit vocab.json"):
        tokenizer_from_directory(tmp_path)
    write(tmp_path / "vocab.json", {"a": 1})
    with pytest.raises(TokenizerError, match=r"vocab.json: ids are not 0, 1, 2"):
        tokenizer_from_directory(tmp_path)


def test_a_token_of_the_vocabulary_that_is_declared_is_read_as_it_is_written(tmp_path):
    the = tiny_tokenizer().token_id("Ġthe")
    write_directory(tmp_path, added_tokens_decoder={str(the): {"content": "Ġthe", "special": True}})
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.encode("Ġthe") == [the]
    assert the in tokenizer.special_ids


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1}'])
def test_broken_files_are_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a tokenizer"):
        tokenizer_from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]" if content == "[]" else "{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: (not JSON|holds a list)"):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize("wrong", [-1, [2, -1], "</s>", 1.5])
def test_an_end_that_is_no_token_is_refused(tmp_path, wrong):
    write_directory(tmp_path)
    write(tmp_path / "generation_config.json", {"eos_token_id": wrong})
    with pytest.raises(TokenizerError, match=r"eos_token_id="):
        tokenizer_from_directory(tmp_path)
