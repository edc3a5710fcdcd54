"""The endpoints as a client meets them, on loopback."""

import gc
import json
import socket
import struct
import threading
import time
from itertools import pairwise

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fsdfm.serve.schemas import UNSUPPORTED, CompletionBody
from fsdfm.serve.server import Connection
from live_server import serving

PATHS = ("/v1/completions", "/v1/fim/completions", "/v1/infill", "/v1/repair")


@pytest.fixture(scope="module")
def live():
    with serving() as live:
        yield live


def small(**more):
    return {"prompt": "abc", "max_tokens": 12, "steps": 2, "seed": 7, **more}


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_completion_is_the_text_of_the_library(live):
    answer = live.post("/v1/completions", small()).json
    alone = live.models["tiny"].generate("abc", length=1 + 3 + 12, steps=2, seed=7)
    (choice,) = answer["choices"]
    assert "abc" + choice["text"] == alone.text
    assert choice["finish_reason"] == ("stop" if alone.finished else "length")
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == len(alone.tokens) - 3
    assert choice["fsdfm"]["calls"] == 2
    assert answer["model"] == "tiny"


def test_several_prompts_and_copies_are_choices_in_order(live):
    answer = live.post("/v1/completions", small(prompt=["abc", "xy"], n=2, echo=True, model="mask")).json
    lm = live.models["mask"]
    expected = [
        text.text
        for prompt in ("abc", "xy")
        for text in lm.generate(prompt, length=1 + len(prompt) + 12, steps=2, seed=7, num=2)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_texts_do_not_depend_on_the_load(live):
    bodies = [small(seed=seed, steps=1 + seed % 4, max_tokens=6 + seed % 3) for seed in range(12)]
    alone = [live.post("/v1/completions", body).json["choices"][0]["text"] for body in bodies]
    together = [None] * len(bodies)

    def ask(place):
        together[place] = live.post("/v1/completions", bodies[place]).json["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_between_prompt_and_suffix_the_middle_is_answered(live):
    body = {"prompt": "abc", "suffix": "xyz", "max_tokens": 5, "steps": 2, "seed": 1}
    text = live.post("/v1/fim/completions", body).json["choices"][0]["text"]
    assert text == live.post("/v1/completions", body).json["choices"][0]["text"]
    whole = live.models["tiny"].generate("abc", suffix="xyz", length=1 + 3 + 5 + 3, steps=2, seed=1).text
    assert whole == f"abc{text}xyz"


def test_gaps_are_filled(live):
    text = "one [[4]] two [[2]] three"
    expected = live.models["tiny"].infill(text, steps=2, seed=3).text
    body = {"steps": 2, "seed": 3}
    assert live.post("/v1/infill", {"text": text, **body}).json["choices"][0]["text"] == expected
    assert live.post("/v1/completions", {"prompt": text, "gaps": True, **body}).json["choices"][0]["text"] == expected


def test_damage_is_repaired_where_it_is_said_to_be_and_blind(live):
    lm, text = live.models["tiny"], "a text with damage"
    said = live.post("/v1/repair", {"text": text, "damaged": [[2, 6]], "steps": 2, "seed": 1, "details": True}).json
    assert said["choices"][0]["text"] == lm.repair(text, [(2, 6)], steps=2, seed=1).text
    assert said["choices"][0]["fsdfm"]["details"]["marked"] == [2, 3, 4, 5]
    blind = live.post("/v1/repair", {"text": text, "steps": 2, "seed": 1}).json
    assert blind["choices"][0]["text"] == lm.repair(text, steps=2, seed=1).text
    corrupted = live.post("/v1/repair", {"text": text, "corrupt": 0.5, "steps": 2, "seed": 1, "details": True}).json
    assert corrupted["choices"][0]["fsdfm"]["details"]["asked"] == lm.corrupt(text, 0.5, seed=1).text


def test_a_draft_is_written_anew_from_a_time(live):
    body = {"prompt": "abc", "start_from": "some draft", "steps": 2, "seed": 1, "echo": True}
    near = live.post("/v1/completions", {**body, "start": 0.9}).json["choices"][0]
    assert near["text"].startswith("abc")
    assert len(near["text"].encode()) >= len("abc")
    assert live.post("/v1/completions", {**body, "max_tokens": 3}).status == 400


def test_a_text_is_cut_at_a_stop_behind_the_prompt(live):
    whole = live.post("/v1/completions", small(echo=True)).json["choices"][0]["text"]
    stop = whole[5]
    at = whole.index(stop, 3)
    cut = live.post("/v1/completions", small(echo=True, stop=[stop])).json["choices"][0]
    assert cut["text"] == whole[:at]
    assert cut["finish_reason"] == "stop"


def test_a_seed_is_random_unless_said_and_always_told(live):
    first = live.post("/v1/completions", {"prompt": "abc", "max_tokens": 12, "steps": 2}).json["choices"][0]
    again = live.post("/v1/completions", small(seed=first["fsdfm"]["seed"])).json["choices"][0]
    assert again["text"] == first["text"]


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_plain_stream_is_one_delta_then_usage_then_the_end(live):
    whole = live.post("/v1/completions", small()).json
    streamed = live.post("/v1/completions", small(stream=True, stream_options={"include_usage": True}))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    text, usage = streamed.events
    assert text["choices"][0]["text"] == whole["choices"][0]["text"]
    assert text["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]


def test_a_diffusing_stream_replaces_the_text_at_every_step(live):
    whole = live.post("/v1/completions", small(steps=4)).json["choices"][0]["text"]
    *steps, last = live.post("/v1/completions", small(steps=4, stream=True, diffusing=True)).events
    facts = [event["choices"][0]["fsdfm"] for event in steps]
    assert [fact["step"] for fact in facts] == [0, 1, 2, 3, 4]
    assert last["choices"][0]["text"] == whole
    for before, event in pairwise(steps):
        old, new = before["choices"][0]["text"], event["choices"][0]["text"]
        changed = {place for begin, end in event["choices"][0]["fsdfm"]["changed"] for place in range(begin, end)}
        if len(old) == len(new):
            assert {place for place in range(len(new)) if old[place] != new[place]} <= changed


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 3),
        ("logit_bias", {"50256": -100}),
        ("best_of", 4),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1.0),
        ("tools", []),
    ],
)
def test_what_cannot_be_honoured_is_named(live, field, value):
    answer = live.post("/v1/completions", small(**{field: value}))
    assert answer.status == 400
    assert answer.error["param"] == field
    assert field in answer.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 50_000,
        {"prompt": 3},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"prompt": "a", "n": 0},
        {"prompt": "a", "n": 17},
        {"prompt": "a", "n": True},
        {"prompt": "a", "steps": 0},
        {"prompt": "a", "steps": 10**9},
        {"prompt": "a", "seed": -1},
        {"prompt": "a", "seed": 2**64},
        {"prompt": "a", "temperature": 0},
        {"prompt": "a", "top_p": 1.5},
        {"prompt": "a", "start": 1},
        {"prompt": "a", "jump": "high"},
        {"prompt": "a", "grid": "0,1,0.5"},
        b'{"prompt": "a", "final_temperature": 1e999}',
        {"prompt": "a", "stop": ["x"] * 5},
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "a", "diffusing": True},
        {"prompt": "a", "stream_options": {"include_usage": True}},
        {"prompt": "a" * 70_000},
        {"prompt": "a" * 2000},
        {"prompt": "a [[x]]", "gaps": True},
    ],
)
def test_a_bad_body_is_refused_in_openais_envelope(live, body):
    answer = live.post("/v1/completions", body)
    assert answer.status == 400
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    live.idle()


