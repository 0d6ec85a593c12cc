// One or several servers of the same model, any of which may take over from another.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "maniple/v1/admin.grpc.pb.h"
#include "maniple/v1/inference.grpc.pb.h"

namespace maniple {

struct Server {
  std::string target;
  std::unique_ptr<v1::InferenceService::Stub> inference;
  std::unique_ptr<v1::AdminService::Stub> admin;
};

class Servers {
 public:
  // Connects in the background. The first target is preferred.
  Servers(const std::vector<std::string>& targets, std::shared_ptr<grpc::ChannelCredentials> credentials);

  // The server that is asked now. Valid until the next Move.
  const Server& now() const { return all_[present_]; }

  // Turns to the server that was named as the owner of a request, or else to the next in turn.
  void Move(const std::string& owner);

 private:
  std::size_t Add(const std::string& target);

  std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::vector<Server> all_;
  std::size_t present_ = 0;
};

}  // namespace maniple
