// Why a call or a stream ended badly, and what the server said about it.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <string>
#include <vector>

#include "maniple/v1/errors.pb.h"

namespace maniple {

// One broken rule of a request.
struct Violation {
  std::string field;
  std::string description;
};

struct Problem {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  std::string reason;  // of the table in docs/errors.md; empty where the server did not say it
  std::string message;
  std::chrono::milliseconds retry_after{0};  // when to come again, where the server said so
  std::vector<Violation> violations;
  std::string owner_address;  // where the request is, if another control plane has it
  std::string incident_id;    // under which the server logged a defect

  // Whether the connection broke, so that nobody said what became of the request. Behind a proxy a killed server shows
  // as INTERNAL ("RST_STREAM"), not as UNAVAILABLE. Both come without a reason of ours.
  bool IsTransportLoss() const;

  std::string ToString() const;
};

// Reads the status of a failed call and the details that came with it.
Problem ProblemOf(const grpc::Status& status);

// Reads the form in which a stream repeats its error, since some proxies lose trailers.
Problem ProblemInBand(const v1::StreamError& error);

// The name of a code as the specification writes it, such as "DEADLINE_EXCEEDED".
std::string CodeName(grpc::StatusCode code);

}  // namespace maniple
