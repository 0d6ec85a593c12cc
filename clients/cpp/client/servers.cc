#include "client/servers.h"

#include <algorithm>

namespace maniple {
namespace {

grpc::ChannelArguments Options() {
  grpc::ChannelArguments options;
  // Retries are decided by us, who know what has begun. gRPC's own would not know.
  options.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Finds a dead peer while a generation is silent. Proxies do not count pings as traffic.
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  options.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // The default waits up to two minutes before it connects again; a server that restarts is back in seconds.
  options.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  options.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Answers with log-probabilities may be longer than the default of 4 MiB.
  options.SetMaxReceiveMessageSize(64 << 20);
  return options;
}

}  // namespace

Servers::Servers(const std::vector<std::string>& targets, std::shared_ptr<grpc::ChannelCredentials> credentials)
    : credentials_(std::move(credentials)) {
  for (const auto& target : targets) Add(target);
}

void Servers::Move(const std::string& owner) {
  if (owner.empty()) {
    present_ = (present_ + 1) % all_.size();
    return;
  }
  const auto known = std::find_if(all_.begin(), all_.end(), [&](const Server& one) { return one.target == owner; });
  present_ = known != all_.end() ? static_cast<std::size_t>(known - all_.begin()) : Add(owner);
}

std::size_t Servers::Add(const std::string& target) {
  const auto channel = grpc::CreateCustomChannel(target, credentials_, Options());
  all_.push_back({target, v1::InferenceService::NewStub(channel), v1::AdminService::NewStub(channel)});
  return all_.size() - 1;
}

}  // namespace maniple
