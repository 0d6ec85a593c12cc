// Shows what happens: text to standard output and the rest to standard error, or everything as JSON lines.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "client/stream.h"

namespace maniple {

// Names and values; a value is JSON already.
using Facts = std::vector<std::pair<std::string, std::string>>;

std::string Quoted(const std::string& text);
template <typename Range>
std::string List(const Range& values);

class Printer {
 public:
  explicit Printer(bool json) : json_(json) {}
  void Message(const Response& response) const;
  void Recovers(const Recovering& recovering) const;
  void Answer(const Facts& facts) const;
  void Failed(const Problem& problem) const;

 private:
  void Line(const Facts& facts) const;

  bool json_;
};

template <typename Range>
std::string List(const Range& values) {
  std::string list;
  for (const auto& value : values) {
    if (!list.empty()) list += ',';
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      list += std::to_string(value);
    } else {
      list += Quoted(value);
    }
  }
  return '[' + list + ']';
}

}  // namespace maniple
