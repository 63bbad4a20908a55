"""Chat templates: a conversation to the text that the model was trained on.

Templates are jinja2, run in its immutable sandbox, with what Hugging Face's `apply_chat_template` offers them. They
come with the model file and are trusted as much as it is, up to the sandbox and a bound on their output; messages and
tools come from clients. Whatever a template raises is the caller's error, in the parameter `messages`.
"""

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest
from protocol.messages import ChatPrompt

MAX_RENDERED = 16 << 20  # characters
PART_SEPARATOR = "\n"  # between the text parts of one message, as vLLM and llama.cpp join them
_log = logging.getLogger("pagetide.chat")


class _GenerationTag(Extension):
    """Accepts {% generation %}, with which templates mark the answers to train on; it does nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class ChatRenderer:
    """Renders conversations with a model's chat templates."""

    def __init__(self, sources: Mapping[str, str], template_tokens: Mapping[str, str]) -> None:
        """`sources` are templates by name: "default", and "tool_use" if tools have one of their own."""
        self._tokens = dict(template_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self._problem = "this model has no chat template; use /v1/completions"
        environment = _environment()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:  # the model can still complete raw prompts
                self._problem = f"this model's chat template does not compile: {error}"
                _log.warning("chat template %r does not compile: %s", name, error)

    def render(self, prompt: ChatPrompt, hide: Callable[[str], str] = str) -> str:
        """Return the conversation as text.

        Every string that a client wrote goes through `hide` first (see `TextModel.hide_special_tokens`). With
        `continue_final_message` the text ends with the last message's content. Raises InvalidRequest.
        """
        template = (self._templates.get("tool_use") if prompt.tools else None) or self._templates.get("default")
        if template is None:
            raise InvalidRequest(self._problem, "messages")
        if not prompt.messages:
            raise InvalidRequest("messages is empty", "messages")
        try:
            messages = [_normalise(i, message) for i, message in enumerate(prompt.messages)]
            given = prompt.template_kwargs | {"messages": messages, "tools": prompt.tools or None}
            context = {name: _map_strings(value, hide) for name, value in given.items()}
            end = f"\ue005{secrets.token_hex(8)}"
            if prompt.continue_final_message:
                context["messages"][-1]["content"] += end
            context |= self._tokens
            context["add_generation_prompt"] = prompt.add_generation_prompt and not prompt.continue_final_message
            text = _bounded(template, context)
        except InvalidRequest:
            raise
        except Exception as error:  # a template can raise anything: TypeError, UndefinedError, KeyError, ...
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", "messages") from error
        if not prompt.continue_final_message:
            return text
        before, mark, _ = text.rpartition(end)
        if not mark:
            raise InvalidRequest("the chat template leaves out the final message, so it can't be continued", "messages")
        return before


def _bounded(template: jinja2.Template, context: dict[str, Any]) -> str:
    parts: list[str] = []
    room = MAX_RENDERED
    for part in template.generate(context):
        room -= len(part)
        if room < 0:
            raise InvalidRequest(f"the rendered conversation is longer than {MAX_RENDERED} characters", "messages")
        parts.append(part)
    return "".join(parts)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value with every string changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _normalise(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as templates expect it: content a string, absent fields absent, tool arguments objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}] has no role", "messages")
    kept = {key: value for key, value in message.items() if value is not None and value != []}
    kept["content"] = _content(index, message.get("content"))
    calls = kept.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InvalidRequest(f"messages[{index}].tool_calls is not a list of objects", "messages")
        kept["tool_calls"] = [_parse_arguments(call) for call in calls]
    return kept


def _content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{index}].content is neither a string nor a list of parts", "messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"messages[{index}].content has a part of type {kind!r}; only text is taken", "messages"
            )
        texts.append(part["text"])
    return PART_SEPARATOR.join(texts)


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object; a string that holds none stays as it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
