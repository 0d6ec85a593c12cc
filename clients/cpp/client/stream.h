// One generation, whatever happens to the servers under it.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>

#include "client/recovery.h"
#include "client/servers.h"

namespace maniple {

using Response = v1::GenerateResponse;
using Deadline = std::optional<std::chrono::system_clock::time_point>;

// Told when a stream broke and something is done about it. With kStartOver, what came before is void.
struct Recovering {
  Action action;
  Problem problem;
  std::chrono::milliseconds delay;
  std::string target;  // which server is asked next
};

// The end of a good stream, after `done`.
struct End {};

using Event = std::variant<Response, Recovering, Problem, End>;

// Reads a generation. Not safe for several threads. Destroying it cancels what still runs: the server frees what it
// held within a step.
class Stream {
 public:
  Stream(Servers& servers, v1::GenerateRequest request, Deadline deadline, Patience patience);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Waits for the next event: a message (started, chunk, finished or done), Recovering, or how it ended: End, Problem.
  Event Next();

 private:
  // One call of Generate or Resume.
  struct Call {
    grpc::ClientContext context;
    std::function<bool(Response*)> read;   // false at the end
    std::function<grpc::Status()> finish;  // after the end
  };

  void Open();
  void HangUp();
  void Abort();
  bool IsNews(const Response& response);
  void Count(std::uint32_t index, int num_tokens, std::size_t num_text_bytes);
  Event GoOn(Problem problem);
  void Forget();

  Servers& servers_;
  v1::GenerateRequest request_;
  Deadline deadline_;
  Recovery recovery_;
  std::unique_ptr<Call> call_;
  std::chrono::milliseconds wait_{0};  // before the next call
  bool sent_before_ = false;
  bool is_done_ = false;   // nothing more comes
  bool has_ended_ = false;  // the server knows that

  // What came so far; it is resumed from here.
  std::optional<Response::Started> started_;
  std::map<std::uint32_t, v1::ResumeRequest::Cursor> cursors_;
  std::set<std::uint32_t> finished_;
};

}  // namespace maniple
