"""Text from an exported model without PyTorch: numpy, onnxruntime and tokenizers. This file stands alone.

    python generate.py "Once upon a time" --steps 4 --seed 1

It is copied beside the graph by `fsdfm.adapters.onnx.export_onnx` and imports nothing of fsdfm. The network's trunk is
the ONNX graph; what is drawn, and when, is here, and is what fsdfm draws: the same Philox numbers under the same
addresses, the same step rules (`exact`, `spaced`), the same inverse CDF, so that the same seed gives the same text
(up to the last digits of the network's arithmetic).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PortableModel", "draw", "uniforms"]

Array = NDArray[Any]
_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_RULES = ("exact", "spaced", "sweep")
_SOURCE, _SOURCE_KIND, _COIN, _DESTINATION, _PHASE = 0, 1, 3, 4, 5  # what a number is for: fsdfm.noise.Purpose
_GOLDEN = (math.sqrt(5) - 1) / 2


# --- randomness and draws ---------------------------------------------------------------------------------------------


def uniforms(seed: int, sample: int, purpose: int, *, length: int, step: int = 0) -> Array:
    """Uniforms in (0, 1) with 52 random bits each, by address: float64 [length] (Philox-4x32-10)."""
    position = np.arange(length, dtype=np.uint64)
    words = [position, np.full_like(position, step), np.full_like(position, sample & 0xFFFFFFFF)]
    words.append(np.full_like(position, (sample >> 32) << 8 | purpose))
    c0, c1, c2, c3 = words
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & _MASK, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    bits = (c0 << np.uint64(20)) | (c1 >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def filtered(logits: Array, shape: tuple[float, int | None, float | None]) -> Array:
    """Logits [N, V] after temperature, top-k and top-p, `shape`; the likeliest token always stays."""
    temperature, top_k, top_p = shape
    shaped: Array = (logits - logits.max(-1, keepdims=True)) / np.float32(temperature)
    if top_k is not None and top_k < shaped.shape[-1]:
        kept = np.argpartition(-shaped, top_k - 1, -1)[:, :top_k]
        mask = np.ones(shaped.shape, bool)
        np.put_along_axis(mask, kept, False, -1)
        shaped = np.where(mask, -np.inf, shaped)
    if top_p is not None and top_p < 1:
        order = np.argsort(-shaped, -1, kind="stable")
        probs = np.exp(np.take_along_axis(shaped, order, -1))
        probs /= probs.sum(-1, keepdims=True)
        removed = np.cumsum(probs, -1) - probs >= top_p
        removed[:, 0] = False
        mask = np.zeros(shaped.shape, bool)
        np.put_along_axis(mask, order, removed, -1)
        shaped = np.where(mask, -np.inf, shaped)
    return shaped


def draw(logits: Array, u: Array, exclude: Array | None = None) -> tuple[Array, Array]:
    """A token per row by the inverse CDF, and 1 - p of the excluded one before its exclusion: int64 [N], float64 [N].

    An excluded token is not drawn, p is renormalised over the others; where it is the only one, it is returned.
    """
    weights = np.exp((logits - logits.max(-1, keepdims=True)).astype(np.float32)).astype(np.float64)
    rows, left = np.arange(len(weights)), np.zeros(len(weights))
    if exclude is not None:
        own = weights[rows, exclude]
        weights[rows, exclude] = 0.0
    cumulative = np.cumsum(weights, -1)
    total = cumulative[:, -1]
    tokens = ((weights > 0) & (cumulative > (u * total)[:, None])).argmax(-1)
    if exclude is not None:
        with np.errstate(divide="ignore"):
            left = -np.expm1(-np.log1p(total / own))
        tokens = np.where(total > 0, tokens, exclude)
    return tokens, left


# --- the causal head --------------------------------------------------------------------------------------------------


class CausalStack:
    """The blocks of a causal head over one text, position by position, with the keys and values so far."""

    def __init__(self, weights: dict[str, Array], *, num_blocks: int, num_heads: int, eps: float):
        self.weights, self.num_blocks, self.num_heads, self.eps = weights, num_blocks, num_heads, eps
        self.keys: list[list[Array]] = [[] for _ in range(num_blocks)]
        self.values: list[list[Array]] = [[] for _ in range(num_blocks)]

    def __call__(self, z: Array, i: int) -> Array:
        """g_i from z_i: [C] -> [C]."""
        for block in range(self.num_blocks):
            z = z + self._attend(block, self._normed(z, f"{block}.norm_attention"), i)
            gate, up = np.split(self.weights[f"{block}.into"] @ self._normed(z, f"{block}.norm_mlp"), 2)
            z = z + self.weights[f"{block}.out"] @ (gate / (1 + np.exp(-gate)) * up)
        return self._normed(z, "norm")

    def _attend(self, block: int, x: Array, i: int) -> Array:
        qkv = (self.weights[f"{block}.qkv"] @ x).reshape(3, self.num_heads, -1)
        width = qkv.shape[-1]
        cos, sin = self.weights["cos"][i], self.weights["sin"][i]
        turned = np.roll(qkv[:2], width // 2, -1) * sin + qkv[:2] * cos
        self.keys[block].append(turned[1])
        self.values[block].append(qkv[2])
        scores = np.einsum("hd,lhd->hl", turned[0], np.stack(self.keys[block])) / math.sqrt(width)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        seen = np.einsum("hl,lhd->hd", scores, np.stack(self.values[block]))
        attended: Array = self.weights[f"{block}.project"] @ seen.reshape(-1)
        return attended

    def _normed(self, x: Array, name: str) -> Array:
        normed: Array = x / np.sqrt(np.mean(x * x) + self.eps) * self.weights[name]
        return normed


# --- the model --------------------------------------------------------------------------------------------------------


class PortableModel:
    """An exported model: `PortableModel("folder").generate("Once upon a time", steps=4)`."""

    def __init__(self, folder: str | Path):
        import onnxruntime
        from tokenizers import Tokenizer

        folder = Path(folder)
        self.config: dict[str, Any] = json.loads((folder / "portable.json").read_text("utf-8"))
        self.weights = dict(np.load(folder / "weights.npz", allow_pickle=False))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a small network on one text: threads would wait for each other
        self.session = onnxruntime.InferenceSession(
            str(folder / "trunk.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True

    def generate(
        self,
        prompt: str = "",
        *,
        steps: int | None = None,
        seed: int = 0,
        length: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        jump: str | None = None,
    ) -> str:
        """A text that begins with the prompt; what is not said is the model's own advice, as in fsdfm."""
        told, advice = self.config, self.config["advice"]
        steps = steps or advice.get("steps") or 8
        temperature = temperature or _at(advice.get("temperature", {}), steps)
        jump = jump or advice.get("jump", "exact")
        if jump not in _RULES or (jump == "sweep" and told["head"] != "causal"):
            raise ValueError(f"jump is {jump!r}; exported models know exact, spaced and, with a causal head, sweep")
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids if prompt else []
        size = length or told["length"]
        if not len(ids) + 2 <= size <= told["length"]:
            raise ValueError(f"length is {size} and the prompt has {len(ids)} tokens; {told['length']} is the most")
        given = np.zeros(size, bool)
        given[: 1 + len(ids)] = True
        x = self._noise(seed, _sample_index(ids), size)
        x[: 1 + len(ids)] = [told["first"], *ids]
        start = (len(ids) / (size - 1)) ** (1 / told["exponent"])  # as much as is known, the path shows at this time
        bounds: list[float] = []
        for step in range(steps):
            t, t_next = (start + (1 - start) * k / steps for k in (step, step + 1))
            kappa, kappa_next = t ** told["exponent"], t_next ** told["exponent"]
            bounds.append(1.0 if step == steps - 1 else (kappa_next - kappa) / (1 - kappa))
            numbers = _Numbers(seed, _sample_index(ids), step=step, size=size)
            if jump == "sweep":
                shares = (
                    (kappa - start ** told["exponent"]) / (1 - start ** told["exponent"])
                    for kappa in (kappa, kappa_next)
                )
                x = self._swept(
                    x, given, tuple(shares), times=(t, t_next - t), u=numbers.u, shape=(temperature, top_k, top_p)
                )
                continue
            coins = numbers.coins(bounds, jump)
            free = ~given if told["movable"] == "all" else ~given & (x == told["mask"])
            candidate = (coins < bounds[-1]) & free
            if candidate.any():
                shape = (temperature, top_k, top_p)
                leave = np.where(candidate, bounds[-1], 0.0)
                x = self._step(x, leave, ~free, times=(t, t_next - t), coins=coins, u=numbers.u, shape=shape)
        text = [int(token) for token in x[1 + len(ids) :]]
        text = text[: text.index(told["eos"])] if told["eos"] in text else text
        return str(self.tokenizer.decode([*ids, *text], skip_special_tokens=True))

    def logits(self, x: Array, t: float, h: float) -> Array:
        """Logits of an independent posterior at every position: [L, V]."""
        return self._head(self._trunk(x, t, h)[0])

    def _noise(self, seed: int, sample: int, size: int) -> Array:
        kind, vocab, mask = self.config["source"], self.config["vocab_size"], self.config["mask"]
        if kind == "mask":
            return np.full(size, mask)
        real = vocab if mask is None else vocab - 1
        x: Array = (uniforms(seed, sample, _SOURCE, length=size) * real).astype(np.int64)
        if kind == "mixture":
            x = x + (x >= mask)
            masked = uniforms(seed, sample, _SOURCE_KIND, length=size) < self.config["mask_share"]
            x = np.where(masked, mask, x)
        return x

    def _trunk(self, x: Array, t: float, h: float) -> list[Array]:
        inputs = {"x_t": x[None].astype(np.int64), "t": np.array([t]), "h": np.array([h])}
        names = {each.name for each in self.session.get_inputs()}
        return [each[0] for each in self.session.run(None, {k: v for k, v in inputs.items() if k in names})]

    def _head(self, features: Array) -> Array:
        logits = features @ self.weights["head"].T + self.weights["head_bias"]
        logits[..., self.config["banned"]] = -np.inf
        return logits  # type: ignore[no-any-return]

    def _swept(
        self, x: Array, given: Array, shares: tuple[float, ...], *, times: tuple[float, float], u: Array, shape: Any
    ) -> Array:
        """The next positions from the left, drawn together; what stands before them is held."""
        rank = np.where(given, -1, np.cumsum(~given) - 1)
        begin, end = (np.round(share * (rank.max() + 1)) for share in shares)
        text = self._causal_text(x, rank < begin, times, u=u, shape=shape)
        return np.where((rank >= begin) & (rank < end), text, x)

    def _step(
        self, x: Array, bounds: Array, held: Array, *, times: tuple[float, float], coins: Array, u: Array, shape: Any
    ) -> Array:
        """x_{t+h}: each candidate leaves or stays, or takes its part of a text that a causal head draws."""
        if self.config["head"] == "causal":
            return np.where(bounds > 0, self._causal_text(x, held, times, u=u, shape=shape), x)
        rows = bounds.nonzero()[0]
        logits = filtered(self._head(self._trunk(x, *times)[0][rows]), shape)
        tokens, left = draw(logits, u[rows], exclude=x[rows])
        moves = coins[rows] < bounds[rows] * left
        x = x.copy()
        x[rows[moves]] = tokens[moves]
        return x

    def _causal_text(self, x: Array, held: Array, times: tuple[float, float], *, u: Array, shape: Any) -> Array:
        inputs, base = self._trunk(x, *times)
        weights = self.weights
        stack = CausalStack(weights, **self.config["causal"])
        text = x.copy()
        for i in range(len(x)):
            g = stack(inputs[i] + weights["embedding"][text[i - 1]] if i else inputs[i], i)
            if not held[i]:
                logits = self._head((base[i] + weights["combine"] @ g)[None])
                text[i] = draw(filtered(logits, shape), u[i : i + 1])[0][0]
        return text


