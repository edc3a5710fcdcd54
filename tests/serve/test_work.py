"""From a body to jobs: what each text of a request is sampled with."""

from fsdfm.generate import LanguageModel
from fsdfm.serve.schemas import CompletionBody
from fsdfm.serve.work import build_work
from tiny_models import random_bundle


def test_an_automatic_budget_is_that_of_its_text():
    bundle = random_bundle()
    bundle.facts["sampling"] = {"curve": [3.0, 1.5, 0.0]}
    models = {"tiny": LanguageModel(bundle)}
    body = CompletionBody(prompt=["a", "fifteen letters"], max_tokens=15, steps="auto", target="quality=0.26", n=2)
    work = build_work(body, models, max_canvas=64)
    assert [config.num_steps() for config in work.configs] == [6, 6, 3, 3]
    assert [request.copy for request in work.requests] == [0, 1, 0, 1]
    assert len({config.seed for config in work.configs}) == 1
    plain = build_work(CompletionBody(prompt=["a", "b"], steps=3, max_tokens=5), models, max_canvas=64)
    assert [config.num_steps() for config in plain.configs] == [3, 3]
