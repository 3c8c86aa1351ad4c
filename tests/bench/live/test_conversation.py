"""A conversation grows turn by turn, and is cut when an agent compacts it."""

from __future__ import annotations

from tiered_kv.bench.live.conversation import Conversation


def talk() -> Conversation:
    made = Conversation()
    made.ask("abcd")
    made.answered("ef")
    made.ask("gh")
    return made


def test_roles_alternate_and_the_text_is_their_contents() -> None:
    assert talk().chat() == [
        {"role": "user", "content": "abcd"},
        {"role": "assistant", "content": "ef"},
        {"role": "user", "content": "gh"},
    ]
    assert talk().text() == "abcdefgh"


def test_a_share_is_kept_from_the_begin_on() -> None:
    for share, left in ((1.0, "abcdefgh"), (0.75, "abcdef"), (0.25, "ab"), (0.0, "")):
        made = talk()
        made.keep(share)
        assert made.text() == left


def test_what_follows_a_cut_in_the_agents_own_message_is_that_messages_end() -> None:
    made = talk()
    made.keep(0.25)
    made.ask("z")
    assert made.chat() == [{"role": "user", "content": "ab z"}]


def test_an_empty_answer_is_a_blank_since_some_servers_refuse_empty_messages() -> None:
    made = Conversation()
    made.ask("a")
    made.answered("")
    assert made.chat()[-1] == {"role": "assistant", "content": " "}
