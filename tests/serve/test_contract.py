"""Real clients against a live server: openai, litellm, curl; and schemathesis over what OpenAPI says."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from live_server import serving

BODY = {"prompt": "abc", "max_tokens": 10, "seed": 5}
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def live():
    with serving(api_key=KEY) as live:
        yield live


@pytest.fixture(scope="module")
def expected(live):
    text = live.models["tiny"].generate("abc", length=1 + 3 + 10, steps=2, seed=5).text
    return text.removeprefix("abc")


def test_the_openai_client(live, expected):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(model="tiny", **BODY, extra_body={"steps": 2})
        assert answer.choices[0].text == expected
        assert answer.usage.prompt_tokens == 3
        stream = client.completions.create(
            model="tiny", **BODY, stream=True, stream_options={"include_usage": True}, extra_body={"steps": 2}
        )
        events = list(stream)
        assert "".join(event.choices[0].text for event in events if event.choices) == expected
        assert events[-1].usage.total_tokens == answer.usage.total_tokens
        assert [model.id for model in client.models.list()] == ["tiny", "chain", "mask"]
        filled = client.post("/infill", body={"text": "a [[3]] b", "seed": 1, "steps": 2}, cast_to=object)
        assert filled["choices"][0]["text"] == live.models["tiny"].infill("a [[3]] b", seed=1, steps=2).text
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.completions.create(model="tiny", **BODY, logprobs=2)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", **BODY)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as client:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


LITELLM = """
import json, sys, litellm
asked = json.loads(sys.argv[1])
answer = litellm.text_completion(**asked)
events = list(litellm.text_completion(**asked, stream=True))
streamed = "".join(event.choices[0].text or "" for event in events if event.choices)
print(json.dumps([answer.choices[0].text, answer.usage.completion_tokens, streamed]))
"""


@pytest.mark.slow
def test_the_litellm_client(live, expected):
    """In a process and a folder of its own: its pins are not ours (`make litellm`)."""
    folder = Path(sys.prefix) / "litellm"
    if not folder.is_dir() and importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not there; `make litellm` installs it beside the environment")
    asked = {"model": "text-completion-openai/tiny", "api_base": f"{live.url}/v1", "api_key": KEY, **BODY}
    asked["extra_body"] = {"steps": 2}
    paths = [str(folder)] if folder.is_dir() else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would look for prices elsewhere
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LITELLM, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    text, tokens, streamed = json.loads(run.stdout.splitlines()[-1])
    assert text == streamed == expected
    assert tokens > 0


def test_curl(live, expected):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    head = ["-sS", "-H", "content-type: application/json", "-H", f"authorization: Bearer {KEY}"]
    body = json.dumps({**BODY, "steps": 2})
    run = subprocess.run([curl, *head, f"{live.url}/v1/completions", "-d", body], capture_output=True, check=True)
    assert json.loads(run.stdout)["choices"][0]["text"] == expected
    body = json.dumps({**BODY, "steps": 2, "stream": True})
    run = subprocess.run([curl, "-N", *head, f"{live.url}/v1/completions", "-d", body], capture_output=True, check=True)
    assert run.stdout.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_answer_is_undocumented_nor_a_fault():
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, given, settings

    with serving(max_canvas=64) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path == "/metrics":
                continue

            @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def check(case):
                if isinstance(case.body, dict):
                    case.body = {**case.body, "steps": 1} if "steps" in case.body else case.body
                response = case.call(timeout=60)
                assert response.status_code < 500, response.text
                case.validate_response(
                    response,
                    checks=[
                        schemathesis.checks.not_a_server_error,
                        schemathesis.specs.openapi.checks.status_code_conformance,
                        schemathesis.specs.openapi.checks.content_type_conformance,
                        schemathesis.specs.openapi.checks.response_schema_conformance,
                    ],
                )

            check()
        live.idle()
