"""Whatever a client sends, it gets an error of the OpenAI shape, and no worker hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from process.cluster import Cluster, unclean

pytestmark = pytest.mark.process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "The", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    ).encode()


CASES = {
    "empty_prompt": (TEXT, body(prompt=""), 400),
    "empty_list": (TEXT, body(prompt=[]), 400),
    "empty_ids": (TEXT, body(prompt=[[]]), 400),
    "mixed_list": (TEXT, body(prompt=["a", 3]), 400),
    "id_beyond_vocabulary": (TEXT, body(prompt=[3072]), 400),
    "negative_id": (TEXT, body(prompt=[-1]), 400),
    "prompt_too_long": (TEXT, body(prompt=[40] * 40_000), 400),
    "prompt_plus_output_too_long": (TEXT, body(prompt=[40] * 10, max_tokens=40_000), 400),
    "unknown_model": (TEXT, body(model="gpt-9"), 404),
    "text_for_a_number": (TEXT, body(max_tokens="5"), 400),
    "bool_for_a_number": (TEXT, body(max_tokens=True), 400),
    "number_for_a_prompt": (TEXT, body(prompt=5), 400),
    "negative_max_tokens": (TEXT, body(max_tokens=-1), 400),
    "nan_temperature": (TEXT, body()[:-1] + b', "temperature": NaN}', 400),
    "infinite_temperature": (TEXT, body()[:-1] + b', "temperature": 1e999}', 400),
    "negative_temperature": (TEXT, body(temperature=-0.5), 400),
    "top_p_zero": (TEXT, body(top_p=0), 400),
    "too_many_stops": (TEXT, body(stop=["x"] * 17), 400),
    "empty_stop": (TEXT, body(stop=""), 400),
    "stream_options_without_stream": (TEXT, body(stream_options={"include_usage": True}), 400),
    "broken_json": (TEXT, b'{"model": "demo", ', 400),
    "json_list": (TEXT, b"[]", 400),
    "nothing": (TEXT, b"", 400),
    "invalid_utf8": (TEXT, b'{"model": "demo", "prompt": "\xff\xfe"}', 400),
    "deep_nesting": (TEXT, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "no_messages": (CHAT, chat(messages=[]), 400),
    "no_model_text": (CHAT, chat(model=7), 400),
    "unknown_role": (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400),
    "image": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
    ),
    "top_logprobs_alone": (CHAT, chat(top_logprobs=3), 400),
    "chat_negative_max_tokens": (CHAT, chat(max_completion_tokens=-3), 400),
    "lone_surrogate": (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400),
}


def check_error(text: str) -> dict[str, Any]:
    """The four keys of an OpenAI error body, and nothing of ours in the message."""
    document = json.loads(text)
    assert set(document) == {"error"}
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    for secret in ("Traceback", "/headrace/", "site-packages"):
        assert secret not in text
    assert len(text) < 2000
    return dict(error)


@pytest.fixture(scope="module", autouse=True)
def nothing_was_allocated(pair: Cluster):
    """After all of it both workers have opened no more legs than before."""
    before = {name: pair.state(name)["engine"]["steps"] for name in pair.workers()}
    yield
    after = {name: pair.state(name)["engine"]["steps"] for name in pair.workers()}
    assert after == before
    assert {name: unclean(pair.state(name)) for name in pair.workers()} == {name: [] for name in before}


@pytest.mark.parametrize("case", CASES)
def test_bad_request_is_answered_with_an_error_body(pair: Cluster, case: str):
    """The right status and the four keys."""
    path, content, status = CASES[case]
    answer = pair.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    check_error(answer.text)
    assert answer.headers["x-request-id"]


def test_bad_stream_request_is_a_plain_error(pair: Cluster):
    """Headers wait for the first token, so an error before it has its real status."""
    answer = pair.http.post(TEXT, content=body(stream=True, max_tokens=-1))
    assert answer.status_code == 400
    check_error(answer.text)


def test_body_over_the_limit_is_refused_unread(pair: Cluster):
    """By its length alone; and counted while it is read when the length is not said."""
    huge = b'{"prompt": "' + b"x" * (40 << 20) + b'"}'
    answer = pair.http.post(TEXT, content=huge, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert check_error(answer.text)["code"] == "request_too_large"


def test_ten_megabytes_of_text_are_too_long_not_too_much(pair: Cluster):
    """Under the limit of the body, over that of the context."""
    answer = pair.http.post(
        TEXT, content=body(prompt="water " * (10 << 20 >> 3)), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert check_error(answer.text)["code"] == "context_length_exceeded"


def test_other_content_type_is_415(pair: Cluster):
    """Forms and files are not read."""
    answer = pair.http.post(TEXT, content=body(), headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    check_error(answer.text)


def test_unknown_paths_and_methods_have_the_same_shape(pair: Cluster):
    """404 and 405 are errors like the others."""
    missing = pair.http.get("/v1/nothing")
    assert missing.status_code == 404
    check_error(missing.text)
    wrong = pair.http.get(TEXT)
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"]
    check_error(wrong.text)
