# SPDX-License-Identifier: Apache-2.0
"""Compares what Python clients see of an engine through Caddy with what they see of it directly.

usage: clients.py MODEL DIRECT_URL CADDY_URL

Prints a line for each scenario and exits 1 if any of them differs or fails.
"""

import asyncio
import sys
import time

import anthropic
import openai

MODEL, DIRECT, CADDY = sys.argv[1:]
LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 12
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def openai_client(base, **options):
    return openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, **options)


def chat(base):
    r = openai_client(base).chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": LONG}, {"role": "user", "content": "Say something."}],
        max_tokens=12, temperature=0)
    return r.choices[0].message.content, r.choices[0].finish_reason, r.usage.prompt_tokens


def chat_stream(base):
    stream = openai_client(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True})
    text, chunks, usage = "", 0, None
    for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text, usage.prompt_tokens, usage.completion_tokens, chunks > 2


def chat_tools(base):
    r = openai_client(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "How is the weather in Oslo?"}], tools=[TOOL],
        tool_choice="none", max_tokens=8, temperature=0)
    return r.choices[0].message.content, r.usage.prompt_tokens


def told(message):
    """What is the same each time in a message that may call tools."""
    return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def chat_with_tools(choice):
    def scenario(base):
        r = openai_client(base).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "How is the weather in Oslo?"}], tools=[TOOL],
            tool_choice=choice, max_tokens=60, temperature=0)
        return told(r.choices[0].message), r.choices[0].finish_reason, r.usage.prompt_tokens

    return scenario


NAMED = {"type": "function", "function": {"name": "weather"}}
chat_tool_auto, chat_tool_required, chat_tool_named = map(chat_with_tools, ["auto", "required", NAMED])


def chat_tool_stream(base):
    stream = openai_client(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "How is the weather in Oslo?"}], tools=[TOOL],
        tool_choice=NAMED, max_tokens=60, temperature=0, stream=True)
    name, arguments, chunks = "", "", 0
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                chunks += 1
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return name, arguments, chunks > 2


def chat_tool_result(base):
    """The turn after a tool was called."""
    r = openai_client(base).chat.completions.create(
        model=MODEL, tools=[TOOL], max_tokens=8, temperature=0, messages=[
            {"role": "user", "content": "How is the weather in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Oslo"}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Snow."}])
    return told(r.choices[0].message), r.usage.prompt_tokens


def chat_image(base):
    """An image for a model that sees none."""
    try:
        openai_client(base).chat.completions.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [
            {"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}])
    except openai.BadRequestError as e:
        return e.status_code, e.body and e.body.get("message")


def completions(base):
    r = openai_client(base).completions.create(model=MODEL, prompt=LONG, max_tokens=8, temperature=0)
    return r.choices[0].text, r.usage.prompt_tokens


def completions_stream(base):
    stream = openai_client(base).completions.create(model=MODEL, prompt=LONG, max_tokens=8, temperature=0, stream=True)
    return "".join(choice.text for chunk in stream for choice in chunk.choices)


def embeddings(base):
    """Not of a model that generates."""
    try:
        openai_client(base).embeddings.create(model=MODEL, input=LONG)
    except openai.NotFoundError as e:
        return e.status_code, e.body


def responses(base):
    r = openai_client(base).responses.create(
        model=MODEL, instructions="Be brief.", input=LONG, max_output_tokens=8, temperature=0)
    return r.output_text, r.usage.input_tokens


def responses_stream(base):
    text, kinds = "", []
    for event in openai_client(base).responses.create(
            model=MODEL, instructions="Be brief.", input=LONG, max_output_tokens=8, temperature=0, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type not in kinds:
            kinds.append(event.type)
    return text, kinds


def messages(base):
    r = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0).messages.create(
        model=MODEL, max_tokens=8, system="Be brief.", messages=[{"role": "user", "content": LONG}],
        extra_body={"temperature": 0})
    return [block.text for block in r.content], r.usage.input_tokens


def messages_stream(base):
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    with client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": LONG}],
        extra_body={"temperature": 0}) as stream:
        return "".join(stream.text_stream)


def messages_tool(base):
    r = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0).messages.create(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
        tools=[{"name": "weather", "description": "The weather at a place", "input_schema": TOOL["function"]["parameters"]}],
        tool_choice={"type": "tool", "name": "weather"}, extra_body={"temperature": 0})
    return [(block.type, getattr(block, "text", None), getattr(block, "input", None)) for block in r.content], r.stop_reason


def messages_count(base):
    return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0).messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": LONG}]).input_tokens


def messages_cancel(base):
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    with client.messages.stream(model=MODEL, max_tokens=500, messages=[{"role": "user", "content": LONG}],
                                extra_body={"temperature": 0, "ignore_eos": True}) as stream:
        for n, _ in enumerate(stream.text_stream, 1):
            if n == 4:
                return n


def messages_timeout(base):
    try:
        anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=0.5).messages.create(
            model=MODEL, max_tokens=2000, messages=[{"role": "user", "content": LONG}],
            extra_body={"temperature": 0, "ignore_eos": True})
    except anthropic.APITimeoutError:
        return "timed out"
    return "answered"


