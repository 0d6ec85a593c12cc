// The contracts, read from protos/ when the program starts: nothing is generated.

import { fileURLToPath } from "node:url";

import { loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";

const PROTOS = process.env.MANIPLE_PROTOS ?? fileURLToPath(new URL("../../../protos", import.meta.url));
const GOOGLE = fileURLToPath(new URL("../../third_party", import.meta.url));

const definition = loadSync(["maniple/v1/inference.proto", "maniple/v1/admin.proto"], {
  includeDirs: [PROTOS],
  keepCase: true,
  enums: String,
  longs: Number, // counts of tokens and bytes: far below 2^53
  defaults: true,
  arrays: true,
  oneofs: true, // the name of what is set, in a field named as the oneof
});

/** Constructors of clients. */
export const { InferenceService, AdminService } = loadPackageDefinition(definition).maniple.v1;

const google = new protobuf.Root();
google.resolvePath = (_, name) => (name.startsWith("google/protobuf/") ? null : `${GOOGLE}/${name}`);
google.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"]);

/** The messages in the details of a status. */
export const details = Object.fromEntries(
  ["Status", "ErrorInfo", "RetryInfo", "BadRequest"].map((name) => [name, google.lookupType(`google.rpc.${name}`)]),
);
