"""Does a session send only what is new, go on from its newest turn, branch and close?"""

from __future__ import annotations

from typing import Any

import pytest
from scripted_inference import Script, chat_script, scripted_gateways

from ripresa.cluster.client import (
    AsyncClient,
    Client,
    PreconditionError,
    UnavailableError,
    system,
    tool,
    user,
)
from ripresa.protos import ripresa_pb2 as pb

WEATHER = tool("get_weather", "Weather", {"type": "object"})


def said(requests: list[Any]) -> list[tuple[str, str]]:
    """Parent and words of each turn."""
    turns = [request for request in requests if isinstance(request, pb.ChatRequest)]
    assert {turn.options.session_id for turn in turns} == {"mine"}
    return [(turn.turn.parent_turn_id, turn.turn.messages[0].content) for turn in turns]


def check_opening(request: Any) -> None:
    assert isinstance(request, pb.OpenSessionRequest)
    assert (request.session_id, request.cache_salt) == ("mine", "salt")
    assert request.idle_ttl.ToTimedelta().total_seconds() == 90
    assert [message.content for message in request.preamble] == ["Be brief."]
    assert [each.name for each in request.config.tools] == ["get_weather"]
    assert request.config.thinking.budget == 30


OPENING: dict[str, Any] = {
    "tools": [WEATHER],
    "effort": 30,
    "session_id": "mine",
    "cache_salt": "salt",
    "idle_ttl_s": 90,
}
EXPECTED = [("", "one"), ("t1", "two"), ("", "other"), ("t7", "again")]


def test_turns_branches_and_the_end() -> None:
    script = Script(chat_script(), breaks=[100, 3])  # the second turn breaks and goes on
    with scripted_gateways(script) as addresses, Client(*addresses) as client:
        with client.open_session([system("Be brief.")], **OPENING) as session:
            assert session.turn([user("one")]).answer().turn_id == "t1"
            assert session.head_turn_id == "t1"
            branch = session.branch("")
            session.turn([user("two")]).answer()
            branch.turn([user("other")]).answer()
            assert branch.head_turn_id == "t1"
            client.session("mine").turn([user("again")]).answer()
        assert client.open_session().session_id == "made-here"
    check_opening(script.asked[0])
    assert said(script.asked) == EXPECTED
    assert script.asked[-2] == pb.CloseSessionRequest(session_id="mine")


async def test_turns_branches_and_the_end_asynchronously() -> None:
    script = Script(chat_script(), breaks=[100, 3])
    with scripted_gateways(script) as addresses:
        async with (
            AsyncClient(*addresses) as client,
            await client.open_session([system("Be brief.")], **OPENING) as session,
        ):
            await session.turn([user("one")]).answer()
            branch = session.branch("")
            await session.turn([user("two")]).answer()
            await branch.turn([user("other")]).answer()
            found = await client.session("mine")
            await found.turn([user("again")]).answer()
    check_opening(script.asked[0])
    assert said(script.asked) == EXPECTED
    assert script.asked[-1] == pb.CloseSessionRequest(session_id="mine")


def test_a_turn_that_fails_moves_nothing() -> None:
    script = Script(chat_script(stream_id="")[:-2])  # ends without `finished`
    with scripted_gateways(script) as addresses, Client(*addresses) as client:
        session = client.session("mine")
        with pytest.raises(UnavailableError, match="before the answer was complete"):
            session.turn([user("one")]).answer()
        assert session.head_turn_id == "t7"


def test_after_a_turn_that_was_not_kept_the_conversation_does_not_go_on_without_it() -> None:
    answer = chat_script(stream_id="")
    answer[-2].finished.ClearField("turn_id")
    answer[-2].finished.turn_error = "SESSION_NOT_FOUND"
    with scripted_gateways(Script(answer)) as addresses, Client(*addresses) as client:
        session = client.session("mine")
        told = session.turn([user("one")]).answer()
        assert (told.content, told.turn_id) == ("One moment.", "")
        with pytest.raises(PreconditionError, match="the whole conversation") as caught:
            session.turn([user("two")])
        assert caught.value.reason == "SESSION_NOT_FOUND"
        session.branch("").turn([user("other")]).answer()
