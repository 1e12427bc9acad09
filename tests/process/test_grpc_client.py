"""A gRPC client made from the proto alone, the standard health service, and reflection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc_tools
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from process.cluster import Cluster, unclean

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the stand-alone client got."""
    stubs = tmp_path_factory.mktemp("stubs")
    standard = Path(grpc_tools.__file__).parent / "_proto"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto' / 'v1'}", f"-I{standard}",
         f"--python_out={stubs}", f"--grpc_python_out={stubs}", "generation.proto"],
        check=True,
    )  # fmt: skip
    script = Path(__file__).with_name("standalone_grpc_client.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), pair.grpc_target, str(stubs)],
        capture_output=True, text=True, timeout=120.0, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_models_and_server_info(found: dict[str, Any]):
    """The served name, and readiness as /ready has it."""
    assert found["models"] == ["demo"]
    assert found["ready"] is True


def test_tokenize_and_detokenize_are_inverse(found: dict[str, Any]):
    """Text to ids and back."""
    assert found["text"] == "The miller keeps the gate."
    assert len(found["tokens"]) > 3


def test_unary_and_stream_agree_with_http(pair: Cluster, found: dict[str, Any]):
    """One greedy request by three ways: the same text, the same ids."""
    by_http = pair.complete(
        model="demo", prompt="The miller keeps the gate.", max_tokens=12, temperature=0, return_token_ids=True
    )
    choice = by_http["choices"][0]
    assert found["unary"] == found["stream"] == choice["text"]
    assert found["ids"] == choice["token_ids"]
    assert found["unary_usage"] == [by_http["usage"]["prompt_tokens"], by_http["usage"]["completion_tokens"]]
    assert found["unary_reason"] in ("REASON_LENGTH", "REASON_STOP")


def test_stream_has_its_events_in_order(found: dict[str, Any]):
    """Started, deltas, one end for the choice, Completed: without the last the answer is not whole."""
    kinds = [kind for kind in found["kinds"] if kind != "keep_alive"]
    assert kinds[0] == "started"
    assert kinds[-2:] == ["choice_finished", "completed"]
    assert set(kinds[1:-2]) == {"delta"}


def test_chat_answers_with_a_message(found: dict[str, Any]):
    """Parsed, as the prompt came."""
    assert found["chat"] is True


def test_errors_have_their_status(found: dict[str, Any]):
    """The same table as HTTP's."""
    assert found["unknown_model"] == "NOT_FOUND"
    assert found["bad_top_p"] == "INVALID_ARGUMENT"
    assert found["no_prompt"] == "INVALID_ARGUMENT"


def test_cancelled_stream_frees_everything(pair: Cluster, found: dict[str, Any]):
    """The client has cancelled a long stream; nothing of it is left on the workers."""
    end_s = time.monotonic() + 10.0
    while any(unclean(pair.state(name)) for name in pair.workers()) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert {name: unclean(pair.state(name)) for name in pair.workers()} == {"decode-0": [], "prefill-0": []}


def test_health_says_what_ready_says(pair: Cluster):
    """The standard service, for the server and for the service by name."""
    with grpc.insecure_channel(pair.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "headrace.v1.Generation"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(pair: Cluster):
    """grpcurl and its like find the API without the file."""
    with grpc.insecure_channel(pair.grpc_target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (reply,) = stub.ServerReflectionInfo(iter(asked), timeout=10)
        names = {service.name for service in reply.list_services_response.service}
    assert {"headrace.v1.Generation", "grpc.health.v1.Health"} <= names
