"""`fsdfm bench generate`: a text in a few network calls, against the machine and against the other ways to write it.

One interleaved run of the sampler that `fsdfm generate` uses, in float32 and with rounded weights, and of what it
is compared with:

    gemm        the trunk's own matrix products, nothing between them: what the machine can do
    trunk       as many bare trunk forwards as the text takes steps: what the network costs
    forward     the network for all logits [1, L, V]
    textbook    the sampler as a textbook writes it (`fsdfm.bench.textbook`)
    1024 steps  the same sampler, 1,024 network calls: 16 are measured and scaled
    causal, crf, ar   joint posteriors and an autoregressive model of the same blocks (`fsdfm.bench.joint`)
    gpt2        an autoregressive model of the same class: `transformers`' GPT-2 small with its key-value cache

Weights are random; no cost depends on them. Memory is the peak of a fresh process that takes one step, the last.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fsdfm.bench.joint import HEADS, autoregressive_jobs, joint_jobs, joint_ratios
from fsdfm.bench.measure import in_fresh_process, peak_mib
from fsdfm.bench.textbook import textbook_sample
from fsdfm.flow import Grid, MixturePath, UniformSource, sample, trajectory
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.model import PRESETS, DiT, ModelConfig, multiplies_bfloat16, to_bfloat16, to_int8
from fsdfm.noise import Noise
from fsdfm.runtime import Runtime, RuntimeConfig, versions
from fsdfm.terminal import moving_bar

__all__ = ["COMPARISONS", "GenerateBench", "bench_generate", "make_model"]

COMPARISONS = ("gemm", "trunk", "textbook", "1024", "int8", "bf16", "causal", "crf", "ar", "gpt2")
TEXTBOOK_BAND = (1.4, 2.3)  # of its own forwards; outside, it is not what others do, and the comparison is void
_MANY, _MEASURED = 1024, 16
_FORWARDS = 2  # full forwards measured, and scaled to the steps
_SWEEP_SECONDS = 20.0  # a size that has taken longer is not repeated
_GPT2_POSITIONS = 1024

_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Job = Callable[[], object]


@dataclass(frozen=True)
class GenerateBench:
    """The setting of the benchmark; the default is the paper's."""

    preset: str = "170m"
    length: int = 1024
    steps: int = 8
    repeats: int = 3
    compare: tuple[str, ...] = COMPARISONS
    batch: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    clock: str = "wall"  # cpu: seconds this process computes, which other work on the machine hardly changes
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the preset's fields

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("steps", self.steps), ("repeats", self.repeats)):
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed are whole numbers >= 1")
        for name, values in (("batch", self.batch), ("lengths", self.lengths)):
            if any(value < 1 for value in values):
                raise ValueError(f"{name} is {','.join(map(str, values))}; allowed are whole numbers >= 1")
        for name in self.compare:
            if name not in COMPARISONS:
                raise ValueError(f"compare has {name!r}; allowed are {', '.join(COMPARISONS)}")
        if self.clock not in _CLOCKS:
            raise ValueError(f"clock is {self.clock!r}; allowed are {', '.join(_CLOCKS)}")
        self.config()

    def config(self) -> ModelConfig:
        """The network: a preset, aware of its step size."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}; allowed are {', '.join(PRESETS)}")
        return ModelConfig.preset(self.preset, **{"conditioning": "step", **self.changes})


def bench_generate(setting: GenerateBench) -> dict[str, Any]:
    """The ratios under their names, and `seconds`, `peak_mib`, `sweeps` they are made of."""
    model = make_model(setting.config())
    seconds = _medians(_jobs(setting, model), setting)
    memory = {
        name: in_fresh_process(_peak_of_a_step, name, setting, torch.get_num_threads()) for name in _remembered(setting)
    }
    return {
        **_ratios(seconds, memory, setting),
        "seconds": seconds,
        "peak_mib": memory,
        "sweeps": _sweep(setting, model),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "setting": asdict(setting),
    }


def make_model(config: ModelConfig, *, seed: int = 0) -> DiT:
    """A model whose weights are all random: none of the zeros that training starts from."""
    model = DiT(config, seed=seed).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not bool(parameter.any()):
            parameter.normal_(0.0, 0.02, generator=generator)
    return model


# --- what is measured -------------------------------------------------------------------------------------------------


def _jobs(setting: GenerateBench, model: DiT) -> dict[str, Job]:
    x_0, steps = _start(setting), setting.steps
    t, h = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1 / steps, dtype=torch.float64)
    jobs: dict[str, Job] = {"ours": lambda: _ours(model, setting)}
    makers: dict[str, Callable[[], dict[str, Job]]] = {
        "gemm": lambda: {"gemm": _products(model, setting.length)},
        "trunk": lambda: {"trunk": lambda: [_quietly(model.trunk, x_0, t, h) for _ in range(steps)]},
        "textbook": lambda: {
            "forward": lambda: [_quietly(model, x_0, t, h) for _ in range(_FORWARDS)],
            "textbook": lambda: textbook_sample(model, x_0, steps),
        },
        "1024": lambda: {"1024 steps": lambda: _first_of_many(model, setting)},
        "int8": lambda: {"int8": _rounded(model, setting, to_int8)},
        "bf16": lambda: {"bf16": _rounded(model, setting, to_bfloat16)} if multiplies_bfloat16() else {},
        **{name: _joint(name, setting) for name in HEADS},
        "ar": lambda: autoregressive_jobs(setting.config(), setting.length),
        "gpt2": lambda: _gpt2(setting.length),
    }
    for name in COMPARISONS:
        if name in setting.compare:
            jobs |= makers[name]()
    return jobs if setting.compare else {}


def _joint(name: str, setting: GenerateBench) -> Callable[[], dict[str, Job]]:
    return lambda: joint_jobs(name, setting.config(), make_model, length=setting.length, steps=setting.steps)


def _start(setting: GenerateBench, *, batch: int = 1) -> Tensor:
    return UniformSource(setting.config().vocab_size).sample(Noise(0, range(batch)), setting.length)


def _network(model: DiT) -> BatchInvariant:
    return BatchInvariant(model, Runtime(RuntimeConfig(device="cpu", precision="float32")))


def _ours(model: DiT, setting: GenerateBench, *, steps: int | None = None) -> Tensor:
    path = MixturePath(UniformSource(model.config.vocab_size))
    grid = Grid.uniform(setting.steps if steps is None else steps)
    return sample(_network(model), path, _start(setting), grid=grid, noise=Noise(0))


def _first_of_many(model: DiT, setting: GenerateBench) -> None:
    """The first of 1,024 steps; the model is asked itself, for a `BatchInvariant` skips the steps that draw nothing."""
    path = MixturePath(UniformSource(model.config.vocab_size))
    walk = trajectory(model, path, _start(setting), grid=Grid.uniform(_MANY), noise=Noise(0))
    for _ in islice(walk, _MEASURED):
        pass


@torch.no_grad()
def _quietly(function: Callable[..., Tensor], *arguments: Tensor) -> None:
    function(*arguments)


def _products(model: DiT, length: int) -> Job:
    """All matrix products of a trunk forward, from the model's own weights, so that they come from memory as there."""
    layers = [layer for block in model.blocks for layer in _linears(block)]
    inputs = {width: torch.randn(length, width) for width in {layer.in_features for layer in layers}}

    def run() -> None:
        for layer in layers:
            _quietly(layer, inputs[layer.in_features])

    return run


