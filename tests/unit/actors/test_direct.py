"""A connection beside Ray: messages in order, nobody without the secret, an end that is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.actors import direct
from penstock.actors.direct import Connection, Listener, connect


class Echo:
    """Sends back what comes."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.listener = Listener(self._hear)

    def _hear(self, message: Any) -> None:
        self.heard.append(message)
        self.listener.send(message)


async def test_messages_arrive_whole_and_in_order() -> None:
    echo = Echo()
    driver = await connect(await echo.listener.listen("127.0.0.1"), timeout_s=10.0)
    sent = [(number, b"x" * (number * 1000)) for number in range(200)] + [(200, b"y" * (32 << 20))]
    for message in sent:
        driver.send(message)
    assert [await driver.receive(10.0) for _ in sent] == sent
    driver.close()
    await echo.listener.close()


async def test_who_has_not_the_secret_is_not_listened_to() -> None:
    echo = Echo()
    address = await echo.listener.listen("127.0.0.1")
    stranger = await connect(replace(address, secret=b"?" * 32), timeout_s=10.0)
    stranger.send("let me in")
    with pytest.raises((EOFError, OSError)):
        await stranger.receive(10.0)
    driver = await connect(address, timeout_s=10.0)
    driver.send("it is me")
    assert await driver.receive(10.0) == "it is me"
    assert echo.heard == ["it is me"]
    stranger.close()
    driver.close()
    await echo.listener.close()


async def test_silence_is_an_end_and_signs_of_life_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SIGN_OF_LIFE_S", 0.05)
    echo = Echo()
    driver = await connect(await echo.listener.listen("127.0.0.1"), timeout_s=10.0)
    waiting = asyncio.create_task(driver.receive(1.0))
    await asyncio.sleep(1.5)
    assert not waiting.done(), "it lives, and has nothing to say"
    await echo.listener.close()
    with pytest.raises(EOFError):
        await waiting
    driver.close()

    mute = await asyncio.start_server(lambda *_: asyncio.sleep(10), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*mute.sockets[0].getsockname()[:2])
    with pytest.raises(TimeoutError):
        await Connection(reader, writer).receive(0.1)
    writer.close()
    mute.close()


async def test_a_message_that_cannot_be_sent_fails_where_it_is_sent() -> None:
    echo = Echo()
    driver = await connect(await echo.listener.listen("127.0.0.1"), timeout_s=10.0)
    with pytest.raises((TypeError, AttributeError)):
        driver.send(lambda: None)
    driver.send("the next one")
    assert await driver.receive(10.0) == "the next one"
    driver.close()
    await echo.listener.close()
