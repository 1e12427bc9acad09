"""A client that knows the .proto file and grpcio, nothing of headrace: `TARGET STUBS_FOLDER`. Prints what it got.

The folder holds what protoc made of generation.proto under its plain name, as someone else's build would.
"""

import json
import sys

import grpc

target, stubs = sys.argv[1:]
sys.path.insert(0, stubs)
import generation_pb2 as pb  # noqa: E402
import generation_pb2_grpc as services  # noqa: E402

assert not any(name.split(".")[0] == "headrace" for name in sys.modules)
channel = grpc.insecure_channel(target)
service = services.GenerationStub(channel)
found = {}

models = service.ListModels(pb.ListModelsRequest(), timeout=10)
found["models"] = [model.id for model in models.models]
info = service.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
found["ready"] = info.ready
tokens = service.Tokenize(pb.TokenizeRequest(text="The miller keeps the gate."), timeout=10)
found["tokens"] = list(tokens.token_ids)
found["text"] = service.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids), timeout=10).text

greedy = pb.SamplingParams(temperature=0, max_tokens=12)
asked = pb.GenerateRequest(text="The miller keeps the gate.", sampling=greedy)
answer = service.Generate(asked, timeout=60)
found["unary"] = answer.choices[0].text
found["unary_usage"] = [answer.usage.prompt_tokens, answer.usage.completion_tokens]
found["unary_reason"] = pb.Finish.Reason.Name(answer.choices[0].finish.reason)

kinds, text = [], ""
for event in service.GenerateStream(asked, timeout=60):
    kinds.append(event.WhichOneof("event"))
    if kinds[-1] == "delta":
        text += event.delta.text
found["kinds"], found["stream"] = kinds, text

by_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens.token_ids), sampling=greedy)
found["ids"] = list(service.Generate(by_ids, timeout=60).choices[0].token_ids)

chat = pb.ChatPrompt(messages_json=json.dumps([{"role": "user", "content": "Hello"}]))
reply = service.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=5, seed=3)), timeout=60)
found["chat"] = reply.choices[0].HasField("message")

for name, wrong in {
    "unknown_model": pb.GenerateRequest(model="other", text="x"),
    "bad_top_p": pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=2.0)),
    "no_prompt": pb.GenerateRequest(),
}.items():
    try:
        service.Generate(wrong, timeout=10)
    except grpc.RpcError as error:
        found[name] = error.code().name

call = service.GenerateStream(
    pb.GenerateRequest(text="The", sampling=pb.SamplingParams(max_tokens=20000, ignore_eos=True)), timeout=60
)
for event in call:
    if event.WhichOneof("event") == "delta":
        break
call.cancel()
print(json.dumps(found))