def _linears(block: Any) -> list[torch.nn.Linear]:
    return [block.attention.qkv, block.attention.out, block.mlp.into, block.mlp.out]


def _rounded(model: DiT, setting: GenerateBench, rounding: Callable[[DiT], None]) -> Job:
    rounded = copy.deepcopy(model)
    rounding(rounded)
    return lambda: _ours(rounded, setting)


def _gpt2(length: int) -> dict[str, Job]:
    """GPT-2 small with random weights writes as many tokens; nothing where `transformers` is missing."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_positions=max(length, _GPT2_POSITIONS))
    network = GPT2LMHeadModel(config).eval()
    first = torch.full((1, 1), config.eos_token_id)
    options = {"do_sample": True, "use_cache": True, "pad_token_id": config.eos_token_id}

    def run() -> None:
        with torch.no_grad():
            network.generate(
                first,
                attention_mask=torch.ones_like(first),
                min_new_tokens=length - 1,
                max_new_tokens=length - 1,
                **options,
            )

    return {"gpt2": run} if length > 1 else {}


# --- time -------------------------------------------------------------------------------------------------------------


def _medians(jobs: Mapping[str, Job], setting: GenerateBench, *, limit: float | None = None) -> dict[str, float]:
    """Median seconds of each job, all of them once per round; above the limit in all a job is not repeated.

    There is no round to warm up: a job is long against what is allocated once. Hence the first matrix product.
    """
    torch.randn(512, 512) @ torch.randn(512, 512)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    clock = _CLOCKS[setting.clock]
    with moving_bar(Console(), transient=True) as progress:
        task = progress.add_task("bench generate", total=setting.repeats * len(jobs))
        for _ in range(setting.repeats):
            for name, job in jobs.items():
                if limit is None or sum(seconds[name]) < limit:
                    started = clock()
                    job()
                    seconds[name].append(clock() - started)
                progress.advance(task)
    return {name: statistics.median(values) for name, values in seconds.items()}


def trunk_flops(config: ModelConfig, length: int) -> tuple[float, float]:
    """Floating-point operations of a trunk forward over one text: those of the Linears, and those of attention."""
    heads = config.num_heads + 2 * config.kv_heads
    gates = 2 if config.style == "llama" else 1
    weights = config.width * (heads * config.head_width + config.width + (gates + 1) * config.hidden_width)
    return 2.0 * length * config.num_blocks * weights, 4.0 * length**2 * config.num_blocks * config.width


def _ratios(
    seconds: Mapping[str, float], memory: Mapping[str, float | None], setting: GenerateBench
) -> dict[str, float | bool | None]:
    linears, attention = trunk_flops(setting.config(), setting.length)
    steps = setting.steps

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    ours, trunk = seconds.get("ours"), seconds.get("trunk")
    peak = over(linears, seconds.get("gemm"))
    achieved = over((linears + attention) * steps, trunk)
    forwards = seconds["forward"] * steps / _FORWARDS if "forward" in seconds else None
    many = seconds["1024 steps"] * _MANY / _MEASURED if "1024 steps" in seconds else None
    textbook = over(seconds.get("textbook"), forwards)
    return {
        "trunk_gemm_fraction": over(achieved, peak),
        "over_trunk": over(ours, trunk),
        "speedup_over_textbook": over(seconds.get("textbook"), ours),
        "memory_over_textbook": over(memory.get("ours"), memory.get("textbook")),
        "textbook_over_forwards": textbook,
        "textbook_is_void": None if textbook is None else not TEXTBOOK_BAND[0] <= textbook <= TEXTBOOK_BAND[1],
        "speedup_over_gpt2": over(seconds.get("gpt2"), ours),
        "speedup_over_1024_steps": over(many, ours),
        "int8_speedup": over(ours, seconds.get("int8")),
        "bf16_speedup": over(ours, seconds.get("bf16")),
        **joint_ratios(seconds, steps=steps, length=setting.length),
        "int8_memory": over(memory.get("int8"), memory.get("ours")),
        "gemm_gflops": None if peak is None else peak / 1e9,
        "trunk_gflops": None if achieved is None else achieved / 1e9,
    }


# --- how the cost grows -----------------------------------------------------------------------------------------------


def _sweep(setting: GenerateBench, model: DiT) -> dict[str, list[dict[str, float]]]:
    """Seconds of a text and tokens per second, by batch and by length.

    One step is timed, the one whose share of candidates is nearest to the mean of all steps, and scaled.
    """
    jobs: dict[str, Job] = {}
    sizes = [(batch, setting.length) for batch in setting.batch] + [(1, length) for length in setting.lengths]
    for batch, length in sizes:
        jobs[f"{batch} x {length}"] = _one_step(model, setting, batch=batch, length=length)
    seconds = _medians(jobs, setting, limit=_SWEEP_SECONDS) if jobs else {}

    def row(batch: int, length: int) -> dict[str, float]:
        taken = setting.steps * seconds[f"{batch} x {length}"]
        return {"batch": batch, "length": length, "seconds": taken, "tokens_per_second": batch * length / taken}

    return {
        "batch": [row(batch, setting.length) for batch in setting.batch],
        "lengths": [row(1, length) for length in setting.lengths],
    }


def _one_step(model: DiT, setting: GenerateBench, *, batch: int, length: int) -> Job:
    path, noise = MixturePath(UniformSource(model.config.vocab_size)), Noise(0, range(batch))
    left = torch.arange(setting.steps, 0, -1, dtype=torch.float64)  # with k steps left, a share 1/k are candidates
    index = int((1 / left - (1 / left).mean()).abs().argmin())
    times = Grid.uniform(setting.steps).times[index:]
    x_t = path.source.sample(noise, length)

    def run() -> None:
        next(iter(trajectory(_network(model), path, x_t, grid=Grid(times), noise=noise)))

    return run


# --- memory -----------------------------------------------------------------------------------------------------------


def _remembered(setting: GenerateBench) -> list[str]:
    return [name for name in ("textbook", "int8") if name in setting.compare] + (["ours"] if setting.compare else [])


def _peak_of_a_step(name: str, setting: GenerateBench, threads: int) -> float | None:
    torch.set_num_threads(threads)
    model = make_model(setting.config())
    if name == "int8":
        to_int8(model)
    if name == "textbook":
        textbook_sample(model, _start(setting), 2)  # two steps: the last needs less than the others
    else:
        _ours(model, setting, steps=1)  # every position is drawn
    return peak_mib()
