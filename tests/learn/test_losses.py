import torch

from fsdfm.learn.losses import log_probs_at, soft_cross_entropy


def random_logits(rows=4, vocab=9):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_log_probabilities_and_their_gradient():
    logits = random_logits().requires_grad_()
    tokens = torch.tensor([[0, 3], [2, 2], [8, 1], [5, 0]])
    assert torch.autograd.gradcheck(lambda x: log_probs_at(x, tokens), logits)
    assert torch.allclose(log_probs_at(logits, tokens), torch.log_softmax(logits, -1).gather(1, tokens))


def test_soft_cross_entropy_and_its_gradient():
    logits, target = random_logits().requires_grad_(), torch.softmax(random_logits().flip(0), -1)
    assert torch.autograd.gradcheck(lambda x: soft_cross_entropy(x, target), logits)
    assert torch.allclose(soft_cross_entropy(logits, target), -(target * torch.log_softmax(logits, -1)).sum(-1))


def test_forbidden_tokens_and_extreme_logits_stay_finite():
    logits = random_logits().float()
    logits[:, 4] = -torch.inf
    logits[0, 0], logits[1, 1] = 500.0, -500.0
    logits.requires_grad_()
    target = torch.softmax(logits.detach() / 2, -1)
    tokens = torch.tensor([[1], [1], [0], [0]])
    for value in (soft_cross_entropy(logits, target).sum(), log_probs_at(logits, tokens).sum()):
        (gradient,) = torch.autograd.grad(value, logits)
        assert bool(torch.isfinite(value))
        assert bool(torch.isfinite(gradient).all())
