import json

import pytest
from tiny_text import PIECES, model_proto, piece_tokenizer

from treadle.runtime.text.directory import tokenizer_from_directory
from treadle.runtime.text.tokenizer import TokenizerError

TEXT = "ab ab<tool>é日  b"


def write(directory, raw, **config):
    (directory / "tokenizer.model").write_bytes(raw)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("kind", "name"), [(2, "llama"), (1, "t5")])
def test_a_file_gives_the_vocabulary_of_a_gguf_file(kind, name, tmp_path):
    tokenizer = tokenizer_from_directory(write(tmp_path, model_proto(kind, add_space=False)))
    assert tokenizer.encode(TEXT, False) == piece_tokenizer(name).encode(TEXT, False)
    assert tokenizer.encode("ab") == [1, PIECES.index("ab")], "what begins a text, as the class of these files does"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})


@pytest.mark.parametrize(("legacy", "last"), [(None, "▁ab"), (True, "▁ab"), (False, "ab")])
def test_the_space_after_tokens_is_the_old_behaviour(legacy, last, tmp_path):
    config = {} if legacy is None else {"legacy": legacy}
    tokenizer = tokenizer_from_directory(write(tmp_path, model_proto(2), **config))
    assert [PIECES[i] for i in tokenizer.encode("ab<tool>ab")] == ["<s>", "▁ab", "<tool>", last]


def test_the_config_says_what_surrounds_a_text(tmp_path):
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"}
    tokenizer = tokenizer_from_directory(write(tmp_path, model_proto(2), **config))
    assert [PIECES[i] for i in tokenizer.encode("ab")] == ["▁ab", "</s>"]


def test_spaces_are_joined_where_the_file_says_so(tmp_path):
    tokenizer = tokenizer_from_directory(write(tmp_path, model_proto(2, join_spaces=True)))
    assert [PIECES[i] for i in tokenizer.encode(" ab   ab ", False)] == ["▁ab", "▁ab"]


@pytest.mark.parametrize("cut", [1, 7, 100, -3])
def test_a_truncated_file_is_named(cut, tmp_path):
    write(tmp_path, model_proto(2)[:cut])
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: not a SentencePiece model, or a truncated one"):
        tokenizer_from_directory(tmp_path)


def test_models_of_other_types_are_named(tmp_path):
    write(tmp_path, model_proto(3))
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: a SentencePiece model of type 3; .*unigram \(1\)"):
        tokenizer_from_directory(tmp_path)
    write(tmp_path, b"IQ== 0\nIg== 1\n")
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        tokenizer_from_directory(tmp_path)