@pytest.mark.parametrize(
    ("path", "more", "param", "words"),
    [
        (0, {"prompt": [1, 2]}, "prompt", "allowed are texts of at most 65536 characters or lists of 1 to 16 of texts"),
        (0, {"prompt": ["x"] * 17}, "prompt", "lists of 1 to 16 of"),
        (0, {"stop": ["x"] * 5}, "stop", "texts of 1 to 128 characters or lists of at most 4 of"),
        (0, {"n": 17}, "n", "whole numbers >= 1 and <= 16"),
        (0, {"temperature": 0}, "temperature", "numbers > 0"),
        (0, {"steps": 1.5}, "steps", "<= 1024 or 'auto'"),
        (0, {"stream": "yes"}, "stream", "true and false"),
        (0, {"stream_options": 3}, "stream_options", "JSON objects"),
        (0, {"logprobs": True}, "logprobs", "cannot be honoured"),
        (0, {"jump": "exat"}, "jump", "did you mean 'exact'?"),
        (0, {"max_tokens": 5000}, "max_tokens", "at most 1024 in all"),
        (2, {"text": None}, "text", "allowed are texts"),
        (3, {"text": "abc", "damaged": [[2, 9]]}, "damaged", "0 <= begin < end <= 3"),
        (3, {"text": "abc", "damaged": [[2]]}, "damaged", "lists of at most 1024 of lists of 2 of whole numbers"),
        (3, {"text": "abc", "blind": True}, "blind", "only allowed with corrupt"),
        (3, {}, "text", "is missing"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_what_is_allowed(live, path, more, param, words):
    answer = live.post(PATHS[path], more if path else {**small(), **more})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]
    assert "constrained" not in answer.error["message"]  # no word of the machinery


def test_what_is_refused_whatever_is_sent_is_told_so():
    body = CompletionBody.model_json_schema()["properties"]
    assert {name for name, about in body.items() if about.get("description", "").startswith("Refused")} == set(
        UNSUPPORTED
    )


def test_what_can_be_got_has_a_head(live):
    for path in ("/", "/health", "/v1/models"):
        answer = live.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")
    assert live.ask("HEAD", "/v1/completions").status == 405
    assert live.get("/none").error["code"] == "not_found"


def test_details_tell_the_canvas(live):
    """What makes the same text in the library, wherever a text ends and whatever first token there is."""
    made = live.post("/v1/completions", small(details=True, echo=True)).json["choices"][0]
    length = made["fsdfm"]["details"]["length"]
    assert live.models["tiny"].generate("abc", length=length, steps=2, seed=7).text == made["text"]


def test_a_grid_and_a_final_temperature_are_those_of_the_library(live):
    options = {"grid": "0,0.25,0.5,1", "temperature": 1.0, "final_temperature": 0.5}
    alone = live.models["tiny"].generate("abc", length=1 + 3 + 12, seed=7, **options)
    body = {"prompt": "abc", "max_tokens": 12, "seed": 7, "echo": True, **options}
    assert live.post("/v1/completions", body).json["choices"][0]["text"] == alone.text
    long = ",".join(str(k / 1025) for k in range(1026))
    refused = live.post("/v1/completions", {**body, "grid": long})
    assert (refused.status, "1025 steps" in refused.error["message"]) == (400, True)


def test_an_unknown_model_or_path_is_not_found(live):
    answer = live.post("/v1/completions", small(model="tinny"))
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "tiny" in answer.error["message"]
    assert live.get("/v1/models/none").status == 404
    assert live.get("/v1/chat").status == 404
    assert live.ask("PUT", "/v1/infill", {}).status == 405


def test_a_body_too_large_is_refused_whether_it_says_so_or_not(live):
    assert live.post("/v1/infill", b"x" * (2**20 + 1)).status == 413
    connection = live.connect()
    connection.request("POST", "/v1/infill", iter([b"x" * 2**19] * 4), {"content-type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()


def test_other_content_types_are_not_read_as_json(live):
    assert live.post("/v1/infill", b'{"text": "a [[3]]"}', content_type="text/plain").status == 400


# --- protection -------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_everywhere_but_at_the_door():
    key = "0123456789abcdef"
    with serving(api_key=key) as live:
        for path in PATHS:
            assert live.post(path, small()).status == 401
        assert live.get("/v1/models").status == 401
        assert live.get("/metrics").status == 401
        assert live.get("/v1/models", authorization=f"Basic {key}").status == 401
        assert live.get("/v1/models", authorization=f"Bearer {key}x").status == 401
        refused = live.get("/v1/models", authorization="Bearer wrong")
        assert refused.error["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert live.get("/v1/models", authorization=f"Bearer {key}").status == 200
        for path in ("/", "/page.js", "/health", "/ready", "/openapi.json"):
            assert live.get(path).status == 200
        assert live.get("/openapi.json").json["security"]


def test_other_origins_are_let_in_only_if_named():
    with serving(cors=("https://example.org",)) as live:
        named = live.get("/v1/models", origin="https://example.org")
        assert named.headers["access-control-allow-origin"] == "https://example.org"
        other = live.get("/v1/models", origin="https://example.com")
        assert "access-control-allow-origin" not in other.headers


def test_without_cors_no_origin_is_let_in(live):
    assert "access-control-allow-origin" not in live.get("/v1/models", origin="https://example.org").headers


def test_requests_have_numbers_and_a_harmless_one_is_kept(live):
    assert live.get("/health", x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    assert live.get("/health", x_request_id="<b>").headers["x-request-id"] != "<b>"


@pytest.mark.slow
def test_a_full_queue_is_429_with_a_time_to_come_again():
    with serving(running=1, waiting=1) as live:
        answers = []
        body = {"prompt": "abc", "max_tokens": 28, "steps": 300}
        threads = [
            threading.Thread(target=lambda: answers.append(live.post("/v1/completions", body))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    statuses = sorted(answer.status for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    refused = next(answer for answer in answers if answer.status == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.error["type"] == "rate_limit_error"


def test_a_text_not_ready_in_time_is_given_up():
    with serving(request_seconds=0.3) as live:
        answer = live.post("/v1/completions", {"max_tokens": 31, "steps": 1024, "n": 16})
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        live.idle()


def test_a_body_that_does_not_come_is_not_waited_for():
    with serving(body_seconds=0.3) as live, socket.create_connection(("127.0.0.1", live.port), timeout=20) as slow:
        slow.sendall(b"POST /v1/infill HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(live, stream):
    live.idle()
    before = live.engine.metrics.cancelled.labels("cancelled")._value.get()
    body = json.dumps({"max_tokens": 31, "steps": 1024, "stream": stream, "diffusing": stream}).encode()
    client = socket.create_connection(("127.0.0.1", live.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    while not any(live.engine.load):
        time.sleep(0.005)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    live.idle()
    assert live.engine.metrics.cancelled.labels("cancelled")._value.get() == before + 1


@pytest.mark.slow
def test_a_slow_reader_does_not_hold_the_engine(live):
    body = json.dumps({"max_tokens": 31, "steps": 1000, "stream": True, "diffusing": True, "details": True}).encode()
    slow = socket.create_connection(("127.0.0.1", live.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    slow.sendall(head.encode() + b"\r\n\r\n" + body)  # and reads nothing
    assert live.post("/v1/completions", small()).status == 200
    live.idle(60)  # the slow one's text is finished all the same
    slow.close()


def hold(live, body):
    """A client that asks and does not read."""
    content = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", live.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    return client


def reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def alive(kind):
    return sum(type(each).__name__ == kind for each in gc.get_objects())


def until_gone(kind, seconds=10):
    """How many are left when none is expected."""
    end = time.monotonic() + seconds
    while alive(kind) and time.monotonic() < end:
        time.sleep(0.05)
    return alive(kind)


@pytest.fixture
def no_collector(live):
    """Without the garbage collector what is kept by a circle, or by a timer, is seen."""
    live.idle()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_left_of_a_client_that_left(live, stream):
    for _ in range(3):
        client = hold(live, {"max_tokens": 31, "steps": 200, "stream": stream, "diffusing": stream})
        while not any(live.engine.load):
            time.sleep(0.005)
        reset(client)
        live.idle()
    assert until_gone("Job") == 0
    assert until_gone("GenerationRun") == 0


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_of_a_request_that_was_answered(live):
    for more in ({}, {"stream": True}, {"stream": True, "diffusing": True}, {"steps": 0}):
        live.post("/v1/completions", small(**more))
    assert until_gone("Job") == 0
    assert until_gone("GenerationRun") == 0


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_of_a_connection_that_was_reset_after_its_answer(live):
    """A kept-alive connection has a timer; the timer must not keep the connection when that is broken."""
    others = [each for each in gc.get_objects() if type(each) is Connection]  # of clients of earlier tests
    known = {id(each) for each in others}

    def own():
        return sum(type(each) is Connection and id(each) not in known for each in gc.get_objects())

    for _ in range(3):
        client = hold(live, small(max_tokens=8, steps=1))
        assert client.recv(2**16)
        time.sleep(0.1)  # the answer is complete
        assert own(), "or the test could not tell"
        reset(client)
    end = time.monotonic() + 3  # far sooner than the timer
    while own() and time.monotonic() < end:
        time.sleep(0.05)
    assert own() == 0


# --- facts ------------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_what_they_are(live):
    cards = live.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["tiny", "chain", "mask"]
    assert cards[0]["length"] == 32
    assert cards[0]["budgets"] == [1, 2, 4, 8]
    assert live.get("/v1/models/mask").json == cards[2]


def test_health_and_readiness(live):
    assert live.get("/health").json["status"] == "ok"
    assert live.get("/ready").status == 200


def test_metrics_count(live):
    live.post("/v1/completions", small())
    text = live.get("/metrics").body.decode()
    for name in ("queue_seconds_count", "call_seconds_count", "batch_size_count", "calls_total", "cancelled_total"):
        assert f"fsdfm_{name}" in text
    assert 'fsdfm_tokens_total{kind="completion"}' in text
    assert "process_resident_memory_bytes" in text


def test_logs_hold_no_prompt_unless_asked(caplog):
    with caplog.at_level("INFO", logger="fsdfm.serve"), serving() as live:
        live.post("/v1/completions", small(prompt="hush\x1b[31m"))
        live.post("/v1/completions", small(prompt="hush", logprobs=1))
    assert "hush" not in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="fsdfm.serve"), serving(log_prompts=True) as live:
        live.post("/v1/completions", small(prompt="hush\x1b[31m"))
    assert "hush" in caplog.text
    assert "\x1b" not in caplog.text
    record = json.loads(caplog.records[-1].message)
    assert record["status"] == 200


def test_the_page_is_whole_and_takes_nothing_from_elsewhere(live):
    page = live.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/", "/page.css", "/page.js"):
        content = live.get(path).body.decode()
        assert "http://" not in content.replace("http://www.w3.org", "")
        assert "https://" not in content
    assert "innerHTML" not in live.get("/page.js").body.decode()


def test_openapi_says_what_is_refused(live):
    schema = live.get("/openapi.json").json
    assert set(PATHS) <= set(schema["paths"])
    for path in PATHS:
        answers = schema["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
        assert "text/event-stream" in answers["200"]["content"]
        assert schema["paths"][path]["post"]["requestBody"]
    health = schema["paths"]["/health"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert health == {"$ref": "#/components/schemas/Status"}
    assert set(schema["paths"]["/metrics"]["get"]["responses"]) == {"200", "401"}


def test_openapi_says_every_limit(live):
    """A client may check a body by it before it asks."""
    schemas = live.get("/openapi.json").json["components"]["schemas"]

    def limits(body, field):
        kinds = schemas[body]["properties"][field].get("anyOf", [schemas[body]["properties"][field]])
        (number,) = [kind for kind in kinds if kind.get("type") in ("integer", "number")]
        return {name: value for name, value in number.items() if "inimum" in name or "aximum" in name}

    assert limits("CompletionBody", "steps") == {"minimum": 1, "maximum": 1024}
    assert limits("CompletionBody", "top_p") == {"exclusiveMinimum": 0, "maximum": 1}
    assert limits("CompletionBody", "top_k")["minimum"] == 1
    assert limits("RepairBody", "corrupt") == {"exclusiveMinimum": 0, "maximum": 1}


def test_top_k_reaches_the_sampler(live):
    body = small(top_k=1, steps=1, max_tokens=20)
    expected = live.models["tiny"].generate("abc", length=1 + 3 + 20, steps=1, seed=7, top_k=1).text
    assert "abc" + live.post("/v1/completions", body).json["choices"][0]["text"] == expected
    assert live.post("/v1/completions", small(steps=1, max_tokens=20)).json["choices"][0]["text"] != expected[3:]


def test_a_page_that_was_let_in_may_send_its_key():
    with serving(cors=("https://example.org",)) as live:
        asked = {
            "origin": "https://example.org",
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization, content-type, x-request-id",
        }
        answer = live.ask("OPTIONS", "/v1/completions", **asked)
        assert answer.status == 200
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert "POST" in answer.headers["access-control-allow-methods"]


def test_a_body_of_just_the_allowed_size_is_read():
    with serving(max_body=200) as live:
        body = json.dumps(small()).encode()
        assert live.post("/v1/completions", body + b" " * (200 - len(body))).status == 200
        assert live.post("/v1/completions", body + b" " * (201 - len(body))).status == 413


def counted(live, name):
    lines = live.get("/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_metrics_count_tokens_and_faults(monkeypatch):
    with serving() as live:
        live.post("/v1/completions", small())
        assert counted(live, 'fsdfm_tokens_total{kind="prompt"}') == 3
        assert counted(live, 'fsdfm_tokens_total{kind="completion"}') > 0
        assert counted(live, "fsdfm_errors_total") == 0

        def fails(*_):
            raise ZeroDivisionError("a fault of ours")

        monkeypatch.setattr(live.models["tiny"].network, "posteriors", fails)
        assert live.post("/v1/completions", small()).status == 500
        assert counted(live, "fsdfm_errors_total") == 1
        live.post("/v1/completions", small(stream=True))
        assert counted(live, "fsdfm_errors_total") == 2


def test_a_stop_may_be_the_first_that_is_written(live):
    written = live.post("/v1/completions", small()).json["choices"][0]["text"]
    cut = live.post("/v1/completions", small(stop=[written[:2]])).json["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("", "stop")
