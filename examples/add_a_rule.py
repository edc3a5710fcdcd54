"""Add step rules: this file and a line of registration each, nothing of fsdfm edited.

    python examples/add_a_rule.py

`confident` reveals the k likeliest masked positions of a step, k = ceil(masks left / steps left). `second-thoughts`
does the same and remembers in `SamplerState.memory` how sure it was of every token; in each step but the last it masks
the one it was least sure of again. Registered, they have names for `lm.generate(jump=...)` and recipes' `plugins`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fsdfm
from fsdfm.checkpoint import Checkpoint
from fsdfm.data import Tokenizer
from fsdfm.flow import RULES, MaskSource, MixturePath, Plan, Posterior, SamplerState, StepRule, draw
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Purpose


@dataclass(frozen=True)
class ConfidentOrder(StepRule):
    remask: bool = False

    def plan(self, state: SamplerState) -> Plan:
        if state.path.source.mask_token is None:
            raise ValueError("this rule reveals masks, and the source has none; use exact or spaced")
        masked = (state.x_t == state.path.source.mask_token) & state.movable()
        return Plan(masked.flatten().nonzero()[:, 0])  # the network is asked about these positions only

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        shape, mask = state.x_t.shape, state.path.source.mask_token
        u = state.noise.uniform(Purpose.DESTINATION, shape[1], state.index).flatten()[plan.rows]
        tokens = torch.zeros(len(plan.rows), dtype=torch.int64)
        sure = torch.full((shape.numel(),), -torch.inf, dtype=torch.float64)
        for part, logits, own in posterior.marginals(plan.rows):
            logits = logits if own is None else logits[own]
            tokens[part] = draw(logits, u[part], forbidden=mask, filter=state.filter).tokens
            log_p = logits.double().log_softmax(-1)
            sure[plan.rows[part]] = log_p.gather(-1, tokens[part, None])[:, 0]
        drawn = state.x_t.flatten().index_copy(0, plan.rows, tokens).view(shape)
        sure = sure.view(shape)
        left = (sure > -torch.inf).sum(-1)
        counts = -(-left // (state.steps - state.index))
        chosen = (sure.argsort(-1, descending=True).argsort(-1) < counts[:, None]) & (sure > -torch.inf)
        x_next = torch.where(chosen, drawn, state.x_t)
        return self.reconsider(state, x_next, torch.where(chosen, sure, torch.inf)) if self.remask else x_next

    def reconsider(self, state: SamplerState, x_next: Tensor, sure: Tensor) -> Tensor:
        known = torch.minimum(state.memory.get("sure", torch.full_like(sure, torch.inf)), sure)
        if state.index < state.steps - 1:
            worst = known.argmin(-1, keepdim=True)
            doubted = torch.zeros_like(known, dtype=torch.bool).scatter(-1, worst, True) & known.isfinite()
            x_next = torch.where(doubted, state.path.source.mask_token, x_next)
            known = torch.where(doubted, torch.inf, known)
        state.memory["sure"] = known
        return x_next


RULES["confident"] = ConfidentOrder()
RULES["second-thoughts"] = ConfidentOrder(remask=True)


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = Tokenizer.bytes()
    path = MixturePath(MaskSource(tokenizer.vocab_size + 1))
    sizes = {"width": 32, "num_blocks": 1, "num_heads": 2, "cond_width": 16}
    model = DiT(ModelConfig(vocab_size=path.source.vocab_size, **sizes)).eval()  # weights at random: it writes noise
    lm = fsdfm.LanguageModel(Checkpoint(model, path, tokenizer, length=24))
    for rule in ("confident", "second-thoughts"):
        result = lm.generate("Once ", steps=6, jump=rule, keep_states=True)
        masks = [sum(token == path.source.mask_token for token in state.tokens) for state in result.states]
        print(f"{rule}: masks left after every step {masks}, {result.calls} network calls")


if __name__ == "__main__":
    main()
