// Maniple from the command line, in C++: streams a generation and does about errors what can be done about them.

#include <iostream>

#include "client/servers.h"
#include "client/stream.h"
#include "printer.h"
#include "settings.h"

namespace maniple {
namespace {

int Generate(Servers& servers, const Settings& settings, const Printer& printer) {
  Stream stream(servers, settings.request, settings.deadline, settings.patience);
  int num_tokens = 0;
  for (;;) {
    const Event event = stream.Next();
    if (const auto* message = std::get_if<Response>(&event)) {
      printer.Message(*message);
      num_tokens += message->chunk().token_ids_size();
      if (settings.cancel_after > 0 && num_tokens >= settings.cancel_after) {
        printer.Answer({{"event", "\"cancelled\""}});
        return 0;  // the end of the stream's life cancels
      }
    } else if (const auto* recovering = std::get_if<Recovering>(&event)) {
      printer.Recovers(*recovering);
      if (recovering->action == Action::kStartOver) num_tokens = 0;
    } else if (const auto* problem = std::get_if<Problem>(&event)) {
      printer.Failed(*problem);
      return 1;
    } else {
      return 0;
    }
  }
}

// Shows the answer to a call that is answered once.
int Show(const grpc::Status& status, const Printer& printer, const Facts& facts) {
  if (!status.ok()) {
    printer.Failed(ProblemOf(status));
    return 1;
  }
  printer.Answer(facts);
  return 0;
}

int Ask(const Server& server, const Settings& settings, const Printer& printer) {
  grpc::ClientContext context;
  if (settings.deadline) context.set_deadline(*settings.deadline);
  const std::string& verb = settings.words[0];
  const std::size_t num_arguments = settings.words.size() - 1;
  if (verb == "abort" && num_arguments == 1) {
    v1::AbortRequest request;
    v1::AbortResponse answer;
    request.set_request_id(settings.words[1]);
    const auto status = server.inference->Abort(&context, request, &answer);
    return Show(status, printer, {{"event", "\"aborted\""}, {"was_running", answer.was_running() ? "true" : "false"}});
  }
  if (verb == "tokenize" && num_arguments == 1) {
    v1::TokenizeRequest request;
    v1::TokenizeResponse answer;
    request.set_text(settings.words[1]);
    const auto status = server.inference->Tokenize(&context, request, &answer);
    return Show(status, printer, {{"event", "\"tokens\""}, {"token_ids", List(answer.token_ids())}});
  }
  if (verb == "model" && num_arguments == 0) {
    v1::GetModelResponse answer;
    const auto status = server.inference->GetModel(&context, {}, &answer);
    return Show(status, printer, {{"event", "\"model\""},
                                  {"names", List(answer.served_names())},
                                  {"max_model_len", std::to_string(answer.max_model_len())},
                                  {"vocab_size", std::to_string(answer.vocab_size())}});
  }
  if (verb == "status" && num_arguments == 0) {
    v1::GetStatusResponse answer;
    const auto status = server.admin->GetStatus(&context, {}, &answer);
    std::uint32_t num_running = 0;
    std::uint32_t num_waiting = 0;
    for (const auto& group : answer.groups()) {
      num_running += group.num_running();
      num_waiting += group.num_waiting();
    }
    return Show(status, printer, {{"event", "\"status\""},
                                  {"ready", answer.ready() ? "true" : "false"},
                                  {"why_not", Quoted(answer.not_ready_reason())},
                                  {"num_running", std::to_string(num_running)},
                                  {"num_waiting", std::to_string(num_waiting)}});
  }
  throw UsageError("no such verb, or not its arguments: " + verb);
}

int Run(int argc, char** argv) {
  const Settings settings = ParseSettings(argc, argv);
  if (settings.help || settings.words.empty()) {
    std::cerr << kUsage;
    return settings.help ? 0 : 2;
  }
  const Printer printer(settings.json);
  Servers servers(settings.targets, CredentialsOf(settings));
  if (settings.words.size() == 1 && settings.words[0] == "generate") return Generate(servers, settings, printer);
  return Ask(servers.now(), settings, printer);
}

}  // namespace
}  // namespace maniple

int main(int argc, char** argv) {
  try {
    return maniple::Run(argc, argv);
  } catch (const maniple::UsageError& error) {
    std::cerr << "maniple-cpp: " << error.what() << "; see maniple-cpp --help\n";
    return 2;
  }
}
