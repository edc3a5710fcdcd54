"""Data: text to tokens, tokens to a packed corpus on the disk, a corpus to endless batches of x_1."""

from fsdfm.data.batches import BeginWith, Blocks, RowSource, TrainingBatch, batches, begin_with
from fsdfm.data.corpus import Corpus, Header, prepare
from fsdfm.data.documents import SEPARATOR, Documents, open_documents, texts
from fsdfm.data.pairs import PairHeader, Pairs, PairsAndText, PairWriter, StepPairs, pair_times
from fsdfm.data.tokenizer import Tokenizer, make_tokenizer

__all__ = [
    "SEPARATOR",
    "BeginWith",
    "Blocks",
    "Corpus",
    "Documents",
    "Header",
    "PairHeader",
    "PairWriter",
    "Pairs",
    "PairsAndText",
    "RowSource",
    "StepPairs",
    "Tokenizer",
    "TrainingBatch",
    "batches",
    "begin_with",
    "make_tokenizer",
    "open_documents",
    "pair_times",
    "prepare",
    "texts",
]
