"""Scores of lm-evaluation-harness through the server, beside those that transformers gives on the same weights.

``python tests/lmeval/compare.py`` from the root, with lm-eval and accelerate installed; no network but the package
registry for the model. Prints a line for each score, and ends with exit code 1 if two differ. Not run by pytest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from treadle.conf.load import compose
from treadle.graph.fetch import fetch

HERE = Path(__file__).parent
TASKS = ["treadle_capitals", "treadle_sums"]
SERVER = ("model.dtype=float32", "passes.quantize=none", "passes.compile=false", "model.max_len=2048", "serve.port=0")
FIELDS = ("acc", "acc_norm", "exact_match")


def scores(model: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the scores of every task and the log-probability of every choice, by name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        batch_size=1,
        bootstrap_iters=0,
        log_samples=True,
    )
    named = {
        f"{task}/{name}": value
        for task, values in found["results"].items()
        for key, value in values.items()
        if (name := key.partition(",")[0]) in FIELDS
    }
    for task, samples in found["samples"].items():
        for sample in samples:
            for i, response in enumerate(sample["filtered_resps"]):
                if isinstance(response, tuple | list):
                    named[f"{task}/{sample['doc_id']}/{i}"] = float(response[0])
                else:
                    named[f"{task}/{sample['doc_id']}/{response!r}"] = 1.0
    return named


def through_transformers(checkpoint: Path, folder: Path) -> dict[str, float]:
    """Return the scores of the checkpoint in transformers, and leave its tokenizer in ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(checkpoint.parent), "gguf_file": checkpoint.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32").eval()
    return scores("hf", {"pretrained": model, "tokenizer": tokenizer, "device": "cpu"})


def through_treadle(folder: Path, *overrides: str) -> dict[str, float]:
    """Return the scores through a server, which gets token ids and is asked for echo and log-probabilities."""
    command = [sys.executable, "-P", "-m", "treadle.serve", "serve", *SERVER, *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"answers at (http\S+)/v1", line)))
            arguments = {"model": "smollm2", "base_url": f"{url}/v1/completions", "tokenizer": str(folder)}
            return scores("local-completions", arguments | {"num_concurrent": 4, "tokenized_requests": True})
        finally:
            server.terminate()


def main(overrides: list[str]) -> int:
    """Compare; ``overrides`` are more of the server's. Returns the exit code."""
    package = compose().model.package
    assert package is not None
    with tempfile.TemporaryDirectory() as name:
        direct = through_transformers(fetch(package), Path(name))
        served = through_treadle(Path(name), *overrides)
    answers = [key for key in direct if key.count("/") == 1]
    for key in answers:
        print(f"{key:<32} transformers {direct[key]:.4f}   treadle {served.get(key, float('nan')):.4f}")
    others = direct.keys() - answers
    same = others == served.keys() - answers
    worst = max((abs(direct[key] - served[key]) for key in others & served.keys()), default=float("nan"))
    print(f"{len(others)} log-probabilities and texts: {'the same' if same else 'different'} keys, worst {worst:.2e}")
    return 0 if same and worst < 1e-2 and all(direct[key] == served.get(key) for key in answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
