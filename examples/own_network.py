"""A network that is not a transformer, from training to evaluation: this file and one line of registration.

    python examples/own_network.py

Two wide convolutions look at the letters around a position. The network saves, loads, generates and is evaluated like
any other; a program that loads it imports the file that registers it first.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import fsdfm
from fsdfm import MixturePath, Noise, UniformSource
from fsdfm.checkpoint import Checkpoint, save_model
from fsdfm.data import Tokenizer
from fsdfm.measure.evaluation import EvaluationRequest, run_evaluation
from fsdfm.model import ARCHITECTURES, Architecture, Network

TEXT, LENGTH, BATCH, STEPS = "the cat sat on the mat. the dog sat on the log. " * 40, 24, 16, 60


@dataclass(frozen=True)
class ConvConfig:
    vocab_size: int
    width: int = 48
    to_dict = asdict

    @classmethod
    def from_dict(cls, values: dict) -> "ConvConfig":
        return cls(**values)


class ConvNetwork(Network):
    def __init__(self, config: ConvConfig, *, seed: int = 0):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            self.near = nn.Conv1d(config.width, config.width, 7, padding=3)
            self.far = nn.Conv1d(config.width, config.width, 7, padding=9, dilation=3)
            self.head = nn.Linear(config.width + 1, config.vocab_size)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        x = self.embedding(x_t).transpose(1, 2)
        x = x + self.far(torch.relu(self.near(x)))
        time = t.to(x)[:, None, None].expand(-1, x.shape[2], 1)
        return torch.cat([x.transpose(1, 2), time], -1)

    def logits_at(self, features: Tensor) -> Tensor:
        return self.head(features)


ARCHITECTURES["conv"] = Architecture(ConvConfig, ConvNetwork)


def main() -> None:
    torch.set_num_threads(1)
    tokenizer, path = Tokenizer.bytes(), MixturePath(UniformSource(Tokenizer.bytes().vocab_size))
    model, tokens = ConvNetwork(ConvConfig(path.source.vocab_size)), torch.tensor(tokenizer.encode(TEXT))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        noise = Noise(0, range(step * BATCH, (step + 1) * BATCH))
        x_1 = tokens.unfold(0, LENGTH, 1)[torch.randint(len(tokens) - LENGTH, [BATCH])]
        t = torch.rand(BATCH, dtype=torch.float64)
        x_t = path.sample(path.source.sample(noise, LENGTH), x_1, t, noise=noise)
        loss = nn.functional.cross_entropy(model.logits_at(model.trunk(x_t, t, t)).flatten(0, 1), x_1.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_model("conv", Checkpoint(model.eval(), path, tokenizer, length=LENGTH))
    print("loss", round(loss.item(), 2), "|", fsdfm.load("conv", threads=1).generate("the ", steps=16).text)
    asked = EvaluationRequest(model="conv", steps="4", num=4, metrics="diversity")
    print(f"evaluated: {len(run_evaluation(asked).evaluation.rows)} rows")


if __name__ == "__main__":
    main()
