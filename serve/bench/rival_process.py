"""A rival engine of Python in a process of its own: ``python -m treadle.serve.bench.rival_process SETTINGS``.

It answers every line of standard input; what the engines print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Play = Callable[[list[list[int]], int], list[list[float]]]
"""Takes prompts and a number of tokens, returns the seconds from the start to each token of each prompt."""


def open_transformers(settings: dict[str, Any]) -> Play:
    """Return a player over transformers' model and its cache: a greedy loop, prompts of one length as one batch."""
    torch = import_module("torch")
    transformers = import_module("transformers")
    torch.set_num_threads(settings["threads"])
    model = _transformers_model(transformers, Path(settings["model"]), getattr(torch, settings["dtype"]))

    def play(prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        token_s = []
        with torch.inference_mode():
            start_s, cache, ids = time.perf_counter(), None, torch.tensor(prompts)
            for _ in range(num_tokens):
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                ids.tolist()
                token_s.append(time.perf_counter() - start_s)
        return [token_s] * len(prompts)

    return play


def _transformers_model(transformers: Any, path: Path, dtype: Any) -> Any:
    """Return the model of a directory, or of a GGUF file with its weights dequantised."""
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    from treadle.graph.source import open_source

    source = open_source(path)
    config = transformers.AutoConfig.for_model(**source.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict({name: source.read(name) for name in source.tensors}, strict=False)
    model.tie_weights()
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model.eval()


def open_xllamacpp(settings: dict[str, Any]) -> Play:
    """Return a player over llama.cpp's server inside this process, a slot for each prompt."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_parallel = settings["batch"]
    params.n_ctx = settings["batch"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)

    def one(prompt: list[int], num_tokens: int, start_s: float) -> list[float]:
        token_s: list[float] = []

        def on_chunk(_: object) -> bool:
            token_s.append(time.perf_counter() - start_s)
            return False

        body = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "cache_prompt": False, "stream": True}
        server.handle_completions({**body, "samplers": ["top_k"], "top_k": 1}, on_chunk)
        # A token that ends inside a character is held back: only the first and the last time are sure.
        step_s = (token_s[-1] - token_s[0]) / max(num_tokens - 1, 1)
        return [token_s[0] + index * step_s for index in range(num_tokens)]

    def play(prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        start_s = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: one(prompt, num_tokens, start_s), prompts))

    return play


def main(settings: str) -> None:
    """Load the engine, then play until standard input ends."""
    wanted = json.loads(settings)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    play = {"transformers": open_transformers, "xllamacpp": open_xllamacpp}[wanted["engine"]](wanted)
    print(json.dumps({"version": f"{wanted['engine']} {version(wanted['engine'])}"}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"token_s": play(asked["prompts"], asked["num_tokens"])}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
