import json

import pytest
from tiny_text import TEMPLATE, tiny_tokenizer

from treadle.runtime.request import RequestError
from treadle.runtime.text.template import ChatTemplate, chat_template, plain_messages

HI = [{"role": "user", "content": "hi"}]


def render(source, messages=HI, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_the_models_own_template():
    facts = tiny_tokenizer().facts
    template = chat_template(facts.chat_templates, facts.template_tokens)
    text = template.render([{"role": "system", "content": "Be brief."}, *HI])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "abc"


def test_variables_and_functions_that_templates_expect():
    assert render("{{ bos_token }}{{ messages | length }}") == "<s>1"
    assert render("{% if enable_thinking %}yes{% endif %}", extra={"enable_thinking": True}) == "yes"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render("{% if tools is none %}none{% endif %}") == "none"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{% set x = 1 %}\n  {% if x %}\nx\n  {% endif %}\n") == "x\n"


def test_tojson_is_plain_json():
    value = {"b": "<é>", "a": 1}
    assert json.loads(render("{{ x | tojson }}", extra={"x": value})) == value
    assert render("{{ x | tojson }}", extra={"x": value}) == '{"b": "<é>", "a": 1}'
    assert render("{{ x | tojson(indent=2) }}", extra={"x": {"a": 1}}) == '{\n  "a": 1\n}'


def test_content_may_be_missing_beside_tool_calls():
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]
    assert plain_messages(calls)[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        ([], "messages", "messages is empty"),
        (["hi"], "messages[0]", "is a str"),
        ([{"content": "x"}], "messages[0].role", "role is None"),
        ([*HI, {"role": "user"}], "messages[1].content", "is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content", "is a int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "'image_url'; .*'text'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "text is None"),
    ],
)
def test_messages_that_cannot_be_read_are_named(messages, field, message):
    with pytest.raises(RequestError, match=message) as caught:
        render(TEMPLATE, messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.upper() }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{% for %}", "not valid Jinja"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_a_bad_request(source, message):
    with pytest.raises(RequestError, match=message):
        render(source)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_what_has_a_parameter_is_no_variable(name):
    with pytest.raises(RequestError, match=f"holds {name}") as caught:
        ChatTemplate(TEMPLATE, {}).render([{"role": "user", "content": "a"}], extra={name: False})
    assert caught.value.field == "chat_template_kwargs"


def test_a_missing_template_is_explained():
    with pytest.raises(RequestError, match="has no chat template"):
        chat_template({}, {})
    with pytest.raises(RequestError, match=r"'x'; there are: default, rag"):
        chat_template({"default": "a", "rag": "b"}, {}, "x")
    assert chat_template({"rag": "b"}, {}).source == "b"


SPOKEN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_the_last_message_can_be_left_open():
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]
    template = ChatTemplate(SPOKEN, {})
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>Sure, ")
    assert text == template.render(messages, add_generation_prompt=False).removesuffix("</s>") + " "
    with pytest.raises(RequestError, match="add_generation_prompt takes False") as caught:
        template.render(messages, continue_final_message=True)
    assert caught.value.field == "continue_final_message"
    with pytest.raises(RequestError, match="leaves out the content"):
        ChatTemplate("{{ messages[0].role }}", {}).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def found(source, messages, **how):
    template = ChatTemplate(source, {"bos_token": "<s>"})
    text = template.render(messages, **how)
    return [text[:at] for at in template.seams(messages, text, **how)]


def talk(*roles):
    return [{"role": role, "content": f" {role[0]}{i} "} for i, role in enumerate(roles)]


PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_seams_are_where_the_first_and_the_last_words_begin_and_where_they_end():
    system = "<system>s0<user>"
    assert found(PLAIN, talk("system", "user")) == [system, system + "u1"]
    before = system + "u1<assistant>a2<user>"
    assert found(PLAIN, talk("system", "user", "assistant", "user")) == [system, before, before + "u3"]
    # What stands before the first message is the same in all chats.
    assert found(PLAIN, talk("user")) == ["<user>u0"]
    assert found(PLAIN, talk("user", "user")) == ["<user>u0<user>", "<user>u0<user>u1"]
    open_ended = {"add_generation_prompt": False, "continue_final_message": True}
    assert found(PLAIN, talk("user", "assistant"), **open_ended)[0] == "<user>u0<assistant>"


def test_no_seams_where_a_template_looks_into_the_words():
    assert found("{{ messages[-1].content | length }}", talk("user", "user")) == []
    assert found("{% if messages[-1].content[0] == ' ' %}{{ messages[-1].content }}{% endif %}", talk("user")) != []
    refuses = "{% if messages[-1].content | length > 4 %}{{ raise_exception('long') }}{% endif %}x"
    assert found(refuses, talk("user", "user")) == []
