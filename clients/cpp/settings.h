// What the command line asks for.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "client/stream.h"

namespace maniple {

// The command line is wrong.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Settings {
  std::vector<std::string> words;  // the verb and its arguments
  std::vector<std::string> targets;
  v1::GenerateRequest request;
  Deadline deadline;
  Patience patience;
  int cancel_after = 0;  // 0: never
  bool json = false;
  bool help = false;
  std::string ca, token_file;
};

extern const char kUsage[];

// Reads the command line. Throws UsageError.
Settings ParseSettings(int argc, char** argv);

// Returns credentials as the flags say. Throws UsageError where a file cannot be read.
std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const Settings& settings);

}  // namespace maniple
