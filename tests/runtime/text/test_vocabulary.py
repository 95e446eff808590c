import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import PIECES, gguf_metadata, piece_metadata, piece_tokenizer, tiny_tokenizer, trained

from treadle.runtime.text.pretokenizer import PRE_TOKENIZERS
from treadle.runtime.text.tokenizer import TokenizerError
from treadle.runtime.text.vocabulary import tokenizer_from_gguf


@given(st.text())
def test_equals_the_tokenizer_that_it_was_rebuilt_from(text):
    original = tokenizers.Tokenizer.from_str(trained())
    assert tiny_tokenizer().encode(text) == original.encode(text).ids


def test_digits_stay_apart_where_the_family_splits_them():
    metadata = gguf_metadata()
    digits = [metadata["tokenizer.ggml.tokens"].index(digit) for digit in "12"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "12"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    metadata["tokenizer.ggml.merges"] = ["1 2", *metadata["tokenizer.ggml.merges"]]
    assert tokenizer_from_gguf(metadata).encode("12") == digits
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert tokenizer_from_gguf(metadata).encode("12") == [len(metadata["tokenizer.ggml.tokens"]) - 1]


WORDS = {
    "gpt-2": ["It", "'s", " 1234", " x", "   ", " y", "\n", "\n", "z", "'", "S"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " x", "   ", " y", "\n", "\n", "z", "'", "S"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " x", "   ", " y", "\n\n", "z", "'S"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " x", "   ", " y", "\n\n", "z", "'S"],
    "gpt-4o": ["It's", " ", "123", "4", " x", "   ", " y", "\n\n", "z'S"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_each_family(pre):
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str("It's 1234 x    y\n\nz'S")
    words = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert words == WORDS[pre]


def test_facts_come_from_the_metadata():
    tokenizer = tiny_tokenizer()
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 0)  # <|endoftext|> ends an answer too, though the file names one token only
    assert tokenizer.facts.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template is not None
    named = tokenizer_from_gguf(gguf_metadata(**{"tokenizer.chat_template.tool_use": "x"}))
    assert named.facts.chat_templates["tool_use"] == "x"


@pytest.mark.parametrize(
    ("tokens", "ending"),
    [(["<|end|>"], ["<|end|>"]), (["<|end|>", "<|call|>", "<|return|>"], ["<|call|>", "<|return|>"])],
)
def test_the_end_of_a_message_ends_an_answer_unless_answers_have_several(tokens, ending):
    metadata = gguf_metadata()
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *tokens]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *[3] * len(tokens)]
    ends = tokenizer_from_gguf(metadata).eos_ids
    assert [tokens[i - first] for i in ends if i >= first] == ending


def test_bos_is_added_when_the_file_or_the_family_says_so():
    assert tiny_tokenizer().encode("the")[0] != 1
    assert tokenizer_from_gguf(gguf_metadata(**{"tokenizer.ggml.add_bos_token": True})).encode("the")[0] == 1
    by_family = gguf_metadata(pre="llama-bpe")
    del by_family["tokenizer.ggml.add_bos_token"]
    assert tokenizer_from_gguf(by_family).encode("the")[0] == 1


def test_user_defined_tokens_are_whole_but_not_special():
    metadata = gguf_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool call>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = tokenizer_from_gguf(metadata)
    last = tokenizer.vocab_size - 1
    assert tokenizer.encode("<tool call>") == [last]
    assert tokenizer.decode([last]) == "<tool call>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "smolm"}, r"pre='smolm' is unknown; known: .*smollm"),
        ({"tokenizer.ggml.model": "rwkv"}, r"model='rwkv' is unknown; known: gpt2"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_refusals_name_the_key(changes, message):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(gguf_metadata(**changes))


def test_a_count_of_types_that_does_not_fit_is_refused():
    with pytest.raises(TokenizerError, match=r"token_type has 1 entries for \d+ tokens"):
        tokenizer_from_gguf(piece_metadata(**{"tokenizer.ggml.token_type": [1]}))


def test_sentence_piece_vocabularies():
    text = "ab ab<tool>é日"
    wanted = ["<s>", "ab", "▁ab", "<tool>", "é", "<0xE6>", "<0x97>", "<0xA5>"]
    assert [PIECES[i] for i in piece_tokenizer().encode(text)] == wanted
    likely = ["ab", "▁", "ab", *wanted[3:]]
    assert [PIECES[i] for i in piece_tokenizer("t5").encode(text)] == likely, "no beginning unless the file says so"
    spaced = tokenizer_from_gguf(piece_metadata(**{"tokenizer.ggml.add_space_prefix": True}))
    assert [PIECES[i] for i in spaced.encode("ab")] == ["<s>", "▁ab"]
    assert (spaced.bos_id, spaced.eos_ids) == (1, (2,))
