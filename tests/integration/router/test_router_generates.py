"""One request through a router and fake workers, and what the client sees of it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from tandem.types import Role
from tandem.v1 import inference_pb2 as pb

PROMPT = (72, 105)
PATIENCE_S = 20.0


async def test_tokens_text_usage_and_timings_of_a_handed_over_request(cluster: Any) -> None:
    await cluster.add_pair()
    responses = [response async for response in cluster.generate(*PROMPT, max_tokens=5)]
    tokens = [token for response in responses for token in response.token_ids]
    last = responses[-1]
    assert tokens == cluster.completion(PROMPT, 5)
    assert "".join(response.text for response in responses) == bytes(tokens).decode()
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 5, 0)
    assert last.timings.prefill_seconds == 0.5
    assert last.timings.queue_seconds >= 0.25
    assert (last.timings.transfer_seconds, last.timings.transfer_bytes) == (0.125, 4096)
    assert 0 < last.timings.first_token_seconds <= last.timings.total_seconds
    assert all(not response.HasField("usage") for response in responses[:-1])


async def test_the_first_token_reaches_the_client_before_the_hand_off_is_over(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT)
    first = await call.read()
    assert list(first.token_ids) == cluster.completion(PROMPT, 1)
    decode.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, 8)[1:]


async def test_a_first_token_that_ends_the_sequence_needs_no_hand_off(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    response = await cluster.generate(*PROMPT, max_tokens=1).read()
    assert response.finish_reason == pb.FINISH_REASON_LENGTH
    assert response.timings.transfer_bytes == 0
    await cluster.until(lambda: prefill.idle and decode.idle)


async def test_complete_gathers_what_generate_streams(cluster: Any) -> None:
    await cluster.add_pair()
    generate = pb.GenerateRequest(request_id="mine", text="Hi", sampling=pb.SamplingParams(max_tokens=6, logprobs=1))
    answer = await cluster.inference.Complete(pb.CompleteRequest(generate=generate))
    (choice,) = answer.choices
    assert answer.request_id == "mine"
    assert list(choice.token_ids) == cluster.completion(b"Hi", 6)
    assert choice.text == bytes(choice.token_ids).decode()
    assert [each.token_id for each in choice.logprobs] == list(choice.token_ids)
    assert choice.logprobs[0].top[0].logprob == -0.5
    assert answer.usage.completion_tokens == 6


async def test_a_stop_token_is_delivered_and_named(cluster: Any) -> None:
    await cluster.add_pair()
    tokens = cluster.completion(PROMPT, 5)
    responses = [each async for each in cluster.generate(*PROMPT, stop_token_ids=[tokens[4]])]
    assert [token for each in responses for token in each.token_ids] == tokens
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert responses[-1].stop_token_id == tokens[4]


async def test_a_slow_reader_gets_bigger_messages_and_loses_nothing(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT, max_tokens=200)
    # Not reading: HTTP/2 takes what fits its window, then the router's write waits.
    await cluster.until(lambda: not decode.idle)
    decode.let_go()
    await cluster.until(lambda: decode.idle)
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, 200)


async def test_many_requests_at_once_keep_apart(cluster: Any) -> None:
    await cluster.add_pair("0")
    await cluster.add_pair("1")
    prompts = [(number, number + 1) for number in range(40)]
    answers = await asyncio.gather(*(cluster.read_tokens(cluster.generate(*each, max_tokens=30)) for each in prompts))
    assert answers == [cluster.completion(each, 30) for each in prompts]


async def test_a_chat_is_rendered_by_the_models_template(cluster: Any) -> None:
    await cluster.add_pair()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
    rendered = b"user: Hi\nassistant:"
    tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    assert bytes(tokenized.token_ids) == rendered
    assert list(tokenized.tokens[:4]) == list("user")
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=3))
    assert await cluster.read_tokens(cluster.inference.Generate(request)) == cluster.completion(rendered, 3)


async def test_the_trace_context_of_the_caller_reaches_both_workers(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(max_tokens=2))
    sent = (("traceparent", traceparent), ("tracestate", "sampler=th:c"), ("tracestate", "vendor=1"))
    call = cluster.inference.Generate(request, metadata=grpc.aio.Metadata(*sent))
    await cluster.read_tokens(call)
    got = [(worker.specs[0].traceparent, worker.specs[0].tracestate) for worker in (prefill, decode)]
    assert got == [(traceparent, "sampler=th:c,vendor=1")] * 2


async def test_detokenize_and_get_model_answer_without_workers(cluster: Any) -> None:
    text = await cluster.inference.Detokenize(pb.DetokenizeRequest(token_ids=[72, 105, 256]))
    assert text.text == "Hi"
    kept = await cluster.inference.Detokenize(pb.DetokenizeRequest(token_ids=[72, 105, 256], skip_special_tokens=False))
    assert kept.text == "Hi<eos>"
    model = await cluster.inference.GetModel(pb.GetModelRequest())
    assert (model.model, model.vocab_size, list(model.eos_token_ids)) == ("tiny", 260, [256])
    assert model.has_chat_template
    assert model.limits.max_logprobs == 20
    assert all(getattr(model.limits, field.name) for field in pb.RequestLimits.DESCRIPTOR.fields)


async def test_without_max_tokens_any_of_unequal_workers_can_serve(cluster: Any) -> None:
    await cluster.add(Role.PREFILL, "p")
    small = await cluster.add(Role.DECODE, "small", max_sequence_tokens=16)
    large = await cluster.add(Role.DECODE, "large", max_sequence_tokens=20)
    for _ in range(20):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        assert len(await cluster.read_tokens(cluster.inference.Generate(request, timeout=PATIENCE_S))) == 14
    assert small.specs
    assert large.specs
