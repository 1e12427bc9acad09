"""The one internal request of every surface, and the validators that make it.

A surface reads its body into a `Draft` (all checks that need no tokens), the prompts are tokenised off the event loop,
and `settle` checks lengths. Whatever the workers cannot do yet is refused here by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import PromptTooLong, RequestError, UnknownModel
from ..core.sampling import MAX_CHOICES, SamplingParams
from . import dialect as d
from .chat_format import ParseStart, fill_in_the_middle, render
from .fields import (
    INT64,
    Fields,
    as_float,
    as_list,
    as_text,
    as_token_ids,
    missing,
    unsupported,
    unsupported_value,
    wrong_type,
    wrong_value,
)
from .messages import ChatPrompt, read_chat
from .served_model import ServedModel
from .tokenizer import Segment, TokenizerPool

MAX_SEQUENCES = 1024
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
LARGEST_COUNT = (1 << 31) - 1

COMPLETION_MAX_TOKENS = 16

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 0.01

CONSTRAINTS = ("structured_outputs", "regex", "ebnf")
GUIDED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "guided_decoding_backend",
    "guided_whitespace_pattern",
)  # fmt: skip
NO_EFFECT = (
    "metadata", "store", "service_tier", "prompt_cache_options", "prompt_cache_retention", "verbosity", "prediction",
    "moderation", "spaces_between_special_tokens", "parallel_tool_calls", "session_id",
    "prompt_cache_key", "safety_identifier", "user", "user_id",
)  # fmt: skip

COMMON_FIELDS = frozenset(
    (
        "model", "stream", "stream_options", "max_tokens", "min_tokens", "n", "best_of", "temperature", "top_p",
        "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
        "stop_token_ids", "include_stop_str_in_output", "no_stop_trim", "ignore_eos", "logit_bias", "bad_words",
        "allowed_token_ids", "response_format", "skip_special_tokens", "truncate_prompt_tokens", "truncation_side",
        "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs", "priority", "cache_salt",
        "kv_transfer_params", "logprobs", "echo", *CONSTRAINTS, *GUIDED, *NO_EFFECT,
    )
)  # fmt: skip
CHAT_FIELDS = COMMON_FIELDS | {
    "messages", "tools", "tool_choice", "thinking", "reasoning_effort", "chat_template_kwargs", "include_reasoning",
    "separate_reasoning", "thinking_token_budget", "top_logprobs", "continue_final_message", "add_generation_prompt",
    "task", "functions", "function_call", "modalities", "audio", "web_search_options", "max_completion_tokens",
}  # fmt: skip
COMPLETION_FIELDS = COMMON_FIELDS | {"prompt", "suffix", "prompt_embeds"}


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised."""

    ids: tuple[int, ...]
    text: str | None = None
    """As given; None if it came as ids."""


