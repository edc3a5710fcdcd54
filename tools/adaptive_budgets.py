"""What rules that adapt gain over the fixed grid at as many calls: the frontier of docs/adaptive.md.

    python tools/adaptive_budgets.py parent --judge stories15m:stories15M.bin --temperature 0.85
    python tools/adaptive_budgets.py parent --judge smollm2 --way bounded:bound=40@32 --way spaced@8

A way is a rule and the most calls it may make, RULE@CALLS, `fitted@CALLS` the rule of --rule on the grid that the
model's entropy curve asks for. Texts of all ways have the same noise. Every row goes to --out as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import fsdfm
from fsdfm.generate import LanguageModel
from fsdfm.measure import bootstrap_mean, distinct_n, make_judge, token_perplexity, unigram_entropy_bits

WAYS = (
    *(f"spaced@{calls}" for calls in (4, 6, 8, 12, 16)),
    "fitted@8",
    "certain@8",
    "stop:entropy=1,patience=0@8",
    *(f"bounded:bound={nats}@32" for nats in (20, 40, 80)),
)


def write(lm: LanguageModel, way: str, args: argparse.Namespace) -> Any:
    """The texts of a way."""
    rule, _, calls = way.rpartition("@")
    fitted = rule == "fitted"
    return lm.generate(
        num=args.texts,
        length=args.length,
        steps=int(calls),
        jump=args.rule if fitted else rule,
        grid="fitted" if fitted else "uniform",
        temperature=args.temperature,
        seed=args.seed,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--judge", required=True)
    parser.add_argument("--way", action="append", help="RULE@CALLS; all of the table unless said")
    parser.add_argument("--rule", default="spaced", help="of the fitted grid")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("adaptive.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    lm, judge = fsdfm.load(args.model, threads=1), make_judge(args.judge)
    for way in args.way or WAYS:
        made = write(lm, way, args)
        tokens = [[*each.tokens] for each in made]
        scores = judge.score([each.text or "." for each in made])
        row = {
            "calls": f"{bootstrap_mean([float(each.calls) for each in made]):.2f}",
            "perplexity": f"{token_perplexity(scores):.1f}",
            "bits": f"{bootstrap_mean([unigram_entropy_bits(each) for each in tokens]):.2f}",
            "distinct-2": round(distinct_n(tokens, 2), 3),
        }
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps({**known, way: row}, indent=1))
        sys.stdout.write(f"{way} {json.dumps(row)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
