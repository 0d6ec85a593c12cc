#include "client/problem.h"

#include <array>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace maniple {
namespace {

constexpr char kDomain[] = "maniple.dev";
constexpr std::array<const char*, 17> kCodeNames = {
    "OK",        "CANCELLED",         "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED",  "INTERNAL",          "UNAVAILABLE",        "DATA_LOSS",           "UNAUTHENTICATED"};

template <typename Map>
std::string Find(const Map& map, const char* key) {
  const auto found = map.find(key);
  return found == map.end() ? std::string() : found->second;
}

}  // namespace

bool Problem::IsTransportLoss() const {
  return reason.empty() && (code == grpc::StatusCode::UNAVAILABLE || code == grpc::StatusCode::INTERNAL);
}

std::string Problem::ToString() const {
  return CodeName(code) + (reason.empty() ? "" : " " + reason) + ": " + message;
}

Problem ProblemOf(const grpc::Status& status) {
  Problem problem;
  problem.code = status.error_code();
  problem.message = status.error_message();
  google::rpc::Status details;
  details.ParseFromString(status.error_details());  // the trailer grpc-status-details-bin; unreadable: no details
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&info) && info.domain() == kDomain) {
      problem.reason = info.reason();
      problem.owner_address = Find(info.metadata(), "owner_address");
      problem.incident_id = Find(info.metadata(), "incident_id");
    } else if (detail.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      problem.retry_after = std::chrono::milliseconds(delay.seconds() * 1000 + delay.nanos() / 1'000'000);
    } else if (detail.UnpackTo(&bad)) {
      for (const auto& one : bad.field_violations()) problem.violations.push_back({one.field(), one.description()});
    }
  }
  return problem;
}

Problem ProblemInBand(const v1::StreamError& error) {
  static const std::string kPrefix = "ERROR_REASON_";
  Problem problem;
  problem.code = static_cast<grpc::StatusCode>(error.code());
  problem.message = error.message();
  problem.owner_address = error.owner_address();
  problem.incident_id = error.incident_id();
  const std::string& name = v1::ErrorReason_Name(error.reason());  // empty for one of a newer server
  if (error.reason() != v1::ERROR_REASON_UNSPECIFIED && name.size() > kPrefix.size()) {
    problem.reason = name.substr(kPrefix.size());
  }
  return problem;
}

std::string CodeName(grpc::StatusCode code) {
  const auto index = static_cast<std::size_t>(code);
  return index < kCodeNames.size() ? kCodeNames[index] : "UNKNOWN";
}

}  // namespace maniple
