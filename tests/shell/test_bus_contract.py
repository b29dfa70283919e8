"""One contract, two buses: what holds for a real nats-server must hold for the in-memory one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
from support.waiting import eventually

from kvbus.bus import Bus, MemoryBroker, MemoryBus, NatsBus
from kvbus.errors import BusUnavailableError, PayloadTooLargeError
from kvbus.local import NatsServer

Make = Callable[[], Bus]


@pytest.fixture(params=["memory", "nats"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes clients of one server."""
    if request.param == "memory":
        broker = MemoryBroker()
        return lambda: MemoryBus(broker)
    server: NatsServer = request.getfixturevalue("nats_server")
    return lambda: NatsBus([server.url], "test")


class Inbox:
    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []

    def __call__(self, subject: str, payload: bytes) -> None:
        self.got.append((subject, payload))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.got]


class TestBusContract:
    async def test_every_matching_subscriber_gets_each_message_in_order(self, make: Make) -> None:
        one, all_of_it, other = Inbox(), Inbox(), Inbox()
        async with make() as sender, make() as receiver:
            await receiver.subscribe("c.a.*", one)
            await receiver.subscribe("c.>", all_of_it)
            await receiver.subscribe("c.b.*", other)
            await eventually(lambda: sender.connected and receiver.connected)
            await self.settle(sender, receiver, "c.settle")
            sent = [str(number).encode() for number in range(200)]
            for payload in sent:
                assert sender.publish("c.a.x", payload)
            await eventually(lambda: len(one.got) == 200 and len(all_of_it.payloads) >= 200)
            assert one.payloads == sent
            assert one.got[0][0] == "c.a.x"
            assert other.got == []

    async def test_publish_from_another_thread(self, make: Make) -> None:
        inbox = Inbox()
        async with make() as sender, make() as receiver:
            await receiver.subscribe("t.a", inbox)
            await eventually(lambda: sender.connected and receiver.connected)
            await self.settle(sender, receiver, "t.settle")

            def send() -> None:
                for number in range(100):
                    sender.publish("t.a", str(number).encode())

            threads = [threading.Thread(target=send) for _ in range(4)]
            for thread in threads:
                thread.start()
            await eventually(lambda: len(inbox.got) == 400)
            for thread in threads:
                thread.join()

    async def test_request_and_reply(self, make: Make) -> None:
        async with make() as asker, make() as server:
            await server.serve("r.*", lambda subject, payload: payload.upper() if subject == "r.up" else None)
            await eventually(lambda: asker.connected and server.connected)
            await self.settle(asker, server, "r-settle")
            assert await asker.request("r.up", b"hi", 2.0) == b"HI"
            with pytest.raises(BusUnavailableError, match=r"r\.silent"):
                await asker.request("r.silent", b"hi", 0.1)
            with pytest.raises(BusUnavailableError, match=r"x\.nobody"):
                await asker.request("x.nobody", b"hi", 2.0)

    async def test_a_payload_at_the_limit_goes_and_one_over_it_does_not(self, make: Make) -> None:
        inbox = Inbox()
        async with make() as sender, make() as receiver:
            await receiver.subscribe("l.a", inbox)
            await eventually(lambda: sender.connected and receiver.connected)
            await self.settle(sender, receiver, "l.settle")
            limit = sender.max_payload
            with pytest.raises(PayloadTooLargeError, match=f"{limit + 1} bytes.*max_payload={limit}"):
                sender.publish("l.a", b"x" * (limit + 1))
            with pytest.raises(PayloadTooLargeError):
                await sender.request("l.a", b"x" * (limit + 1), 1.0)
            assert sender.publish("l.a", b"x" * limit)
            await eventually(lambda: len(inbox.got) == 1)
            assert sender.connected, "the connection survives"

    async def test_a_callback_that_raises_is_logged_counted_and_called_again(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        inbox = Inbox()

        def bad(subject: str, payload: bytes) -> None:
            inbox(subject, payload)
            raise RuntimeError("told to")

        async with make() as sender, make() as receiver:
            await receiver.subscribe("e.a", bad)
            await eventually(lambda: sender.connected and receiver.connected)
            await self.settle(sender, receiver, "e.settle")
            with caplog.at_level(logging.CRITICAL, "kvbus"):
                sender.publish("e.a", b"1")
                sender.publish("e.a", b"2")
                await eventually(lambda: inbox.payloads == [b"1", b"2"])
                await eventually(lambda: receiver.counters["callback_errors"] == 2)
            assert receiver.connected

    async def test_watchers_hear_of_the_connection(self, make: Make) -> None:
        heard: list[bool] = []
        bus = make()
        bus.watch(heard.append)
        assert not bus.connected
        assert bus.publish("w.a", b"lost") is False
        assert bus.counters["publish_dropped"] == 1
        async with bus:
            await eventually(lambda: heard == [True])
            assert bus.connected
            assert bus.local_host == "127.0.0.1"

    async def test_a_request_while_disconnected_fails_at_once(self, make: Make) -> None:
        with pytest.raises(BusUnavailableError, match="not connected"):
            await make().request("a.b", b"", 5.0)

    @staticmethod
    async def settle(sender: Bus, receiver: Bus, subject: str) -> None:
        """Return when what ``receiver`` subscribes to is known to the server that ``sender`` uses."""
        inbox = Inbox()
        await receiver.subscribe(subject, inbox)
        while not inbox.got:
            sender.publish(subject, b"?")
            await asyncio.sleep(0.01)