class _Numbers:
    """The uniforms of one step."""

    def __init__(self, seed: int, sample: int, *, step: int, size: int):
        self.phase = uniforms(seed, sample, _PHASE, length=1)[0]
        self.coin = uniforms(seed, sample, _COIN, length=size, step=step)
        self.u = uniforms(seed, sample, _DESTINATION, length=size, step=step)

    def coins(self, bounds: list[float], jump: str) -> Array:
        """What decides over candidates: any uniform, or under `spaced` none before a position's first turn."""
        if jump == "exact":
            return self.coin
        begin = 1 - float(np.prod(1 - np.array(bounds[:-1])))
        end = 1 - (1 - begin) * (1 - bounds[-1])
        turn = np.modf(self.phase + _GOLDEN * np.arange(len(self.coin)))[0]
        return np.where(turn < begin, self.coin, np.where(turn < end, bounds[-1] * self.coin, 1.0))


def _sample_index(ids: list[int]) -> int:
    """What a prompt's noise is addressed by: as in fsdfm.generate.request."""
    fixed = [(1 + i, token) for i, token in enumerate(ids)]
    digest = hashlib.sha256(repr(fixed).encode()).digest() if fixed else bytes(4)
    return (int.from_bytes(digest[:4], "big") >> 4) << 28


def _at(advice: dict[str, float], steps: int) -> float:
    """The advised temperature of the nearest number of steps; 1 where there is no advice."""
    known = {int(key): float(value) for key, value in advice.items()}
    return known[min(known, key=lambda key: abs(math.log(key / steps)))] if known else 1.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Text from an exported model, without PyTorch.")
    parser.add_argument("prompt", nargs="?", default="")
    for name, kind in (("steps", int), ("seed", int), ("length", int), ("temperature", float), ("top-k", int)):
        parser.add_argument(f"--{name}", type=kind, default=0 if name == "seed" else None)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--jump", choices=_RULES)
    said = vars(parser.parse_args())
    print(PortableModel(Path(__file__).parent).generate(said.pop("prompt"), **said))  # noqa: T201
