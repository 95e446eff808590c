import subprocess
import sys
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import tiny_tokenizer
from tokenizers import decoders, models

from treadle.runtime.text.tokenizer import Tokenizer, TokenizerError, TokenizerFacts, surround

DIVERSE = [
    "Hello, world! It's 12345 and ½.",
    "  leading, trailing  \n\n\t\r\n x",
    "Repeat: 👩🏽‍🚀 龘 𝄞 é",
    "日本語のテキスト、العربية ١٢٣, עברית",
    "def f(x):\n    return x**2  # \U0001d7d9\U0001d7da\n",
    "e\u0301 \u200b\u200d\ufeff\u3000\u2028 \ufffd \x00\x7f",
]


@pytest.mark.parametrize("text", DIVERSE)
def test_round_trip(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_round_trip_of_any_text(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1)))
def test_decode_of_any_tokens_is_the_librarys(ids):
    tokenizer = tiny_tokenizer()
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer.core.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_read_and_skipped():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"
    assert tokenizer.special_ids == {0, 1, 2}


def test_tokens_alone_are_readable_and_exact():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("𝄫")
    assert len(ids) > 1
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "𝄫".encode()
    for token_id in ids:
        raw = tokenizer.token_bytes(token_id)
        assert tokenizer.token_text(token_id) == "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    assert tokenizer.token_text(tokenizer.encode(" the")[0]) == " the"


def test_ids_that_no_token_has_read_as_nothing():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode([tokenizer.vocab_size, 10**12, -1]) == ""


def test_surround_takes_tokens_that_template_syntax_would_misread():
    core = tokenizers.Tokenizer(models.BPE({"<a:1>": 0, "$B": 1, "x": 2}, []))
    core.decoder = decoders.ByteLevel()
    surround(core, [0], [1])
    tokenizer = Tokenizer(core, TokenizerFacts())
    assert tokenizer.encode("x") == [0, 2, 1]
    assert tokenizer.encode("x", add_special_tokens=False) == [2]


def test_unknown_decoder_is_refused_by_name():
    core = tokenizers.Tokenizer(models.BPE())
    core.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"WordPiece.*ByteLevel"):
        Tokenizer(core, TokenizerFacts())
    core = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(TokenizerError, match="no decoder"):
        Tokenizer(core, TokenizerFacts())


def test_added_tokens_of_a_byte_level_vocabulary_are_plain_text():
    core = tokenizers.Tokenizer.from_str(tiny_tokenizer().core.to_str())
    core.add_tokens(["<é>"])
    tokenizer = Tokenizer(core, TokenizerFacts())
    assert tokenizer.decode(tokenizer.encode("a<é>b")) == "a<é>b"


def test_import_is_quick_and_needs_no_torch():
    program = (
        "import sys; import treadle.runtime.text.directory, treadle.runtime.text.vocabulary, "
        "treadle.runtime.text.output, treadle.runtime.text.prompt, treadle.runtime.text.template; "
        "assert 'torch' not in sys.modules"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
    assert time.monotonic() - started < 3.0


def test_places_of_a_text_as_tokens():
    tokenizer = tiny_tokenizer()
    text = "the <|im_start|>dog, 日本"
    places = [text.index(part) for part in ("the", "<|im", "dog", "本")]
    ids, at = tokenizer.encode_at(text, [*places, len(text)])
    assert ids == tokenizer.encode(text)
    assert [tokenizer.decode(ids[:token], False) for token in at[:3]] == ["", "the ", "the <|im_start|>"]
    assert tokenizer.decode(ids[: at[3]]).startswith("the dog, ")
    assert len(at) == 4
