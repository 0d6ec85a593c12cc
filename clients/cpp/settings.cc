#include "settings.h"

#include <getopt.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace maniple {

const char kUsage[] = R"(usage: maniple-cpp VERB [flags]

  generate              stream a generation of --prompt or --token-ids
  abort ID              end a running request
  tokenize TEXT         show the token ids of a text
  model                 show what is served
  status                show what the server is doing

flags:
  --target HOST:PORT    the server, or several with commas (or MANIPLE_SERVER; default 127.0.0.1:50051)
  --prompt TEXT         text to continue
  --token-ids IDS       ids to continue, with commas
  --request-id ID       id of the request (default: drawn)
  --max-tokens N        at most so many tokens (default 64)
  --temperature T       0 is greedy (default: the server's)
  --seed N              fixes what is sampled (default: none)
  --ignore-eos          go on after the end of text
  --deadline S          end the request after so many seconds (default: never)
  --cancel-after N      cancel after so many tokens (default: never)
  --retry-for S         give up after so many seconds without a word (default 30)
  --start-over N        begin anew so often when what had begun is lost (default 1)
  --detach-grace S      the request goes on so many seconds without a connection (default 0)
  --tls-ca FILE         use TLS, and trust the certificates in this file
  --token-file FILE     send the bearer token in this file (needs --tls-ca)
  --json                print one JSON object a line
)";

namespace {

// Reads a whole word as a number.
template <typename Number>
Number Read(const std::string& flag, const std::string& word) {
  std::istringstream stream(word);
  Number number{};
  if (word.empty() || !(stream >> number) || stream.peek() != EOF || (std::is_unsigned_v<Number> && word[0] == '-')) {
    throw UsageError("--" + flag + ": \"" + word + "\" is no number");
  }
  return number;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Sends a bearer token, read for each call: it may be renewed.
class Bearer : public grpc::MetadataCredentialsPlugin {
 public:
  explicit Bearer(std::string file) : file_(std::move(file)) {}

  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    std::ifstream file(file_);
    std::string token;
    if (!(file >> token)) return {grpc::StatusCode::UNAUTHENTICATED, "cannot read " + file_};
    metadata->emplace("authorization", "Bearer " + token);
    return grpc::Status::OK;
  }

 private:
  std::string file_;
};

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

}  // namespace

Settings ParseSettings(int argc, char** argv) {
  static constexpr option kFlags[] = {
      {"target", required_argument, nullptr, 0},       {"prompt", required_argument, nullptr, 0},
      {"token-ids", required_argument, nullptr, 0},    {"request-id", required_argument, nullptr, 0},
      {"max-tokens", required_argument, nullptr, 0},   {"temperature", required_argument, nullptr, 0},
      {"seed", required_argument, nullptr, 0},         {"ignore-eos", no_argument, nullptr, 0},
      {"deadline", required_argument, nullptr, 0},     {"cancel-after", required_argument, nullptr, 0},
      {"retry-for", required_argument, nullptr, 0},    {"start-over", required_argument, nullptr, 0},
      {"detach-grace", required_argument, nullptr, 0}, {"tls-ca", required_argument, nullptr, 0},
      {"token-file", required_argument, nullptr, 0},   {"json", no_argument, nullptr, 0},
      {"help", no_argument, nullptr, 0},
      {nullptr, 0, nullptr, 0}};
  Settings settings;
  const char* server = std::getenv("MANIPLE_SERVER");
  settings.targets = Split(server != nullptr && *server != '\0' ? server : "127.0.0.1:50051");
  auto& request = settings.request;
  auto& sampling = *request.mutable_sampling();
  sampling.set_max_tokens(64);
  request.set_text("");
  int index = 0;
  for (int got; (got = getopt_long(argc, argv, "", kFlags, &index)) != -1;) {
    if (got != 0) throw UsageError("a flag is unknown or lacks its value");
    const std::string flag = kFlags[index].name;
    const std::string word = optarg != nullptr ? optarg : "";
    if (flag == "target") {
      settings.targets = Split(word);
    } else if (flag == "prompt") {
      request.set_text(word);
    } else if (flag == "token-ids") {
      for (const auto& id : Split(word)) request.mutable_token_ids()->add_ids(Read<std::uint32_t>(flag, id));
    } else if (flag == "request-id") {
      request.set_request_id(word);
    } else if (flag == "max-tokens") {
      sampling.set_max_tokens(Read<std::uint32_t>(flag, word));
    } else if (flag == "temperature") {
      sampling.set_temperature(Read<float>(flag, word));
    } else if (flag == "seed") {
      sampling.set_seed(Read<std::uint64_t>(flag, word));
    } else if (flag == "ignore-eos") {
      sampling.set_ignore_eos(true);
    } else if (flag == "deadline") {
      const double seconds = Read<double>(flag, word);
      if (seconds > 0) settings.deadline = std::chrono::system_clock::now() + Milliseconds(seconds);
    } else if (flag == "cancel-after") {
      settings.cancel_after = Read<int>(flag, word);
    } else if (flag == "retry-for") {
      settings.patience.retry_for = Milliseconds(Read<double>(flag, word));
    } else if (flag == "start-over") {
      settings.patience.starts_over = Read<int>(flag, word);
    } else if (flag == "detach-grace") {
      request.set_detach_grace_s(Read<float>(flag, word));
    } else if (flag == "tls-ca") {
      settings.ca = word;
    } else if (flag == "token-file") {
      settings.token_file = word;
    } else if (flag == "json") {
      settings.json = true;
    } else if (flag == "help") {
      settings.help = true;
    }
  }
  settings.words.assign(argv + optind, argv + argc);
  if (settings.targets.empty()) throw UsageError("--target: at least one address is needed");
  return settings;
}

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const Settings& settings) {
  if (settings.ca.empty() && !settings.token_file.empty()) throw UsageError("--token-file needs --tls-ca");
  if (settings.ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = ReadFile(settings.ca);
  auto tls = grpc::SslCredentials(options);
  if (settings.token_file.empty()) return tls;
  return grpc::CompositeChannelCredentials(
      tls, grpc::MetadataCredentialsFromPlugin(std::make_unique<Bearer>(settings.token_file)));
}

}  // namespace maniple