def responses_timeout(base):
    try:
        openai_client(base, timeout=0.5).responses.create(
            model=MODEL, input=LONG, max_output_tokens=2000, temperature=0, extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        return "timed out"
    return "answered"


def cancel(base):
    """A client that leaves in the middle of a stream."""
    stream = openai_client(base).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=500, temperature=0, stream=True,
        extra_body={"ignore_eos": True})
    got = 0
    for _ in stream:
        got += 1
        if got == 4:
            stream.close()
            break
    return got


def cancel_async(base):
    """A task that is cancelled while it waits for the whole answer."""

    async def run():
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
            task = asyncio.create_task(client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=2000, temperature=0,
                extra_body={"ignore_eos": True}))
            await asyncio.sleep(0.3)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return "cancelled"
            return "answered"

    return asyncio.run(run())


def timeout(base):
    """A client that gives up before the answer is there."""
    began = time.monotonic()
    try:
        openai_client(base, timeout=0.5).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=2000, temperature=0,
            extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        return "timed out", time.monotonic() - began < 5
    return "answered", True


def unknown_model(base):
    try:
        openai_client(base).chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hello"}])
    except openai.NotFoundError as e:
        return e.status_code, e.body and e.body.get("code")


def bad_request(base):
    try:
        openai_client(base).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=-1)
    except openai.BadRequestError as e:
        return e.status_code


def models(base):
    return [m.id for m in openai_client(base).models.list()]


def attempt(scenario, base):
    try:
        return scenario(base)
    except Exception as e:  # of any client: it is compared and reported
        return f"{type(e).__name__}: {e}"[:300]


SCENARIOS = {
    "chat": chat, "chat, streamed": chat_stream,
    "tools, none to be called": chat_tools, "tools, auto": chat_tool_auto, "tools, required": chat_tool_required,
    "tools, named": chat_tool_named, "tools, streamed": chat_tool_stream, "tools, the result": chat_tool_result,
    "image": chat_image, "completions": completions, "completions, streamed": completions_stream, "embeddings": embeddings,
    "responses": responses, "responses, streamed": responses_stream, "responses, time-out": responses_timeout,
    "messages": messages, "messages, streamed": messages_stream, "messages, a tool": messages_tool,
    "messages, counted": messages_count, "messages, cancelled": messages_cancel, "messages, time-out": messages_timeout,
    "cancelled": cancel, "cancelled while waiting": cancel_async, "time-out": timeout,
    "unknown model": unknown_model, "bad request": bad_request, "models": models}
failed = False
for name, scenario in SCENARIOS.items():
    directly, through = attempt(scenario, DIRECT), attempt(scenario, CADDY)
    broken = directly is None or isinstance(directly, str) and "Error" in directly
    same = directly == through and not broken
    failed |= not same
    print("ok  " if same else "FAIL", name, directly if same else f"\n  directly: {directly}\n  through Caddy: {through}")
sys.exit(failed)
