"""The public gRPC service, health and reflection of a real cluster, called as any client would."""

import math

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry_rpc import public_pb2, public_pb2_grpc
from kvferry_rpc.common_pb2 import SamplingParams
from tests.support.live_cluster import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
MODEL = "tiny-real"


def _request(**sampling: float) -> public_pb2.GenerateRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return public_pb2.GenerateRequest(model=MODEL, text="Once upon a time", sampling=params, with_receipt=True)


def test_generate_streams_text_tokens_and_a_receipt(cluster: LiveCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)
        messages = list(stub.Generate(_request(), timeout=60))
        finish = messages[-1].finish
        assert [token.index for message in messages for token in message.tokens] == list(
            range(finish.completion_tokens)
        )
        assert finish.receipt.checksum_verified
        assert finish.receipt.tokens_recomputed == 0
        kept = stub.GetReceipt(public_pb2.GetReceiptRequest(request_id=messages[0].request_id), timeout=10)
        assert kept == finish.receipt


def test_reflection_names_the_service_and_describes_its_methods(cluster: LiveCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest
        listed, described = list(
            stub.ServerReflectionInfo(
                iter([ask(list_services=""), ask(file_containing_symbol="kvferry.v1.Kvferry")]), timeout=10
            )
        )
    names = {service.name for service in listed.list_services_response.service}
    assert "kvferry.v1.Kvferry" in names
    assert not any("internal" in name for name in names)
    file = descriptor_pb2.FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert {method.name for method in file.service[0].method} >= {"Generate", "Tokenize", "ListModels", "ClusterState"}


def test_health_says_serving(cluster: LiveCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "sampling", [{"temperature": math.nan}, {"top_p": 0.0}, {"min_p": math.inf}, {"presence_penalty": -9.0}]
)
def test_values_that_only_grpc_can_carry_are_refused(cluster: LiveCluster, sampling: dict[str, float]) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(_request(**sampling), timeout=30))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_deadline_ends_the_call_and_frees_the_workers(cluster: LiveCluster) -> None:
    request = _request(max_tokens=4000)
    request.sampling.ignore_eos = True
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)
        with pytest.raises(grpc.RpcError) as ended:
            list(stub.Generate(request, timeout=0.3))  # no machine makes so many tokens in that time
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_at_rest()


def test_tokenize_and_list_models_agree_with_generate(cluster: LiveCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = public_pb2_grpc.KvferryStub(channel)
        model = stub.ListModels(public_pb2.ListModelsRequest(), timeout=10).models[0]
        tokens = stub.Tokenize(public_pb2.TokenizeRequest(model=MODEL, text="Once upon a time"), timeout=10)
        finish = list(stub.Generate(_request(), timeout=60))[-1].finish
    assert model.id == MODEL
    assert tokens.max_context_tokens == model.max_context_tokens
    assert finish.prompt_tokens == len(tokens.token_ids)


def test_the_internal_ports_refuse_callers_without_the_secret(cluster: LiveCluster) -> None:
    from kvferry_rpc import internal_pb2, internal_pb2_grpc

    address = next(worker.address for worker in cluster.state().workers if worker.role == "prefill")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        list(internal_pb2_grpc.PrefillWorkerStub(channel).Prefill(internal_pb2.PrefillRequest(), timeout=10))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
