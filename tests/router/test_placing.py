"""The forecast follows what runs: how far answers have come, and which worker they are on."""

from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import LoadReport
from router.admission.admission import AdmissionLimits
from router.admission.kv_ledger import Expectation
from router.admission.placing import Placing, PlacingLimits
from router.generation import GenerationRequest
from router.policy import Plan, RequestShape
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from tests.support.registry_parts import attach


def nothing_cached(worker_id: str) -> int:
    return 0


async def test_an_answer_that_is_nearly_done_makes_room_for_the_next_one() -> None:
    clock = ManualClock()
    registry = WorkerRegistry(clock)
    worker = attach(registry)
    placing = Placing(registry, PlacingLimits(AdmissionLimits(8, 8, 10_000), 512), clock, lambda why, slo: None)
    shape = RequestShape(40, dict.fromkeys(registry.hashers, ()))
    sampling = SamplingParams(max_tokens=256)
    request = GenerationRequest("r", tuple(range(40)), sampling, clock.now() + 60)
    async with placing.seat(request, clock.now(), nothing_cached) as seat:
        assert isinstance(placing.plan(seat, shape), Plan)
        clock.advance(1.0)
        registry.report(worker, LoadReport(blocks_free=24, sequences_running=1))
        # 300 tokens and 256 more are 35 blocks; there are 24, and the one that runs will give back 19 when it ends.
        assert not placing.reserve(Expectation(300, 256, 256, nothing_cached))
        placing.generated(seat, 250)
        assert placing.reserve(Expectation(300, 256, 256, nothing_cached))