@dataclass(frozen=True, kw_only=True)
class ChatOutput:
    """How the output of a chat request becomes a message."""

    start: ParseStart
    parse_tools: bool
    single_call: bool = False
    include_reasoning: bool = True
    given_text: str = ""
    """With `echo`: the text that the answer continues."""
    given_reasoning: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be generated and in which form it goes back."""

    request_id: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    """Of choice 0; the others differ in their seed."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    chat: ChatOutput | None = None
    """None: plain text."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    score_only: bool = False
    """max_tokens was 0: the token that is made all the same is not shown."""
    logprobs: int | None = None
    """Alternatives to show for each token; None: no log-probabilities."""
    show_prompt_logprobs: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    max_chunk_tokens: int = 0
    """Most tokens of one piece of a stream; 0: all of a step."""
    timeout_s: float = 600.0
    traceparent: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the choices of each prompt: distinct draws for each; empty for a single one, which has the request's."""
        return tuple(choice_seed(self.sampling.seed, choice) for choice in range(self.n)) if self.n > 1 else ()


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: choice 0 has the request's own, so that n does not change it.

    A fixed 64 bit mix (splitmix64's finaliser), so that a request repeats all its choices.
    """
    if choice == 0:
        return seed
    mask = (1 << 64) - 1
    z = ((seed & mask) + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >= INT64 else z


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What requests are checked against; from settings, checkpoint and workers."""

    max_model_len: int
    max_prompt_tokens: int = 0
    """The longest prompt that any worker's pools can hold at all; 0: unknown."""
    default_max_tokens: int = 0
    strict_fields: bool = False
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A request whose fields are good, before its prompts are tokens."""

    request: Request
    """With no prompts and a max_tokens still to be settled."""
    texts: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    segments: tuple[Segment, ...] | None = None
    infill: tuple[tuple[str, bool], ...] | None = None
    max_tokens: int | None = None
    default_max_tokens: int = 0
    """0: the rest of the context."""
    truncate: int | None = None
    """Prompt tokens to keep; -1: what fits."""
    keeps_left: bool = False
    param: str = "prompt"


def pick_model(fields: Fields, model: ServedModel) -> str:
    """The served name that the request is answered under.

    Raises:
        UnknownModel: no such name; `param` is model.
    """
    name = fields.text("model")
    if name is None or name == "":
        return model.names[0]
    if name not in model.names:
        raise UnknownModel(f"the model {name[:200]!r} does not exist", param="model")
    return name


# ---- bodies ----


def draft_chat(body: Mapping[str, Any], model: ServedModel, bounds: Bounds, base: Request) -> Draft:
    """A /v1/chat/completions body. `base` carries what came outside the body."""
    fields = Fields(body)
    _check_known(body, CHAT_FIELDS, bounds)
    name = pick_model(fields, model)
    chat = read_chat(fields, model.dialect)
    _refuse_chat(fields, chat)
    common = _read_common(fields, model, base)
    wants = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wants:
        raise wrong_value("top_logprobs", "used with logprobs: true", top)
    logprobs = (top or 0) if wants else None
    max_tokens = fields.integer("max_tokens", 1, LARGEST_COUNT)
    completion = fields.integer("max_completion_tokens", 1, LARGEST_COUNT)
    max_tokens = max_tokens if completion is None else completion
    rendered = render(chat, model.dialect, model.profile)
    last = chat.messages[-1]
    echo = fields.flag("echo", False) and chat.continued
    output = ChatOutput(
        start=rendered.parse_start,
        parse_tools=rendered.parse_tools,
        single_call=not fields.flag("parallel_tool_calls", True),
        include_reasoning=fields.flag("include_reasoning", True),
        given_text=last.text if echo else "",
        given_reasoning=last.reasoning if echo and chat.thinking else "",
    )
    request = dataclasses.replace(
        common,
        model=name,
        chat=output,
        echo=echo,
        logprobs=logprobs,
        sampling=dataclasses.replace(common.sampling, logprobs=logprobs),
    )
    return Draft(
        request=request,
        segments=rendered.segments,
        max_tokens=max_tokens,
        default_max_tokens=bounds.default_max_tokens,
        param="messages",
    )


def draft_completion(body: Mapping[str, Any], model: ServedModel, bounds: Bounds, base: Request) -> Draft:
    """A /v1/completions body."""
    fields = Fields(body)
    _check_known(body, COMPLETION_FIELDS, bounds)
    name = pick_model(fields, model)
    if fields.given("prompt_embeds"):
        raise unsupported("prompt_embeds", "send text or token ids as prompt")
    echo = fields.flag("echo", False)
    common = _read_common(fields, model, base)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, LARGEST_COUNT)
    prompt_logprobs = common.sampling.prompt_logprobs
    if echo and logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, logprobs)
    request = dataclasses.replace(
        common,
        model=name,
        echo=echo,
        logprobs=logprobs,
        score_only=max_tokens == 0,
        sampling=dataclasses.replace(common.sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )
    texts, ids = _read_prompts(fields, model.vocab_size)
    infill = None
    suffix = fields.text("suffix")
    if suffix:
        if len(texts) != 1 or ids:
            raise wrong_value("suffix", "used with one prompt of text", suffix)
        for marker in (d.FIM_BEGIN, d.FIM_HOLE, d.FIM_END):
            if marker not in model.tokenizer.added_ids:
                raise unsupported("suffix", "the model's tokenizer has no fill-in-the-middle tokens")
        infill = fill_in_the_middle(texts[0], suffix)
    truncate, keeps_left = read_truncation(fields)
    if request.n * (len(texts) + len(ids)) > MAX_SEQUENCES:
        raise wrong_value("n", f"so small that n times the prompts is at most {MAX_SEQUENCES}", request.n)
    return Draft(
        request=request,
        texts=texts,
        ids=ids,
        infill=infill,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        truncate=truncate,
        keeps_left=keeps_left,
    )


def plain_text(draft: Draft) -> Draft:
    """A chat request whose output is not parsed: text and ids as they come."""
    return dataclasses.replace(draft, request=dataclasses.replace(draft.request, chat=None, echo=False))


def _check_known(body: Mapping[str, Any], known: frozenset[str], bounds: Bounds) -> None:
    if bounds.strict_fields:
        for name in body:
            if name not in known:
                raise unsupported(name[:200], "no such field is known")


def _refuse_chat(fields: Fields, chat: ChatPrompt) -> None:
    """What is asked for but cannot be done yet; silence would give a wrong answer."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.given(old):
            raise unsupported(old, f"use {new}")
    if fields.given("modalities") and fields.raw("modalities") != ["text"]:
        raise unsupported_value("modalities", "the model writes text only")
    for name in ("audio", "web_search_options"):
        if fields.given(name):
            raise unsupported(name, "the model reads and writes text only")
    if fields.integer("thinking_token_budget", 0, LARGEST_COUNT) is not None:
        raise unsupported("thinking_token_budget", "the workers cannot force the end of reasoning yet")
    if fields.maybe_flag("separate_reasoning") is False:
        raise unsupported_value("separate_reasoning", "reasoning is always separate; include_reasoning hides it")
    if fields.given("truncate_prompt_tokens"):
        raise unsupported("truncate_prompt_tokens", "it would cut the chat format; shorten the messages")
    for index, tool in enumerate(chat.tools):
        if tool.strict and chat.tools_active:
            raise unsupported_value(
                f"tools[{index}].function.strict", "arguments cannot be held to their schema yet; leave it out"
            )
    if chat.tool_choice == "named":
        raise unsupported_value("tool_choice", "one function cannot be forced yet; use required without thinking")
    if chat.tool_choice == "required" and (chat.thinking or chat.task is not None):
        raise unsupported_value("tool_choice", "a call can be forced only with thinking disabled so far")


def _read_common(fields: Fields, model: ServedModel, base: Request) -> Request:
    """The fields that chat and completions share."""
    stream = fields.flag("stream", False)
    options = fields.members("stream_options")
    if options is not None and not stream:
        raise wrong_value("stream_options", "used with stream: true", fields.raw("stream_options"))
    _refuse_common(fields)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise unsupported_value("best_of", "it must equal n")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise wrong_value("prompt_logprobs", "used without stream", prompt_logprobs)
    for name in ("user", "user_id", "safety_identifier"):
        fields.text(name, high=512)
    return dataclasses.replace(
        base,
        n=n,
        sampling=_read_sampling(fields, model, prompt_logprobs),
        stop=_read_stop(fields),
        include_stop=fields.flag("include_stop_str_in_output", False) or fields.flag("no_stop_trim", False),
        skip_special=fields.flag("skip_special_tokens", True),
        stream=stream,
        include_usage=options.flag("include_usage", False) if options is not None else False,
        continuous_usage=options.flag("continuous_usage_stats", False) if options is not None else False,
        show_prompt_logprobs=prompt_logprobs is not None,
        return_token_ids=fields.flag("return_token_ids", False),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids", False),
        priority=base.priority if (given := fields.integer("priority", -INT64, INT64 - 1)) is None else given,
        cache_salt=_read_salt(fields),
    )


def _refuse_common(fields: Fields) -> None:
    wanted = fields.members("response_format")
    if wanted is not None:
        kind = wanted.choice("type", ("text", "json_object", "json_schema", "structural_tag"))
        if kind != "text":
            raise unsupported("response_format", "constrained output is not offered yet; only type text is")
    for name in CONSTRAINTS:
        if fields.given(name):
            raise unsupported(name, "constrained output is not offered yet")
    for name in GUIDED:
        if fields.given(name):
            raise unsupported(name, "it was replaced by structured_outputs, which is not offered yet")
    if fields.items("bad_words", high=MAX_BIASES):
        raise unsupported("bad_words", "the workers cannot ban token sequences yet")
    if fields.given("kv_transfer_params"):
        raise unsupported("kv_transfer_params", "it is accepted from trusted peers only")


def _read_sampling(fields: Fields, model: ServedModel, prompt_logprobs: int | None) -> SamplingParams:
    temperature = fields.number("temperature", 0.0, 2.0)
    if temperature is None:
        temperature = model.default_temperature
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    elif temperature < LEAST_TEMPERATURE:
        temperature = LEAST_TEMPERATURE
    top_p = fields.number("top_p", 0.0, 1.0, above_low=True)
    top_k = fields.integer("top_k", -1, model.vocab_size)
    seed = fields.integer("seed", -INT64, INT64 - 1)
    if seed is None or seed == -1:
        seed = secrets.randbits(62)
    allowed = fields.raw("allowed_token_ids")
    repetition = fields.number("repetition_penalty", 0.0, float("inf"), above_low=True)
    return SamplingParams(
        temperature=temperature,
        top_p=model.default_top_p if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        max_tokens=1,
        min_tokens=fields.integer("min_tokens", 0, LARGEST_COUNT) or 0,
        seed=seed,
        stop_token_ids=_ids(fields, "stop_token_ids", model.vocab_size, high=MAX_STOP_IDS),
        eos_token_ids=model.eos_token_ids,
        ignore_eos=fields.flag("ignore_eos", False),
        logit_bias=_read_bias(fields, model.vocab_size),
        allowed_token_ids=()
        if allowed is None
        else as_token_ids(allowed, "allowed_token_ids", model.vocab_size, low=1, high=model.vocab_size),
        prompt_logprobs=prompt_logprobs,
    )


def _ids(fields: Fields, name: str, vocab_size: int, *, high: int) -> tuple[int, ...]:
    value = fields.raw(name)
    return () if value is None else as_token_ids(value, fields.path(name), vocab_size, high=high)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (as_text(value, "stop", low=1, high=MAX_STOP_CHARACTERS),)
    if not isinstance(value, list):
        raise wrong_type("stop", "a string or a list of strings", value)
    return tuple(
        as_text(item, f"stop[{index}]", low=1, high=MAX_STOP_CHARACTERS)
        for index, item in enumerate(as_list(value, "stop", high=MAX_STOPS))
    )


def _read_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    found = fields.members("logit_bias")
    if found is None:
        return {}
    raw = fields.raw("logit_bias")
    if len(raw) > MAX_BIASES:
        raise wrong_value("logit_bias", f"an object of at most {MAX_BIASES} entries", raw)
    bias: dict[int, float] = {}
    for key, value in raw.items():
        plain = key.isascii() and key.isdecimal() and len(key) < 10
        if not plain or not int(key) < vocab_size:
            raise wrong_value("logit_bias", f"keyed by token ids from 0 to {vocab_size - 1}", key)
        number = as_float(value, f"logit_bias.{key}", float("-inf"), float("inf"))
        bias[int(key)] = min(max(number, -100.0), 100.0)
    return bias


def _read_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt", low=1, high=128)
    if salt is not None and not set(salt).isdisjoint("@/\\\0"):
        raise wrong_value("cache_salt", "without '@', '/', '\\' and NUL", salt)
    return salt or ""


def read_truncation(fields: Fields) -> tuple[int | None, bool]:
    """(prompt tokens to keep, whether the first ones)."""
    keep = fields.integer("truncate_prompt_tokens", -1, LARGEST_COUNT)
    if keep == 0:
        raise wrong_value("truncate_prompt_tokens", "at least 1, or -1", keep)
    side = fields.choice("truncation_side", ("left", "right"))
    return keep, side == "right"


def _read_prompts(fields: Fields, vocab_size: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """(texts, lists of ids); one of them is empty."""
    value = fields.raw("prompt")
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        if not value:
            raise wrong_value("prompt", "not empty", value)
        return (value,), ()
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, a list of strings, a list of token ids, or a list of those", value)
    if not value:
        raise wrong_value("prompt", "not empty", value)
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return (), (as_token_ids(value, "prompt", vocab_size, high=LARGEST_COUNT),)
    as_list(value, "prompt", low=1, high=MAX_PROMPTS)
    if kinds == {str}:
        for index, item in enumerate(value):
            as_text(item, f"prompt[{index}]", low=1)
        return tuple(value), ()
    if kinds == {list}:
        return (), tuple(
            as_token_ids(item, f"prompt[{index}]", vocab_size, low=1, high=LARGEST_COUNT)
            for index, item in enumerate(value)
        )
    if bool in kinds or float in kinds or dict in kinds or type(None) in kinds:
        wrong = next(i for i, item in enumerate(value) if type(item) not in (int, str, list))
        raise wrong_type(f"prompt[{wrong}]", "a string, an integer or a list of integers", value[wrong])
    raise wrong_type("prompt", "of one kind: strings, token ids, or lists of token ids", value)


# ---- tokens and lengths ----


async def settle(draft: Draft, model: ServedModel, bounds: Bounds, pool: TokenizerPool) -> Request:
    """Tokenise and check the lengths.

    Raises:
        PromptTooLong: prompt and output do not fit the model or any worker's pools.
    """
    prompts = await tokenise(draft, model, bounds, pool)
    limit = bounds.max_model_len
    longest = max(len(prompt.ids) for prompt in prompts)
    if not all(prompt.ids for prompt in prompts):
        raise wrong_value(draft.param, "of at least one token", "")
    if longest >= limit or (draft.max_tokens is not None and longest + draft.max_tokens > limit):
        wanted = f"{draft.max_tokens} tokens of output" if draft.max_tokens is not None else "output"
        raise too_long(draft.param, limit, longest, wanted)
    if bounds.max_prompt_tokens and longest > bounds.max_prompt_tokens:
        raise too_long(draft.param, bounds.max_prompt_tokens, longest, "output")
    max_tokens = draft.max_tokens
    if max_tokens is None:
        rest = limit - longest
        max_tokens = min(draft.default_max_tokens, rest) if draft.default_max_tokens else rest
    sampling = draft.request.sampling
    if sampling.min_tokens > max_tokens:
        raise wrong_value("min_tokens", f"at most max_tokens ({max_tokens})", sampling.min_tokens)
    return dataclasses.replace(
        draft.request, prompts=prompts, sampling=dataclasses.replace(sampling, max_tokens=max_tokens)
    )


def too_long(param: str, limit: int, num_prompt: int | str, output: str) -> RequestError:
    return PromptTooLong(
        f"at most {limit} tokens fit, but the prompt has {num_prompt} tokens and {output} was asked for", param=param
    )


async def tokenise(draft: Draft, model: ServedModel, bounds: Bounds, pool: TokenizerPool) -> tuple[Prompt, ...]:
    """The prompts as ids; a text that is surely too long is refused unread."""
    texts = draft.texts if draft.segments is None else tuple(segment.text for segment in draft.segments)
    whole = sum(map(len, texts)) if draft.segments is not None else max(map(len, texts), default=0)
    at_least = whole // model.tokenizer.longest_token_bytes
    if at_least > bounds.max_model_len and draft.truncate is None:
        raise too_long(draft.param, bounds.max_model_len, f"at least {at_least}", "output")
    if draft.segments is not None:
        return (Prompt(tuple(await pool.encode_segments(draft.segments))),)
    if draft.infill is not None:
        pieces = [text for text, is_marker in draft.infill if not is_marker]
        encoded = iter(await pool.encode_raw(pieces))
        ids: list[int] = []
        for text, is_marker in draft.infill:
            ids.extend([model.tokenizer.marker_id(text)] if is_marker else next(encoded))
        return (Prompt(tuple(ids), draft.texts[0]),)
    if draft.texts:
        found = await pool.encode_raw(draft.texts)
        prompts = tuple(Prompt(tuple(ids), text) for ids, text in zip(found, draft.texts, strict=True))
    else:
        prompts = tuple(Prompt(ids) for ids in draft.ids)
    if draft.truncate is None:
        return prompts
    keep = draft.truncate
    if keep == -1:
        keep = max(bounds.max_model_len - (draft.max_tokens or draft.default_max_tokens), 1)
    return tuple(
        prompt if len(prompt.ids) <= keep else Prompt(prompt.ids[:keep] if draft.keeps_left else prompt.ids[-keep:])
        for prompt in prompts
    )
