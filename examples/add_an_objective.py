"""Add an objective with a teacher of its own: this file and its two lines of registration, nothing of fsdfm edited.

    python examples/add_an_objective.py

Every row takes the path loss, and `strength` times the disagreement with what the averaged network says at the end of
the step it would take: on average over x_{t+h} the posterior there is the posterior here, p(.|x_t) = E p(.|x_{t+h}).

    L = L_path + strength * KL( p_ema(. | x_{t+h}, t+h) || p(. | x_t, t) )

From a recipe, with this file in the current folder:  plugins = ["add_an_objective"]  and  objective.kind = "ahead".
"""

from dataclasses import dataclass

import fsdfm
from fsdfm import MixturePath
from fsdfm.flow import POLICIES
from fsdfm.learn import (
    CrossEntropy,
    FewStepObjective,
    Outcome,
    PathObjective,
    ShortcutTeacher,
    Stage,
    Tableau,
    register_objective,
)
from fsdfm.run import train

AHEAD = Tableau((Stage(0.0), Stage(1.0, start=0, drive=0, hop=1.0)), weights=(0.0, 1.0))  # jump by h, ask there


@dataclass(frozen=True, kw_only=True)
class AheadConfig:
    """The keys of [objective]; any other is an error that names these."""

    kind: str = "ahead"
    strength: float = 0.5  # of the disagreement


class AheadObjective:
    def __init__(self, path: MixturePath, strength: float):
        self.strength, self.teacher = strength, ShortcutTeacher(AHEAD, from_h=0.0)
        self.near = PathObjective(path, loss=CrossEntropy())
        self.far = FewStepObjective(path, teacher=self.teacher, weights=POLICIES["PU"])
        self.step_sizes, self.teacher_share, self.validation = self.far.step_sizes, 1.0, self.near

    def __call__(self, model, batch, noise, *, training_step, ema) -> Outcome:
        near = self.near(model, batch, noise, training_step=training_step, ema=ema)
        far = self.far(model, batch, noise, training_step=training_step, ema=ema)
        loss = near.loss + self.strength * far.loss
        logs = {"loss": float(loss.detach()), "path_loss": near.logs["loss"], "ahead_loss": far.logs["loss"]}
        return Outcome(loss, far.t, far.h, near.sample_loss + self.strength * far.sample_loss, logs)


register_objective("ahead", AheadConfig, lambda config, path: AheadObjective(path, config.strength))


def main() -> None:
    with open("ahead.txt", "w") as file:
        file.write("the cat sat on the mat. the dog sat on the log. " * 50)
    sizes = ["model.width=32", "model.num_blocks=1", "model.num_heads=2", "model.cond_width=16", "data.length=24"]
    times = ["train.steps=30", "train.batch_size=8", "train.log_every=10", "sample.every=0"]
    text = ["data.inputs=ahead.txt", "data.tokenizer=bytes"]
    mine = ["objective.kind=ahead", "objective.strength=0.2", "out=runs/ahead"]
    result = train("tiny-dfm", [*sizes, *times, *text, *mine, "runtime.device=cpu", "runtime.threads=1"])
    print(f"{result.folder}: training step {result.training_step}")
    print(fsdfm.load(result.folder).generate(steps=4).text)


if __name__ == "__main__":
    main()
