// The server, as the page calls it: gRPC-web to where the page came from, or to ?server=URL.

import { createFileRegistry, fromBinary } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";

const baseUrl = new URLSearchParams(location.search).get("server") ?? location.origin;

// The contracts come with the page, described by themselves: nothing is generated.
const described = await (await fetch("maniple.binpb")).arrayBuffer();
const contracts = createFileRegistry(fromBinary(FileDescriptorSetSchema, new Uint8Array(described)));

const server = createClient(contracts.getService("maniple.v1.InferenceService"), createGrpcWebTransport({ baseUrl }));
const errorInfo = contracts.getMessage("google.rpc.ErrorInfo");

/** The served model. */
export const model = () => server.getModel({});

/**
 * Stream the model's answer to a conversation. Yields {text}, at last {done}. Ends at once when `signal` aborts, and the
 * server frees what it held.
 */
export async function* answer(messages, { hasTemplate, maxTokens, signal }) {
  const prompt = hasTemplate
    ? { case: "chat", value: { messages } }
    : { case: "text", value: messages.map((message) => message.content).join("\n") };
  let ended = false;
  for await (const { event } of server.generate({ prompt, sampling: { maxTokens } }, { signal })) {
    if (event.case === "chunk") yield { text: event.value.text };
    else if (event.case === "done") (ended = true), yield { done: event.value };
    // The rest: started, finished, error (the status says the same), waiting, and what a newer server may say.
  }
  if (!ended) throw new ConnectError("the stream broke off", Code.Unavailable);
}

/** What went wrong, for people: the server's own words, and its reason. Empty if the caller ended it himself. */
export function wordsOf(error) {
  const known = ConnectError.from(error);
  if (known.code === Code.Canceled) return "";
  const [about] = known.findDetails(errorInfo);
  return `${known.rawMessage} (${about?.reason ?? Code[known.code]})`;
}
