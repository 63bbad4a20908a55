import inspect
import math
import types
import typing
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages, status
from protocol.codec import Decoder, encode
from protocol.messages import (
    Finish,
    Hello,
    Message,
    Part,
    Role,
    RowExtra,
    SamplingParams,
    StepOutput,
    Submit,
    TextParams,
    TopLogprobs,
    pack_i32,
    pack_i64,
    unpack_i32,
    unpack_i64,
)

MODULES = (messages, status)
CLASSES = [
    kind
    for module in MODULES
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, (Message, Part)) and kind.__module__ == module.__name__
]
MESSAGES = [kind for kind in CLASSES if issubclass(kind, Message) and kind is not Message]
PARTS = [kind for kind in CLASSES if issubclass(kind, Part) and kind is not Part]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PRIMITIVES: dict[Any, st.SearchStrategy[Any]] = {
    Any: JSON,
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    types.NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    if kind in PRIMITIVES:
        return PRIMITIVES[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


def with_defaults(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of which only the required fields are set."""
    required = {field.name: field.type for field in msgspec.structs.fields(kind) if field.required}
    return st.builds(kind, **{name: values(hint) for name, hint in required.items()})


# -- integer columns ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_i32_round_trip(column: list[int]) -> None:
    assert list(unpack_i32(pack_i32(column))) == column


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_i64_round_trip(column: list[int]) -> None:
    assert list(unpack_i64(pack_i64(column))) == column


def test_columns_are_little_endian() -> None:
    assert pack_i32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert pack_i64([258]) == b"\x02\x01\0\0\0\0\0\0"


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_i32_refuses_what_does_not_fit(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_i32([value])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_half_a_number_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_i32(bytes(length))
    with pytest.raises(ValueError, match="multiple"):
        unpack_i64(bytes(length))


# -- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_round_trips(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    decoder = Decoder(typing.Union[tuple(MESSAGES)], "test")  # noqa: UP007
    decoded = decoder.decode(encode(message))
    assert type(decoded) is kind
    assert decoded == message
    assert decoder.dropped == 0


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_tag_comes_first(kind: type[Message]) -> None:
    """A message is an array that starts with its class name, so a foreign reader can tell them apart."""
    config = kind.__struct_config__
    assert (config.array_like, config.tag, config.frozen) == (True, kind.__name__, True)


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_parts_are_frozen_arrays(kind: type[Part]) -> None:
    assert kind.__struct_config__.array_like
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_an_older_and_a_newer_sender_are_understood(kind: type[Message], data: st.DataObject) -> None:
    """Fields are only ever added at the end, with a default: then neither side has to be upgraded first."""
    message = data.draw(with_defaults(kind))
    required = sum(field.required for field in msgspec.structs.fields(kind))
    array = msgspec.msgpack.decode(encode(message))
    decoder = Decoder(kind, "test")
    older, newer = array[: 1 + required], [*array, "a field of the future"]
    assert decoder.decode(msgspec.msgpack.encode(older)) == message
    assert decoder.decode(msgspec.msgpack.encode(newer)) == message
    assert required == 0 or decoder.decode(msgspec.msgpack.encode(older[:-1])) is None


def test_codes_on_the_wire_never_change() -> None:
    assert {finish.name: finish.value for finish in Finish} == {"NONE": 0, "STOP": 1, "LENGTH": 2, "ERROR": 3}
    assert {role.name: role.value for role in Role} == {"CORE": 0, "TOKENIZER": 1, "DETOKENIZER": 2, "FRONTEND": 3}


def test_a_hello_on_the_wire() -> None:
    """Another version has to be able to read this one forever, in order to refuse it."""
    hello = Hello(1, Role.FRONTEND, "frontend-ab", 4711)
    assert msgspec.msgpack.decode(encode(hello)) == ["Hello", 1, 3, "frontend-ab", 4711, ""]


@given(st.floats(allow_nan=False))
def test_floats_are_exact(temperature: float) -> None:
    sampling = (
        Decoder(Submit, "test")
        .decode(encode(Submit(1, b"", SamplingParams(temperature=temperature), TextParams(), "f", "d")))
        .sampling
    )
    assert math.copysign(1, sampling.temperature) == math.copysign(1, temperature)
    assert sampling.temperature == temperature


def test_default_lists_are_not_shared() -> None:
    first = StepOutput(1, b"", b"", b"")
    first.extras.append(RowExtra(0, TopLogprobs(1, -0.5, b"", [])))
    assert StepOutput(2, b"", b"", b"").extras == []
