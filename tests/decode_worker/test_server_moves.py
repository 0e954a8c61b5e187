"""A move at the decode worker's door."""

from decode_worker.hand_over import HandOverRequest, PauseRequest, ResumeRequest
from kvferry_rpc.internal_pb2 import DecodeCommand, DecodeEvent, HandOver, Pause, Paused, PrefillDone, Resume, Ticket
from tests.support.decode_door import decode_door, read


async def test_the_steps_of_a_move_reach_the_engine_and_its_end_is_the_end_of_the_request() -> None:
    async with decode_door() as bench:
        call = await bench.session()
        admitted = await bench.admitted(call)
        ticket = Ticket(handoff_id="x", block_ids=[1, 2])
        names = {"request_id": admitted.request_id, "attempt": admitted.attempt}
        await call.write(DecodeCommand(pause=Pause(**names)))
        await call.write(DecodeCommand(resume=Resume(**names)))
        await call.write(DecodeCommand(hand_over=HandOver(**names, ticket=ticket)))
        seq_id = admitted.sequence.seq_id
        assert await bench.loop.wait(HandOverRequest) == [HandOverRequest(seq_id, ticket)]
        assert bench.loop.of(PauseRequest) == [PauseRequest(seq_id)]
        assert bench.loop.of(ResumeRequest) == [ResumeRequest(seq_id)]
        assert bench.service.in_flight.count == 1
        admitted.emit([DecodeEvent(**names, paused=Paused())])
        (paused,) = await read(call)
        assert paused.HasField("paused")
        assert bench.service.in_flight.count == 1
        admitted.emit([DecodeEvent(**names, handed_over=PrefillDone(blocks_sent=2))])
        (left,) = await read(call)
        assert left.handed_over.blocks_sent == 2
        assert bench.service.in_flight.count == 0, "a worker that drains may leave now"
        call.cancel()
