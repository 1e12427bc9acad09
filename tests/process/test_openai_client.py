"""The official openai client, unmodified, against real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from process.cluster import Cluster, unclean

pytestmark = pytest.mark.process

MESSAGES = [{"role": "user", "content": "Tell me about the river."}]


@pytest.fixture(scope="module")
def client(pair: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


def test_models_are_listed_and_retrieved(client: openai.OpenAI):
    """Load generators read the first entry's id."""
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "headrace")
    assert client.models.retrieve("demo") == model


def test_chat_answers(client: openai.OpenAI):
    """One message, a finish reason, and a usage that adds up."""
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, reasoning_effort="none", max_tokens=24, seed=7
    )  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 24
    assert answer.object == "chat.completion"


def test_chat_stream_is_the_same_answer_in_pieces(client: openai.OpenAI):
    """Equal seed, equal text; the role comes first, the finish reason once, the usage last."""
    asked = {"model": "demo", "messages": MESSAGES, "reasoning_effort": "none", "max_tokens": 40, "seed": 11}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_reasoning_arrives_under_both_names(client: openai.OpenAI):
    """Thinking is on unless it is declined; some clients read the one field, some the other."""
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, seed=3)  # type: ignore[arg-type]
    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning != ""  # type: ignore[attr-defined]


def test_chat_stream_helper_accumulates(client: openai.OpenAI):
    """`chat.completions.stream()` is stricter about the order of chunks than a plain loop."""
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, reasoning_effort="none", max_tokens=8, seed=3
    ) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        snapshot = stream.current_completion_snapshot
    assert kinds[0] == "chunk"
    assert "content.delta" in kinds
    assert snapshot.choices[0].finish_reason in ("stop", "length")
    assert snapshot.choices[0].message.content


def test_completions_take_text_lists_and_token_ids(client: openai.OpenAI):
    """All four forms of a prompt; greedy, so that equal prompts have equal answers."""
    text = "The miller keeps the gate."
    single = client.completions.create(
        model="demo", prompt=text, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = single.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert single.choices[0].finish_reason in ("stop", "length")
    several = client.completions.create(model="demo", prompt=[text, text], max_tokens=12, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]
    by_ids = client.completions.create(model="demo", prompt=ids, max_tokens=12, temperature=0)
    nested = client.completions.create(model="demo", prompt=[ids], max_tokens=12, temperature=0)
    texts = [choice.text for answer in (several, by_ids, nested) for choice in answer.choices]
    assert texts == [single.choices[0].text] * 4


def test_completions_stream_is_the_same_answer(client: openai.OpenAI):
    """Text in pieces, with the finish reason on the last."""
    asked = {"model": "demo", "prompt": "In the morning", "max_tokens": 30, "seed": 5}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs_are_given_for_each_token(client: openai.OpenAI):
    """One item a token; the likeliest alternatives in order."""
    answer = client.completions.create(model="demo", prompt="The wheel", max_tokens=6, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert answer.usage is not None
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.completion_tokens
    assert all(value <= 0.0 for value in found.token_logprobs)
    chat = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    items = chat.choices[0].logprobs.content
    assert len(items) == chat.usage.completion_tokens
    assert all(len(item.top_logprobs) == 2 for item in items)


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI):
    """The text is searched, not the tokens."""
    free = client.completions.create(model="demo", prompt="The water", max_tokens=40, temperature=0).choices[0]
    stop = free.text[5:9]
    cut = client.completions.create(model="demo", prompt="The water", max_tokens=40, temperature=0, stop=stop).choices[
        0
    ]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_closing_a_stream_cancels_the_work(pair: Cluster, client: openai.OpenAI):
    """A client that leaves in mid-stream frees its pages on both workers, long before its tokens are up."""
    stream = client.completions.create(
        model="demo", prompt="The river", max_tokens=20_000, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert pair.state("decode-0")["legs"] == 1
    stream.close()
    end_s = time.monotonic() + 10.0
    while any(unclean(pair.state(name)) for name in pair.workers()) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert {name: unclean(pair.state(name)) for name in pair.workers()} == {"decode-0": [], "prefill-0": []}


def test_errors_are_the_clients_own_classes(client: openai.OpenAI):
    """Status, code and parameter arrive as attributes."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="demo", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="x")
