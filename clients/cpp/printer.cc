#include "printer.h"

#include <cstdio>
#include <iostream>

namespace maniple {
namespace {

std::string ReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_ABORT:
      return "abort";
    default:
      return "unknown";
  }
}

const char* ActionName(Action action) {
  switch (action) {
    case Action::kSendAgain:
      return "sending_again";
    case Action::kResume:
      return "resuming";
    case Action::kStartOver:
      return "starting_over";
    case Action::kGiveUp:
      break;
  }
  return "giving_up";
}

void Append(Facts& facts, const Problem& problem) {
  std::string violations;
  for (const auto& one : problem.violations) {
    if (!violations.empty()) violations += ',';
    violations += "{\"field\":" + Quoted(one.field) + ",\"description\":" + Quoted(one.description) + '}';
  }
  facts.insert(facts.end(), {{"status", Quoted(CodeName(problem.code))},
                             {"reason", Quoted(problem.reason)},
                             {"message", Quoted(problem.message)},
                             {"violations", '[' + violations + ']'},
                             {"incident_id", Quoted(problem.incident_id)}});
}

}  // namespace

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

void Printer::Message(const Response& response) const {
  switch (response.event_case()) {
    case Response::kStarted: {
      const auto& started = response.started();
      Line({{"event", "\"started\""},
            {"request_id", Quoted(started.request_id())},
            {"num_prompt_tokens", std::to_string(started.num_prompt_tokens())},
            {"num_cached_tokens", std::to_string(started.num_cached_tokens())}});
      break;
    }
    case Response::kChunk: {
      const auto& chunk = response.chunk();
      Line({{"event", "\"chunk\""},
            {"index", std::to_string(chunk.index())},
            {"token_ids", List(chunk.token_ids())},
            {"text", Quoted(chunk.text())}});
      if (!json_) std::cout << chunk.text() << std::flush;
      break;
    }
    case Response::kFinished: {
      const auto& finished = response.finished();
      Line({{"event", "\"finished\""},
            {"index", std::to_string(finished.index())},
            {"reason", Quoted(ReasonName(finished.reason()))},
            {"num_output_tokens", std::to_string(finished.num_output_tokens())}});
      break;
    }
    case Response::kDone:
      Line({{"event", "\"done\""},
            {"num_output_tokens", std::to_string(response.done().num_output_tokens())},
            {"duration_s", std::to_string(response.done().duration_s())}});
      if (!json_) std::cout << std::endl;
      break;
    default:
      break;
  }
}

void Printer::Recovers(const Recovering& recovering) const {
  const double delay_s = static_cast<double>(recovering.delay.count()) / 1000;
  Facts facts = {{"event", Quoted(ActionName(recovering.action))},
                 {"delay_s", std::to_string(delay_s)},
                 {"target", Quoted(recovering.target)}};
  Append(facts, recovering.problem);
  Line(facts);
  if (!json_) {
    std::cerr << "\n[" << recovering.problem.ToString() << ": " << ActionName(recovering.action) << " at "
              << recovering.target << "]\n";
  }
}

void Printer::Answer(const Facts& facts) const {
  Line(facts);
  if (json_) return;
  for (const auto& [name, value] : facts) {
    if (name != "event") std::cout << name << ": " << value << '\n';
  }
}

void Printer::Failed(const Problem& problem) const {
  Facts facts = {{"event", "\"error\""}};
  Append(facts, problem);
  Line(facts);
  if (!json_) std::cerr << '\n' << problem.ToString() << '\n';
}

void Printer::Line(const Facts& facts) const {
  if (!json_) return;
  std::string line;
  for (const auto& [name, value] : facts) {
    if (!line.empty()) line += ',';
    line += Quoted(name) + ':' + value;
  }
  std::cout << '{' << line << '}' << std::endl;
}

}  // namespace maniple
