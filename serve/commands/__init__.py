"""The commands of ``treadle`` as a table. Each lives in a module of its own name here, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.conf.schema import PASSES


@dataclass(frozen=True, kw_only=True)
class Option:
    """One ``--name VALUE`` or ``name=VALUE`` of a command. It reaches ``run`` as a keyword: ``max_tokens=128``."""

    name: str
    summary: str
    kind: type = str
    """str, int, float, or bool for a switch"""
    default: Any = None
    choices: tuple[str, ...] = ()
    """the only values that it takes; empty: any"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: ``treadle.serve.commands.NAME.run(resolved, console, **options) -> exit code``.

    ``resolved`` is a ``treadle.graph.resolve.Resolved``; ``words``, if named, is a keyword that gets the free text of
    the command line, joined by spaces, or else that of standard input.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()
    words: str | None = None
    words_unless: str | None = None
    """an option with which no text is needed"""
    computes: bool = True
    """whether it runs the model here, so that the hardware must be this machine's"""
    until_ended: bool = False
    """whether it runs until a signal ends it, which then ends a sweep over it too"""
    asks: str | None = None
    """an option that names a running server. With it nothing is resolved, and instead of ``run``
    ``ask(deployment, console, **options)`` is called"""
    example: str = ""


COMMANDS = (
    Command(
        name="serve",
        summary="answer over HTTP",
        until_ended=True,
        example="treadle serve model=hf model.path=DIR serve.port=8080",
    ),
    Command(
        name="generate",
        summary="continue one prompt, or answer a file of them: input=prompts.jsonl output=answers.jsonl",
        words="prompt",
        words_unless="input",
        options=(
            Option(name="input", summary="file of prompts or messages, a JSON object a line"),
            Option(name="output", summary="file for their answers; a run that was ended goes on where it was"),
            Option(name="max_tokens", summary="tokens to generate at most", kind=int, default=128),
            Option(name="temperature", summary="0 is greedy", kind=float, default=0.0),
            Option(name="seed", summary="of sampling", kind=int),
        ),
        example='treadle generate "The capital of France is" --max-tokens 20',
    ),
    Command(
        name="chat",
        summary="talk to the model in the terminal",
        options=(
            Option(name="system", summary="system message"),
            Option(name="temperature", summary="0 is greedy", kind=float, default=0.7),
        ),
        example="treadle chat model=smollm2",
    ),
    Command(
        name="memory",
        summary="what the deployment takes, byte by byte, and what fits; nothing is loaded",
        options=(Option(name="url", summary="running server whose state memory to show, planned and actual"),),
        asks="url",
        computes=False,
        example="treadle memory model=llama3-8b hardware=h200",
    ),
    Command(
        name="lock",
        summary="write down every resolved choice, to start the same server again with --lock FILE",
        computes=False,
        options=(Option(name="output", summary="file to write instead of the terminal"),),
        example="treadle lock --output server.lock.yaml",
    ),
    Command(
        name="explain",
        summary="what each pass does to the model's graph, how long it takes and what it changes",
        computes=False,
        options=(
            Option(
                name="show", summary="pass whose program to print before and after, as Python", choices=tuple(PASSES)
            ),
            Option(name="prove", summary="check each pass numerically against the graph before it", kind=bool),
        ),
        example="treadle explain --show fuse_add_norm",
    ),
    Command(
        name="bisect",
        summary="name the pass and node where the program parts from the reference",
        example="treadle bisect model=smollm2",
    ),
    Command(
        name="bench",
        summary="measure this machine by a recipe, beside baselines and targets",
        options=(Option(name="output", summary="folder for the results, a JSON file a run", default="."),),
        example="treadle bench bench=cpu",
    ),
)
"""In the order in which help lists them."""
