#include "client/stream.h"

#include <thread>
#include <utility>

namespace maniple {
namespace {

std::string NewRequestId() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::random_device random;
  std::string id(32, '0');
  for (char& digit : id) digit = kDigits[random() & 15];
  return id;
}

}  // namespace

Stream::Stream(Servers& servers, v1::GenerateRequest request, Deadline deadline, Patience patience)
    : servers_(servers), request_(std::move(request)), deadline_(deadline), recovery_(patience) {
  // An id of ours, so that sending it again cannot run it twice.
  if (request_.request_id().empty()) request_.set_request_id(NewRequestId());
}

Stream::~Stream() {
  HangUp();
  if (started_ && !has_ended_ && request_.detach_grace_s() > 0) Abort();
}

Event Stream::Next() {
  if (is_done_) return End{};
  if (!call_) Open();
  std::optional<Problem> in_band;
  for (Response response; call_->read(&response);) {
    if (response.has_error()) {
      in_band = ProblemInBand(response.error());
    } else if (IsNews(response)) {
      recovery_.Heard();
      is_done_ = has_ended_ = response.has_done();
      return response;
    }
  }
  const grpc::Status status = call_->finish();
  call_.reset();
  Problem problem = ProblemOf(status);
  if (in_band && in_band->reason != problem.reason) {
    problem = *in_band;  // something on the way replaced the status, which otherwise has more details
  } else if (status.ok()) {
    problem = ProblemOf({grpc::StatusCode::UNAVAILABLE, "the stream ended before its last message"});
  }
  return GoOn(std::move(problem));
}

// Begins the next call: Generate, or Resume once the request has begun.
void Stream::Open() {
  std::this_thread::sleep_for(std::exchange(wait_, {}));
  call_ = std::make_unique<Call>();
  if (deadline_) call_->context.set_deadline(*deadline_);
  auto& stub = *servers_.now().inference;
  if (!started_) {
    std::shared_ptr<grpc::ClientReader<Response>> reader = stub.Generate(&call_->context, request_);
    call_->read = [reader](Response* response) { return reader->Read(response); };
    call_->finish = [reader] { return reader->Finish(); };
    return;
  }
  v1::ResumeRequest resume;
  resume.set_request_id(started_->request_id());
  resume.set_resume_token(started_->resume_token());
  for (const auto& [index, cursor] : cursors_) *resume.add_cursors() = cursor;
  std::shared_ptr<grpc::ClientReader<v1::ResumeResponse>> reader = stub.Resume(&call_->context, resume);
  call_->read = [reader](Response* response) {
    v1::ResumeResponse message;
    if (!reader->Read(&message)) return false;
    *response = std::move(*message.mutable_response());
    return true;
  };
  call_->finish = [reader] { return reader->Finish(); };
}

void Stream::HangUp() {
  is_done_ = true;
  if (!call_) return;
  call_->context.TryCancel();
  for (Response rest; call_->read(&rest);) {
  }
  call_->finish();
  call_.reset();
}

// The server was asked to go on when a connection ends, so it must be told. If it cannot be, it is not needed.
void Stream::Abort() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  v1::AbortRequest request;
  v1::AbortResponse answer;
  request.set_request_id(request_.request_id());
  servers_.now().inference->Abort(&context, request, &answer);
}

// Keeps what a message says. A resumed stream says again what began and what ended; that is no news.
bool Stream::IsNews(const Response& response) {
  switch (response.event_case()) {
    case Response::kStarted:
      if (started_) return false;
      started_ = response.started();
      return true;
    case Response::kChunk:
      Count(response.chunk().index(), response.chunk().token_ids_size(), response.chunk().text().size());
      return true;
    case Response::kFinished: {
      const auto& finished = response.finished();
      if (!finished_.insert(finished.index()).second) return false;
      Count(finished.index(), finished.token_ids_size(), finished.text().size());
      return true;
    }
    case Response::kDone:
      return true;
    default:
      return false;  // an event of a newer server
  }
}

void Stream::Count(std::uint32_t index, int num_tokens, std::size_t num_text_bytes) {
  auto& cursor = cursors_[index];
  cursor.set_index(index);
  cursor.set_num_tokens(cursor.num_tokens() + num_tokens);
  cursor.set_num_text_bytes(cursor.num_text_bytes() + num_text_bytes);
}

// Decides what is done about a problem. It waits before the next call, but not beyond the deadline.
Event Stream::GoOn(Problem problem) {
  const auto step = recovery_.After(problem, Clock::now(), started_.has_value(), sent_before_);
  const auto is_late = [&] { return deadline_ && std::chrono::system_clock::now() + step.delay >= *deadline_; };
  if (step.action == Action::kGiveUp || is_late()) {
    is_done_ = true;
    has_ended_ = !problem.reason.empty();
    return problem;
  }
  if (step.action == Action::kStartOver) {
    request_.set_request_id(NewRequestId());  // the old id is taken for a minute
    Forget();
  } else {
    servers_.Move(problem.owner_address);
  }
  sent_before_ = step.action == Action::kSendAgain;
  wait_ = step.delay;
  return Recovering{step.action, std::move(problem), step.delay, servers_.now().target};
}

void Stream::Forget() {
  started_.reset();
  cursors_.clear();
  finished_.clear();
}

}  // namespace maniple
