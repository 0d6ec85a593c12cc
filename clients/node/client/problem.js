// Why a call or a stream ended badly, and what the server said about it.

import { status as Status } from "@grpc/grpc-js";

import { details } from "./protos.js";

const DOMAIN = "maniple.dev";
const NAMES = Object.fromEntries(Object.entries(Status).map(([name, code]) => [code, name]));

/** A call or a stream ended badly. */
export class Problem extends Error {
  /**
   * @param {object} facts
   * @param {string} facts.status name of the gRPC status, such as "UNAVAILABLE"
   * @param {string} facts.message for people
   * @param {string} [facts.reason] of the table in docs/errors.md; empty where the server did not say it
   * @param {number} [facts.retryAfterMs] when to come again, where the server said so
   * @param {{field: string, description: string}[]} [facts.violations] what was wrong with the request
   * @param {string} [facts.ownerAddress] where the request is, if another control plane has it
   * @param {string} [facts.incidentId] under which the server logged a defect
   */
  constructor({ status, message, reason = "", retryAfterMs = 0, violations = [], ownerAddress = "", incidentId = "" }) {
    super(message);
    this.name = "Problem";
    Object.assign(this, { status, reason, retryAfterMs, violations, ownerAddress, incidentId });
  }

  /**
   * Whether the connection broke, so that nobody said what became of the request. Behind a proxy a killed server shows
   * as INTERNAL ("RST_STREAM"), not as UNAVAILABLE. Both come without a reason of ours.
   */
  get isTransportLoss() {
    return this.reason === "" && (this.status === "UNAVAILABLE" || this.status === "INTERNAL");
  }

  toString() {
    return [this.status, this.reason].filter(Boolean).join(" ") + `: ${this.message}`;
  }
}

/** Read the status of a failed call and the details that came with it. */
export function problemOf(error) {
  if (error instanceof Problem) return error;
  if (error.code === undefined) throw error; // no call's error but a mistake of ours
  const facts = { status: NAMES[error.code] ?? "UNKNOWN", message: error.details ?? error.message };
  for (const bytes of error.metadata?.get("grpc-status-details-bin") ?? []) {
    for (const { type_url: url, value } of details.Status.decode(bytes).details) {
      switch (url.slice(url.lastIndexOf("/") + 1)) {
        case "google.rpc.ErrorInfo": {
          const info = details.ErrorInfo.decode(value);
          if (info.domain !== DOMAIN) break;
          facts.reason = info.reason;
          facts.ownerAddress = info.metadata.owner_address;
          facts.incidentId = info.metadata.incident_id;
          break;
        }
        case "google.rpc.RetryInfo": {
          const { retryDelay: delay } = details.RetryInfo.decode(value);
          facts.retryAfterMs = Number(delay?.seconds ?? 0) * 1000 + (delay?.nanos ?? 0) / 1e6;
          break;
        }
        case "google.rpc.BadRequest":
          facts.violations = details.BadRequest.decode(value).fieldViolations.map(({ field, description }) => ({
            field,
            description,
          }));
      }
    }
  }
  return new Problem(facts);
}

/** Read the form in which a stream repeats its error, since some proxies lose trailers. */
export function problemInBand(error) {
  return new Problem({
    status: NAMES[error.code] ?? "UNKNOWN",
    message: error.message,
    reason: error.reason === "ERROR_REASON_UNSPECIFIED" ? "" : String(error.reason).replace("ERROR_REASON_", ""),
    ownerAddress: error.owner_address,
    incidentId: error.incident_id,
  });
}

/** Prefer the status, which has all details, unless something on the way replaced it. */
export function richer(inBand, status) {
  return inBand && inBand.reason !== status.reason ? inBand : status;
}

/** A stream that ended in order, but without its last message. */
export function endedEarly() {
  return new Problem({ status: "UNAVAILABLE", message: "the stream ended before its last message" });
}
