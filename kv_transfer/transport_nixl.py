"""One-sided writes by NIXL: straight into the registered pool of the peer, over RDMA where there are devices for it.

    sender                                      receiver
    connect: an agent, `memory` registered
             Proposal (the way back)       ->   accept: an agent, the pool registered
                                           <-  Answer (the way in, the pool's address, a token)
             hello                        <->   hello: it does come through
    write:   Write frame                   ->   read: drives its agent
             bytes                         ->   (over TCP UCX lands them only then)
             note: token, number           ->   this write has landed, and all before it
    close: the agent ends                       close: the agent ends

nixl_agent.py says why each end of a link has an agent of its own. Nobody polls while no write is under way.
"""

import secrets
import threading
import weakref
from collections.abc import Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer.nixl_agent import NixlAgent, NixlError, address_of
from kv_transfer.nixl_greeting import OFFER, TOKEN_BYTES, Answer, Proposal, packed, parse
from kv_transfer.nixl_library import load
from kv_transfer.nixl_link import NixlReader, NixlWriter, say_hello
from kv_transfer.pages import MAX_WRITE_BYTES
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Ask, Channel, PayloadReader, PayloadWriter, TransportUnavailable


class NixlTransport:
    """For pools in host memory. Each link has an agent of its own at each end; see nixl_agent.py."""

    name = "nixl"
    one_sided = True
    write_bytes = MAX_WRITE_BYTES  # Each costs a description of all pieces and a round trip at its end.

    def __init__(self, bind_host: str) -> None:
        """Load the library: its UCX listens at the interface of this address alone. Raises ValueError if missing."""
        self._library = load(bind_host)
        self._lock = threading.Lock()  # Agents are made one at a time.
        self._agents: weakref.WeakSet[NixlAgent] = weakref.WeakSet()
        self._closed = False

    @property
    def num_registrations(self) -> int:
        """Regions registered now: one a pool and link."""
        with self._lock:
            return sum(agent.num_registrations for agent in self._agents)

    def offer(self, pool: MemoryRegion) -> bytes | None:
        """The same for every pool."""
        return OFFER

    def connect(
        self, offer: bytes, channel: Channel, layout: KVCacheLayout, memory: Sequence[MemoryRegion], ask: Ask
    ) -> PayloadWriter:
        """Register `memory`, learn where the pool is, and see that it can be reached.

        Waits seconds for a peer that agreed but cannot be reached. Raises TransportUnavailable, LinkError.
        """
        if offer != OFFER:
            raise TransportUnavailable("the peer offers another kind of nixl")
        agent = self._new_agent(memory)
        try:
            answer = parse(ask(packed(Proposal.of(agent.name, agent.way_back()))), Answer)
            agent.meet(answer.agent, answer.metadata)
            say_hello(agent)
            detail = f"UCX, devices {self._library.devices}, {_expectation(agent, memory, answer)}"
            return NixlWriter(agent, channel, layout, memory, answer, detail)
        except NixlError as error:
            agent.close()
            raise TransportUnavailable(str(error)) from error
        except BaseException:
            agent.close()
            raise

    def accept(
        self, data: bytes, channel: Channel, layout: KVCacheLayout, pool: MemoryRegion
    ) -> tuple[bytes, PayloadReader]:
        """Register the pool. Raises TransportUnavailable."""
        proposal = parse(data, Proposal)
        agent = self._new_agent([pool])
        try:
            agent.meet(proposal.agent, proposal.metadata)
            token = secrets.token_bytes(TOKEN_BYTES)
            answer = packed(Answer.of(agent.name, agent.way_in(), address_of(pool.buffer), pool.size_bytes, token))
            return answer, NixlReader(agent, token)
        except (NixlError, RuntimeError) as error:  # RuntimeError: no thread left to give.
            agent.close()
            raise TransportUnavailable(str(error)) from error
        except BaseException:
            agent.close()
            raise

    def close(self) -> None:
        """Make no more agents. Those there are end with their links."""
        with self._lock:
            self._closed = True

    def _new_agent(self, memory: Sequence[MemoryRegion]) -> NixlAgent:
        with self._lock:
            if self._closed:
                raise TransportUnavailable("nixl is closed")
            try:
                agent = NixlAgent(self._library, memory)
            except NixlError as error:
                raise TransportUnavailable(str(error)) from error
            self._agents.add(agent)
            return agent


def _expectation(agent: NixlAgent, memory: Sequence[MemoryRegion], answer: Answer) -> str:
    """What UCX expects of the lanes that it chose; which ones these are NIXL does not tell."""
    size = min(MAX_WRITE_BYTES, answer.size_bytes, *(region.size_bytes for region in memory))
    transfer = agent.prepare([(address_of(memory[0].buffer), answer.address, size)], b"")
    try:
        seconds = agent.estimate_s(transfer)
    finally:
        agent.release(transfer)
    return f"{size / seconds / 1e9:.1f} GB/s estimated" if seconds else "speed not estimated"
