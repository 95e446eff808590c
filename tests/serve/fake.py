"""A server whose engine process is real and whose engine is not: it repeats the prompt, one token a step.

Of every prompt it says that three tokens were cached, and of the last one that another salt's would have been.

``python fake.py serve OPTIONS`` runs the HTTP process, which starts ``python fake.py engine FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from treadle.conf.schema import ServeConfig
from treadle.runtime.protocol import Endpoints
from treadle.runtime.request import (
    HINTS,
    Abort,
    KindStats,
    Metric,
    Output,
    Request,
    RequestError,
    Stats,
    TokenLogprob,
)
from treadle.runtime.text.prompt import Limits
from treadle.runtime.text.tokenizer import Tokenizer, TokenizerFacts
from treadle.runtime.worker import serve_engine
from treadle.serve.server import Plan, serve

VOCAB = 258
EOS = 256
MAX_LEN = 2048
OPTIONS = {"slots": 4, "step_s": 0.0, "load_s": 0.0, "max_queue": 64, "fail": None, "drain_s": 20.0}
SERVE = [spec.name for spec in fields(ServeConfig)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class BadCheckpointError(ValueError):
    __module__ = "treadle.fake"


class RepeatEngine:
    """Token i of an answer is the prompt's token i, round and round; the prompt's EOS ends it."""

    def __init__(self, options: dict, on_phase) -> None:
        self.options = options
        self.waiting: list[Request] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.steps = self.tokens = 0
        self.hints = dict.fromkeys(HINTS, 0)
        self.ready: list[Output] = []
        for done in range(4):
            on_phase("weights", done, 4)
            time.sleep(options["load_s"] / 4)
            if options["fail"] == "user":
                raise BadCheckpointError("model.path=x: tensor embed.weight is missing")
            if options["fail"] == "crash":
                raise RuntimeError("the disk is on fire")

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.ready)

    def add(self, request: Request) -> None:
        if request.prompt[0] == ord("\x01"):
            raise RequestError("the engine refuses this prompt", "prompt")
        session = request.session
        for hint in HINTS if session is not None else ():
            self.hints[hint] += bool(getattr(session, "pin_s" if hint == "pin" else hint))
        if session is not None and session.prefetch:
            self.ready.append(Output(id=request.id, token_ids=[], finish_reason="length", num_cached_tokens=3))
            return
        self.waiting.append(request)

    def abort(self, abort: Abort) -> None:
        self.waiting = [request for request in self.waiting if request.id != abort.id]
        self.running.pop(abort.id, None)

    def step(self) -> list[Output]:
        self.steps += 1
        time.sleep(self.options["step_s"])
        while self.waiting and len(self.running) < self.options["slots"]:
            request = self.waiting.pop(0)
            self.running[request.id] = (request, 0)
        outputs, self.ready = self.ready, []
        for request, count in list(self.running.values()):
            if request.prompt[0] == ord("\x02"):
                raise RuntimeError("an illegal instruction in the kernel")
            token = request.prompt[count % len(request.prompt)]
            reason = "stop" if token == EOS else "length" if count + 1 == request.params.max_tokens else None
            outputs.append(self._output(request, token, count, reason))
            self.tokens += 1
            if reason is None:
                self.running[request.id] = (request, count + 1)
            else:
                del self.running[request.id]
        return outputs

    def _output(self, request: Request, token: int, count: int, reason) -> Output:
        wanted, of_prompt = request.params.logprobs, request.params.prompt_logprobs
        logprobs = None if wanted is None else [self._logprob(token, -0.5, wanted)]
        prompt = None
        if of_prompt is not None and count == 0:
            prompt = [self._logprob(each, -0.25 * i, of_prompt) for i, each in enumerate(request.prompt[1:], start=1)]
        length, salted = len(request.prompt), request.cache_salt is not None
        cached = min(3, length) if count == 0 else 0
        missed = {"cold": max(length - 4, 0), "salt" if salted else "below_granularity": int(length > 3)}
        if request.params.skip_reading_prefix_cache:
            missed = {"opted_out": length}
        return Output(
            id=request.id,
            token_ids=[token],
            logprobs=logprobs,
            prompt_logprobs=prompt,
            finish_reason=reason,
            num_cached_tokens=cached,
            cached_tokens={"device": cached - 1, "host": 1} if cached else {},
            missed_tokens=missed if cached else {},
            queue_s=0.0 if count == 0 else None,
        )

    @staticmethod
    def _logprob(token: int, logprob: float, count: int) -> TokenLogprob:
        """The token itself is the likeliest, and the ones behind it follow."""
        top = [(token + i) % VOCAB for i in range(count)]
        return TokenLogprob(logprob, 1, top, [logprob - i for i in range(count)])

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            steps=self.steps,
            pages_total=10,
            session_hints=self.hints,
            state_kinds={"full": KindStats(used_bytes=100 * len(self.running))},
            tiers=[Metric("kv_offload_load_bytes", "Bytes copied to the device", "counter", 17, {"tier": "host"})],
        )


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: _byte(c))
    core = Core(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["</s>", "<s>"])
    return Tokenizer(core, TokenizerFacts(eos_ids=(EOS,), chat_templates={"default": TEMPLATE}))


def _byte(char: str) -> int:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return ord(char) if ord(char) in printable else rest[ord(char) - 256]


def run_server(options: dict) -> int:
    config = ServeConfig(port=0, **{key: options[key] for key in SERVE if key in options})
    plan = Plan(
        config=config,
        name="fake",
        fingerprint="fp_fake",
        limits=Limits(max_len=MAX_LEN, vocab=VOCAB, boundaries=True),
        capacity=options["slots"] + options["max_queue"],
        load_tokenizer=byte_tokenizer,
        command=lambda endpoints: [sys.executable, __file__, "engine", endpoints.folder],
        deployment=json.dumps(options).encode(),
    )
    return serve(plan, Console(width=120))


def run_engine(folder: str) -> int:
    endpoints = Endpoints(folder)
    options = json.loads(Path(endpoints.deployment).read_bytes())
    print("hello from the engine", file=sys.stderr, flush=True)
    return serve_engine(endpoints, lambda on_phase: RepeatEngine(options, on_phase))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(run_server(OPTIONS | json.loads(sys.argv[2])))
    os._exit(run_engine(sys.argv[2]))
