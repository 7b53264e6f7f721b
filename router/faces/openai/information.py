"""What is served, tokens, health: the small endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from router.faces.openai.conversation import FunctionTool, Message, chat_prompt
from router.faces.openai.desk import Desk
from router.faces.openai.reading import read_body
from router.faces.openai.sampling import Uint32
from router.faces.openai.tools import Tools
from router.request import ChatPrompt, TextPrompt
from shell.http.server import Call
from tandem import __version__
from tandem.errors import InvalidRequest, Unavailable


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's request for the tokens of a text or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def as_prompt(self) -> TextPrompt | ChatPrompt:
        """Raises InvalidRequest unless there is exactly one of text and conversation."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages must be there")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        tools = [each.tool(f"tools[{index}]") for index, each in enumerate(self.tools or ())]
        variables = {"add_generation_prompt": self.add_generation_prompt, **(self.chat_template_kwargs or {})}
        return chat_prompt(self.messages or [], Tools.of(tools, None), variables)


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's request for the text of tokens."""

    tokens: list[Uint32]
    model: str = ""


async def tokenize(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers with token ids, and with what each stands for if that is asked for."""
    request = read_body(await call.body(), TokenizeRequest)
    desk.entrance.check_model(request.model)
    token_ids = await desk.entrance.tokenize(request.as_prompt())
    answer = {"count": len(token_ids), "max_model_len": desk.checkpoint.context_tokens, "tokens": list(token_ids)}
    with desk.tokenization.answering(len(token_ids)):
        strings: list[str] = []
        if request.return_token_strs:
            await desk.tokenization.describe(token_ids, lambda _, tokens: strings.extend(tokens))
        return _json(answer | {"token_strs": strings if request.return_token_strs else None})


async def detokenize(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers with the text of tokens, special ones included."""
    request = read_body(await call.body(), DetokenizeRequest)
    desk.entrance.check_model(request.model)
    return _json({"prompt": await desk.entrance.detokenize(request.tokens, skip_special_tokens=False)})


async def models(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers with the served model under each of its names, in OpenAI's or Anthropic's shape."""
    listed = [_model(desk, call, name) for name in (desk.model, *desk.checkpoint.other_names)]
    if "anthropic-version" in call.request.headers:
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return _json({"data": listed, "has_more": False, **ends})
    return _json({"object": "list", "data": listed})


async def model(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers with the model of that name. Raises ModelNotFound."""
    name = call.request.match_info["model"]
    desk.entrance.check_model(name)
    return _json(_model(desk, call, name))


async def version(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers with Tandem's version."""
    return _json({"version": __version__})


async def health(desk: Desk, call: Call) -> web.StreamResponse:
    """Answers that a request could be served now. Raises Unavailable."""
    obstacle = desk.status.obstacle()
    if obstacle is not None:
        raise Unavailable(obstacle)
    return _json({"status": "ok"})


def _model(desk: Desk, call: Call, name: str) -> dict[str, Any]:
    if "anthropic-version" in call.request.headers:
        return {"type": "model", "id": name, "display_name": name, "created_at": desk.started.isoformat()}
    return {
        "id": name,
        "object": "model",
        "created": int(desk.started.timestamp()),
        "owned_by": "tandem",
        "root": desk.model,
        "max_model_len": desk.checkpoint.context_tokens,
    }


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
