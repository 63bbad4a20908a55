import json
from datetime import datetime
from typing import Any

import pytest

from frontend import chat
from frontend.chat import ChatRenderer
from protocol.errors import InvalidRequest
from protocol.messages import ChatPrompt

DUMP = "{{ messages | tojson }}"
CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, messages: list[Any], hide: Any = str, **options: Any) -> str:
    return ChatRenderer({"default": source}, {"bos_token": "<s>"}).render(ChatPrompt(messages, **options), hide)


def refusal(source: str, messages: list[Any], **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        render(source, messages, **options)
    assert caught.value.param == "messages"
    assert caught.value.message
    return caught.value.message


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_generation_prompt_and_tokens() -> None:
    assert render(CHATML, [user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, [user("hi")], add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert render("{{ bos_token }}{{ eos_token }}.", [user("")]) == "<s>."


def test_environment_equals_hugging_face_s() -> None:
    """trim_blocks, lstrip_blocks, tojson as plain JSON, loop controls, the generation tag, strftime_now."""
    assert render("  {% if true %}\nx\n  {% endif %}\ny", [user("")]) == "x\ny"
    assert render("{{ 'ü<&\"' | tojson }}", [user("")]) == '"ü<&\\""'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", [user("")]) == '{\n "b": 1,\n "a": 2\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", [user("")]) == "01"
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", [user("X")]) == "aXb"
    assert render("{{ strftime_now('%Y') }}", [user("")]) in (str(datetime.now().year), str(datetime.now().year - 1))


def test_what_a_template_raises_is_the_caller_s_error() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}", [user("a")])
    assert refusal("{{ raise_exception('') }}", [user("a")])
    refusal("{{ messages[0].name + 1 }}", [user("a")])
    refusal("{{ 1 / 0 }}", [user("a")])
    refusal("{{ messages.append(1) }}", [user("a")])
    refusal("{{ ''.__class__.__mro__[1].__subclasses__() }}", [user("a")])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED", 1000)
    assert "longer than 1000" in refusal("{% for i in range(99999) %}0123456789{% endfor %}", [user("a")])


def test_missing_and_broken_templates() -> None:
    prompt = ChatPrompt([user("a")])
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatRenderer({}, {}).render(prompt)
    with pytest.raises(InvalidRequest, match="does not compile"):
        ChatRenderer({"default": "{% if %}"}, {}).render(prompt)


def test_tools_and_their_template() -> None:
    renderer = ChatRenderer({"default": "plain {{ tools is none }}", "tool_use": "{{ tools | tojson }}"}, {})
    assert renderer.render(ChatPrompt([user("a")])) == "plain True"
    assert renderer.render(ChatPrompt([user("a")], tools=[])) == "plain True"
    assert renderer.render(ChatPrompt([user("a")], tools=[{"type": "function"}])) == '[{"type": "function"}]'


def test_template_options() -> None:
    source = "{{ enable_thinking }}{{ add_generation_prompt }}{{ bos_token }}"
    kwargs = {"enable_thinking": False, "add_generation_prompt": "mine", "bos_token": "mine", "messages": "mine"}
    assert render(source, [user("a")], template_kwargs=kwargs) == "FalseTrue<s>"


def tool_turn(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        user("weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        user("thanks"),
    ]


def test_second_tool_turn() -> None:
    """Templates of Qwen's kind iterate over the arguments, or dump them; clients replay them as a string."""
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m['content'] + '|' }}{% for call in m.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    expected = "user:weather?|assistant:|city=Ölstadttool:sunny|user:thanks|"
    assert render(source, tool_turn('{"city": "Ölstadt"}')) == expected
    assert render(source, tool_turn({"city": "Ölstadt"})) == expected
    for arguments in ("{not json", "3", ""):
        messages = json.loads(render(DUMP, tool_turn(arguments)))
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_the_request_is_not_changed() -> None:
    messages = tool_turn('{"city": "x"}')
    render(DUMP, messages, lambda s: s.replace("x", "y"))
    assert messages == tool_turn('{"city": "x"}')


def test_absent_fields() -> None:
    """What clients send as null or as an empty list is absent for the template; content is always a string."""
    message = {"role": "assistant", "content": None, "tool_calls": [], "name": None, "refusal": None}
    assert json.loads(render(DUMP, [message, {"role": "user"}])) == [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_content_parts() -> None:
    def text(value: str) -> dict[str, str]:
        return {"type": "text", "text": value}

    assert render("{{ messages[0].content }}", [user([text("a"), text("b")])]) == "a\nb"
    assert render("{{ messages[0].content }}.", [user([])]) == "."
    assert "image_url" in refusal(DUMP, [user([text("a"), {"type": "image_url", "image_url": {"url": "x"}}])])
    for parts in (["a"], [{"type": "text"}], [{"type": "text", "text": 3}], [None]):
        assert "messages[0].content" in refusal(DUMP, [user(parts)])


def test_malformed_messages() -> None:
    assert "empty" in refusal(DUMP, [])
    assert "messages[1] has no role" in refusal(DUMP, [user("a"), {"content": "b"}])
    assert "messages[0].content" in refusal(DUMP, [user(3)])
    assert "tool_calls" in refusal(DUMP, [{"role": "assistant", "tool_calls": "x"}])
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    refusal(DUMP, [{"role": "user", "content": "a", "extra": nested}])


def test_every_string_of_a_client_is_hidden() -> None:
    messages = [{"role": "user", "content": "a", "name": "b"}]
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ option }}c"
    text = render(
        source,
        messages,
        lambda s: s.upper() if len(s) == 1 else s,
        tools=[{"d": ["e"]}],
        template_kwargs={"option": "f"},
    )
    assert text == '[{"role": "user", "content": "A", "name": "B"}][{"D": ["E"]}]Fc'


def test_continue_final_message() -> None:
    messages = [user("hi"), {"role": "assistant", "content": "Sure, "}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "
    assert render(CHATML, messages, continue_final_message=True) == expected
    message = refusal("{{ messages[0].content }}", messages, continue_final_message=True)
    assert "can't be continued" in message
