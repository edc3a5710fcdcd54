"""The `lm` object: from a checkpoint to text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args, overload

import torch

from fsdfm.checkpoint import Checkpoint, load_model, require_finite
from fsdfm.generate.budget import seconds_per_call
from fsdfm.generate.config import SamplerConfig, SamplerOptions, check_options
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.generate.request import Begin, Damage, PromptEncoder, Request
from fsdfm.generate.result import Generation, State, pieces_of
from fsdfm.generate.run import GenerationRun, blocks_of, least_known
from fsdfm.model import CausalHead, multiplies_bfloat16
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import Precision, Runtime, RuntimeConfig, free_threads

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Corruption", "LanguageModel", "Stream", "load"]

_GROUP = 16  # rows on their way at a time; it changes no text


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    precision: Precision | Literal["int8"] = "float32",
    threads: int = 0,
) -> LanguageModel:
    """The language model in a folder, or one that ships with the package; without a name the best of these.

    path        a checkpoint; a run, whose newest one is taken; "fewstep" or "parent": an embedded model
    device      auto, cpu, cuda, cuda:1, mps
    precision   float32; bfloat16: faster on a GPU or CPU that has it, slower on others, of which `lm.warnings` tells;
                auto: bfloat16 where the device has it, else float32; int8: 8-bit weights, faster on a CPU
    threads     CPU threads; 0: as many as torch has and the machine has free (`fsdfm.runtime.threads`)
    """
    if path is not None and not isinstance(path, str | Path):
        raise ValueError(f"the model is {path!r:.80}; allowed are a folder and the name of an embedded model")
    if precision not in (*get_args(Precision), "int8"):
        raise ValueError(f"precision is {precision!r:.80}; allowed are {', '.join(get_args(Precision))}, int8")
    if precision == "int8" and device not in ("auto", "cpu"):
        raise ValueError(f"precision is int8 and device {device!r}; allowed is cpu: on a GPU use bfloat16")
    if not threads and device in ("auto", "cpu"):
        threads = free_threads(torch.get_num_threads())
    config = RuntimeConfig(device=device, precision="float32", threads=threads)
    if precision == "int8":
        config = replace(config, device="cpu")
    runtime = Runtime(config)
    if precision == "auto" and runtime.device.type == "cpu":
        precision = "bfloat16" if multiplies_bfloat16() else "float32"
    here = runtime.device.type == "cpu" and precision in ("int8", "bfloat16")
    if not here and precision != "int8":
        runtime = Runtime(replace(config, precision=precision))
    rounded = cast(Literal["float32", "bfloat16", "int8"], precision if here else "float32")
    lm = LanguageModel(load_model(path, device=runtime.device, precision=rounded), runtime=runtime)
    if rounded == "bfloat16" and not multiplies_bfloat16():
        lm.warnings = ("this CPU does not multiply bfloat16, which is slower here than float32; use precision auto",)
    return lm


@dataclass(frozen=True)
class Corruption:
    """A text with some tokens replaced by noise: what a repair is tested with (the paper's appendix D.4)."""

    text: str
    tokens: tuple[int, ...]
    original: tuple[int, ...]
    damaged: tuple[bool, ...]

    def recovered(self, tokens: Sequence[int]) -> float:
        """The share of the damaged tokens that a repair brought back."""
        pairs = zip(self.original, tokens, self.damaged, strict=True)
        return sum(a == b for a, b, damaged in pairs if damaged) / sum(self.damaged)


class Stream(Iterator[State]):
    """The states of a text, one after the other; `result` walks to the end and is what came of it."""

    def blocks(self) -> Iterator[str]:
        """The text block by block, each as soon as it is done; joined they are the text."""
        decode, last = self._run.checkpoint.tokenizer.decode, self._run.blocks[-1].stop
        before, pending, written = list[int](), list[int](), 0
        stops = (self._run.blocks[state.block].stop for state in self._states if state.done)
        for stop in chain(stops, [last]):  # what is given at the end takes no steps
            pending += self._run.tokens(0, written, stop)
            written = stop
            text = decode(before + pending)[len(decode(before)) :]  # a first token may lose the space before its word
            if text and (not text.endswith("\ufffd") or stop == last):  # else a character is cut
                before, pending = pending, []
                yield text

    @property
    def num_blocks(self) -> int:
        """Blocks, or canvases, of the text, if it does not end before."""
        return len(self._run.blocks)

    def __init__(self, run: GenerationRun):
        self._run = run
        self.steps = run.steps
        self._states = run.run()

    def __next__(self) -> State:
        return self._run.state(next(self._states), 0)

    @property
    def result(self) -> Generation:
        """The finished text."""
        for _ in self._states:
            pass
        return self._run.results()[0]


class LanguageModel:
    """Text in, text out.

        lm = fsdfm.load("runs/tiny-dfm")
        print(lm.generate("Once upon a time", steps=8).text)

    Every method takes the keyword arguments of `SamplerConfig`: steps, target, seed, temperature, top_p, top_k,
    jump, grid, start, renoise, cache, keep_states. A text depends on its request and the settings, never on what else
    is in the batch.

    Threads may share one: a call keeps its state to itself, and the weights are only read. On a CPU so may a process
    and its forks: a child writes the same texts with one thread. On a GPU children load their own (`multiprocessing`
    with spawn).

    begin   "document": position 0 holds the token that begins a document, given; "anywhere": nothing does
    """

    def __init__(self, checkpoint: Checkpoint, *, runtime: Runtime | None = None):
        self.checkpoint = checkpoint
        self.warnings: tuple[str, ...] = ()  # what a user of it should know
        self.runtime = runtime or Runtime(RuntimeConfig(device="cpu"))
        require_finite(checkpoint.model)
        self.network = BatchInvariant(checkpoint.model, self.runtime)
        self.encoder = PromptEncoder(
            checkpoint.tokenizer,
            checkpoint.bos_id,
            needs_bos=getattr(checkpoint.model.config, "next_token", False),
            length=checkpoint.length,
            canvas=getattr(checkpoint.model.config, "canvas", None),
        )

    def __repr__(self) -> str:
        return (
            f"LanguageModel({self.checkpoint.loaded or type(self.checkpoint.model).__name__}, on {self.runtime.device})"
        )

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        suffix: str | None = None,
        length: int | None = None,
        begin: Begin = "document",
        num: None = None,
        on_block: Callable[[str], object] | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        suffix: str | None = None,
        length: int | None = None,
        begin: Begin = "document",
        num: int = 1,
        **options: Unpack[SamplerOptions],
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        suffix: str | None = None,
        length: int | None = None,
        begin: Begin = "document",
        num: int | None = None,
        on_block: Callable[[str], object] | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Generation | list[Generation]:
        """Write a text: after a prompt, before a suffix, between both, or from nothing.

        prompt   a text, or several
        length   tokens in all, what is given included; the training length unless said; more takes several blocks
        num      how many texts of each prompt; with it, or with several prompts, the answer is a list
        on_block   is given one text's blocks, or canvases, as soon as each is done; joined they are the text
        options  steps, target, seed, temperature, final_temperature, top_p, top_k, jump, grid, start,
                 renoise, cache, keep_states, curve: see `SamplerConfig`
        """
        single = prompt is None or isinstance(prompt, str)
        prompts: list[str | None] = [None] if prompt is None else [*_texts("prompt", prompt)]
        if on_block is not None:
            if num is not None or not single:
                raise ValueError("on_block follows one text; leave num and further prompts out")
            stream = self.stream(prompts[0], suffix=suffix, length=length, begin=begin, **options)
            for text in stream.blocks():
                on_block(text)
            return stream.result
        requests = [self.encoder.continuation(each, suffix, length=length, begin=begin) for each in prompts]
        return self._answer(requests, num if single or num is not None else 1, options)

    @overload
    def infill(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too; the first one counts
        self, text: str, *, begin: Begin = "document", num: None = None, **options: Unpack[SamplerOptions]
    ) -> Generation: ...
    @overload
    def infill(
        self, text: str | Sequence[str], *, begin: Begin = "document", num: int = 1, **options: Unpack[SamplerOptions]
    ) -> list[Generation]: ...
    def infill(
        self,
        text: str | Sequence[str],
        *,
        begin: Begin = "document",
        num: int | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Generation | list[Generation]:
        r"""Fill the gaps of a text, or of several: `[[6]]` stands for six tokens, `\[[` for a literal `[[`.

        options   steps, target, seed, temperature, final_temperature, top_p, top_k, jump, grid, start,
                  renoise, cache, keep_states, curve: see `SamplerConfig`
        """
        requests = [self.encoder.gaps(each, begin=begin) for each in _texts("text", text)]
        return self._answer(requests, num if isinstance(text, str) or num is not None else 1, options)

    @overload
    def repair(  # type: ignore[overload-overlap]  # as above
        self,
        text: str | Sequence[int],
        damaged: Damage | None = None,
        *,
        begin: Begin = "document",
        num: None = None,
        **options: Unpack[SamplerOptions],
    ) -> Generation: ...
    @overload
    def repair(
        self,
        text: str | Sequence[int] | Sequence[str],
        damaged: Damage | None = None,
        *,
        begin: Begin = "document",
        num: int = 1,
        **options: Unpack[SamplerOptions],
    ) -> list[Generation]: ...
    def repair(
        self,
        text: str | Sequence[int] | Sequence[str],
        damaged: Damage | None = None,
        *,
        begin: Begin = "document",
        num: int | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Generation | list[Generation]:
        """Repair a text, or its tokens, or several texts blind; `replaced` says which tokens changed.

        damaged   known damage: a bool per token, token positions, or spans (begin, end) of characters; these are
                  written anew from noise and the rest stands fast. None: blind; so are the tokens that the model finds
                  surely wrong given all others (`marked`), about one right token in 200 among them
                  (`fsdfm.generate.blind`)
        options   steps, target, seed, temperature, final_temperature, top_p, top_k, jump, grid, start,
                  renoise, cache, keep_states, curve: see `SamplerConfig`
        """
        if isinstance(text, str) or not _holds_texts(text):
            one = cast("str | Sequence[int]", text)
            return self._answer([self.encoder.damaged(one, damaged, begin=begin)], num, options)
        if damaged is not None:
            raise ValueError("known damage belongs to one text; repair such texts one by one, or all of them blind")
        requests = [self.encoder.damaged(each, None, begin=begin) for each in _texts("text", text)]
        return self._answer(requests, 1 if num is None else num, options)

    def sampler_config(self, request: Request | None = None, /, **options: Unpack[SamplerOptions]) -> SamplerConfig:
        """How these options sample: what they leave open is the model's own advice, if it has any.

        request   of which an automatic budget is: the less is left to write, the fewer calls; None: one of the
                  training length of which nothing is given
        """
        check_options(options)
        advice = self.checkpoint.facts.get("sampling")
        config = SamplerConfig(**options).advised(advice)
        if config.steps != "auto":
            return config
        length = self.checkpoint.length if request is None else len(request.tokens)
        share, turns = (0.0, 1) if request is None else least_known(request, blocks_of(self.checkpoint, length))
        if (start := config.fixed_start()) is not None:
            share = float(self.checkpoint.path.schedule.kappa(torch.tensor(start, dtype=torch.float64)))
        in_order = isinstance(self.network.joint, CausalHead)
        config = config.budgeted(lambda: turns * seconds_per_call(self, length), share=share, in_order=in_order)
        return config.advised(advice)

    def stream(
        self,
        asked: str | Request | None = None,
        *,
        suffix: str | None = None,
        length: int | None = None,
        begin: Begin = "document",
        **options: Unpack[SamplerOptions],
    ) -> Stream:
        """The states of one text as they come: of a prompt's continuation, or of a request of `lm.encoder`.

        suffix, length, begin   as in `generate`; a request has them already
        """
        if isinstance(asked, Request) and (suffix, length, begin) != (None, None, "document"):
            raise ValueError("a request says its suffix, length and beginning itself; leave them out")
        if isinstance(asked, Request):
            request = asked
        else:
            request = self.encoder.continuation(asked, suffix, length=length, begin=begin)
        config = self.sampler_config(request, **options)
        return Stream(GenerationRun(self.checkpoint, self.network, [request], config=config))

    def run(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[SamplerOptions],
    ) -> list[Generation]:
        """Answer any requests, ragged ones too, in their order; those of equal length go together.

        progress   is told of the steps of the texts on their way: after each, which block it was of how many
        """
        answers: dict[int, Generation] = {}
        for config, group in self._groups(requests, options):
            texts = GenerationRun(self.checkpoint, self.network, [requests[index] for index in group], config=config)
            for state in texts.run():
                if progress is not None:
                    progress(state.block + 1, len(texts.blocks))
            answers |= dict(zip(group, texts.results(), strict=True))
        return [answers[index] for index in range(len(requests))]

    def corrupt(self, text: str, share: float, *, seed: int = 0) -> Corruption:
        """Replace a share of a text's tokens by uniform ones, at least one of them."""
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; allowed are 0 < share <= 1")
        original = self.encoder.damaged(text).tokens[1:]  # without the first, which begins the document
        noise = Noise(seed, [0])
        order = noise.uniform(Purpose.DATA, len(original)).argsort()[0]
        damaged = torch.zeros(len(original), dtype=torch.bool)
        damaged[order[: max(1, round(share * len(original)))]] = True
        other = noise.integers(Purpose.DATA, len(original), self.checkpoint.tokenizer.vocab_size - 1, step=1)[0]
        other += other >= torch.tensor(original)  # every token but the right one
        tokens = tuple(torch.where(damaged, other, torch.tensor(original)).tolist())
        return Corruption(self.checkpoint.tokenizer.decode(tokens), tokens, original, tuple(damaged.tolist()))

    def pieces(self, text: str) -> tuple[str, ...]:
        """The text of every token of a text: what `damaged` counts."""
        return pieces_of(self.checkpoint.tokenizer, self.checkpoint.tokenizer.encode(text))

    def _groups(
        self, requests: Sequence[Request], options: SamplerOptions
    ) -> Iterator[tuple[SamplerConfig, list[int]]]:
        """Requests that go together, of equal length and budget, some at a time: their settings and indices."""
        config = None if options.get("steps") == "auto" else self.sampler_config(**options)
        same: dict[tuple[int, int], list[int]] = {}
        configs: dict[int, SamplerConfig] = {}
        known: dict[Request, SamplerConfig] = {}  # of copies of a request one is asked for
        for index, request in enumerate(requests):
            own = config
            if own is None:
                first = replace(request, copy=0)
                own = known[first] = known.get(first) or self.sampler_config(first, **options)
            steps = own.num_steps()
            configs[steps] = own  # they differ in their steps alone
            same.setdefault((len(request.tokens), steps), []).append(index)
        for (_, steps), group in same.items():
            for start in range(0, len(group), _GROUP):
                yield configs[steps], group[start : start + _GROUP]

    def _answer(
        self, requests: Sequence[Request], num: int | None, options: SamplerOptions
    ) -> Generation | list[Generation]:
        """One text, or `num` of each request."""
        results = self.run(
            [copy for request in requests for copy in request.copies(1 if num is None else num)], **options
        )
        return results[0] if num is None else results


def _holds_texts(value: object) -> bool:
    """Whether this is a list of texts, not one text's tokens."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(each, str) for each in value)


def _texts(name: str, value: object) -> list[str]:
    """The text, or the several, that a caller gives."""
    if isinstance(value, str):
        return [value]
    if not _holds_texts(value):
        raise ValueError(f"{name} is {value!r:.80}; allowed are a text and a list of texts")
    return [*cast("Sequence[str]", value)]
