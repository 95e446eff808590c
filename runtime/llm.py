"""Offline generation: a model, prompts in, answers out, all in this process. In the shape of vLLM's LLM class."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from treadle.conf.load import compose, model_overrides
from treadle.runtime.completion import RequestMetrics, RequestOutput, request_output
from treadle.runtime.driver import Answer, Driver, StepEngine
from treadle.runtime.keywords import llm_overrides, refuse_arguments
from treadle.runtime.progress import AnswerBar, PhaseBars
from treadle.runtime.request import Request, RequestError, SamplingParams, SessionHint, spread
from treadle.runtime.text.hf_tokenizer import HFTokenizer
from treadle.runtime.text.load import load_tokenizer
from treadle.runtime.text.output import Delta
from treadle.runtime.text.prompt import Limits, Prompt, PromptParts, many_parts, prepare, prompt_parts
from treadle.runtime.text.template import ChatTemplate, chat_template
from treadle.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from treadle.graph.resolve import Resolved

Message = Mapping[str, Any]
Sessions = SessionHint | Sequence[SessionHint | None] | None
Each = TypeVar("Each")


class LLM:
    """A model in this process.

    ``model`` is a directory, a .gguf file or the name of a configured model; None takes the default one. ``overrides``
    are configuration in Hydra's syntax, as on the command line; vLLM's keywords (``max_model_len=4096``) mean the
    same as theirs, or are refused by name. Not for use by several threads at once.

    Raises: ConfigError for a configuration that cannot be served, before any weight is read.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        overrides: Sequence[str] = (),
        *,
        config_dir: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        chosen = [] if model is None else model_overrides(str(model))
        overrides = [overrides] if isinstance(overrides, str) else overrides
        deployment = compose(
            [*chosen, *llm_overrides(keywords, None if model is None else str(model)), *overrides], config_dir
        )
        from treadle.graph.resolve import refuse_elsewhere, resolve

        with PhaseBars() as bars:
            resolved = resolve(deployment, bars)
        refuse_elsewhere(resolved)
        self._open(*_build(resolved, load_tokenizer(resolved.source, resolved.deployment.model.sampling)))

    @classmethod
    def from_resolved(cls, resolved: Resolved, tokenizer: Tokenizer | None = None) -> Self:
        """Return an LLM of a deployment that is resolved already; ``tokenizer``: its own, if it is loaded already."""
        return cls.from_parts(
            *_build(resolved, tokenizer or load_tokenizer(resolved.source, resolved.deployment.model.sampling))
        )

    @classmethod
    def from_parts(cls, engine: StepEngine, tokenizer: Tokenizer, limits: Limits) -> Self:
        """Return an LLM over an engine that exists already."""
        llm = cls.__new__(cls)
        llm._open(engine, tokenizer, limits)
        return llm

    def _open(self, engine: StepEngine, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._driver = Driver(engine, tokenizer)
        self._numbers = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        session: Sessions = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return one output for each prompt, in their order; it holds ``n`` answers.

        A list of ints is one prompt of token ids; a dict may hold a ``cache_salt`` beside its ``prompt``.
        ``sampling_params`` is one for all prompts or one for each; None takes what the model recommends. ``session``
        are hints about the session that a prompt belongs to, one for all or one for each. An answer that would not fit
        in the context is shortened. ``use_tqdm`` shows a progress bar in a terminal. ``others`` are vLLM's other
        arguments, as far as they ask for nothing.

        Raises: RequestError for a prompt or parameters that cannot run, before any of them does.
        """
        refuse_arguments(others)
        return self._generate(many_parts(prompts), sampling_params, use_tqdm, session)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        session: Sessions = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return one output for each conversation: a list of messages (OpenAI's shape), or a list of such lists.

        ``chat_template`` is Jinja source that replaces the model's own; ``chat_template_kwargs`` are its variables.
        ``cache_salt`` is every conversation's; ``session`` are hints as for ``generate``.
        ``continue_final_message`` leaves the last message open, for the answer to go on with it; it takes
        ``add_generation_prompt=False``.

        Raises: RequestError as ``generate``, and for messages that the template refuses.
        """
        refuse_arguments(others)
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        template = self._template(chat_template)
        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "extra": chat_template_kwargs,
        }
        prompts = []
        for conversation in cast("Sequence[Sequence[Message]]", conversations):
            text = template.render(conversation, **how)
            seams = template.seams(conversation, text, **how) if self._limits.boundaries else ()
            prompts.append(PromptParts(text, None, cache_salt, seams))
        return self._generate(prompts, sampling_params, use_tqdm, session, add_special_tokens=False)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[Delta]:
        """Yield what each step adds to the answer of one prompt. Ending the iteration early frees its place.

        Raises: RequestError at once if the prompt or the parameters cannot run.
        """
        parts = prompt_parts(prompt, "prompt")
        params = self._params(sampling_params, 1)[0]
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one answer; n takes 1 here, generate takes more", "n")
        request = self._request(parts, params, None, "prompt", add_special_tokens)
        return self._deltas(request)

    def get_tokenizer(self) -> HFTokenizer:
        """Return the tokenizer, with the methods that transformers gives it."""
        return HFTokenizer(self._tokenizer.core, self._tokenizer.facts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``."""
        return self._tokenizer.encode(text, add_special_tokens)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the checkpoint recommends and ``model.sampling`` says."""
        return SamplingParams(**self._tokenizer.facts.sampling)

    def close(self) -> None:
        """Abort what runs and release the engine. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[PromptParts],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        session: Sessions,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params, len(prompts))
        hints = _one_each("session", session, len(prompts))
        requests = [
            self._request(parts, chosen, hint, f"prompts[{i}]", add_special_tokens)
            for i, (parts, chosen, hint) in enumerate(zip(prompts, params, hints))
        ]
        groups = [spread(request) for request in requests]
        choices = [choice for group in groups for choice in group]
        finished: dict[str, Answer] = {}
        with AnswerBar(len(choices), use_tqdm) as bar, closing(self._driver.run(choices)) as steps:
            for answers in steps:
                before = len(finished)
                finished |= {answer.request.id: answer for answer in answers if answer.processor.finished}
                num_tokens = sum(len(delta.token_ids) for answer in answers for delta in answer.deltas)
                bar.advance(num_tokens, len(finished) - before)
        outputs = []
        for request, parts, group in zip(requests, prompts, groups):
            whole = [finished[choice.id] for choice in group]
            metrics = RequestMetrics.over([answer.metrics() for answer in whole])
            outputs.append(request_output(request.id, parts.text, [answer.processor for answer in whole], metrics))
        return outputs

    def _deltas(self, request: Request) -> Iterator[Delta]:
        with closing(self._driver.run([request])) as steps:
            for answers in steps:
                for answer in answers:
                    yield from answer.deltas

    def _request(
        self,
        parts: PromptParts,
        params: SamplingParams,
        session: SessionHint | None,
        field: str,
        add_special_tokens: bool,
    ) -> Request:
        if self._closed:
            raise RuntimeError("this LLM is closed")
        prompt: str | Sequence[int] = parts.text if parts.text is not None else parts.ids or ()
        return prepare(
            self._tokenizer,
            prompt,
            params,
            self._limits,
            request_id=str(next(self._numbers)),
            add_special_tokens=add_special_tokens,
            clamp=True,
            field=field,
            cache_salt=parts.cache_salt,
            session=session,
            seams=parts.seams,
        )

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * num_prompts
        params: Sequence[SamplingParams] = _one_each("sampling_params", given, num_prompts)
        wrong = [each for each in params if not isinstance(each, SamplingParams)]
        if wrong:
            message = f"{reprlib.repr(wrong[0])} is no SamplingParams; SamplingParams(temperature=0) makes some"
            raise RequestError(message, "sampling_params")
        return params

    def _template(self, source: str | None) -> ChatTemplate:
        facts = self._tokenizer.facts
        if source is not None:
            return ChatTemplate(source, facts.template_tokens)
        return chat_template(facts.chat_templates, facts.template_tokens)


def _one_each(name: str, given: Each | Sequence[Each], num_prompts: int) -> Sequence[Each]:
    """Return what belongs to each prompt. Raises RequestError if there are more or fewer."""
    if not isinstance(given, list | tuple):
        return [cast("Each", given)] * num_prompts
    if len(given) != num_prompts:
        message = f"{name} has {len(given)} entries for {num_prompts} prompts; give one, or one for each"
        raise RequestError(message, name)
    return given


def limits_of(resolved: Resolved) -> Limits:
    """Return what the requests of a deployment may ask for."""
    plan = resolved.plan
    return Limits(max_len=plan.max_len, vocab=resolved.spec.vocab, boundaries=plan.state.needs_checkpoints)


def _build(resolved: Resolved, tokenizer: Tokenizer) -> tuple[StepEngine, Tokenizer, Limits]:
    """Return the parts of an LLM; phases that last show a bar in a terminal."""
    from treadle.runtime.build import build_engine

    with PhaseBars() as bars:
        return build_engine(resolved, bars), tokenizer, limits_of(resolved)
