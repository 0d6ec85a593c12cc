#include "client/recovery.h"

#include <algorithm>

namespace maniple {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kFirstDelay{50};
constexpr milliseconds kLastDelay{1000};

}  // namespace

Action ActionAfter(const Problem& problem, bool begun, bool sent_before) {
  const bool aborted = problem.code == grpc::StatusCode::ABORTED;
  const bool group_lost = aborted && problem.reason == "GROUP_LOST";
  const bool taken_over = aborted && problem.reason == "TAKEN_OVER";
  const bool gone = problem.IsTransportLoss() || problem.code == grpc::StatusCode::UNAVAILABLE;
  if (begun) {
    if (gone || taken_over) return Action::kResume;
    if (group_lost || problem.reason == "RESUME_LOST" || problem.reason == "UNKNOWN_REQUEST") return Action::kStartOver;
    return Action::kGiveUp;
  }
  if (gone) return Action::kSendAgain;
  if (problem.code == grpc::StatusCode::RESOURCE_EXHAUSTED && !problem.reason.empty()) return Action::kSendAgain;
  if (group_lost || taken_over) return Action::kStartOver;  // it ran, but nothing of it reached us
  // The first try had been admitted, and ended with its connection.
  if (problem.reason == "DUPLICATE_REQUEST" && sent_before) return Action::kStartOver;
  return Action::kGiveUp;
}

Recovery::Recovery(Patience patience) : patience_(patience), delay_(kFirstDelay), random_(std::random_device{}()) {}

void Recovery::Heard() {
  broken_since_.reset();
  delay_ = kFirstDelay;
}

Recovery::Step Recovery::After(const Problem& problem, Clock::time_point now, bool begun, bool sent_before) {
  const Action action = ActionAfter(problem, begun, sent_before);
  if (action == Action::kStartOver && patience_.starts_over-- <= 0) return {Action::kGiveUp};
  if (!broken_since_) broken_since_ = now;
  if (action == Action::kGiveUp || now - *broken_since_ >= patience_.retry_for) return {Action::kGiveUp};
  const milliseconds delay = std::max(delay_, problem.retry_after);
  delay_ = std::min(2 * delay_, kLastDelay);
  // Up to a fifth more, so that clients that broke together do not come back together.
  std::uniform_int_distribution<milliseconds::rep> more(0, delay.count() / 5);
  return {action, delay + milliseconds(more(random_))};
}

}  // namespace maniple
