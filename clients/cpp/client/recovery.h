// What follows a problem. Pure: time is an argument.
#pragma once

#include <chrono>
#include <optional>
#include <random>

#include "client/problem.h"

namespace maniple {

using Clock = std::chrono::steady_clock;

enum class Action {
  kGiveUp,     // it is the caller's
  kSendAgain,  // the same request with the same id: it did not begin, and an id is admitted once
  kResume,     // take it up where it broke, perhaps at another server
  kStartOver,  // what had begun is gone: a new request with a new id
};

// The table of docs/errors.md, as far as it can be acted on.
//
// begun: the stream brought `started`, and with it the right to resume. sent_before: this id was sent once already.
Action ActionAfter(const Problem& problem, bool begun, bool sent_before);

// How long and how often a stream tries to go on.
struct Patience {
  std::chrono::milliseconds retry_for{30'000};  // how long it may bring nothing after it broke
  int starts_over = 1;                          // how often it may begin anew
};

// Counts the attempts of one stream. Whatever the stream brings starts the count anew.
class Recovery {
 public:
  struct Step {
    Action action;
    std::chrono::milliseconds delay{0};
  };

  explicit Recovery(Patience patience);
  void Heard();
  // Says what to do about a problem, and after how long.
  Step After(const Problem& problem, Clock::time_point now, bool begun, bool sent_before);

 private:
  Patience patience_;
  std::optional<Clock::time_point> broken_since_;
  std::chrono::milliseconds delay_;
  std::minstd_rand random_;
};

}  // namespace maniple
