"""What blind repair takes for wrong: the table of docs/guides/generate.md.

    python tools/blind_repair.py fewstep valid.txt
    python tools/blind_repair.py parent valid.txt --stories 400 --sentences

Of clean stories, the share of the tokens that are called wrong; of stories where some tokens are replaced by uniform
ones, the share of the replaced that is found, and of the others that is called wrong. Intervals of 95 % are over
stories, resampled. `--sentences`: one sentence in four of every story, each a text of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

import fsdfm
from fsdfm.data import SEPARATOR
from fsdfm.generate import LanguageModel
from fsdfm.measure import bootstrap_ratio

BATCH = 8


def judged(lm: LanguageModel, texts: list[list[int]]) -> list[list[bool]]:
    """Which tokens of every text blind repair takes for wrong."""
    requests = [lm.encoder.damaged(tokens) for tokens in texts]
    found = [each for i in range(0, len(requests), BATCH) for each in lm.run(requests[i : i + BATCH], steps=1)]
    return [list(result.marked) for result in found]


def rate(marked: list[list[bool]], among: list[list[bool]]) -> str:
    """The share of the tokens `among` which are marked, with its interval over texts."""
    wrong = torch.tensor([sum(m and a for m, a in zip(*pair, strict=True)) for pair in zip(marked, among, strict=True)])
    of = torch.tensor([sum(each) for each in among])
    found = bootstrap_ratio(wrong, of).map(lambda share: 100 * share)
    return f"{wrong.sum()} of {of.sum()}: {found:.2f} %"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path, help=f"stories parted by {SEPARATOR}")
    parser.add_argument("--stories", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="so many stories first")
    parser.add_argument("--shares", default="0.02,0.05,0.15,0.3,0.5")
    parser.add_argument("--sentences", action="store_true")
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"there is no file {args.text}")
    every = [each.strip() for each in args.text.read_text(encoding="utf-8").split(SEPARATOR) if each.strip()]
    stories = every[args.skip : args.skip + args.stories]
    if not stories:
        parser.error(f"{args.text} has {len(every)} stories; none is left behind the first {args.skip}")
    torch.set_num_threads(1)
    lm = fsdfm.load(args.model, threads=1)
    if args.sentences:
        stories = [each for story in stories for each in re.split(r"(?<=[.!?])\s+", story)[::4]]
    texts = [lm.checkpoint.tokenizer.encode(story) for story in stories]
    whole = [[True] * len(tokens) for tokens in texts]
    sys.stdout.write(f"clean, called wrong: {rate(judged(lm, texts), whole)}\n")
    for share in [] if args.sentences else [float(each) for each in args.shares.split(",")]:
        made = [lm.corrupt(story, share, seed=seed) for seed, story in enumerate(stories)]
        marked, replaced = judged(lm, [list(each.tokens) for each in made]), [list(each.damaged) for each in made]
        others = [[not each for each in which] for which in replaced]
        sys.stdout.write(
            f"{share:.0%} replaced: found {rate(marked, replaced)}; of the others {rate(marked, others)}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
